"""The states of the blocks of a paged cache, over random calls by callers that give back what they took."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from conftest import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixcache.paged_cache import BlockTable, CacheBlock, PagedCacheManager

SIZE = 2  # tokens in a block
MOST = 9  # blocks, the null block among them
CHAINS = [list(range(start, start + 12)) for start in (0, 100, 200)]


class Disk:
    """An SSD manager that has the blocks it is told to have."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()

    def has_block(self, block_hash: bytes) -> bool:
        return block_hash in self.hashes


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("prefixcache").setLevel(logging.ERROR)  # full pools are the point here
        self.disk = Disk()
        self.held: Counter[int] = Counter()  # references that somebody holds, outside of tables
        self.tables: dict[str, BlockTable] = {}

    @initialize(first=st.integers(1, MOST), most=st.integers(2, MOST))
    def make(self, first: int, most: int) -> None:
        self.manager = PagedCacheManager(SIZE, most, True, "m", first)
        self.manager.set_paged_ssd_cache_manager(self.disk)

    def teardown(self) -> None:
        logging.getLogger("prefixcache").setLevel(logging.NOTSET)

    # What the machine knows itself

    def references(self) -> Counter[int]:
        return self.held + Counter(i for table in self.tables.values() for i in table.block_ids)

    def idle(self) -> int:
        return self.manager.max_blocks - 1 - len(self.references())

    def take(self, blocks: list[CacheBlock]) -> None:
        self.held.update(block.block_id for block in blocks)

    def some_held(self, data: Any) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True)) if self.held else []

    # Allocation

    @rule()
    def allocate(self) -> None:
        idle = self.idle()
        block = self.manager.allocate_block()
        assert (block is not None) == (idle > 0)
        if block is not None:
            assert (block.ref_count, block.block_hash, block.token_count) == (1, None, 0)
            assert block.block_id not in self.references()
            self.take([block])

    @rule(count=st.integers(0, MOST))
    def allocate_several(self, count: int) -> None:
        idle, before = self.idle(), self.findable()
        try:
            blocks = self.manager.get_new_blocks(count)
        except ValueError:
            assert count > idle
            assert self.findable() == before
        else:
            assert count <= idle
            assert len({block.block_id for block in blocks} - set(self.references())) == count
            self.take(blocks)

    # References

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def refer_again(self, data: Any) -> None:
        for block_id in self.some_held(data):
            assert self.manager.increment_ref(block_id)
            self.held[block_id] += 1

    @rule(data=st.data())
    def touch(self, data: Any) -> None:
        numbers = data.draw(st.sets(st.integers(1, MOST), max_size=3))
        blocks = [block for block in self.manager.blocks if block.block_id in numbers]
        self.manager.touch(blocks)
        self.take(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        for block_id in self.some_held(data):
            last = self.references()[block_id] == 1
            assert self.manager.free_block(block_id) == last
            self.held -= Counter([block_id])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        block_ids = self.some_held(data)
        assert self.manager.release_for_eviction(block_ids) == len(block_ids)
        self.held -= Counter(block_ids)

    # Hashes

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(0, 6))
    def store(self, chain: list[int], length: int) -> None:
        hashes = self.manager._hashes(chain, None, None, None)[:length]
        known, idle = self.findable(), self.idle()
        blocks = self.manager._adopt(hashes, SIZE)
        assert [block.block_hash for block in blocks] == hashes[: len(blocks)]
        fresh = sum(block_hash not in known for block_hash in hashes)
        assert len(blocks) == length or idle < fresh or self.manager.free_blocks == 0
        self.take(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), chain=st.sampled_from(CHAINS))
    def register(self, data: Any, chain: list[int]) -> None:
        block = self.manager.allocated_blocks[data.draw(st.sampled_from(sorted(self.held)))]
        self.manager.register_block_hash(block, chain[:SIZE])
        assert self.manager.find_cached_block(chain[:SIZE]) is not None

    @precondition(lambda self: self.held)
    @rule(data=st.data(), chain=st.sampled_from(CHAINS))
    def register_a_sequence(self, data: Any, chain: list[int]) -> None:
        blocks = [self.manager.allocated_blocks[block_id] for block_id in self.some_held(data)]
        self.manager.cache_full_blocks(blocks, chain, 0, len(blocks))
        assert all(block.block_hash is not None for block in blocks[: len(chain) // SIZE])

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, 6))
    def write_to_disk(self, chain: list[int], length: int) -> None:
        self.disk.hashes.update(self.manager._hashes(chain, None, None, None)[:length])

    @rule(chain=st.sampled_from(CHAINS), take=st.booleans())
    def fetch(self, chain: list[int], take: bool) -> None:
        hashes = self.manager._hashes(chain, None, None, None)
        known = self.findable()
        hits, misses = self.manager.stats.hits, self.manager.stats.misses
        if take:
            blocks = self.manager._acquire(hashes)
        else:
            blocks, count = self.manager.get_computed_blocks(chain)
            assert count == len(blocks) * SIZE
        assert [block.block_hash for block in blocks] == hashes[: len(blocks)]
        run = next((i for i, h in enumerate(hashes) if h not in known and h not in self.disk.hashes), len(hashes))
        in_memory = next((i for i, h in enumerate(hashes) if h not in known), len(hashes))
        assert in_memory <= len(blocks) <= run
        assert self.manager.stats.hits == hits + len(blocks)
        assert self.manager.stats.misses == misses + (len(blocks) < len(hashes))
        if take:
            self.take(blocks)

    def findable(self) -> set[bytes]:
        return set(self.manager.cached_block_hash_to_block._cache)

    # Eviction

    @rule(count=st.integers(0, MOST))
    def evict(self, count: int) -> None:
        created = len(self.manager.blocks) - 1 - len(self.references())
        assert self.manager.evict_lru_blocks(count) == min(count, created)

    @rule(count=st.integers(0, MOST))
    def press(self, count: int) -> None:
        created = len(self.manager.blocks) - 1 - len(self.references())
        assert self.manager.handle_memory_pressure(count) == (count <= created)
        assert self.manager.free_blocks >= min(count, created)

    @rule(count=st.integers(0, MOST), drop=st.booleans())
    def list_what_nobody_uses(self, count: int, drop: bool) -> None:
        blocks = self.manager.get_evictable_blocks(count)
        created = len(self.manager.blocks) - 1 - len(self.references())
        assert len({block.block_id for block in blocks}) == len(blocks) == min(count, created)
        for block in blocks if drop else []:
            assert self.manager.evict_block_permanently(block.block_id)

    @rule(block_id=st.integers(-2, MOST + 2))
    def evict_one(self, block_id: int) -> None:
        exists = 0 < block_id < len(self.manager.blocks)
        assert self.manager.evict_block_permanently(block_id) == (exists and block_id not in self.references())

    @rule()
    def forget_hashes(self) -> None:
        before = self.findable()
        assert self.manager.reset_prefix_cache() == (not self.references())
        assert self.findable() == (before if self.references() else set())

    @rule()
    def start_anew(self) -> None:
        allocated = self.manager.size
        assert self.manager.clear() == allocated
        self.held.clear()
        self.tables.clear()
        assert self.manager.usage == 0.0

    # Tables

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from("abc"))
    def make_table(self, data: Any, name: str) -> None:
        if name in self.tables:
            return
        table = self.manager.create_block_table(name)
        for block_id in self.some_held(data):
            self.held -= Counter([block_id])
            self.manager.add_block_to_table(table, self.manager.allocated_blocks[block_id], SIZE)
        self.tables[name] = table
        assert table.num_tokens == SIZE * len(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.sampled_from("abc"))
    def fork_table(self, data: Any, name: str) -> None:
        source = self.tables[data.draw(st.sampled_from(sorted(self.tables)))]
        if name in self.tables:
            return
        self.tables[name] = self.manager.fork_block_table(source, name)
        assert self.tables[name].block_ids == source.block_ids
        assert self.manager.get_block_table(name) is self.tables[name]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def write_to_table(self, data: Any) -> None:
        table = self.tables[data.draw(st.sampled_from(sorted(self.tables)))]
        hashes = [self.manager.allocated_blocks[block_id].block_hash for block_id in table.block_ids]
        blocks, copied = self.manager.get_blocks_for_generation(table)
        assert [block.block_id for block in blocks] == table.block_ids
        assert [block.block_hash for block in blocks] == hashes
        if self.idle() > 0:
            assert not any(block.is_shared() for block in blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), keep=st.booleans(), twice=st.booleans())
    def end_table(self, data: Any, keep: bool, twice: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        table = self.tables.pop(name)
        if twice:  # a caller that gives references back itself and then drops the table
            assert self.manager.release_for_eviction(table.block_ids) == len(table)
            assert not keep or self.manager.release_block_table(name) == 0
        elif keep:
            assert self.manager.release_block_table(name) == len(table)
        if not keep:
            self.manager.delete_block_table(name)
        assert self.manager.get_block_table(name) is None

    # What must always hold

    @invariant()
    def the_free_list_is_sound(self) -> None:
        queue = self.manager.free_block_queue
        free = queue.get_all_free_blocks()
        assert len({block.block_id for block in free}) == len(free) == queue.num_free_blocks == self.manager.free_blocks
        backwards, block = [], queue.fake_tail.prev_free_block
        while block is not None and block is not queue.fake_head:
            backwards.append(block)
            block = block.prev_free_block
        assert backwards[::-1] == free

    @invariant()
    def every_block_is_in_one_state_and_has_the_references_that_are_held(self) -> None:
        manager, references = self.manager, self.references()
        free = {block.block_id for block in manager.free_block_queue.get_all_free_blocks()}
        assert [block.block_id for block in manager.blocks] == list(range(len(manager.blocks)))
        assert len(manager.blocks) <= manager.max_blocks
        assert manager.null_block is manager.blocks[0] is manager.allocated_blocks[0]
        assert (manager.null_block.is_null, manager.null_block.ref_count, manager.null_block.block_hash) == (
            True,
            1,
            None,
        )
        for block in manager.blocks[1:]:
            in_use = block.block_id in references
            retained = block.block_id in manager._retained
            assert [block.block_id in free, in_use, retained].count(True) == 1, block
            assert (block.block_id in manager.allocated_blocks) == (in_use or retained)
            assert block.ref_count == references[block.block_id]
            assert not block.is_null
            if block.block_id in free:
                assert (block.block_hash, block.token_count) == (None, 0)

    @invariant()
    def the_map_tells_the_truth(self) -> None:
        for block_hash, found in self.manager.cached_block_hash_to_block._cache.items():
            for block in found.values() if isinstance(found, dict) else [found]:
                assert block.block_hash == block_hash
                assert self.manager.allocated_blocks[block.block_id] is block

    @invariant()
    def the_statistics_are_a_count(self) -> None:
        manager = self.manager
        stats = manager.stats
        allocated = [block for block in manager.allocated_blocks.values() if not block.is_null]
        live = (stats.total_blocks, stats.allocated_blocks, stats.free_blocks)
        assert live == (len(manager.blocks), len(allocated) + 1, manager.free_blocks)
        assert stats.shared_blocks == sum(block.ref_count > 1 for block in allocated)
        assert stats.total_tokens_cached == sum(block.token_count for block in allocated)
        assert manager.usage == len(self.references()) / (manager.max_blocks - 1)
        assert manager.size == len(allocated)


TestLife = Life.TestCase
TestLife.settings = settings(deadline=None, max_examples=examples(60), stateful_step_count=40)
