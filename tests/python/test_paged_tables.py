"""The tables of requests over a paged cache."""

from __future__ import annotations

import pytest

from prefixcache._omlx.block_hash import block_hashes
from prefixcache.paged_cache import BlockTable, PagedCacheManager

SIZE = 4
TOKENS = list(range(12))  # three blocks


def make(max_blocks: int = 20) -> PagedCacheManager:
    return PagedCacheManager(SIZE, max_blocks, model_name="m")


def store(manager: PagedCacheManager, request_id: str, tokens: list[int] = TOKENS) -> BlockTable:
    table = manager.create_block_table(request_id)
    for block in manager._adopt(block_hashes(tokens, SIZE, "m"), SIZE):
        table.add_block(block.block_id, SIZE)
    return table


def references(manager: PagedCacheManager, table: BlockTable) -> list[int]:
    return [manager.blocks[block_id].ref_count for block_id in table.block_ids]


def test_tables_of_requests() -> None:
    manager = make()
    assert manager.get_block_table("r") is None
    table = manager.create_block_table("r")
    assert table == BlockTable("r")
    assert manager.get_block_table("r") is manager.get_or_create_block_table("r") is table
    assert manager.request_tables == {"r": table}
    other = manager.get_or_create_block_table("s")
    assert manager.get_block_table("s") is other
    again = manager.create_block_table("r")
    assert again is not table
    assert manager.get_block_table("r") is again


def test_a_table_takes_over_a_block_with_its_tokens() -> None:
    manager = make()
    table = manager.create_block_table("r")
    first, second = manager.get_new_blocks(2)
    manager.add_block_to_table(table, first, 4)
    manager.add_block_to_table(table, second, 2)
    assert (table.block_ids, table.num_tokens) == ([first.block_id, second.block_id], 6)
    assert (first.token_count, second.token_count, manager.stats.total_tokens_cached) == (4, 2, 6)
    manager.delete_block_table("r")
    assert manager.stats.total_tokens_cached == 0


def test_deleting_a_table_frees_what_nobody_else_uses() -> None:
    manager = make()
    table = store(manager, "r")
    manager.increment_ref(table.block_ids[0])
    manager.delete_block_table("r")
    assert manager.get_block_table("r") is None
    assert references(manager, table) == [1, 0, 0]
    assert manager.free_blocks == 18
    assert manager.find_shared_prefix(TOKENS) == (table.block_ids[:1], TOKENS[4:])
    manager.delete_block_table("r")
    manager.delete_block_table("never was")
    assert references(manager, table) == [1, 0, 0]


def test_releasing_a_table_keeps_its_blocks_findable() -> None:
    manager = make()
    table = store(manager, "r")
    assert manager.release_block_table("r") == 3
    assert manager.get_block_table("r") is None
    assert references(manager, table) == [0, 0, 0]
    assert manager.find_shared_prefix(TOKENS) == (table.block_ids, [])
    assert manager.release_block_table("r") == 0
    assert manager.release_block_table("never was") == 0


@pytest.mark.parametrize("end", ["release", "delete"])
def test_references_that_were_given_back_are_not_given_back_twice(end: str) -> None:
    """They would be those of another request by then."""
    manager = make()
    table = store(manager, "r")
    manager.release_for_eviction(table.block_ids)
    running = store(manager, "s", TOKENS[:8])
    assert manager.get_block_table("r") is table
    if end == "release":
        assert manager.release_block_table("r") == 0
        assert manager.find_shared_prefix(TOKENS)[0] == table.block_ids
    else:
        manager.delete_block_table("r")
        assert manager.find_shared_prefix(TOKENS)[0] == running.block_ids
    assert references(manager, running) == [1, 1]


def test_deleting_a_released_table_leaves_records_that_hold_something_else_by_now() -> None:
    manager = make(max_blocks=4)
    table = store(manager, "r")
    manager.release_for_eviction(table.block_ids)
    other = store(manager, "s", [7] * 12)
    assert sorted(other.block_ids) == sorted(table.block_ids)
    manager.release_for_eviction(other.block_ids)
    manager.delete_block_table("r")
    assert manager.find_shared_prefix([7] * 12)[0] == other.block_ids


