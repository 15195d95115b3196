"""Sizes as people write them."""

from __future__ import annotations

_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


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
