"""Rates over windows of time; the clock is the test's."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from prefixcache import observability
from prefixcache.observability import CacheRateTracker

WINDOW_KEYS = {
    "prefix_hit_rate",
    "prefix_hits",
    "prefix_misses",
    "prefix_match_efficiency",
    "evictions",
    "eviction_rate_per_min",
    "ssd_hot_hits",
    "ssd_disk_loads",
    "ssd_hot_rate",
}
TOTAL_KEYS = {"prefix_tokens_saved", "ssd_saves", "hot_cache_evictions", "hot_cache_promotions"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(observability, "time", made)
    return made


def counters(scale: int = 1, **changed: int) -> dict[str, int]:
    """Distinct numbers for every counter, `scale` times."""
    base = {
        "prefix_hits": 3,
        "prefix_misses": 4,
        "prefix_tokens_matched": 500,
        "prefix_tokens_requested": 1500,
        "prefix_tokens_saved": 450,
        "evictions": 6,
        "ssd_hot_hits": 7,
        "ssd_disk_loads": 2,
        "ssd_saves": 11,
        "hot_cache_evictions": 12,
        "hot_cache_promotions": 13,
    }
    return {**{name: value * scale for name, value in base.items()}, **changed}


def test_nothing_is_known_at_first(clock: Clock) -> None:
    assert CacheRateTracker().get_rates() == {"windows": {}, "cumulative": {}}


def test_defaults(clock: Clock) -> None:
    tracker = CacheRateTracker()
    assert tracker.maybe_snapshot(counters()) is True
    clock.now += 9.9
    assert tracker.maybe_snapshot(counters(2)) is False
    clock.now += 0.1
    assert tracker.maybe_snapshot(counters(3)) is True
    assert list(tracker.get_rates()["windows"]) == ["1m", "5m", "15m"]
    for scale in range(4, 94):
        clock.now += 10
        assert tracker.maybe_snapshot(counters(scale))
    # 90 are kept: the oldest is that of scale 4.
    everything = tracker.get_rates((10_000,))["windows"]["166m"]
    assert everything["prefix_hits"] == 3 * (93 - 4)


def test_a_window_tells_what_was_added_in_it(clock: Clock) -> None:
    tracker = CacheRateTracker(min_interval=0)
    tracker.maybe_snapshot(counters(1))
    clock.now += 60
    tracker.maybe_snapshot(counters(2))
    clock.now += 30
    tracker.maybe_snapshot(counters(5))
    rates = tracker.get_rates((45, 60, 90, 300))
    assert list(rates["windows"]) == ["45s", "1m", "5m"], "90 seconds are labelled 1m too"
    short = rates["windows"]["45s"]
    assert short == {
        "prefix_hit_rate": round(9 / 21, 4),
        "prefix_hits": 9,
        "prefix_misses": 12,
        "prefix_match_efficiency": round(1 / 3, 4),
        "evictions": 18,
        "eviction_rate_per_min": 36.0,
        "ssd_hot_hits": 21,
        "ssd_disk_loads": 6,
        "ssd_hot_rate": round(7 / 9, 4),
    }
    assert rates["windows"]["5m"]["prefix_hits"] == 12
    assert rates["windows"]["5m"]["eviction_rate_per_min"] == 16.0
    assert rates["windows"]["1m"] == rates["windows"]["5m"], "a snapshot exactly as old as the window is inside"


@pytest.mark.parametrize(
    ("window", "label"), [(1, "1s"), (59, "59s"), (60, "1m"), (119, "1m"), (120, "2m"), (3600, "60m")]
)
def test_labels(clock: Clock, window: int, label: str) -> None:
    tracker = CacheRateTracker()
    tracker.maybe_snapshot({})
    assert list(tracker.get_rates((window,))["windows"]) == [label]


def test_without_a_snapshot_in_the_window_the_oldest_of_all_counts(clock: Clock) -> None:
    tracker = CacheRateTracker()
    tracker.maybe_snapshot(counters(1))
    clock.now += 20
    tracker.maybe_snapshot(counters(3))
    clock.now += 1000
    assert tracker.get_rates((60,))["windows"]["1m"]["prefix_hits"] == 6


def test_less_than_a_second_is_no_rate(clock: Clock) -> None:
    tracker = CacheRateTracker(min_interval=0)
    tracker.maybe_snapshot(counters(1))
    assert tracker.get_rates()["windows"] == {"1m": {}, "5m": {}, "15m": {}}
    clock.now += 0.99
    tracker.maybe_snapshot(counters(2))
    assert tracker.get_rates()["windows"]["1m"] == {}
    clock.now += 0.01
    tracker.maybe_snapshot(counters(2))
    assert tracker.get_rates()["windows"]["1m"]["prefix_hits"] == 3


def test_totals(clock: Clock) -> None:
    tracker = CacheRateTracker()
    tracker.maybe_snapshot(counters(1))
    clock.now += 30
    tracker.maybe_snapshot(counters(2))
    totals = tracker.get_rates()["cumulative"]
    assert set(totals) == WINDOW_KEYS | TOTAL_KEYS
    assert {name: totals[name] for name in ("prefix_hits", "prefix_misses", "evictions")} == {
        "prefix_hits": 6,
        "prefix_misses": 8,
        "evictions": 12,
    }
    assert totals["prefix_hit_rate"] == round(3 / 7, 4)
    assert totals["prefix_match_efficiency"] == round(1 / 3, 4)
    assert totals["ssd_hot_rate"] == round(7 / 9, 4)
    assert totals["eviction_rate_per_min"] == 12.0
    assert {name: totals[name] for name in TOTAL_KEYS} == {
        "prefix_tokens_saved": 900,
        "ssd_saves": 22,
        "hot_cache_evictions": 24,
        "hot_cache_promotions": 26,
    }


def test_counters_that_were_reset_add_nothing(clock: Clock) -> None:
    tracker = CacheRateTracker()
    tracker.maybe_snapshot(counters(5))
    clock.now += 60
    tracker.maybe_snapshot(counters(1, prefix_hits=20))
    window = tracker.get_rates()["windows"]["1m"]
    assert set(window) == WINDOW_KEYS
    assert window["prefix_hits"] == 5
    assert window["prefix_misses"] == window["evictions"] == window["ssd_hot_hits"] == 0
    assert window["prefix_hit_rate"] == 1.0
    assert window["prefix_match_efficiency"] == window["ssd_hot_rate"] == window["eviction_rate_per_min"] == 0.0


def test_missing_counters_are_zero(clock: Clock) -> None:
    tracker = CacheRateTracker()
    tracker.maybe_snapshot({"unknown": 1})
    clock.now += 60
    tracker.maybe_snapshot({"prefix_hits": 2})
    rates = tracker.get_rates()
    assert rates["windows"]["1m"] == {**dict.fromkeys(WINDOW_KEYS, 0), "prefix_hits": 2, "prefix_hit_rate": 1.0}
    assert rates["cumulative"]["ssd_saves"] == 0


def test_snapshots_are_copies(clock: Clock) -> None:
    tracker = CacheRateTracker()
    live = counters(1)
    tracker.maybe_snapshot(live)
    live["prefix_hits"] = 1000
    clock.now += 60
    tracker.maybe_snapshot(counters(2))
    assert tracker.get_rates()["windows"]["1m"]["prefix_hits"] == 3


def test_snapshot_and_get_rates(clock: Clock) -> None:
    tracker = CacheRateTracker()
    assert tracker.snapshot_and_get_rates(counters(1))["cumulative"]["prefix_hits"] == 3
    clock.now += 5
    assert tracker.snapshot_and_get_rates(counters(2))["cumulative"]["prefix_hits"] == 3, "inside of the interval"
    clock.now += 5
    rates = tracker.snapshot_and_get_rates(counters(3), windows=(30,))
    assert list(rates["windows"]) == ["30s"]
    assert rates["windows"]["30s"]["prefix_hits"] == 6


def test_clear(clock: Clock) -> None:
    tracker = CacheRateTracker()
    tracker.maybe_snapshot(counters(1))
    tracker.clear()
    assert tracker.get_rates() == {"windows": {}, "cumulative": {}}
    assert tracker.maybe_snapshot(counters(2)) is True


def test_one_snapshot_an_interval_however_many_threads_ask(clock: Clock) -> None:
    tracker = CacheRateTracker(max_snapshots=1000)
    taken: list[bool] = []

    def ask() -> None:
        for _ in range(200):
            taken.append(tracker.maybe_snapshot(counters()))
            tracker.get_rates()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (taken.count(True), len(taken)) == (1, 800)


def test_the_real_clock_is_used() -> None:
    tracker = CacheRateTracker(min_interval=3600)
    answers: list[Any] = [tracker.maybe_snapshot(counters()), tracker.maybe_snapshot(counters())]
    assert answers == [True, False]
