"""The life of a block: free, in use, retained for the next request, free again."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from prefixcache._omlx.blocks import BlockHashToBlockMap, BlockTable, CacheBlock, FreeKVCacheBlockQueue
from prefixcache.stats import PagedCacheStats

logger = logging.getLogger(__name__)

_GROWTH = 256
_GROWTH_BEHIND_NEED = 128


class BlockPool:
    """Block records with reference counts, and the map from hashes to them. Metadata only: no tensor is in here.

    A block is free (in the queue, no hash), in use (one reference or more), retained (no reference, but still found
    under its hash until its record is needed) or the null block, number 0, which is never given out. Any thread: one
    re-entrant lock guards all of it.
    """

    def __init__(
        self,
        block_size: int = 64,
        max_blocks: int = 1000,
        enable_caching: bool = True,
        model_name: str = "",
        initial_blocks: int = 256,
    ) -> None:
        """ValueError for a ``block_size`` (tokens) or ``max_blocks`` below 1."""
        if block_size < 1 or max_blocks < 1:
            raise ValueError(f"block_size and max_blocks must be at least 1, not {block_size} and {max_blocks}")
        if not model_name:
            logger.warning("no model name: blocks of different models with equal tokens would be taken for one another")
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.enable_caching = enable_caching
        self.model_name = model_name
        self.initial_blocks = initial_blocks
        self.request_tables: dict[str, BlockTable] = {}
        # By the identity of their list, also when they are in no map any more: a late caller may still hold them.
        self._by_list: weakref.WeakValueDictionary[int, BlockTable] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._paged_ssd_cache_manager: Any = None
        self._serial = 0  # allocations so far
        self._make_blocks()

    def _make_blocks(self) -> None:
        created = max(1, min(self.initial_blocks, self.max_blocks))
        self.blocks = [CacheBlock(number) for number in range(created)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.null_block.ref_count = 1
        self.allocated_blocks: dict[int, CacheBlock] = {0: self.null_block}
        # The least recently used in front. Callers may write reference counts, so entries are checked when taken.
        self._retained: OrderedDict[int, CacheBlock] = OrderedDict()
        self._counted: dict[int, int] = {}  # tokens of each block that are in the statistics
        self.stats = PagedCacheStats()
        self._sync_stats()

    @property
    def _current_allocated_count(self) -> int:
        return len(self.blocks)

    # Allocation

    def allocate_block(self) -> CacheBlock | None:
        """A block with one reference and no hash, or None.

        A pool that has handed out all its records grows up to ``max_blocks``; one that cannot gives up the least
        recently used retained block.
        """
        with self._lock:
            if not self._find_room(1, _GROWTH):
                logger.warning("all %d blocks are in use", self.max_blocks)
                return None
            block = self._take_free()
            self._sync_stats()
            return block

    def get_new_blocks(self, num_blocks: int) -> list[CacheBlock]:
        """``num_blocks`` blocks as of ``allocate_block``. ValueError, and no change, if there are not so many."""
        with self._lock:
            missing = num_blocks - self.free_block_queue.num_free_blocks
            if missing > 0 and not self._find_room(num_blocks, missing + _GROWTH_BEHIND_NEED):
                raise ValueError(f"{num_blocks} blocks wanted, of {self.max_blocks} too few are not in use")
            blocks = [self._take_free() for _ in range(num_blocks)]
            self._sync_stats()
            return blocks

    def allocate_blocks_for_tokens(self, num_tokens: int) -> list[CacheBlock]:
        """As many new blocks as ``num_tokens`` fill, the last perhaps in part. ValueError as ``get_new_blocks``."""
        return self.get_new_blocks(-(-num_tokens // self.block_size))

    def _grow_blocks(self, count: int) -> int:
        """Make up to ``count`` more records; how many there were."""
        first = len(self.blocks)
        fresh = [CacheBlock(number) for number in range(first, min(first + count, self.max_blocks))]
        self.blocks += fresh
        self.free_block_queue.append_n(fresh)
        self._sync_stats()
        return len(fresh)

    def _find_room(self, wanted: int, growth: int) -> bool:
        """See that ``wanted`` blocks are free: new records first, then those of retained blocks."""
        queue = self.free_block_queue
        if queue.num_free_blocks >= wanted or self._grow_blocks(growth) and queue.num_free_blocks >= wanted:
            return True
        missing = wanted - queue.num_free_blocks
        if missing > len(self._retained) and missing > len(self._idle_blocks()):
            return False
        self._reclaim(missing)
        return queue.num_free_blocks >= wanted

    def _take_free(self) -> CacheBlock:
        block = self.free_block_queue.popleft()
        self._maybe_evict_cached_block(block)
        self._number(block)
        block.ref_count = 1
        block.token_count = 0
        block.touch()
        self.allocated_blocks[block.block_id] = block
        return block

    def _number(self, block: CacheBlock) -> None:
        """Another allocation of this record: what its number meant before is over."""
        self._serial += 1
        block._serial = self._serial

    def _maybe_evict_cached_block(self, block: CacheBlock) -> bool:
        """Take a block out of the map, counted, and forget its hash in any case; whether it was in the map."""
        found = self._unmap(block)
        if found:
            self.stats.record_eviction()
        return found

    # References

    def increment_ref(self, block_id: int) -> bool:
        """Take one more reference. False if the block is not allocated; the null block is not counted."""
        with self._lock:
            block = self.allocated_blocks.get(block_id)
            if block is None:
                return False
            self._hold(block)
            block.touch()
            return True

    def decrement_ref(self, block_id: int) -> bool:
        """``free_block`` under its other name."""
        return self.free_block(block_id)

    def free_block(self, block_id: int) -> bool:
        """Give one reference back. With the last one the block is freed and no longer found: then True."""
        with self._lock:
            block = self.allocated_blocks.get(block_id)
            if block is None:
                logger.warning("block %s is not allocated: nothing to free", block_id)
                return False
            if block.is_null:
                return False
            if block.ref_count > 1:
                self._drop(block)
                return False
            self._free(block)
            self._sync_stats()
            return True

    def free_block_ids(self, block_ids: Iterable[int]) -> int:
        """``free_block`` for each id; how many became free.

        The name ``free_blocks`` is the number of free blocks, so it cannot be that of a method too.
        """
        with self._lock:
            return sum(self.free_block(block_id) for block_id in list(block_ids))

    def release_for_eviction(self, block_ids: Sequence[int]) -> int:
        """Give back one reference on each block but keep it findable; how many references that were.

        Blocks without a reference left are retained: the next request finds them, and their records are reused, of
        one call the last id first, when nothing else is free. Ids that are not in use are passed over.
        """
        with self._lock:
            released = [
                block
                for block_id in block_ids
                if (block := self.allocated_blocks.get(block_id)) and not block.is_null and block.ref_count > 0
            ]
            # A chain is of no use without its beginning, so its end goes first.
            for block in reversed(released):
                self._drop(block)
            return len(released)

    def touch(self, blocks: Iterable[CacheBlock]) -> None:
        """Take a reference on each block, whether it is in use, retained or free."""
        with self._lock:
            for block in blocks:
                self._hold(block)
                block.touch()

    def _is_own(self, block: CacheBlock) -> bool:
        """Whether a record is one of this pool that can be given out; records from before ``clear`` are not."""
        number = block.block_id
        return 0 < number < len(self.blocks) and self.blocks[number] is block

    def _hold(self, block: CacheBlock) -> bool:
        """Take a reference, whatever the state of the block. False for a record that cannot be given out."""
        if not self._is_own(block):
            return False
        if block.ref_count <= 0:
            block.ref_count = 0
            self._retained.pop(block.block_id, None)
            if block.prev_free_block is not None and block.next_free_block is not None:
                self.free_block_queue.remove(block)
                self._number(block)
            if block.block_id not in self.allocated_blocks:
                self.allocated_blocks[block.block_id] = block
                self._sync_stats()
        block.ref_count += 1
        if block.ref_count == 2:
            self.stats.shared_blocks += 1
        return True

    def _drop(self, block: CacheBlock) -> None:
        """Give a reference back; without any the block is retained."""
        block.ref_count -= 1
        if block.ref_count == 1:
            self.stats.shared_blocks = max(0, self.stats.shared_blocks - 1)
        elif block.ref_count == 0:
            self._retained[block.block_id] = block
            if self._counted.get(block.block_id) != block.token_count:
                self._count_tokens(block)  # the caller wrote it
            if block.block_hash is None:  # nobody can find it again
                self._retained.move_to_end(block.block_id, last=False)

    def _free(self, block: CacheBlock) -> None:
        self._unmap(block)
        if block.ref_count > 1:
            self.stats.shared_blocks = max(0, self.stats.shared_blocks - 1)
        block.ref_count = 0
        block.token_count = 0
        self._retained.pop(block.block_id, None)
        self.stats.total_tokens_cached -= self._counted.pop(block.block_id, 0)
        self.allocated_blocks.pop(block.block_id, None)
        self.free_block_queue.append(block)

    # The map

    def _map(self, block: CacheBlock, block_hash: bytes, token_count: int | None = None) -> None:
        """Register a block under a hash, and under no other."""
        if block.is_null:
            return
        if block.block_hash is not None:
            self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
        block.block_hash = block_hash
        self.cached_block_hash_to_block.insert(block_hash, block)
        if token_count is not None:
            block.token_count = token_count
        self._count_tokens(block)

    def _unmap(self, block: CacheBlock) -> bool:
        block_hash = block.block_hash
        block.reset_hash()
        return block_hash is not None and self.cached_block_hash_to_block.pop(block_hash, block.block_id) is not None

    def _count_tokens(self, block: CacheBlock) -> None:
        if self.allocated_blocks.get(block.block_id) is block and not block.is_null:
            before = self._counted.get(block.block_id, 0)
            self._counted[block.block_id] = block.token_count
            self.stats.total_tokens_cached += block.token_count - before

    # Eviction

    def evict_lru_blocks(self, num_blocks: int) -> int:
        """Evict up to ``num_blocks`` blocks that nobody uses; how many.

        Retained blocks come first, the least recently used in front, and become free. Then free ones, which hold
        nothing, move to the back of the queue.
        """
        with self._lock:
            free = self.free_block_queue.num_free_blocks
            evicted = self._reclaim(num_blocks)
            for _ in range(min(free, num_blocks - evicted)):
                block = self.free_block_queue.popleft()
                self._maybe_evict_cached_block(block)
                self.free_block_queue.append(block)
                evicted += 1
            self._sync_stats()
            return evicted

    def handle_memory_pressure(self, num_blocks_needed: int) -> bool:
        """Free retained blocks until ``num_blocks_needed`` are free; whether they are. The pool does not grow."""
        with self._lock:
            missing = num_blocks_needed - self.free_block_queue.num_free_blocks
            if missing > 0:
                self._reclaim(missing)
                self._sync_stats()
            return self.free_block_queue.num_free_blocks >= num_blocks_needed

    def get_evictable_blocks(self, num_blocks: int) -> list[CacheBlock]:
        """At most ``num_blocks`` blocks that nobody uses: free ones, then retained ones by their last access."""
        with self._lock:
            found: list[CacheBlock] = []
            for block in self.free_block_queue:
                if len(found) >= num_blocks:
                    return found
                if not block.is_null and block.ref_count == 0:
                    found.append(block)
            idle = sorted(self._idle_blocks(), key=lambda block: block.last_access)
            return found + idle[: max(0, num_blocks - len(found))]

    def evict_block_permanently(self, block_id: int) -> bool:
        """Forget what a block holds and make it free; what is on SSD stays.

        False for an id that does not exist, a block in use and the null block. A free block stays where it is.
        """
        with self._lock:
            block = self.blocks[block_id] if 0 <= block_id < len(self.blocks) else None
            if block is None or block.is_null or block.ref_count > 0:
                return False
            if block.prev_free_block is None or block.next_free_block is None:
                self._free(block)
            else:
                self._unmap(block)
                block.token_count = 0
            self.stats.record_eviction()
            self._sync_stats()
            return True

    def _idle_blocks(self) -> list[CacheBlock]:
        """Allocated blocks without a reference, in the order in which they are reclaimed."""
        idle = [block for block in self._retained.values() if block.ref_count <= 0]
        if len(self.allocated_blocks) - 1 > len(idle):
            # A caller may have written a reference count.
            known = self._retained
            idle += [b for b in self.allocated_blocks.values() if b.ref_count <= 0 and b.block_id not in known]
        return idle

    def _reclaim(self, wanted: int) -> int:
        """Free up to ``wanted`` retained blocks, the least recently used first; how many."""
        freed = 0
        while freed < wanted and self._retained:
            block = self._retained.popitem(last=False)[1]
            if block.ref_count <= 0 and self.allocated_blocks.get(block.block_id) is block:
                self._free(block)
                self.stats.record_eviction()
                freed += 1
        for block in self._idle_blocks()[: wanted - freed] if freed < wanted else ():
            self._free(block)
            self.stats.record_eviction()
            freed += 1
        return freed

    def _sync_stats(self) -> None:
        stats = self.stats
        stats.total_blocks = len(self.blocks)
        stats.allocated_blocks = len(self.allocated_blocks)
        stats.free_blocks = self.free_block_queue.num_free_blocks
