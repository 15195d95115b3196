"""Block records, tables of blocks, the list of free blocks, the map from hashes to blocks."""

from __future__ import annotations

import time
from collections import OrderedDict, deque

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.paged_cache import BlockHashToBlockMap, BlockTable, CacheBlock, FreeKVCacheBlockQueue


def make_blocks(count: int) -> list[CacheBlock]:
    return [CacheBlock(number) for number in range(count)]


def ids(blocks: list[CacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


# Blocks


def test_a_new_block() -> None:
    before = time.time()
    block = CacheBlock(7)
    found = (block.block_id, block.ref_count, block.block_hash, block.is_null, block.token_count)
    assert found == (7, 0, None, False, 0)
    assert block.prev_free_block is block.next_free_block is None
    assert before <= block.last_access <= time.time()


def test_the_fields_of_a_block_in_their_order() -> None:
    other = CacheBlock(1)
    block = CacheBlock(3, 2, b"hash1", other, None, True, 5, 1.5)
    assert (block.block_id, block.ref_count, block.block_hash, block.is_null) == (3, 2, b"hash1", True)
    assert block.prev_free_block is other
    assert (block.next_free_block, block.token_count, block.last_access) == (None, 5, 1.5)


def test_a_block_is_full_from_the_block_size_on() -> None:
    assert [CacheBlock(1, token_count=count).is_full(4) for count in (3, 4, 5)] == [False, True, True]


def test_a_block_is_shared_from_the_second_reference_on() -> None:
    assert [CacheBlock(1, ref_count=count).is_shared() for count in (0, 1, 2)] == [False, False, True]


def test_touching_and_forgetting() -> None:
    block = CacheBlock(1, block_hash=b"h", last_access=0.0)
    block.reset_hash()
    assert block.block_hash is None
    before = time.time()
    block.touch()
    assert before <= block.last_access <= time.time()


def test_what_is_shown_of_a_block() -> None:
    first, second, third = make_blocks(3)
    FreeKVCacheBlockQueue([first, second, third])
    second.block_hash, second.ref_count, second.token_count = bytes.fromhex("0123456789abcdef"), 4, 9
    assert repr(second) == "CacheBlock(id=1, ref=4, tokens=9, prev=0, next=2, hash=01234567)"
    assert repr(CacheBlock(8)) == "CacheBlock(id=8, ref=0, tokens=0, prev=None, next=None, hash=None)"


def test_two_records_are_equal_only_if_they_are_one() -> None:
    """Compared by their fields, linked blocks would walk their list, for ever or until Python gives up."""
    blocks = make_blocks(5000)
    twins = make_blocks(5000)
    FreeKVCacheBlockQueue(blocks)
    FreeKVCacheBlockQueue(twins)
    assert blocks[0] == blocks[0]
    assert blocks[0] != twins[0]
    assert len({blocks[0], twins[0]}) == 2


# Tables


def test_a_table_of_blocks() -> None:
    table = BlockTable("r")
    assert (table.request_id, table.block_ids, table.num_tokens, len(table)) == ("r", [], 0, 0)
    table.add_block(3, 4)
    table.add_block(9, 2)
    assert (table.block_ids, table.num_tokens, len(table)) == ([3, 9], 6, 2)
    table.block_ids.append(5)
    assert len(table) == 3
    assert BlockTable("other").block_ids == []


def test_a_copy_of_a_table_has_a_list_of_its_own() -> None:
    table = BlockTable("r", [1, 2], 8)
    copy = table.copy("s")
    assert copy == BlockTable("s", [1, 2], 8)
    table.block_ids.append(3)
    assert copy.block_ids == [1, 2]


# Free blocks


def test_the_ends_of_the_list_are_no_blocks() -> None:
    queue = FreeKVCacheBlockQueue([])
    assert (queue.fake_head.block_id, queue.fake_tail.block_id, queue.num_free_blocks) == (-1, -2, 0)
    assert queue.get_all_free_blocks() == []
    with pytest.raises(ValueError, match="no free blocks"):
        queue.popleft()
    for end in (queue.fake_head, queue.fake_tail):
        with pytest.raises(RuntimeError):
            queue.remove(end)


def test_blocks_are_taken_in_front_and_added_at_the_back() -> None:
    blocks = make_blocks(4)
    queue = FreeKVCacheBlockQueue(blocks[:3])
    assert queue.popleft() is blocks[0]
    assert blocks[0].prev_free_block is blocks[0].next_free_block is None
    queue.append(blocks[3])
    queue.append(blocks[0])
    assert ids(queue.get_all_free_blocks()) == [1, 2, 3, 0]
    assert queue.num_free_blocks == 4


def test_several_at_once() -> None:
    blocks = make_blocks(5)
    queue = FreeKVCacheBlockQueue(blocks)
    assert queue.popleft_n(0) == []
    taken = queue.popleft_n(3)
    assert ids(taken) == [0, 1, 2]
    queue.append_n([])
    queue.append_n([taken[2], taken[0]])
    assert ids(queue.get_all_free_blocks()) == [3, 4, 2, 0]


def test_more_than_there_are_is_an_assertion_error_and_takes_nothing() -> None:
    queue = FreeKVCacheBlockQueue(make_blocks(2))
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        queue.popleft_n(3)
    assert ids(queue.get_all_free_blocks()) == [0, 1]


def test_a_block_in_no_list_cannot_be_removed() -> None:
    queue = FreeKVCacheBlockQueue(make_blocks(2))
    block = queue.popleft()
    for stray in (block, CacheBlock(9), CacheBlock(9, next_free_block=block), CacheBlock(9, prev_free_block=block)):
        with pytest.raises(RuntimeError, match="not in the free list"):
            queue.remove(stray)
    assert queue.num_free_blocks == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_block_that_is_free_already_is_not_added_twice(place: int) -> None:
    """Linked twice, the list would lose the blocks between and its count would be wrong."""
    blocks = make_blocks(3)
    queue = FreeKVCacheBlockQueue(blocks)
    queue.append(blocks[place])
    assert queue.num_free_blocks == 3
    assert ids(queue.get_all_free_blocks()) == [number for number in range(3) if number != place] + [place]
    assert sorted(ids(queue.popleft_n(3))) == [0, 1, 2]
    assert queue.num_free_blocks == 0


def test_a_list_takes_over_blocks_of_a_list_that_is_gone() -> None:
    blocks = make_blocks(3)
    FreeKVCacheBlockQueue(blocks)
    queue = FreeKVCacheBlockQueue(reversed(blocks))
    assert ids(queue.get_all_free_blocks()) == [2, 1, 0]
    assert queue.num_free_blocks == 3


@given(st.lists(st.tuples(st.sampled_from(["pop", "pop_n", "remove", "append", "append_n"]), st.integers(0, 7))))
@settings(deadline=None, max_examples=examples(200))
def test_the_list_behaves_as_a_plain_one(steps: list[tuple[str, int]]) -> None:
    blocks = make_blocks(8)
    queue, model = FreeKVCacheBlockQueue(blocks[:5]), deque(range(5))
    for step, number in steps:
        if step == "pop" and model:
            assert queue.popleft().block_id == model.popleft()
        elif step == "pop_n" and number <= len(model):
            assert ids(queue.popleft_n(number)) == [model.popleft() for _ in range(number)]
        elif step == "remove" and number in model:
            queue.remove(blocks[number])
            model.remove(number)
        elif step.startswith("append"):
            added = [number, (number + 3) % 8] if step == "append_n" else [number]
            queue.append_n([blocks[i] for i in added])
            for i in added:
                if i in model:
                    model.remove(i)
                model.append(i)
        assert ids(queue.get_all_free_blocks()) == list(model)
        assert queue.num_free_blocks == len(model)


# The map


def test_one_block_under_a_hash() -> None:
    known, block = BlockHashToBlockMap(), CacheBlock(4)
    assert (known.get_block(b"h"), known.pop(b"h", 4), len(known)) == (None, None, 0)
    known.insert(b"h", block)
    assert (known.get_block(b"h"), len(known)) == (block, 1)
    assert known.pop(b"h", 5) is None
    assert known.get_block(b"h") is block
    assert known.pop(b"h", 4) is block
    assert (known.get_block(b"h"), len(known)) == (None, 0)


def test_several_blocks_under_a_hash_count_once_and_the_first_is_found() -> None:
    known, blocks = BlockHashToBlockMap(), make_blocks(3)
    for block in reversed(blocks):
        known.insert(b"h", block)
    assert (known.get_block(b"h"), len(known)) == (blocks[2], 1)
    assert known.pop(b"h", 9) is None
    assert known.pop(b"h", 2) is blocks[2]
    assert known.get_block(b"h") is blocks[1]
    assert known.pop(b"h", 0) is blocks[0]
    assert known.pop(b"h", 1) is blocks[1]
    assert len(known) == 0
    known.insert(b"h", blocks[0])
    assert known.get_block(b"h") is blocks[0]


def test_a_block_that_is_inserted_twice_is_there_once() -> None:
    known, block = BlockHashToBlockMap(), CacheBlock(4)
    known.insert(b"h", block)
    known.insert(b"h", block)
    assert known.pop(b"h", 4) is block
    assert known.get_block(b"h") is None


def test_forgetting_all() -> None:
    known = BlockHashToBlockMap()
    for block in make_blocks(3):
        known.insert(b"ab"[:1] if block.block_id else b"c", block)
    assert len(known) == 2
    known.clear()
    assert (len(known), known.get_block(b"a"), known.get_block(b"c")) == (0, None, None)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([b"x", b"y"]), st.integers(0, 3))))
@settings(deadline=None, max_examples=examples(200))
def test_the_map_behaves_as_a_plain_one(steps: list[tuple[bool, bytes, int]]) -> None:
    blocks, known = make_blocks(4), BlockHashToBlockMap()
    model: dict[bytes, OrderedDict[int, CacheBlock]] = {b"x": OrderedDict(), b"y": OrderedDict()}
    for insert, key, number in steps:
        if insert:
            known.insert(key, blocks[number])
            model[key][number] = blocks[number]
        else:
            assert known.pop(key, number) is model[key].pop(number, None)
        for name, held in model.items():
            assert known.get_block(name) is next(iter(held.values()), None)
        assert len(known) == sum(bool(held) for held in model.values())
