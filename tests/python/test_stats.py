"""The counters of the cache managers."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest

from prefixcache.stats import (
    BaseCacheStats,
    PagedCacheStats,
    PagedSSDCacheStats,
    PrefixCacheStats,
    VLMCacheStats,
)

BASE = ["hits", "misses", "evictions"]
# The fields that follow the base's, in the order in which a constructor takes them, and those that reset() leaves.
OWN: dict[type[BaseCacheStats], tuple[list[str], set[str]]] = {
    BaseCacheStats: ([], set()),
    PrefixCacheStats: (
        [
            "tokens_saved",
            "partial_block_skips",
            "partial_tokens_skipped",
            "block_size",
            "last_partial_tokens_skipped",
            "last_tokens_to_next_block",
            "tokens_matched_total",
            "tokens_requested_total",
            "_total_queries",
        ],
        {"block_size"},
    ),
    PagedCacheStats: (
        ["total_blocks", "allocated_blocks", "free_blocks", "shared_blocks", "total_tokens_cached", "cow_copies"],
        {"total_blocks", "allocated_blocks", "free_blocks", "shared_blocks", "total_tokens_cached"},
    ),
    VLMCacheStats: (["tokens_saved", "image_cache_hits"], set()),
    PagedSSDCacheStats: (
        [
            "saves",
            "saves_persisted",
            "loads",
            "errors",
            "ssd_write_drops",
            "ssd_inline_write_fallbacks",
            "evict_unlink_failures",
            "total_size_bytes",
            "max_size_bytes",
            "configured_max_size_bytes",
            "num_files",
            "hot_cache_entries",
            "hot_cache_size_bytes",
            "hot_cache_max_bytes",
            "hot_cache_hits",
            "hot_cache_evictions",
            "hot_cache_promotions",
        ],
        {
            "total_size_bytes",
            "max_size_bytes",
            "configured_max_size_bytes",
            "num_files",
            "hot_cache_entries",
            "hot_cache_size_bytes",
            "hot_cache_max_bytes",
            "hot_cache_hits",
            "hot_cache_evictions",
            "hot_cache_promotions",
        },
    ),
}
KINDS = pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)


def filled(kind: type[BaseCacheStats]) -> Any:
    return kind(*range(1, len(fields(kind)) + 1))


@KINDS
def test_fields_and_their_order(kind: type[BaseCacheStats]) -> None:
    assert [field.name for field in fields(kind)] == BASE + OWN[kind][0]
    assert set(asdict(kind()).values()) == {0}


@KINDS
def test_reset_leaves_sizes_and_settings(kind: type[BaseCacheStats]) -> None:
    stats = filled(kind)
    before = asdict(stats)
    stats.reset()
    assert asdict(stats) == {name: value if name in OWN[kind][1] else 0 for name, value in before.items()}


@KINDS
def test_events_are_counted_one_by_one(kind: type[BaseCacheStats]) -> None:
    stats = kind()
    stats.record_hit()
    stats.record_hit()
    stats.record_hit()
    stats.record_miss()
    stats.record_eviction()
    stats.record_eviction()
    assert (stats.hits, stats.misses, stats.evictions, stats.total_queries, stats.hit_rate) == (3, 1, 2, 4, 0.75)


@KINDS
def test_rates_of_nothing_are_zero(kind: type[BaseCacheStats]) -> None:
    stats = kind()
    assert (stats.total_queries, stats.hit_rate) == (0, 0.0)
    assert isinstance(stats.hit_rate, float)


@KINDS
def test_the_dict_holds_every_field_and_the_rates(kind: type[BaseCacheStats]) -> None:
    rates = {PagedCacheStats: {"utilization"}, PagedSSDCacheStats: {"save_rate"}}.get(kind, set())
    stats = filled(kind)
    found = stats.to_dict()
    assert set(found) == set(asdict(stats)) | {"total_queries", "hit_rate"} | rates
    for name, value in found.items():
        assert value == getattr(stats, name)


def test_a_prefix_caches_queries_may_be_set() -> None:
    stats = PrefixCacheStats(hits=2, misses=2)
    stats.total_queries = 10
    assert (stats.total_queries, stats.hit_rate) == (10, 0.2)
    assert stats.to_dict()["_total_queries"] == 10
    stats.total_queries = 0
    assert (stats.total_queries, stats.hit_rate) == (4, 0.5)
    stats.total_queries = -1
    assert stats.total_queries == 4


def test_a_prefix_caches_reset_forgets_the_queries_that_were_set() -> None:
    stats = PrefixCacheStats(block_size=16)
    stats.total_queries = 9
    stats.reset()
    assert (stats.total_queries, stats.block_size) == (0, 16)


def test_the_queries_that_were_set_are_not_shown() -> None:
    assert repr(PrefixCacheStats(hits=1)).count("total_queries") == 0


def test_utilization_of_the_blocks_made_so_far() -> None:
    assert PagedCacheStats(total_blocks=8, allocated_blocks=2).utilization == 0.25
    assert PagedCacheStats(allocated_blocks=2).utilization == 0.0


def test_image_hits() -> None:
    stats = VLMCacheStats()
    stats.record_image_hit()
    assert (stats.image_cache_hits, stats.hits) == (1, 0)


def test_a_load_is_a_hit_and_errors_lower_the_save_rate() -> None:
    stats = PagedSSDCacheStats()
    assert stats.save_rate == 0.0
    stats.record_load()
    stats.record_save()
    stats.record_save()
    stats.record_save()
    stats.record_error()
    assert (stats.loads, stats.hits, stats.saves, stats.errors, stats.save_rate) == (1, 1, 3, 1, 0.75)
