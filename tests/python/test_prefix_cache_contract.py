"""The names that callers of oMLX's prefix cache touch: import paths, constructor, counters, tables, index."""

from __future__ import annotations

import importlib
import inspect
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from mlx_lm.models.cache import KVCache
from omlx_doubles import BLOCK, MODEL, Model, build, mock_ssd, seed, seed_prompt

from prefixcache.hybrid_cache import ModelCacheConfig
from prefixcache.interface import CacheManager
from prefixcache.paged_cache import BlockTable, PagedCacheManager, compute_block_hash
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache, BlockCacheEntry
from prefixcache.stats import PrefixCacheStats
from prefixcache.type_handlers import SizedArraysCache

TWELVE = list(range(1, 13))
COUNTERS = {
    "_hits": "hits",
    "_misses": "misses",
    "_tokens_saved": "tokens_saved",
    "_partial_block_skips": "partial_block_skips",
    "_partial_tokens_skipped": "partial_tokens_skipped",
    "_last_partial_tokens_skipped": "last_partial_tokens_skipped",
    "_last_tokens_to_next_block": "last_tokens_to_next_block",
}


def insert(cache: BlockAwarePrefixCache, paged: PagedCacheManager, request_id: str, hashes: list[bytes]) -> Any:
    """A request as callers put one in by hand."""
    table = seed(paged, request_id, hashes)
    cache._request_tables[request_id] = BlockCacheEntry(block_table=table, last_access=time.time())
    return table


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("paged_cache", ["BlockTable", "PagedCacheManager", "compute_block_hash"]),
        ("prefix_cache", ["BlockAwarePrefixCache", "BlockCacheEntry"]),
        ("stats", ["PrefixCacheStats"]),
        ("hybrid_cache", ["ModelCacheConfig"]),
        ("paged_ssd_cache", ["PagedSSDCacheManager"]),
        ("type_handlers", ["SizedArraysCache"]),
    ],
)
def test_import_paths(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"prefixcache.{module}")
    assert [name for name in names if not inspect.isclass(getattr(found, name)) and name != "compute_block_hash"] == []
    assert callable(compute_block_hash)


def test_classes_can_be_used_as_the_callers_use_them() -> None:
    assert issubclass(BlockAwarePrefixCache, CacheManager)
    assert ModelCacheConfig.from_type_list(["KVCache"]).num_layers == 1
    assert len(SizedArraysCache.__mro__) > 1
    ssd = MagicMock(spec=PagedSSDCacheManager)
    for method in ("save_block", "load_block_with_metadata", "forget_block", "delete_block"):
        assert callable(getattr(ssd, method))
    assert callable(ssd.invalidate_stale_layer_signature)


def test_constructor_by_position_and_by_name() -> None:
    model, paged, ssd = Model(KVCache), PagedCacheManager(block_size=BLOCK, max_blocks=8, model_name=MODEL), mock_ssd()
    by_name = BlockAwarePrefixCache(model=model, paged_cache_manager=paged, paged_ssd_cache_manager=ssd)
    for cache in (BlockAwarePrefixCache(model, paged, ssd), by_name):
        assert cache.model is model
        assert cache.paged_cache is paged
        assert cache.block_size == BLOCK
        assert cache.paged_ssd_cache is ssd
    assert BlockAwarePrefixCache(model, paged).paged_ssd_cache is None


def test_signatures_and_defaults() -> None:
    def parameters(name: str) -> list[tuple[str, Any]]:
        found = inspect.signature(getattr(BlockAwarePrefixCache, name)).parameters.values()
        return [(p.name, p.default) for p in found if p.name != "self"]

    empty = inspect.Parameter.empty
    salts = [("extra_keys", None), ("extra_key_token_start", None), ("extra_key_ranges", None)]
    assert parameters("fetch_cache") == [("request_id", empty), ("tokens", empty), *salts]
    assert parameters("store_cache") == [
        *(("request_id", empty), ("tokens", empty), ("cache_data", empty)),
        *(("model_cache_config", None), ("boundary_snapshots", None), *salts, ("hot_cache_write_back", True)),
    ]
    assert parameters("reconstruct_cache") == [("block_table", empty), ("promote_to_hot_cache", True)]
    assert parameters("_find_best_prefix_match") == [("tokens", empty), ("extra_keys", None)]
    assert parameters("_update_prefix_index") == [("tokens", empty), ("block_ids", empty), ("extra_keys", None)]
    assert [default for _, default in parameters("_forget_incompatible_ssd_block")] == [empty, None]
    assert [default for _, default in parameters("_validate_block_cache_data")] == [empty, None]
    wanted = [empty, empty, empty, None, False, None]
    assert [default for _, default in parameters("_extract_block_tensor_slice")] == wanted
    names = [name for name, _ in parameters("_extract_block_tensor_slice")][3:]
    assert names == ["model_cache_config", "is_last_block", "snapshot_cache_data"]
    for name in ("_is_placeholder_state", "_canonical_layer_cache_types"):
        assert isinstance(inspect.getattr_static(BlockAwarePrefixCache, name), staticmethod)


