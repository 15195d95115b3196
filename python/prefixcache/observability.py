"""Rates of cache counters over the last minutes, from snapshots that a server takes now and then."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

Counters = Mapping[str, int]

_WINDOWS = (60, 300, 900)
_TOTALS = ("prefix_tokens_saved", "ssd_saves", "hot_cache_evictions", "hot_cache_promotions")


class CacheRateTracker:
    """The last ``max_snapshots`` counter values, at least ``min_interval`` seconds apart. Any thread.

    Counters that it knows: ``prefix_hits``, ``prefix_misses``, ``prefix_tokens_matched``, ``prefix_tokens_requested``,
    ``prefix_tokens_saved``, ``evictions``, ``ssd_hot_hits``, ``ssd_disk_loads``, ``ssd_saves``,
    ``hot_cache_evictions``, ``hot_cache_promotions``. A missing one counts as 0.
    """

    def __init__(self, max_snapshots: int = 90, min_interval: float = 10.0) -> None:
        self._lock = threading.Lock()
        self._min_interval = min_interval
        self._snapshots: deque[tuple[float, dict[str, int]]] = deque(maxlen=max_snapshots)

    def maybe_snapshot(self, counters: Counters) -> bool:
        """Keeps a copy of the counters. False if the last one is less than ``min_interval`` seconds old."""
        now = time.monotonic()
        with self._lock:
            if self._snapshots and now - self._snapshots[-1][0] < self._min_interval:
                return False
            self._snapshots.append((now, dict(counters)))
            return True

    def get_rates(self, windows: Sequence[int] = _WINDOWS) -> dict[str, dict[str, Any]]:
        """``{"windows": {"1m": {...}, ...}, "cumulative": {...}}``; both empty before the first snapshot.

        ``windows`` in seconds. A window tells what was counted up to the newest snapshot from the oldest one inside of
        it, or from the oldest of all; it is empty if less than a second lies between. ``cumulative`` tells the newest
        totals. Ratios have 4 places, numbers a minute 2.
        """
        now = time.monotonic()
        with self._lock:
            snapshots = list(self._snapshots)
        if not snapshots:
            return {"windows": {}, "cumulative": {}}
        last_time, last = snapshots[-1]
        rates = {}
        for window in windows:
            inside = (snapshot for snapshot in snapshots if now - snapshot[0] <= window)
            first_time, first = next(inside, snapshots[0])
            rates[_label(window)] = _rates(_growth(first, last), last_time - first_time)
        first_time, first = snapshots[0]
        per_minute = _per_minute(_growth(first, last).get("evictions", 0), last_time - first_time)
        totals = {name: last.get(name, 0) for name in _TOTALS}
        return {"windows": rates, "cumulative": {**_ratios(last), "eviction_rate_per_min": per_minute, **totals}}

    def snapshot_and_get_rates(self, counters: Counters, windows: Sequence[int] = _WINDOWS) -> dict[str, Any]:
        """``maybe_snapshot``, then ``get_rates``."""
        self.maybe_snapshot(counters)
        return self.get_rates(windows)

    def clear(self) -> None:
        """Forgets every snapshot."""
        with self._lock:
            self._snapshots.clear()


def _label(window: int) -> str:
    return f"{window}s" if window < 60 else f"{window // 60}m"


def _growth(first: Counters, last: Counters) -> dict[str, int]:
    """What was added; 0 for a counter that was reset in between."""
    return {name: max(0, value - first.get(name, 0)) for name, value in last.items()}


def _rates(counts: Counters, seconds: float) -> dict[str, Any]:
    if seconds < 1:
        return {}
    return {**_ratios(counts), "eviction_rate_per_min": _per_minute(counts.get("evictions", 0), seconds)}


def _ratios(counts: Counters) -> dict[str, Any]:
    hits, misses = counts.get("prefix_hits", 0), counts.get("prefix_misses", 0)
    hot, loads = counts.get("ssd_hot_hits", 0), counts.get("ssd_disk_loads", 0)
    return {
        "prefix_hit_rate": _ratio(hits, hits + misses),
        "prefix_hits": hits,
        "prefix_misses": misses,
        "prefix_match_efficiency": _ratio(
            counts.get("prefix_tokens_matched", 0), counts.get("prefix_tokens_requested", 0)
        ),
        "evictions": counts.get("evictions", 0),
        "ssd_hot_hits": hot,
        "ssd_disk_loads": loads,
        "ssd_hot_rate": _ratio(hot, hot + loads),
    }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _per_minute(count: int, seconds: float) -> float:
    return round(count * 60 / seconds, 2) if seconds >= 1 else 0.0
