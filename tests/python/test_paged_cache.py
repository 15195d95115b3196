"""The paged cache: what it finds, and what it answers to every call of oMLX's surface."""

from __future__ import annotations

import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from prefixcache import paged_cache
from prefixcache._omlx.block_hash import block_hashes
from prefixcache.paged_cache import BlockTable, CacheBlock, PagedCacheManager, compute_block_hash
from prefixcache.stats import PagedCacheStats

SIZE = 4
TOKENS = list(range(100, 112))  # three blocks
MODEL = "model"


class Disk:
    """An SSD manager with some blocks, that notes what it was asked."""

    def __init__(self, *hashes: bytes) -> None:
        self.hashes = set(hashes)
        self.asked: list[bytes] = []

    def has_block(self, block_hash: bytes) -> bool:
        self.asked.append(block_hash)
        return block_hash in self.hashes


def make(max_blocks: int = 20, initial_blocks: int = 256, enable_caching: bool = True) -> PagedCacheManager:
    return PagedCacheManager(SIZE, max_blocks, enable_caching, MODEL, initial_blocks)


def hashes_of(tokens: Any, *salts: Any) -> list[bytes]:
    return block_hashes(tokens, SIZE, MODEL, *salts)


def store(manager: PagedCacheManager, tokens: list[int], request_id: str = "r") -> BlockTable:
    """What a request leaves that has computed `tokens` and goes on: blocks in use, in a table."""
    table = manager.create_block_table(request_id)
    for block in manager._adopt(hashes_of(tokens), SIZE):
        table.add_block(block.block_id, SIZE)
    return table


def finish(manager: PagedCacheManager, tokens: list[int], request_id: str = "r") -> list[int]:
    """The ids of blocks that a finished request leaves behind, retained."""
    table = store(manager, tokens, request_id)
    manager.release_for_eviction(table.block_ids)
    return table.block_ids