class Layered:
    """A model that tells the number of its layers in one way or another."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


def raising(error: Exception) -> Any:
    def make_cache() -> Any:
        raise error

    return make_cache


SIX, SEVEN = SimpleNamespace(num_hidden_layers=6), SimpleNamespace(num_hidden_layers=7)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Layered(make_cache=lambda: [1, 2, 3], layers=[0] * 5, args=SIX, config=SEVEN), 3),
        (Layered(make_cache=list, layers=[0] * 5, args=SIX), 5),
        (Layered(make_cache=lambda: (1, 2, 3), layers=[0] * 5), 5),
        (Layered(make_cache=MagicMock(), layers=[0] * 5), 5),
        (Layered(make_cache=lambda: None, args=SIX), 6),
        (Layered(layers=[0] * 5, args=SIX, config=SEVEN), 5),
        (Layered(args=SIX, config=SEVEN), 6),
        (Layered(config=SEVEN), 7),
        (Layered(), 0),
        (MagicMock(), 0),
        (None, 0),
    ],
)
def test_expected_number_of_layers(model: Any, expected: int) -> None:
    cache = BlockAwarePrefixCache(model, PagedCacheManager(block_size=BLOCK, max_blocks=8, model_name=MODEL))
    assert cache.expected_num_layers == expected
    assert isinstance(cache.expected_num_layers, int)


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), ValueError("no"), TypeError("no"), AttributeError("no"), NotImplementedError("no")]
)
def test_a_model_that_cannot_make_caches_is_asked_for_its_layers(error: Exception) -> None:
    model = Layered(make_cache=raising(error), layers=[0] * 5)
    assert BlockAwarePrefixCache(model, PagedCacheManager(block_size=BLOCK, max_blocks=8)).expected_num_layers == 5


def test_counters_can_be_written_and_are_what_the_statistics_read() -> None:
    cache, _ = build()
    for value, name in enumerate(COUNTERS, 3):
        assert getattr(cache, name) == 0
        setattr(cache, name, value)
    stats, as_dict = cache.get_stats(), cache.get_stats_dict()
    assert isinstance(stats, PrefixCacheStats)
    for value, name in enumerate(COUNTERS.values(), 3):
        assert getattr(stats, name) == value
        assert as_dict[name] == value
    assert stats.hit_rate == as_dict["hit_rate"] == 3 / 7
    assert stats.total_queries == 7
    cache.reset_stats()
    assert [getattr(cache, name) for name in COUNTERS] == [0] * len(COUNTERS)
    assert [getattr(cache.get_stats(), name) for name in COUNTERS.values()] == [0] * len(COUNTERS)


def test_statistics_name_the_requests_and_the_memory() -> None:
    cache, paged = build()
    insert(cache, paged, "r", [b"one", b"two"])
    as_dict = cache.get_stats_dict()
    memory = paged.get_memory_usage()
    assert as_dict["active_requests"] == 1
    assert {name: as_dict[name] for name in memory} == memory
    assert as_dict["block_size"] == BLOCK
    assert as_dict["allocated_blocks"] == 3
    assert cache.get_stats().block_size == BLOCK
    assert cache.get_stats() is not cache.get_stats()


def test_evictions_are_those_of_the_paged_cache() -> None:
    cache, paged = build()
    table = seed(paged, "r", [b"one"])
    paged.release_for_eviction(table.block_ids)
    assert paged.evict_block_permanently(table.block_ids[0]) is True
    assert paged.stats.evictions == 1
    assert cache.get_stats().evictions == 1


def test_a_hit_and_a_miss_are_counted_per_fetch() -> None:
    cache, _ = build()
    cache.fetch_cache("a", TWELVE[:10])
    cache.store_cache("a", TWELVE[:10], [])
    cache.fetch_cache("b", TWELVE[:10])
    assert (cache._hits, cache._misses, cache._tokens_saved) == (1, 1, 8)
    stats = cache.get_stats()
    assert (stats.tokens_matched_total, stats.tokens_requested_total) == (8, 20)
    table, remaining = cache.fetch_cache("c", [])
    assert (table, remaining) == (None, [])
    stats = cache.get_stats()
    assert (stats.hits, stats.misses, stats.tokens_requested_total) == (1, 1, 20)
    cache.reset_stats()
    assert (cache.get_stats().tokens_matched_total, cache.get_stats().tokens_requested_total) == (0, 0)


def test_inserted_requests_are_counted() -> None:
    cache, paged = build()
    assert (len(cache), cache.size) == (0, 0)
    insert(cache, paged, "r", [b"hash1"])
    insert(cache, paged, "s", [b"hash2"])
    assert (len(cache), cache.size) == (2, 2)
    assert cache.max_size == paged.max_blocks == 64


def test_release_of_an_inserted_request_frees_its_blocks() -> None:
    cache, paged = build()
    table = insert(cache, paged, "r", [b"hash1"])
    free = paged.free_blocks
    own = paged.allocated_blocks.get(table.block_ids[0])
    cache.release_cache("r")
    assert paged.free_blocks == free + 1
    assert own.ref_count == 0
    assert "r" not in cache._request_tables
    cache.release_cache("r")
    cache.release_cache("never seen")
    assert paged.free_blocks == free + 1


def test_clearing_the_entry_of_a_request_keeps_its_table_and_its_blocks() -> None:
    cache, paged = build()
    table = insert(cache, paged, "r", [b"hash1"])
    cache.clear_request_entry("r")
    assert len(cache) == 0
    assert paged.request_tables["r"] is table
    assert paged.allocated_blocks.get(table.block_ids[0]).ref_count == 1
    cache.clear_request_entry("r")


def test_fork_shares_the_blocks() -> None:
    cache, paged = build()
    table = insert(cache, paged, "r", [b"hash1"])
    fork = cache.fork_cache("r", "s")
    assert fork.request_id == "s"
    assert fork.block_ids == table.block_ids
    assert fork.block_ids is not table.block_ids
    assert fork.num_tokens == BLOCK
    assert paged.allocated_blocks.get(table.block_ids[0]).ref_count == 2
    assert cache._request_tables["s"].block_table.block_ids == table.block_ids
    cache.release_cache("r")
    assert paged.allocated_blocks.get(table.block_ids[0]).ref_count == 1
    assert cache.fork_cache("never seen", "t") is None
    assert "t" not in cache._request_tables


def test_evict_and_clear_act_on_inserted_requests() -> None:
    cache, paged = build()
    insert(cache, paged, "r", [b"hash1"])
    assert cache.evict("r") is True
    assert "r" not in cache._request_tables
    assert cache.evict("r") is False
    insert(cache, paged, "s", [b"hash2"])
    insert(cache, paged, "t", [b"hash3"])
    assert cache.clear() > 0
    assert (len(cache), cache._request_tables, len(cache._prefix_index)) == (0, {}, 0)
    assert paged.stats.allocated_blocks == 1
    assert cache.clear() == 0


def test_keys_of_a_wrong_kind_are_a_miss_and_a_refusal() -> None:
    cache, _ = build()
    assert cache.fetch("bad") == (None, False)
    assert cache.store("bad", []) is False


def test_the_prefix_index_takes_entries_by_hand() -> None:
    cache, paged = build()
    ids = [own.block_id for own in paged.get_new_blocks(1)]
    key = compute_block_hash(b"", TWELVE[:4], model_name=paged.model_name)
    cache._prefix_index[key] = (4, ids, 1)
    assert len(cache._prefix_index) == 1
    length, found, blocks = cache._find_best_prefix_match(TWELVE[:4])
    assert (length, list(found), blocks) == (4, ids, 1)
    assert cache._find_best_prefix_match([9, 9, 9, 9]) is None
    assert cache._find_best_prefix_match(TWELVE[:4], extra_keys=("image",)) is None


def test_the_prefix_index_keeps_its_own_ids() -> None:
    cache, paged = build()
    ids = [own.block_id for own in paged.get_new_blocks(2)]
    kept = list(ids)
    cache._update_prefix_index(TWELVE[:8], ids)
    assert len(cache._prefix_index) > 0
    ids.append(99)
    ids[0] = 98
    length, found, blocks = cache._find_best_prefix_match(TWELVE[:8])
    assert (length, list(found), blocks) == (8, kept, 2)
    length, found, blocks = cache._find_best_prefix_match(TWELVE[:7])
    assert (length, list(found), blocks) == (4, kept[:1], 1)


def test_the_prefix_index_tells_salts_apart() -> None:
    cache, paged = build()
    ids = [own.block_id for own in paged.get_new_blocks(1)]
    cache._update_prefix_index(TWELVE[:4], ids, extra_keys=("image",))
    assert cache._find_best_prefix_match(TWELVE[:4]) is None
    length, found, _ = cache._find_best_prefix_match(TWELVE[:4], ("image",))
    assert (length, list(found)) == (4, ids)


def test_the_cold_restore_callback_is_kept_and_never_called() -> None:
    cache, _ = build()
    callback = MagicMock()
    cache.set_cold_restore_callback(callback)
    assert cache._cold_restore_callback is callback
    assert cache.store_cache("r", TWELVE[:8], []).num_tokens == 8
    table, _ = cache.fetch_cache("s", TWELVE[:8])
    assert cache.reconstruct_cache(table) is None
    callback.assert_not_called()


@pytest.mark.parametrize("types", [None, ["KVCache"], ["SizedArraysCache", "PrefillReadyRotatingKVCache"]])
def test_canonical_layer_types(types: list[str] | None) -> None:
    renamed = {"SizedArraysCache": "ArraysCache", "PrefillReadyRotatingKVCache": "RotatingKVCache"}
    found = BlockAwarePrefixCache._canonical_layer_cache_types(types)
    assert found == (None if types is None else [renamed.get(name, name) for name in types])


def test_other_layer_types_keep_their_names() -> None:
    types = ["TurboQuantKVCache", "CacheList", "BatchRotatingKVCache", "QuantizedKVCache", "Anything"]
    assert list(BlockAwarePrefixCache._canonical_layer_cache_types(types)) == types


def test_public_members_are_there() -> None:
    cache, _ = build()
    names = "fetch_cache store_cache reconstruct_cache get_cache_for_generation release_cache clear_request_entry"
    names += " fork_cache get_stats get_stats_dict reset_stats clear fetch store evict set_paged_ssd_cache_manager"
    names += " set_cold_restore_callback preload_blocks"
    assert [name for name in names.split() if not callable(getattr(cache, name, None))] == []


def test_members_of_the_paged_manager_that_callers_touch() -> None:
    paged = PagedCacheManager(block_size=BLOCK, max_blocks=8, model_name=MODEL)
    assert paged.stats.allocated_blocks == 1
    assert paged.model_name == MODEL
    assert paged._paged_ssd_cache_manager is None
    table = seed_prompt(paged, "r", TWELVE, 2)
    assert isinstance(table, BlockTable)
    assert paged.request_tables["r"] is table
    first, second = (paged.allocated_blocks.get(block_id) for block_id in table.block_ids)
    assert paged.find_shared_prefix(TWELVE) == (table.block_ids, TWELVE[8:])
    assert paged.cached_block_hash_to_block.pop(second.block_hash, second.block_id) is second
    assert paged.cached_block_hash_to_block.get_block(second.block_hash) is None
    assert paged.find_shared_prefix(TWELVE) == (table.block_ids[:1], TWELVE[4:])
    paged.cached_block_hash_to_block.insert(b"hash1", second)
    assert paged.cached_block_hash_to_block.get_block(b"hash1") is second
    first.block_hash, first.token_count, first.ref_count = b"hash1", 3, 5
    assert (first.block_hash, first.token_count, first.ref_count, first.is_null) == (b"hash1", 3, 5, False)
    assert [own.is_null for own in paged.allocated_blocks.values()].count(True) == 1
    assert table.block_ids.copy() == [first.block_id, second.block_id]
    assert isinstance(paged.free_blocks, int)
    assert paged.free_blocks == 5
    assert [own.ref_count for own in paged.get_new_blocks(2)] == [1, 1]
    assert paged.free_blocks == 3
