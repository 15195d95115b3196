"""Tables of oMLX's prefix cache: what an id meant, and references that are given back once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omlx_doubles import BLOCK, ForeignSSD, build, chain, check_kv, check_table, finish, kv_layer, refs, seed_prompt

from prefixcache.paged_cache import BlockTable, PagedCacheManager
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache, BlockCacheEntry

A = list(range(1, 13))
B = list(range(101, 113))
C = list(range(201, 213))
ROWS = {"A": (A, 0), "B": (B, 1), "C": (C, 2)}  # a prompt of three blocks, and which rows are its


class Engine:
    """A prefix cache over one kind of SSD manager."""

    def __init__(self, ssd: Any, max_blocks: int = 64) -> None:
        self.cache, self.paged = build(ssd=ssd, max_blocks=max_blocks)

    def store(self, request: str, name: str, blocks: int = 3) -> BlockTable:
        tokens, layer = ROWS[name]
        n = blocks * BLOCK
        table = self.cache.store_cache(request, tokens[:n], [kv_layer(0, n, layer)])
        assert table is not None
        assert len(table.block_ids) == blocks
        return table

    def finished(self, request: str, name: str, blocks: int = 3) -> BlockTable:
        table = self.store(request, name, blocks)
        finish(self.cache, self.paged, request, table)
        return table

    def fetch(self, request: str, name: str) -> BlockTable:
        table, _ = self.cache.fetch_cache(request, [*ROWS[name][0], 99])
        assert table is not None
        return table

    def check(self, table: BlockTable, name: str, blocks: int) -> None:
        caches = self.cache.reconstruct_cache(table)
        assert table.num_tokens == blocks * BLOCK
        if blocks == 0:
            assert caches is None
        else:
            check_kv(caches[0], blocks * BLOCK, ROWS[name][1])


@pytest.fixture(params=["own", "foreign"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    opened: list[PagedSSDCacheManager] = []

    def engine(max_blocks: int = 64) -> Engine:
        if request.param == "foreign":
            return Engine(ForeignSSD(), max_blocks)
        opened.append(PagedSSDCacheManager(tmp_path / str(len(opened)), 1 << 26))
        return Engine(opened[-1], max_blocks)

    yield engine
    for ssd in opened:
        ssd.close()


Make = Callable[..., Engine]


# What an id meant


def test_a_record_that_was_used_again_is_not_served_to_the_request_before(make: Make) -> None:
    engine = make(max_blocks=4)
    table = engine.store("a", "A")
    kept = BlockTable("kept", list(table.block_ids), table.num_tokens)
    engine.paged.release_for_eviction(table.block_ids)
    other = engine.finished("c", "C")
    assert sorted(other.block_ids) == sorted(kept.block_ids)
    assert engine.cache.get_cache_for_generation("a") == (None, False)
    engine.check(table, "A", 0)
    engine.check(engine.fetch("d", "C"), "C", 3)


def test_what_is_left_of_a_table_is_served(make: Make) -> None:
    engine = make(max_blocks=4)
    table = engine.store("a", "A")
    first = table.block_ids[:2]
    engine.paged.release_for_eviction(table.block_ids)
    engine.finished("c", "C", blocks=1)  # takes the record of the last block
    caches, copied = engine.cache.get_cache_for_generation("a")
    assert copied is False
    check_kv(caches[0], 8, 0)
    assert table.block_ids == first
    engine.check(engine.fetch("d", "C"), "C", 1)


@pytest.mark.parametrize("stored", [False, True])
def test_a_table_from_before_a_reset_is_worth_nothing_after_it(make: Make, stored: bool) -> None:
    engine = make(max_blocks=4)
    table = engine.store("a", "A")
    if not stored:
        finish(engine.cache, engine.paged, "a", table)
        table = engine.fetch("f", "A")
    engine.cache.clear()
    engine.finished("b", "B")
    running = engine.fetch("r", "B")
    assert table.block_ids == running.block_ids
    engine.check(table, "A", 0)
    assert refs(engine.paged, running.block_ids) == [1, 1, 1]
    engine.check(running, "B", 3)


def test_a_worker_that_ends_after_a_reset_takes_nothing_from_those_who_run_now(make: Make) -> None:
    engine = make(max_blocks=4)
    told = engine.store("old", "A")
    engine.cache.clear()
    engine.finished("b", "B")
    running = engine.fetch("r", "B")
    assert told.block_ids == running.block_ids
    assert engine.paged.release_for_eviction(told.block_ids) == 0
    engine.cache.clear_request_entry("old")
    assert refs(engine.paged, running.block_ids) == [1, 1, 1]
    tokens, layer = ROWS["C"]
    assert engine.cache.store_cache("c", tokens, [kv_layer(0, 12, layer)]).block_ids == []  # no record is free
    engine.check(running, "B", 3)


def test_ids_appended_before_a_reset_mean_what_they_meant() -> None:
    cache, paged = build()
    table = seed_prompt(paged, "a", A, 3)
    cache.clear()
    running = cache.store_cache("b", B, [])
    assert table.block_ids == running.block_ids
    assert paged.release_for_eviction(table.block_ids) == 0
    assert refs(paged, running.block_ids) == [1, 1, 1]


@pytest.mark.parametrize("end", ["delete", "release", "fork", "shorten", "extend"])
def test_no_other_use_of_such_a_table_touches_the_new_owner(make: Make, end: str) -> None:
    engine = make(max_blocks=4)
    table = engine.store("a", "A")
    for block_id in table.block_ids:
        engine.paged.free_block(block_id)  # as somebody does who has lost count
    other = engine.store("c", "C")
    assert sorted(other.block_ids) == sorted(table.block_ids)
    if end == "delete":
        engine.paged.delete_block_table("a")
    elif end == "release":
        engine.cache.release_cache("a")
    elif end == "fork":
        assert engine.cache.fork_cache("a", "f") == BlockTable("f")
    elif end == "shorten":
        engine.check(table, "A", 0)
    else:
        assert engine.cache.store_cache("a", A, [kv_layer(0, 12)]).block_ids == []
    assert refs(engine.paged, other.block_ids) == [1, 1, 1]
    engine.check(engine.fetch("d", "C"), "C", 3)


def test_ids_that_a_caller_appended_are_taken_as_they_are(make: Make) -> None:
    engine = make()
    stored = engine.finished("a", "A")
    table = engine.paged.create_block_table("own")
    for block_id in stored.block_ids[:2]:
        engine.paged.increment_ref(block_id)
        table.block_ids.append(block_id)
    table.num_tokens = 8
    engine.check(table, "A", 2)
    engine.cache._request_tables["own"] = BlockCacheEntry(table)
    free = engine.paged.free_blocks
    engine.cache.release_cache("own")
    assert engine.paged.free_blocks == free + 2


def test_a_released_table_takes_no_records_of_its_own(make: Make) -> None:
    engine = make()
    table = engine.store("a", "A")
    for request in ("x", "y"):
        engine.fetch(request, "A")
    engine.paged.release_for_eviction(table.block_ids)
    caches, copied = engine.cache.get_cache_for_generation("a")
    assert copied is False
    check_kv(caches[0], 12, 0)
    assert refs(engine.paged, table.block_ids) == [2, 2, 2]


def test_a_released_table_that_is_shortened_gives_back_no_more(make: Make) -> None:
    engine = make()
    table = engine.store("a", "A")
    running = engine.fetch("r", "A")
    engine.paged.release_for_eviction(table.block_ids)
    engine.cache._shorten(table, 1, 2)
    assert (len(table.block_ids), table.num_tokens) == (1, BLOCK)
    assert engine.paged.release_for_eviction(table.block_ids) == 0
    engine.cache.release_cache("a")
    assert refs(engine.paged, running.block_ids) == [1, 1, 1]


# References are given back once

CALLS: dict[str, Callable[[BlockAwarePrefixCache, PagedCacheManager, BlockTable], Any]] = {
    "release list": lambda cache, paged, table: paged.release_for_eviction(table.block_ids),
    "release ids": lambda cache, paged, table: paged.release_for_eviction(list(table.block_ids)),
    "delete": lambda cache, paged, table: paged.delete_block_table("r"),
    "release": lambda cache, paged, table: cache.release_cache("r"),
    "evict": lambda cache, paged, table: cache.evict("r"),
    "clear": lambda cache, paged, table: cache.clear_request_entry("r"),
    "generate": lambda cache, paged, table: cache.get_cache_for_generation("r"),
    "fork": lambda cache, paged, table: cache.fork_cache("r", "s"),
    "again": lambda cache, paged, table: cache.release_cache("s"),
}


def started(how: str) -> tuple[BlockAwarePrefixCache, PagedCacheManager, BlockTable, BlockTable]:
    """A request `r` over blocks that another one, which runs, uses too."""
    cache, paged = build()
    finish(cache, paged, "seed", cache.store_cache("seed", A[:8], []))
    running, _ = cache.fetch_cache("o", [*A[:8], 99])
    table = None
    if how != "store":
        table, _ = cache.fetch_cache("r", [*A[:8], 98])
    if how != "fetch":
        table = cache.store_cache("r", A, [])
    assert running is not None
    assert table is not None
    return cache, paged, running, table


@pytest.mark.parametrize("how", ["fetch", "store", "fetch and store"])
def test_calls_that_end_a_request_in_any_order(how: str) -> None:
    # Ids without their list do not tell whose they are, so they are left to the next test.
    for calls in itertools.permutations([call for call in CALLS if call != "release ids"], 3):
        cache, paged, running, table = started(how)
        for call in calls:
            CALLS[call](cache, paged, table)
        assert all(paged.blocks[block_id].ref_count >= 1 for block_id in running.block_ids), calls
        check_table(paged, running, A, 2)
        cache.release_cache("s")
        cache.release_cache("r")
        paged.delete_block_table("r")
        paged.release_for_eviction(table.block_ids)
        assert [paged.blocks[block_id].ref_count for block_id in running.block_ids] == [1, 1], calls
        in_use = sum(block.ref_count for block in paged.allocated_blocks.values() if not block.is_null)
        assert in_use == 2, calls


@pytest.mark.parametrize("first", ["delete", "release list", "release ids", "release", "evict"])
@pytest.mark.parametrize("second", ["delete", "release list", "release", "evict", "clear"])
def test_ending_twice_takes_nothing_from_another(make: Make, first: str, second: str) -> None:
    engine = make()
    table = engine.store("r", "A")
    running = engine.fetch("o", "A")
    for call in (first, second, "clear"):
        CALLS[call](engine.cache, engine.paged, table)
        assert refs(engine.paged, running.block_ids) == [1, 1, 1]
    engine.check(running, "A", 3)


def test_an_id_that_is_used_again_gives_back_nothing_of_a_cleared_request() -> None:
    cache, paged, running, table = started("fetch")
    paged.release_for_eviction(list(table.block_ids))
    cache.clear_request_entry("r")
    assert paged.get_block_table("r") is table
    assert cache.fetch_cache("r", [7] * 9)[0] is None
    assert cache.store_cache("r", [7] * 8, []).num_tokens == 8
    assert refs(paged, running.block_ids) == [1, 1]
    assert cache.fetch_cache("r", [*A[:8], 5])[0].block_ids == running.block_ids
    assert refs(paged, running.block_ids) == [2, 2]


def test_a_cleared_request_may_be_released_afterwards() -> None:
    cache, paged, running, table = started("fetch")
    cache.clear_request_entry("r")
    cache.fetch_cache("r", [*A[:8], 5])
    assert refs(paged, running.block_ids) == [3, 3]
    assert paged.release_for_eviction(table.block_ids) == 2
    assert paged.release_for_eviction(table.block_ids) == 0
    assert refs(paged, running.block_ids) == [2, 2]


def test_ids_of_a_caller_with_references_of_its_own_end_no_table() -> None:
    cache, paged = build()
    table = cache.store_cache("r", A, [])
    ids, _ = paged.find_shared_prefix(A)
    for block_id in ids:
        paged.increment_ref(block_id)
    assert (ids, paged.release_for_eviction(ids)) == (table.block_ids, 3)
    assert refs(paged, table.block_ids) == [1, 1, 1]
    assert paged.release_for_eviction(table.block_ids) == 3


def test_blocks_added_after_a_release_are_given_back_alone() -> None:
    cache, paged = build()
    table = cache.store_cache("r", A[:8], [])
    paged.release_for_eviction(table.block_ids)
    running, _ = cache.fetch_cache("o", A[:8])
    cache._extend(table, chain(A))  # a store that the end of its request did not stop
    assert refs(paged, table.block_ids) == [1, 1, 1]
    assert paged.release_for_eviction(table.block_ids) == 1
    assert refs(paged, table.block_ids) == [1, 1, 0]
    check_table(paged, running, A, 2)


# Forks


def test_a_fork_over_another_request_gives_its_references_back(make: Make) -> None:
    engine = make()
    source, old = engine.store("a", "A"), engine.store("b", "B", blocks=2)
    ids = list(old.block_ids)
    fork = engine.cache.fork_cache("a", "b")
    assert (fork.block_ids, refs(engine.paged, ids)) == (source.block_ids, [0, 0])
    engine.cache.release_cache("a")
    engine.check(fork, "A", 3)
    engine.cache.release_cache("b")
    assert engine.paged.usage == 0.0
    engine.check(engine.fetch("c", "B"), "B", 2)  # still findable


@pytest.mark.parametrize("how", ["fetch", "store", "fetch and store"])
def test_a_fork_onto_itself_takes_no_more(how: str) -> None:
    cache, paged, running, table = started(how)
    fork = cache.fork_cache("r", "r")
    assert fork is not table
    assert fork.block_ids == table.block_ids
    assert refs(paged, running.block_ids) == [2, 2]
    paged.release_for_eviction(table.block_ids)
    assert refs(paged, running.block_ids) == [2, 2]
    cache.release_cache("r")
    assert refs(paged, running.block_ids) == [1, 1]
    assert cache.fork_cache("r", "r") is None


# Without caching


def test_without_caching_nothing_is_found() -> None:
    paged = PagedCacheManager(BLOCK, 64, enable_caching=False, model_name="m")
    cache = BlockAwarePrefixCache(None, paged)
    assert len(cache.store_cache("a", A, []).block_ids) == 3
    assert cache.fetch_cache("b", A) == (None, A)
    assert paged.stats.hits == 0