def ids(blocks: list[CacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


# The surface


def test_the_module_has_omlxs_names() -> None:
    names = {"PagedCacheManager", "CacheBlock", "BlockTable", "FreeKVCacheBlockQueue", "BlockHashToBlockMap"}
    assert names | {"BlockHash", "compute_block_hash", "resolve_block_extra_keys"} == set(paged_cache.__all__)
    assert all(hasattr(paged_cache, name) for name in paged_cache.__all__)
    assert paged_cache.BlockHash(b"x") == b"x"


SALTS = {"extra_keys": None, "extra_key_token_start": None, "extra_key_ranges": None}
SIGNATURES: dict[str, dict[str, Any]] = {
    "__init__": {
        "block_size": 64,
        "max_blocks": 1000,
        "enable_caching": True,
        "model_name": "",
        "initial_blocks": 256,
    },
    "allocate_block": {},
    "get_new_blocks": {"num_blocks": ...},
    "increment_ref": {"block_id": ...},
    "decrement_ref": {"block_id": ...},
    "free_block": {"block_id": ...},
    "find_cached_block": {"tokens": ..., "parent_hash": None, "extra_keys": None},
    "register_block_hash": {"block": ..., "tokens": ..., "parent_hash": None, "extra_keys": None},
    "cache_full_blocks": {
        "blocks": ...,
        "token_ids": ...,
        "num_cached_blocks": ...,
        "num_full_blocks": ...,
        "extra_keys": None,
    },
    "get_computed_blocks": {"token_ids": ..., **SALTS},
    "find_shared_prefix": {"tokens": ..., **SALTS},
    "create_block_table": {"request_id": ...},
    "fork_block_table": {"source_table": ..., "new_request_id": ...},
    "get_blocks_for_generation": {"table": ...},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = list(inspect.signature(getattr(PagedCacheManager, name)).parameters.values())[1:]
    found = {p.name: ... if p.default is inspect.Parameter.empty else p.default for p in parameters}
    assert found == SIGNATURES[name]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)


def test_a_new_manager() -> None:
    manager = PagedCacheManager(model_name="m")
    settings = (manager.block_size, manager.max_blocks, manager.enable_caching, manager.initial_blocks)
    assert settings == (64, 1000, True, 256)
    assert (len(manager.blocks), manager._current_allocated_count, manager.free_blocks) == (256, 256, 255)
    assert manager.stats == PagedCacheStats(total_blocks=256, allocated_blocks=1, free_blocks=255)
    null = manager.null_block
    assert (null, null.block_id, null.is_null, null.ref_count) == (manager.blocks[0], 0, True, 1)
    assert manager.allocated_blocks == {0: null}
    assert manager.request_tables == {}
    assert manager._paged_ssd_cache_manager is None
    assert len(manager.cached_block_hash_to_block) == 0
    assert manager.free_block_queue.num_free_blocks == 255


def test_no_more_blocks_are_made_than_there_may_be() -> None:
    assert len(make(max_blocks=5).blocks) == 5
    assert make(max_blocks=1).allocate_block() is None
    assert len(make(initial_blocks=0).blocks) == 1


@pytest.mark.parametrize(("block_size", "max_blocks"), [(0, 10), (-1, 10), (4, 0), (4, -1)])
def test_sizes_below_one_are_refused(block_size: int, max_blocks: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagedCacheManager(block_size, max_blocks, model_name="m")


def test_a_manager_without_a_model_name_warns(caplog: pytest.LogCaptureFixture) -> None:
    PagedCacheManager()
    assert "no model name" in caplog.text
    caplog.clear()
    make()
    assert caplog.text == ""


# Allocation and references


def test_blocks_are_given_out_from_the_front_with_one_reference() -> None:
    manager = make()
    first, second = manager.allocate_block(), manager.allocate_block()
    assert first is manager.blocks[1]
    assert second is manager.blocks[2]
    assert first.ref_count == 1
    assert manager.allocated_blocks[1] is first
    assert (manager.stats.allocated_blocks, manager.stats.free_blocks) == (3, 17)


def test_a_pool_grows_until_its_largest_size() -> None:
    manager = make(max_blocks=400, initial_blocks=2)
    assert manager.allocate_block() is not None
    assert manager.allocate_block() is not None
    assert (len(manager.blocks), manager.stats.total_blocks) == (258, 258)
    manager.get_new_blocks(255)
    manager.get_new_blocks(2)
    assert len(manager.blocks) == 258 + 2 + 128
    manager.get_new_blocks(manager.free_blocks)
    assert manager.allocate_block() is not None
    assert len(manager.blocks) == 400
    assert manager._grow_blocks(5) == 0


def test_a_pool_whose_blocks_are_all_in_use_has_none(caplog: pytest.LogCaptureFixture) -> None:
    manager = make(max_blocks=4)
    blocks = manager.get_new_blocks(3)
    assert manager.allocate_block() is None
    assert "in use" in caplog.text
    with pytest.raises(ValueError, match="1 blocks wanted"):
        manager.get_new_blocks(1)
    assert manager.free_block(blocks[1].block_id)
    assert manager.allocate_block() is blocks[1]


def test_blocks_for_a_number_of_tokens() -> None:
    manager = make()
    assert [len(manager.allocate_blocks_for_tokens(count)) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="blocks wanted"):
        manager.allocate_blocks_for_tokens(1000)


def test_references_are_counted() -> None:
    manager = make()
    block = manager.allocate_block()
    assert block is not None
    assert manager.increment_ref(block.block_id) is True
    assert (block.ref_count, block.is_shared(), manager.stats.shared_blocks) == (2, True, 1)
    assert manager.decrement_ref(block.block_id) is False
    assert (block.ref_count, manager.stats.shared_blocks) == (1, 0)
    assert manager.free_block(block.block_id) is True
    assert block.block_id not in manager.allocated_blocks
    assert manager.free_block_queue.get_all_free_blocks()[-1] is block
    assert manager.increment_ref(block.block_id) is False


def test_freeing_what_is_not_allocated(caplog: pytest.LogCaptureFixture) -> None:
    manager = make()
    assert manager.free_block(7) is False
    assert "block 7 is not allocated" in caplog.text
    assert manager.free_block(0) is False
    assert manager.null_block.ref_count == 1
    assert manager.increment_ref(0) is True
    assert manager.null_block.ref_count == 1


def test_released_blocks_stay_findable() -> None:
    manager = make()
    table = store(manager, TOKENS)
    manager.increment_ref(table.block_ids[0])
    assert manager.release_for_eviction([*table.block_ids, 0, 17, -5]) == 3
    assert [manager.allocated_blocks[i].ref_count for i in table.block_ids] == [1, 0, 0]
    assert (manager.free_blocks, manager.stats.shared_blocks) == (16, 0)
    assert manager.find_shared_prefix(TOKENS) == (table.block_ids, [])
    assert manager.release_for_eviction(table.block_ids) == 1
    assert manager.release_for_eviction(table.block_ids) == 0


def test_touching_takes_references_in_every_state() -> None:
    manager = make()
    table = store(manager, TOKENS[:8])
    used, kept = (manager.blocks[i] for i in table.block_ids)
    manager.release_for_eviction([kept.block_id])
    free = manager.blocks[9]
    manager.touch([used, kept, free, manager.null_block])
    assert [used.ref_count, kept.ref_count, free.ref_count, manager.null_block.ref_count] == [2, 1, 1, 1]
    assert manager.allocated_blocks[9] is free
    assert 9 not in ids(manager.free_block_queue.get_all_free_blocks())
    assert manager.stats.free_blocks == manager.free_blocks == 16
    assert [manager.free_block(block.block_id) for block in (kept, free)] == [True, True]


# Weaknesses of the peer: life cycle


def test_a_freed_block_forgets_its_hash_and_is_registered_when_used_again() -> None:
    """Otherwise `cache_full_blocks` takes it for one that is registered, and its new tokens are never found."""
    manager = make(max_blocks=2)
    (block,) = manager.get_new_blocks(1)
    manager.cache_full_blocks([block], TOKENS[:4], 0, 1)
    assert manager.free_block(block.block_id)
    assert (block.block_hash, block.token_count, len(manager.cached_block_hash_to_block)) == (None, 0, 0)
    block.block_hash = b"written by a caller"
    assert manager.allocate_block() is block
    assert block.block_hash is None
    manager.cache_full_blocks([block], TOKENS[4:8], 0, 1)
    assert manager.find_shared_prefix(TOKENS[4:8]) == ([block.block_id], [])
    assert manager.find_shared_prefix(TOKENS[:4]) == ([], TOKENS[:4])


def test_evicting_a_free_block_leaves_the_free_list_sound() -> None:
    manager = make(max_blocks=10)
    assert manager.evict_block_permanently(5) is True
    for block in manager.get_evictable_blocks(9):
        assert manager.evict_block_permanently(block.block_id) is True
    assert manager.free_blocks == manager.stats.free_blocks == 9
    assert sorted(ids(manager.get_new_blocks(9))) == list(range(1, 10))
    assert manager.free_blocks == 0


def test_evicting_a_block_for_good() -> None:
    manager = make()
    kept, used = finish(manager, TOKENS[:4]), store(manager, TOKENS[4:8], "s").block_ids
    assert manager.evict_block_permanently(kept[0]) is True
    assert manager.find_shared_prefix(TOKENS[:4]) == ([], TOKENS[:4])
    assert manager.stats.evictions == 1
    assert kept[0] not in manager.allocated_blocks
    assert [manager.evict_block_permanently(i) for i in (used[0], 0, -1, 20, 10**9)] == [False] * 5


def test_a_pool_full_of_retained_blocks_gives_up_the_least_recently_used() -> None:
    manager = make(max_blocks=7)
    old, young = finish(manager, TOKENS, "old"), finish(manager, [1, *TOKENS], "young")
    assert (manager.free_blocks, manager.usage) == (0, 0.0)
    assert manager.allocate_block() is manager.blocks[old[2]]  # the end of a chain goes before its beginning
    found = [manager.get_cached_block(block_hash) for block_hash in hashes_of(TOKENS)]
    assert found == [manager.blocks[old[0]], manager.blocks[old[1]], None]
    assert sorted(ids(manager.get_new_blocks(2))) == sorted(old[:2])
    assert manager.find_shared_prefix(TOKENS) == ([], TOKENS)
    assert manager.find_shared_prefix([1, *TOKENS])[0] == young
    assert manager.stats.evictions == 3
    assert manager.stats.allocated_blocks == 7


def test_a_use_saves_a_retained_block() -> None:
    manager = make(max_blocks=7)
    old, young = finish(manager, TOKENS, "old"), finish(manager, [1, *TOKENS], "young")
    manager.find_shared_prefix(TOKENS)
    manager.get_new_blocks(3)
    assert manager.find_shared_prefix(TOKENS)[0] == old
    assert manager.find_shared_prefix([1, *TOKENS])[0] == []
    assert young


@pytest.mark.parametrize("use", ["find", "restore"])
def test_a_use_of_a_single_block_saves_it_too(use: str) -> None:
    manager = make(max_blocks=3)
    old, young = finish(manager, TOKENS[:4], "old"), finish(manager, TOKENS[4:8], "young")
    if use == "find":
        assert manager.find_cached_block(TOKENS[:4]) is manager.blocks[old[0]]
    else:
        assert manager.restore_block(old[0], None) is True
    assert manager.allocate_block() is manager.blocks[young[0]]
    assert manager.find_shared_prefix(TOKENS[:4])[0] == old


def test_a_request_for_more_than_can_be_had_evicts_nothing() -> None:
    manager = make(max_blocks=5)
    kept = finish(manager, TOKENS)
    store(manager, [1] * 4, "s")
    with pytest.raises(ValueError, match="blocks wanted"):
        manager.get_new_blocks(4)
    assert manager.find_shared_prefix(TOKENS) == (kept, [])


def test_a_block_whose_count_a_caller_lowered_is_reclaimed_too() -> None:
    manager = make(max_blocks=3)
    first, second = manager.get_new_blocks(2)
    second.ref_count = 0
    assert manager.get_evictable_blocks(5) == [second]
    assert manager.allocate_block() is second
    assert first.ref_count == 1
    assert manager.allocate_block() is None


def test_a_block_whose_count_a_caller_raised_is_not_reclaimed() -> None:
    manager = make(max_blocks=4)
    kept = finish(manager, TOKENS)
    manager.blocks[kept[2]].ref_count = 1  # the first to go otherwise
    assert ids(manager.get_evictable_blocks(9)) == [kept[1], kept[0]]
    assert sorted(ids(manager.get_new_blocks(2))) == sorted(kept[:2])
    assert manager.allocate_block() is None
    assert manager.blocks[kept[2]].block_hash == hashes_of(TOKENS)[2]
    free = make(max_blocks=3)
    free.blocks[1].ref_count = 1
    assert ids(free.get_evictable_blocks(9)) == [2]


def test_a_retained_block_that_nobody_can_find_goes_first() -> None:
    manager = make(max_blocks=5)
    kept = finish(manager, TOKENS)
    block = manager.allocate_block()
    assert block is not None
    manager.release_for_eviction([block.block_id])
    assert manager.allocate_block() is block
    assert manager.find_shared_prefix(TOKENS)[0] == kept


def test_the_null_block_is_never_registered() -> None:
    manager = make()
    manager.register_block_hash(manager.null_block, TOKENS[:4])
    manager.cache_full_blocks([manager.null_block], TOKENS, 0, 1)
    assert manager.null_block.block_hash is None
    assert manager.find_shared_prefix(TOKENS) == ([], TOKENS)
    assert manager.stats.total_tokens_cached == 0


def test_memory_pressure_frees_retained_blocks() -> None:
    manager = make(max_blocks=8)
    kept = finish(manager, TOKENS)
    assert manager.handle_memory_pressure(4) is True
    assert manager.find_shared_prefix(TOKENS)[0] == kept
    assert manager.handle_memory_pressure(6) is True
    assert (manager.free_blocks, manager.stats.free_blocks) == (6, 6)
    assert manager.find_shared_prefix(TOKENS)[0] == kept[:1]
    assert manager.handle_memory_pressure(8) is False
    assert manager.free_blocks == 7


def test_evicting_the_least_recently_used_frees_retained_blocks_first() -> None:
    manager = make(max_blocks=8)
    kept = finish(manager, TOKENS)
    assert manager.evict_lru_blocks(2) == 2
    assert manager.find_shared_prefix(TOKENS)[0] == kept[:1]
    assert manager.free_blocks == 6
    assert manager.evict_lru_blocks(100) == 7
    assert (manager.free_blocks, manager.stats.free_blocks) == (7, 7)
    store(manager, TOKENS)
    assert manager.evict_lru_blocks(100) == 4
    assert manager.find_shared_prefix(TOKENS)[1] == []


def test_evictable_blocks_are_free_ones_and_then_retained_ones_by_age() -> None:
    manager = make(max_blocks=6)
    kept = finish(manager, TOKENS)
    for age, block_id in zip((5.0, 9.0, 7.0), kept, strict=True):
        manager.blocks[block_id].last_access = age
    free = ids(manager.free_block_queue.get_all_free_blocks())
    assert ids(manager.get_evictable_blocks(9)) == [*free, kept[0], kept[2], kept[1]]
    assert ids(manager.get_evictable_blocks(3)) == [*free, kept[0]]
    assert manager.get_evictable_blocks(0) == []
    assert manager.free_blocks == 2


@pytest.mark.parametrize("retained", [True, False])
def test_evictable_blocks_of_a_large_pool_are_each_listed_once(retained: bool) -> None:
    manager = PagedCacheManager(1, 8001, model_name="m", initial_blocks=8001)
    if retained:
        manager.release_for_eviction(ids(manager._adopt(block_hashes(range(8000), 1, "m"), 1)))
    assert sorted(ids(manager.get_evictable_blocks(9000))) == list(range(1, 8001))
    assert len(set(ids(manager.get_evictable_blocks(64)))) == 64


def test_the_number_of_free_blocks_and_the_method_that_frees_have_names_of_their_own() -> None:
    manager = make()
    blocks = manager.get_new_blocks(3)
    manager.increment_ref(blocks[1].block_id)
    assert manager.free_blocks == 16
    assert manager.free_block_ids(iter(ids(blocks))) == 2
    assert manager.free_blocks == 18


def test_cold_and_restored_blocks() -> None:
    manager = make()
    kept = finish(manager, TOKENS[:8])
    used = manager.allocate_block()
    assert used is not None
    assert (ids(manager.get_cold_blocks()), manager.cold_block_count) == (kept, 2)
    assert [manager.mark_block_cold(i) for i in (kept[0], used.block_id, 0, 15, 99)] == [True, *[False] * 4]
    assert manager.stats.evictions == 1
    manager.blocks[kept[0]].last_access = 0.0
    assert [manager.restore_block(i, object()) for i in (kept[0], 0, 15)] == [True, False, False]
    assert time.time() - manager.blocks[kept[0]].last_access < 60


# Finding


def test_a_registered_block_is_found() -> None:
    manager = make()
    block = manager.allocate_block()
    assert block is not None
    manager.register_block_hash(block, TOKENS[:4], b"parent", ("salt",))
    assert block.block_hash == compute_block_hash(b"parent", TOKENS[:4], ("salt",), MODEL)
    assert block.token_count == 0
    assert manager.get_cached_block(block.block_hash) is block
    assert manager.find_cached_block(TOKENS[:4], b"parent", ("salt",)) is block
    assert manager.find_cached_block(TOKENS[:4], b"parent") is None
    assert manager.find_cached_block(TOKENS[:4]) is None
    assert manager.get_cached_block(b"other") is None
    assert (manager.stats.hits, manager.stats.misses, block.ref_count) == (2, 3, 1)


def test_a_block_is_found_under_its_latest_hash_only() -> None:
    manager = make()
    block = manager.allocate_block()
    assert block is not None
    manager.register_block_hash(block, TOKENS[:4])
    manager.register_block_hash(block, TOKENS[4:8])
    assert manager.find_cached_block(TOKENS[:4]) is None
    assert manager.find_cached_block(TOKENS[4:8]) is block
    assert len(manager.cached_block_hash_to_block) == 1


def test_a_map_entry_that_a_caller_made_untrue_is_not_believed() -> None:
    """Its tensors are those of another hash: found under this one, they would be another prompt's."""
    manager = make()
    table = store(manager, TOKENS)
    manager.blocks[table.block_ids[1]].block_hash = b"hash1"
    assert manager.find_shared_prefix(TOKENS) == (table.block_ids[:1], TOKENS[4:])
    (fresh,) = manager._adopt(hashes_of(TOKENS)[1:2], SIZE)
    assert manager.find_shared_prefix(TOKENS)[0] == [table.block_ids[0], fresh.block_id, table.block_ids[2]]
    manager.cached_block_hash_to_block.insert(b"hash1", manager.blocks[table.block_ids[1]])
    assert manager.get_cached_block(b"hash1") is manager.blocks[table.block_ids[1]]


def test_whole_blocks_of_a_prompt_are_found_without_a_reference() -> None:
    manager = make()
    table = store(manager, TOKENS)
    blocks, count = manager.get_computed_blocks([*TOKENS, 1, 2])
    assert (ids(blocks), count) == (table.block_ids, 12)
    assert [block.ref_count for block in blocks] == [1, 1, 1]
    assert manager.find_shared_prefix([*TOKENS[:8], 0, 0, 0, 0]) == (table.block_ids[:2], [0, 0, 0, 0])
    assert manager.find_shared_prefix(TOKENS[:7]) == (table.block_ids[:1], TOKENS[4:7])
    assert manager.find_shared_prefix(TOKENS[:3]) == ([], TOKENS[:3])
    assert manager.find_shared_prefix([]) == ([], [])


def test_hits_are_counted_by_block_and_a_miss_where_it_stops() -> None:
    manager = make()
    store(manager, TOKENS)
    manager.find_shared_prefix(TOKENS)
    assert (manager.stats.hits, manager.stats.misses) == (3, 0)
    manager.find_shared_prefix([*TOKENS[:4], *TOKENS])
    assert (manager.stats.hits, manager.stats.misses) == (4, 1)
    manager.find_shared_prefix(TOKENS[:3])
    assert (manager.stats.hits, manager.stats.misses) == (4, 1)


def test_what_remains_of_an_unknown_prompt_is_a_copy() -> None:
    tokens = list(TOKENS)
    found, remaining = make().find_shared_prefix(tokens)
    assert (found, remaining) == ([], tokens)
    assert remaining is not tokens


def test_tokens_may_be_an_array() -> None:
    manager = make()
    table = store(manager, TOKENS)
    found, remaining = manager.find_shared_prefix(np.array([*TOKENS, 7]))  # type: ignore[arg-type]
    assert (found, [int(token) for token in remaining]) == (table.block_ids, [7])


def test_salts_belong_to_what_is_found() -> None:
    manager = make()
    ranges = [(5, ("a",)), (9, ("a", "b"))]
    blocks = manager._adopt(hashes_of(TOKENS, None, None, ranges), SIZE)
    find = manager.find_shared_prefix
    assert find(TOKENS, extra_key_ranges=ranges) == (ids(blocks), [])
    assert find(TOKENS, extra_key_ranges=[(5, ("a",)), (9, ("a", "c"))]) == (ids(blocks)[:2], TOKENS[8:])
    assert find(TOKENS, extra_key_ranges=[(5, ("z",)), (9, ("a", "b"))]) == (ids(blocks)[:1], TOKENS[4:])
    assert find(TOKENS, ("a",), 5) == (ids(blocks)[:2], TOKENS[8:])
    assert find(TOKENS, ("a",)) == ([], TOKENS)
    assert find(TOKENS) == (ids(blocks)[:1], TOKENS[4:])


def test_another_models_blocks_are_not_found() -> None:
    manager = make()
    store(manager, TOKENS)
    manager.model_name = "another"
    assert manager.find_shared_prefix(TOKENS) == ([], TOKENS)


def test_a_sequence_is_registered_block_by_block() -> None:
    manager = make()
    blocks = manager.get_new_blocks(4)
    manager.cache_full_blocks(blocks, [*TOKENS, 1], 0, 2)
    assert [block.block_hash for block in blocks] == [*hashes_of(TOKENS)[:2], None, None]
    assert [block.token_count for block in blocks] == [4, 4, 0, 0]
    manager.cache_full_blocks(blocks, [*TOKENS, 1], 2, 4)  # the fourth block is not full
    assert [block.block_hash for block in blocks] == [*hashes_of(TOKENS), None]
    assert manager.find_shared_prefix(TOKENS) == (ids(blocks)[:3], [])


def test_a_block_that_has_a_hash_is_passed_over_and_is_the_parent_of_the_next() -> None:
    manager = make()
    blocks = manager.get_new_blocks(2)
    blocks[0].block_hash = b"hash1"
    manager.cache_full_blocks(blocks, TOKENS, 0, 2, ("salt",))
    assert blocks[0].block_hash == b"hash1"
    assert blocks[1].block_hash == compute_block_hash(b"hash1", TOKENS[4:8], ("salt",), MODEL)


def test_a_lost_parent_does_not_make_the_middle_of_a_sequence_its_beginning() -> None:
    manager = make()
    blocks = manager.get_new_blocks(3)
    manager.cache_full_blocks(blocks, TOKENS, 2, 3, ("salt",))
    assert blocks[2].block_hash == hashes_of(TOKENS, ("salt",))[2]
    assert manager.find_cached_block(TOKENS[8:], None, ("salt",)) is None


def test_without_caching_nothing_is_found_or_registered() -> None:
    manager = make(enable_caching=False)
    manager.set_paged_ssd_cache_manager(disk := Disk(*hashes_of(TOKENS)))
    blocks = manager.get_new_blocks(3)
    manager.cache_full_blocks(blocks, TOKENS, 0, 3)
    manager.register_block_hash(blocks[0], TOKENS[:4])
    assert manager.store(b"key", blocks[0]) is False
    assert [block.block_hash for block in blocks] == [None] * 3
    assert len(manager._adopt(hashes_of(TOKENS), SIZE)) == 3
    assert manager._acquire(hashes_of(TOKENS)) == []
    assert manager.get_computed_blocks(TOKENS) == ([], 0)
    assert manager.find_shared_prefix(TOKENS) == ([], TOKENS)
    assert manager.find_cached_block(TOKENS[:4]) is None
    assert (len(manager.cached_block_hash_to_block), disk.asked) == (0, [])


@pytest.mark.parametrize("tokens", [[1, -2, 3, 4], [1, 2, 3, 2**32]])
def test_tokens_out_of_range_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        make().find_shared_prefix(tokens)


# What only the SSD manager has


def test_blocks_on_ssd_become_retained_blocks() -> None:
    manager, hashes = make(), hashes_of(TOKENS)
    manager.set_paged_ssd_cache_manager(disk := Disk(*hashes[:2]))
    blocks, count = manager.get_computed_blocks(TOKENS)
    assert ([block.block_hash for block in blocks], count) == (hashes[:2], 8)
    assert [(block.ref_count, block.token_count) for block in blocks] == [(0, SIZE)] * 2
    assert all(manager.allocated_blocks[block.block_id] is block for block in blocks)
    assert (manager.stats.hits, manager.stats.misses, disk.asked) == (2, 1, hashes)
    disk.asked.clear()
    assert manager.find_shared_prefix(TOKENS)[0] == ids(blocks)
    assert disk.asked == hashes[2:]
    manager.set_paged_ssd_cache_manager(None)
    assert manager.find_shared_prefix(TOKENS)[0] == ids(blocks)


def test_a_mock_has_every_block() -> None:
    manager = make()
    manager.set_paged_ssd_cache_manager(MagicMock())
    assert manager.find_shared_prefix(TOKENS)[1] == []
    manager = make()
    manager.set_paged_ssd_cache_manager(MagicMock(has_block=MagicMock(return_value=False)))
    assert manager.find_shared_prefix(TOKENS) == ([], TOKENS)


def test_an_ssd_manager_without_has_block_has_none() -> None:
    manager = make()
    manager.set_paged_ssd_cache_manager(object())
    assert manager.find_shared_prefix(TOKENS) == ([], TOKENS)


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("closed"), ValueError("odd")])
def test_an_ssd_manager_in_trouble_is_a_miss(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    manager = make()
    table = store(manager, TOKENS[:4])
    manager.set_paged_ssd_cache_manager(MagicMock(has_block=MagicMock(side_effect=error)))
    assert manager.find_shared_prefix(TOKENS) == (table.block_ids, TOKENS[4:])
    assert str(error) in caplog.text


def test_an_error_that_is_no_trouble_leaves_no_references() -> None:
    manager = make()
    table = store(manager, TOKENS[:4])
    manager.set_paged_ssd_cache_manager(MagicMock(has_block=MagicMock(side_effect=ZeroDivisionError)))
    for find in (manager._acquire, manager._match):
        with pytest.raises(ZeroDivisionError):
            find(hashes_of(TOKENS))
    assert [manager.blocks[i].ref_count for i in table.block_ids] == [1]


def test_a_prompt_longer_than_the_pool_does_not_evict_its_own_beginning() -> None:
    manager = make(max_blocks=4)
    finish(manager, TOKENS, "other")
    tokens = list(range(40))
    manager.set_paged_ssd_cache_manager(Disk(*hashes_of(tokens)))
    blocks, count = manager.get_computed_blocks(tokens)
    assert ([block.block_hash for block in blocks], count) == (hashes_of(tokens)[:3], 12)
    assert [block.ref_count for block in blocks] == [0, 0, 0]
    assert manager.stats.misses == 1


# For the prefix cache


def test_blocks_are_found_and_held_in_one_step() -> None:
    manager = make()
    table = store(manager, TOKENS)
    manager.release_for_eviction(table.block_ids[1:])
    blocks = manager._acquire([*hashes_of(TOKENS), b"unknown"])
    assert ids(blocks) == table.block_ids
    assert [block.ref_count for block in blocks] == [2, 1, 1]
    assert (manager.stats.hits, manager.stats.misses, manager.stats.shared_blocks) == (3, 1, 1)
    assert manager._match([]) == manager._acquire([]) == []
    assert (manager.stats.hits, manager.stats.misses) == (3, 1)


def test_records_from_before_a_clear_are_not_given_out() -> None:
    manager = make()
    table = store(manager, TOKENS)
    old = [manager.blocks[i] for i in table.block_ids]
    manager.clear()
    for block in old:
        manager.cached_block_hash_to_block.insert(block.block_hash or b"", block)
    assert manager._acquire(hashes_of(TOKENS)) == []
    manager.touch(old)
    assert manager.allocated_blocks == {0: manager.null_block}
    assert manager.evict(old[0].block_hash) is True
    assert manager.free_blocks == 19


def test_a_chain_is_adopted_from_what_is_known_and_what_is_new() -> None:
    manager = make(max_blocks=5)
    kept = finish(manager, TOKENS[:8])
    manager.create_block_table("other").block_ids += ids(manager.get_new_blocks(1))
    tokens = list(range(100, 120))
    blocks = manager._adopt(hashes_of(tokens), SIZE)
    assert ids(blocks[:2]) == kept
    assert [block.block_hash for block in blocks] == hashes_of(tokens)[:3]
    assert [(block.ref_count, block.token_count) for block in blocks] == [(1, SIZE)] * 3
    assert (manager.stats.hits, manager.stats.total_tokens_cached) == (0, 12)
    assert manager.find_shared_prefix(tokens) == (ids(blocks), tokens[12:])


# What every manager has


def test_fetch_store_and_evict_by_hash_or_id() -> None:
    manager = make()
    block = manager.allocate_block()
    assert block is not None
    assert manager.fetch(b"key") == (None, False)
    assert manager.store(b"key", block) is True
    assert manager.fetch(b"key") == (block, True)
    assert block.block_hash == b"key"
    assert [manager.evict(key) for key in (b"key", block.block_id, b"other", 0, 99, "key", None)] == [False] * 7
    manager.release_for_eviction([block.block_id])
    assert manager.evict(b"key") is True
    assert manager.fetch(b"key") == (None, False)
    assert manager.evict(block.block_id) is True
    assert manager.free_blocks == 19


@pytest.mark.parametrize(
    ("key", "value"), [("key", CacheBlock(1)), (b"key", [1, 2]), (b"key", None), (3, CacheBlock(1))]
)
def test_what_is_no_hash_or_block_is_not_stored(key: Any, value: Any) -> None:
    manager = make()
    assert manager.store(key, value) is False
    assert manager.fetch(key) == (None, False)


def test_clear_starts_anew() -> None:
    manager = make(max_blocks=400, initial_blocks=3)
    store(manager, TOKENS)
    finish(manager, TOKENS[4:8], "s")
    manager.find_shared_prefix([*TOKENS, *TOKENS])
    assert manager.clear() == 4
    assert manager.request_tables == {}
    assert manager.stats == PagedCacheStats(total_blocks=3, allocated_blocks=1, free_blocks=2)
    assert manager.find_shared_prefix(TOKENS) == ([], TOKENS)
    assert (manager.usage, manager.size, len(manager.blocks)) == (0.0, 0, 3)
    assert manager.clear() == 0


# Weaknesses of the peer: accounting


def test_the_prefix_cache_of_an_idle_pool_can_be_reset() -> None:
    manager = make(max_blocks=1000, initial_blocks=8)
    assert manager.reset_prefix_cache() is True
    kept = finish(manager, TOKENS)
    table = store(manager, TOKENS[:4], "s")
    assert table.block_ids == kept[:1]
    assert manager.reset_prefix_cache() is False
    assert manager.find_shared_prefix(TOKENS)[0] == kept
    manager.release_for_eviction(table.block_ids)
    assert manager.reset_prefix_cache() is True
    assert manager.find_shared_prefix(TOKENS) == ([], TOKENS)
    assert (manager.free_blocks, manager.size, len(manager.cached_block_hash_to_block)) == (7, 0, 0)


def test_usage_is_the_share_of_the_whole_pool_that_is_in_use() -> None:
    manager = make(max_blocks=101, initial_blocks=8)
    assert manager.usage == 0.0
    table = store(manager, TOKENS)
    assert manager.usage == 0.03
    manager.release_for_eviction(table.block_ids)
    assert (manager.usage, manager.size, manager.utilization) == (0.0, 3, 3 / 101)
    assert make(max_blocks=1).usage == 0.0


def test_cached_tokens_are_those_of_the_blocks_that_are_held() -> None:
    manager = make(max_blocks=6)
    kept = finish(manager, TOKENS)
    assert manager.stats.total_tokens_cached == 12
    manager.get_new_blocks(3)
    assert manager.stats.total_tokens_cached == 8
    for block_id in kept[:2]:
        manager.free_block(block_id)
    assert manager.stats.total_tokens_cached == 0
    block = manager.allocate_block()
    assert block is not None
    block.token_count = 3
    assert manager.get_memory_usage()["total_tokens_cached"] == 3
    block.token_count = 4
    manager.release_for_eviction([block.block_id])
    assert manager.stats.total_tokens_cached == 4
    manager.evict_block_permanently(block.block_id)
    assert manager.stats.total_tokens_cached == 0


def test_shared_blocks_are_counted_at_every_step() -> None:
    manager = make()
    table = store(manager, TOKENS)
    fork = manager.fork_block_table(table, "s")
    assert manager.stats.shared_blocks == 3
    manager.get_blocks_for_generation(fork)
    assert manager.stats.shared_blocks == 0
    manager._acquire(hashes_of(TOKENS))
    manager._match(hashes_of(TOKENS))
    assert manager.stats.shared_blocks == 3
    manager.delete_block_table("r")
    assert manager.stats.shared_blocks == 0
    manager.blocks[table.block_ids[0]].ref_count = 5
    assert manager.get_stats().shared_blocks == 1
    assert manager.get_stats() is manager.stats


def test_memory_usage() -> None:
    manager = make()
    table = store(manager, TOKENS)
    manager.increment_ref(table.block_ids[0])
    manager.find_shared_prefix([*TOKENS, 1, 1, 1, 1])
    assert manager.get_memory_usage() == {
        "block_size": 4,
        "max_blocks": 20,
        "allocated_blocks": 4,
        "free_blocks": 16,
        "shared_blocks": 1,
        "total_tokens_cached": 12,
        "utilization": 0.2,
        "cache_hit_rate": 0.75,
    }


def test_resetting_statistics_leaves_sizes() -> None:
    manager = make()
    table = store(manager, TOKENS)
    manager.get_blocks_for_generation(manager.fork_block_table(table, "s"))
    manager.find_shared_prefix([*TOKENS, 1, 1, 1, 1])
    manager.release_for_eviction(table.block_ids)
    manager.evict_lru_blocks(1)
    stats = manager.stats
    assert (stats.hits, stats.misses, stats.evictions, stats.cow_copies) == (3, 1, 1, 3)
    manager.reset_stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.cow_copies) == (0, 0, 0, 0)
    assert (stats.allocated_blocks, stats.total_tokens_cached) == (6, 20)


def test_reference_counts_in_one_line() -> None:
    manager = make()
    assert (manager.get_ref_count_distribution(), manager.get_ref_count_summary()) == ({}, "rc=none")
    table = store(manager, TOKENS)
    manager.release_for_eviction(table.block_ids[1:])
    manager.increment_ref(table.block_ids[0])
    stray = manager.allocate_block()
    assert stray is not None
    manager.release_for_eviction([stray.block_id])
    manager.get_new_blocks(2)
    assert manager.get_ref_count_distribution() == {0: 3, 1: 2, 2: 1}
    assert manager.get_ref_count_summary() == "rc0=3(ssd=2),rc1=2,rc2=1"


# Threads


@pytest.mark.parametrize("read", ["free_blocks", "usage", "size", "evict"])
def test_reads_wait_for_a_writer(read: str) -> None:
    """A thread that holds the lock is in the middle of something that others must not see."""
    manager = make()
    done = threading.Event()

    def look() -> None:
        if read == "evict":
            manager.evict(b"key")
        else:
            getattr(manager, read)
        done.set()

    with manager._lock:
        thread = threading.Thread(target=look)
        thread.start()
        assert not done.wait(0.05)
    assert done.wait(5)
    thread.join()


def test_threads_share_a_manager() -> None:
    manager = make(max_blocks=40, initial_blocks=4)
    prompts = [list(range(start, start + 24)) for start in range(0, 400, 100)]

    def serve(number: int) -> None:
        for turn in range(150):
            hashes = hashes_of(prompts[(number + turn) % 4])
            name = f"{number}-{turn}"
            table = manager.create_block_table(name)
            blocks = manager._acquire(hashes)
            blocks += manager._adopt(hashes[len(blocks) :], SIZE)
            # Held blocks keep their hashes, whatever the other threads do.
            assert [block.block_hash for block in blocks] == hashes[: len(blocks)]
            table.block_ids += ids(blocks)
            manager.get_stats()
            assert all(block.ref_count >= 1 for block in blocks)
            assert [block.block_hash for block in blocks] == hashes[: len(blocks)]
            if turn % 3:
                manager.release_for_eviction(table.block_ids)
            else:
                manager.delete_block_table(name)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(serve, range(4)))
    assert manager.usage == 0.0
    assert set(manager.get_ref_count_distribution()) <= {0}
    assert manager.get_stats().free_blocks + manager.size + 1 == len(manager.blocks)
    assert manager.stats.total_tokens_cached == manager.size * SIZE