def test_giving_back_an_equal_list_is_not_the_end_of_another_table() -> None:
    manager = make()
    first, second = store(manager, "r"), store(manager, "s")
    assert first.block_ids == second.block_ids
    ended = manager.request_tables.pop("r")
    manager.release_for_eviction(ended.block_ids)
    assert references(manager, second) == [1, 1, 1]
    assert manager.release_block_table("s") == 3


def test_a_request_id_that_is_used_again_does_not_inherit_a_released_table() -> None:
    manager = make()
    table = store(manager, "r")
    assert manager.get_or_create_block_table("r") is table
    manager.release_for_eviction(table.block_ids)
    fresh = manager.get_or_create_block_table("r")
    assert fresh == BlockTable("r")
    assert manager.get_block_table("r") is fresh


# What an id meant


def test_an_id_that_is_added_again_as_another_block_ends_what_it_was() -> None:
    manager = make(max_blocks=4)
    table = store(manager, "r")
    ids = list(table.block_ids)
    listed = table.block_ids
    for block_id in ids:
        manager.free_block(block_id)
    other = manager.allocate_block()
    assert other.block_id == ids[0]
    table.add_block(other.block_id, SIZE)
    assert table.block_ids is listed
    assert listed == [0, *ids[1:], ids[0]]
    assert manager.release_for_eviction(listed) == 1
    assert (other.ref_count, manager.null_block.ref_count) == (0, 1)


def test_a_copy_knows_what_its_ids_meant() -> None:
    manager = make(max_blocks=4)
    table = store(manager, "r")
    copies = [table.copy("before")]
    manager.release_for_eviction(table.block_ids)
    copies.append(table.copy("after"))
    store(manager, "s", [7] * 4)  # takes the record of the last block
    for copied in copies:
        assert copied.block_ids is not table.block_ids
        assert manager.fork_block_table(copied, "t").block_ids == table.block_ids[:2]


def test_a_record_that_was_free_is_another_one_when_it_is_taken_up_again() -> None:
    manager = make()
    table = store(manager, "r")
    block = manager.allocated_blocks[table.block_ids[0]]
    manager.free_block(block.block_id)
    manager.touch([block])
    manager.register_block_hash(block, [7] * 4)
    assert manager.fork_block_table(table, "s") == BlockTable("s")
    manager.delete_block_table("r")
    assert block.ref_count == 1


def test_a_table_outlives_its_manager() -> None:
    manager = make()
    table = store(manager, "r")
    del manager
    table.add_block(9, SIZE)
    assert (table.block_ids[-1], table.num_tokens) == (9, 16)


def test_giving_a_list_back_once_more_does_nothing() -> None:
    manager = make()
    table = store(manager, "r")
    running = store(manager, "s")
    manager.delete_block_table("r")
    assert manager.release_for_eviction(table.block_ids) == 0
    assert references(manager, running) == [1, 1, 1]
    assert manager.release_for_eviction(running.block_ids) == 3
    assert manager.release_for_eviction(running.block_ids) == 0
    assert references(manager, running) == [0, 0, 0]


def test_a_block_that_a_table_names_twice_is_given_back_at_most_to_the_end() -> None:
    manager = make()
    table = store(manager, "r", TOKENS[:4])
    table.block_ids.append(table.block_ids[0])
    assert manager.release_for_eviction(table.block_ids) == 1
    assert references(manager, table) == [0, 0]


# Forks


def test_a_fork_has_references_of_its_own() -> None:
    manager = make()
    table = store(manager, "r")
    fork = manager.fork_block_table(table, "s")
    assert (fork.request_id, fork.block_ids, fork.num_tokens) == ("s", table.block_ids, 12)
    assert fork.block_ids is not table.block_ids
    assert manager.get_block_table("s") is fork
    assert references(manager, table) == [2, 2, 2]
    manager.delete_block_table("r")
    assert references(manager, fork) == [1, 1, 1]


