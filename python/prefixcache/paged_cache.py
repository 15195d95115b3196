"""Which blocks of tokens are known, who uses them and where they are: the paged cache under oMLX's names.

Metadata only. The tensors are in the SSD manager, under the hash of their block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

from prefixcache._core import TokenBuffer
from prefixcache._omlx.block_hash import (
    BlockHash,
    ExtraKeyRanges,
    ExtraKeys,
    block_hashes,
    compute_block_hash,
    resolve_block_extra_keys,
)
from prefixcache._omlx.block_tables import BlockTables
from prefixcache._omlx.blocks import BlockHashToBlockMap, BlockTable, CacheBlock, FreeKVCacheBlockQueue
from prefixcache.interface import CacheManager
from prefixcache.stats import PagedCacheStats

__all__ = [
    "BlockHash",
    "BlockHashToBlockMap",
    "BlockTable",
    "CacheBlock",
    "FreeKVCacheBlockQueue",
    "PagedCacheManager",
    "compute_block_hash",
    "resolve_block_extra_keys",
]

logger = logging.getLogger(__name__)


class PagedCacheManager(BlockTables, CacheManager):
    """Blocks, their hashes, references and tables. Any thread: one re-entrant lock guards all of it."""

    def set_paged_ssd_cache_manager(self, paged_ssd_cache_manager: Any) -> None:
        """Attach the manager that is asked, by ``has_block(hash)``, for blocks that are unknown here; None: no one."""
        with self._lock:
            self._paged_ssd_cache_manager = paged_ssd_cache_manager

    # Hashes

    def get_cached_block(self, block_hash: bytes) -> CacheBlock | None:
        """The block with this hash, or None. Takes no reference; counts a hit or a miss."""
        if not self.enable_caching:
            return None
        with self._lock:
            block = self._lookup(block_hash)
            if block is None:
                self.stats.record_miss()
            else:
                self.stats.record_hit()
            return block

    def find_cached_block(
        self, tokens: Any, parent_hash: bytes | None = None, extra_keys: ExtraKeys | None = None
    ) -> CacheBlock | None:
        """The block with these tokens behind ``parent_hash``, or None. Takes no reference; counts a hit or a miss."""
        block_hash = compute_block_hash(parent_hash, tokens, extra_keys, self.model_name)
        with self._lock:
            block = self.get_cached_block(block_hash)
            if block is not None:
                self._refresh([block])
            return block

    def register_block_hash(
        self,
        block: CacheBlock,
        tokens: Any,
        parent_hash: bytes | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> None:
        """Make a block findable under the hash of its tokens. ``block.token_count`` is the caller's to set."""
        if not self.enable_caching:
            return
        block_hash = compute_block_hash(parent_hash, tokens, extra_keys, self.model_name)
        with self._lock:
            self._map(block, block_hash)

    def cache_full_blocks(
        self,
        blocks: Sequence[CacheBlock],
        token_ids: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        extra_keys: ExtraKeys | None = None,
    ) -> None:
        """Register blocks ``[num_cached_blocks, num_full_blocks)`` of a sequence, each behind the one before it.

        ``token_ids``: the tokens of the sequence from its beginning. Blocks that have a hash are passed over.
        """
        if not self.enable_caching:
            return
        size, tokens = self.block_size, TokenBuffer(token_ids)
        whole = min(num_full_blocks, len(blocks), len(tokens) // size)
        if num_cached_blocks >= whole:
            return
        with self._lock:
            parent: bytes | None = None
            if num_cached_blocks > 0:
                parent = blocks[num_cached_blocks - 1].block_hash
                if parent is None:  # hashed anew: the middle of a sequence must not be taken for its beginning
                    before = tokens.slice(0, num_cached_blocks * size)
                    parent = block_hashes(before, size, self.model_name, extra_keys)[-1]
            for number in range(num_cached_blocks, whole):
                block = blocks[number]
                if block.block_hash is None:
                    here = tokens.slice(number * size, (number + 1) * size)
                    self._map(block, compute_block_hash(parent, here, extra_keys, self.model_name), size)
                parent = block.block_hash

    # Prefixes

    def get_computed_blocks(
        self,
        token_ids: Any,
        extra_keys: ExtraKeys | None = None,
        extra_key_token_start: int | None = None,
        extra_key_ranges: ExtraKeyRanges | None = None,
    ) -> tuple[list[CacheBlock], int]:
        """The known blocks from the beginning on, without a gap, and the number of their tokens.

        Blocks that only the SSD manager has become retained blocks here. Takes no references. Counts a hit for each
        block and a miss where it stops.
        """
        if not self.enable_caching:
            return [], 0
        hashes = self._hashes(token_ids, extra_keys, extra_key_token_start, extra_key_ranges)
        blocks = self._match(hashes)
        return blocks, len(blocks) * self.block_size

    def find_shared_prefix(
        self,
        tokens: list[int],
        extra_keys: ExtraKeys | None = None,
        extra_key_token_start: int | None = None,
        extra_key_ranges: ExtraKeyRanges | None = None,
    ) -> tuple[list[int], list[int]]:
        """``get_computed_blocks`` as block ids, and the tokens behind them, which may be none. Takes no references."""
        blocks, count = self.get_computed_blocks(tokens, extra_keys, extra_key_token_start, extra_key_ranges)
        remaining = tokens[count:] if isinstance(tokens, list) else list(islice(tokens, count, None))
        return [block.block_id for block in blocks], remaining

    def _hashes(
        self, tokens: Any, extra_keys: ExtraKeys | None, token_start: int | None, ranges: ExtraKeyRanges | None
    ) -> list[bytes]:
        return block_hashes(tokens, self.block_size, self.model_name, extra_keys, token_start, ranges)

    def _match(self, hashes: Sequence[bytes]) -> list[CacheBlock]:
        """The blocks of the leading hashes that are known here or to the SSD manager. Takes no references."""
        with self._lock:
            blocks = self._acquire(hashes)
            self._drop_all(blocks)
            return blocks

    def _acquire(self, hashes: Sequence[bytes]) -> list[CacheBlock]:
        """As ``_match``, with a reference on each block for the caller."""
        if not self.enable_caching:
            return []
        with self._lock, ExitStack() as undo:
            blocks: list[CacheBlock] = []
            undo.callback(self._drop_all, blocks)
            for block_hash in hashes:
                # Held at once, so that none of them is reclaimed for the next.
                block = self._lookup(block_hash)
                if block is None or not self._hold(block):
                    block = self._register_cold(block_hash)
                    if block is None:
                        self.stats.record_miss()
                        break
                blocks.append(block)
            undo.pop_all()
            self.stats.hits += len(blocks)
            self._refresh(blocks)
            return blocks

    def _drop_all(self, blocks: list[CacheBlock]) -> None:
        # A chain is of no use without its beginning, so its end will be reclaimed first.
        for block in reversed(blocks):
            self._drop(block)

    def _adopt(self, hashes: Sequence[bytes], token_count: int) -> list[CacheBlock]:
        """A block with a reference for the caller for each hash: the known one, or a new one of ``token_count`` tokens.

        Shorter where the pool has no block left. Counts no hits.
        """
        blocks: list[CacheBlock] = []
        with self._lock:
            for block_hash in hashes:
                block = self._lookup(block_hash) if self.enable_caching else None
                if block is None or not self._hold(block):
                    block = self.allocate_block()
                    if block is None:
                        break
                    self._enter(block, block_hash, token_count)
                blocks.append(block)
            self._refresh(blocks)
        return blocks

    def _lookup(self, block_hash: bytes) -> CacheBlock | None:
        known = self.cached_block_hash_to_block
        block = known.get_block(block_hash)
        while block is not None and block.block_hash != block_hash:
            # A caller gave the block another hash: what the map says of it is no longer true.
            known.pop(block_hash, block.block_id)
            block = known.get_block(block_hash)
        return block

    def _register_cold(self, block_hash: bytes) -> CacheBlock | None:
        """A block with a reference for what only the SSD manager has, or None."""
        has_block = getattr(self._paged_ssd_cache_manager, "has_block", None)
        try:
            if has_block is None or not has_block(block_hash):
                return None
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning("the SSD manager could not say whether it has a block: %s", error)
            return None
        block = self.allocate_block()
        if block is not None:
            self._map(block, block_hash, self.block_size)
        return block

    def _enter(self, block: CacheBlock, block_hash: bytes, token_count: int) -> None:
        if self.enable_caching:
            self._map(block, block_hash, token_count)
        else:  # it has a hash, to find its tensors, but no request finds it
            block.block_hash, block.token_count = block_hash, token_count
            self._count_tokens(block)

    def _refresh(self, blocks: list[CacheBlock]) -> None:
        """Note that blocks are used now, all at one time; a retained one will be reclaimed last."""
        now = time.time()
        for block in blocks:
            block.last_access = now
            if block.ref_count <= 0 and block.block_id in self._retained:
                self._retained.move_to_end(block.block_id)

    # Cold blocks: names that callers of older versions use

    def mark_block_cold(self, block_id: int) -> bool:
        """Count a block whose tensors are on SSD only as evicted; False if it is in use or holds nothing."""
        with self._lock:
            block = self.allocated_blocks.get(block_id)
            if block is None or block.is_null or block.ref_count > 0 or block.block_hash is None:
                return False
            self.stats.record_eviction()
            return True

    def restore_block(self, block_id: int, data: Any = None) -> bool:
        """Note that a block is used again; False if there is none. ``data`` is not kept."""
        with self._lock:
            block = self.allocated_blocks.get(block_id)
            if block is None or block.is_null:
                return False
            self._refresh([block])
            return True

    def get_cold_blocks(self) -> list[CacheBlock]:
        """The blocks that have a hash."""
        with self._lock:
            return [b for b in self.allocated_blocks.values() if b.block_hash is not None and not b.is_null]

    @property
    def cold_block_count(self) -> int:
        """The number of blocks that have a hash."""
        return len(self.get_cold_blocks())

    # What every cache manager has

    def fetch(self, key: Any) -> tuple[CacheBlock | None, bool]:
        """``get_cached_block``, and whether there was one."""
        block = self.get_cached_block(key) if isinstance(key, bytes) else None
        return block, block is not None

    def store(self, key: Any, value: Any) -> bool:
        """Make block ``value`` findable under the hash ``key``. False for anything else."""
        if not isinstance(key, bytes) or not isinstance(value, CacheBlock) or not self.enable_caching:
            return False
        with self._lock:
            self._map(value, key)
            return True

    def evict(self, key: Any) -> bool:
        """``evict_block_permanently`` of the block with this hash or id. False if there is none or it is in use."""
        with self._lock:
            if isinstance(key, bytes):
                block = self._lookup(key)
                if block is None or self._is_own(block):
                    return block is not None and self.evict_block_permanently(block.block_id)
                return self._unmap(block)
            return isinstance(key, int) and self.evict_block_permanently(key)

    def clear(self) -> int:
        """Start anew: no hashes, no tables, all counters zero; how many blocks were allocated."""
        with self._lock:
            allocated = len(self.allocated_blocks) - 1
            self._make_blocks()
            self.request_tables.clear()
            return allocated

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes. False, and no change, while a block is in use."""
        with self._lock:
            if self._in_use():
                return False
            for block in self._idle_blocks():
                self._free(block)
            for block in self.free_block_queue:
                block.reset_hash()
            self.cached_block_hash_to_block.clear()
            self._sync_stats()
            return True

    # Statistics

    def get_stats(self) -> PagedCacheStats:
        """The live statistics, with what callers may have changed in the blocks counted anew."""
        with self._lock:
            shared, counted = 0, self._counted
            for block_id, block in self.allocated_blocks.items():
                if block.ref_count > 1:
                    shared += 1
                if counted.get(block_id, 0) != block.token_count:
                    self._count_tokens(block)
            self.stats.shared_blocks = shared
            self._sync_stats()
            return self.stats

    def reset_stats(self) -> None:
        """Zero hits, misses, copies and evictions."""
        with self._lock:
            self.stats.reset()

    def get_memory_usage(self) -> dict[str, Any]:
        """Sizes in blocks and tokens, and two rates of 0.0 to 1.0."""
        with self._lock:
            stats = self.get_stats()
            return {
                "block_size": self.block_size,
                "max_blocks": self.max_blocks,
                "allocated_blocks": stats.allocated_blocks,
                "free_blocks": stats.free_blocks,
                "shared_blocks": stats.shared_blocks,
                "total_tokens_cached": stats.total_tokens_cached,
                "utilization": stats.utilization,
                "cache_hit_rate": stats.hit_rate,
            }

    def get_ref_count_distribution(self) -> dict[int, int]:
        """How many allocated blocks have how many references, without the null block."""
        with self._lock:
            counts: dict[int, int] = {}
            for block in self.allocated_blocks.values():
                if not block.is_null:
                    counts[block.ref_count] = counts.get(block.ref_count, 0) + 1
            return dict(sorted(counts.items()))

    def get_ref_count_summary(self) -> str:
        """``get_ref_count_distribution`` in one line; of the retained ones, how many have a hash and so tensors."""
        with self._lock:
            counts = self.get_ref_count_distribution()
            kept = sum(b.block_hash is not None and b.ref_count == 0 for b in self.allocated_blocks.values())
            parts = [f"rc{n}={count}" + (f"(ssd={kept})" if n == 0 else "") for n, count in counts.items()]
            return ",".join(parts) or "rc=none"

    @property
    def free_blocks(self) -> int:
        """Free blocks among those made so far."""
        with self._lock:
            return self.free_block_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """The share of the pool, as large as it may become, that is in use, 0.0 to 1.0. Retained blocks are not."""
        with self._lock:
            return self._in_use() / (self.max_blocks - 1) if self.max_blocks > 1 else 0.0

    @property
    def size(self) -> int:
        """Allocated blocks, in use or retained."""
        with self._lock:
            return len(self.allocated_blocks) - 1

    @property
    def max_size(self) -> int:
        """``max_blocks``."""
        return self.max_blocks

    def _in_use(self) -> int:
        return sum(1 for block in self.allocated_blocks.values() if block.ref_count > 0) - 1
