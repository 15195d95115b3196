"""Counts, sizes and ages as people write and read them."""

from __future__ import annotations

_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MOST_SECONDS = 1 << 40
_LONGEST_WAIT = 10**9


def is_count(value: object) -> bool:
    """Whether this is an int, no bool, of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_size(size: int | str, what: str = "size") -> int:
    """Bytes of an int, or of a text such as ``"512MB"`` or ``"1.5 GB"`` (binary units). ValueError for others."""
    if isinstance(size, int) and not isinstance(size, bool):
        number, unit = float(size), 1
        value = size
    else:
        text = size.strip().upper() if isinstance(size, str) else ""
        digits = text.rstrip("BKMGT")
        unit = _UNITS.get(text[len(digits) :].strip() or "B", 0)
        try:
            number = float(digits)
        except ValueError:
            number = -1.0
        value = int(number * unit) if 0 <= number < 1 << 60 else -1
    if unit == 0 or not 0 <= value <= 1 << 60:
        raise ValueError(f"{what} is {size!r}, expected bytes (0..2**60) or a text such as '512MB' or '4GB'")
    return value


def checked_wait(seconds: float, what: str) -> float:
    """``seconds``, if that is a number of them that somebody may wait. ValueError for others."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_WAIT:
        raise ValueError(f"{what} is {seconds!r}, expected seconds, 0..10**9")
    return float(seconds)


def parse_age(age: float | str, what: str = "age") -> float:
    """Seconds of a number, or of a text such as ``"30m"``, ``"12h"``, ``"7d"`` or ``"2w"``. ValueError for others."""
    seconds = -1.0
    if isinstance(age, int | float) and not isinstance(age, bool):
        seconds = float(age)
    elif isinstance(age, str) and age.strip()[-1:].lower() in _SECONDS:
        text = age.strip().lower()
        try:
            seconds = float(text[:-1]) * _SECONDS[text[-1]]
        except ValueError:
            seconds = -1.0
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ValueError(f"{what} is {age!r}, expected a text such as '90s', '12h' or '7d', or a float of seconds")
    return seconds


def format_size(size: int) -> str:
    """``"17 B"``, ``"4.0 MB"``: three digits or so, in the units of ``parse_size``."""
    unit = next((unit for unit, factor in _UNITS.items() if size < 1000 * factor), "TB")
    return f"{size} B" if unit == "B" else f"{size / _UNITS[unit]:.1f} {unit}"


def format_age(seconds: float) -> str:
    """``"42 s"``, ``"5 min"``, ``"3.2 h"``, ``"2.1 d"``; what lies in the future is 0 s old."""
    if seconds < 60:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