def test_a_fork_of_retained_blocks_uses_them_again() -> None:
    manager = make()
    table = store(manager, "r")
    manager.release_for_eviction(table.block_ids)
    fork = manager.fork_block_table(table, "s")
    assert references(manager, fork) == [1, 1, 1]
    assert manager.usage == 3 / 19


def test_a_fork_ends_before_the_first_block_that_is_gone() -> None:
    manager = make(max_blocks=4)
    table = store(manager, "r")
    manager.release_for_eviction(table.block_ids)
    other = store(manager, "s", [7] * 4)  # takes the record of the last block
    assert other.block_ids == table.block_ids[2:]
    fork = manager.fork_block_table(table, "t")
    assert (fork.block_ids, fork.num_tokens) == (table.block_ids[:2], 8)
    assert references(manager, other) == [1]
    manager.free_block(table.block_ids[0])
    assert manager.fork_block_table(fork, "u") == BlockTable("u")


def test_writing_to_shared_blocks_takes_records_of_ones_own() -> None:
    manager = make()
    table = store(manager, "r")
    fork = manager.fork_block_table(table, "s")
    manager.free_block(table.block_ids.pop())
    before = list(fork.block_ids)
    blocks, copied = manager.get_blocks_for_generation(fork)
    assert copied is True
    assert fork.block_ids == [block.block_id for block in blocks]
    assert set(fork.block_ids[:2]).isdisjoint(table.block_ids)
    assert fork.block_ids[2] == before[2]
    assert [block.block_hash for block in blocks] == block_hashes(TOKENS, SIZE, "m")
    assert [(block.ref_count, block.token_count) for block in blocks] == [(1, SIZE)] * 3
    assert (references(manager, table), manager.stats.cow_copies) == ([1, 1], 2)
    assert manager.find_shared_prefix(TOKENS)[0] == [*table.block_ids, before[2]]  # the copies are not in the map
    assert manager.get_blocks_for_generation(fork) == (blocks, False)


def test_without_a_record_the_shared_block_stays_and_missing_ids_are_passed_over() -> None:
    manager = make(max_blocks=4)
    table = store(manager, "r")
    fork = manager.fork_block_table(table, "s")
    fork.block_ids.append(99)
    blocks, copied = manager.get_blocks_for_generation(fork)
    assert ([block.block_id for block in blocks], copied) == (table.block_ids, False)
    assert fork.block_ids == [*table.block_ids, 99]
    assert references(manager, table) == [2, 2, 2]


# Tables of requests that ended


def test_tables_of_requests_that_ended_are_dropped_above_a_bound() -> None:
    manager = make(max_blocks=50)
    running = store(manager, "running")
    shared = store(manager, "shared", [5] * 4)
    for number in range(10_000):
        # Each ends with a prefix that a running request uses too, and every other with a block of its own.
        tokens = [5] * 4 + ([number] * 4 if number % 2 else [])
        table = store(manager, f"r{number}", tokens)
        manager.release_for_eviction(table.block_ids)
    assert len(manager.request_tables) <= 4096 + 256 + 1
    assert manager.get_block_table("running") is running
    assert manager.get_block_table("shared") is shared
    assert (references(manager, running), references(manager, shared)) == ([1, 1, 1], [1])
    newest = [f"r{number}" for number in range(10_000 - 4000, 10_000)]
    assert set(newest) <= set(manager.request_tables)


def test_empty_tables_and_those_whose_blocks_are_gone_are_dropped_too() -> None:
    manager = make()
    for number in range(6000):
        table = manager.create_block_table(f"r{number}")
        if number % 2:
            manager.add_block_to_table(table, manager.get_new_blocks(1)[0], 4)
            manager.release_for_eviction(list(table.block_ids))
    assert len(manager.request_tables) <= 4096 + 256 + 1
    assert manager.get_block_table("r5999") is not None


def test_tables_in_use_are_never_dropped() -> None:
    manager = make()
    (block,) = manager.get_new_blocks(1)
    for number in range(6000):
        manager.increment_ref(block.block_id)
        manager.create_block_table(f"r{number}").block_ids.append(block.block_id)
    assert len(manager.request_tables) == 6000
