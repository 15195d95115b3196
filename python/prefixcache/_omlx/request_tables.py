"""Which blocks a request holds: the tables between the paged manager and the tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from prefixcache._omlx import prefix_index
from prefixcache._omlx.block_hash import BlockHash, block_hashes, compute_block_hash, resolve_block_extra_keys
from prefixcache.paged_cache import BlockTable, CacheBlock, PagedCacheManager

# One of ours; other lengths are hashes that a caller made up.
HASH_LENGTH = 32

Salts = tuple[Any, Any, Any]


class RequestTables:
    """Mixed into ``BlockAwarePrefixCache``. ``_lock`` guards everything and is taken before the paged manager's own."""

    paged_cache: PagedCacheManager
    block_size: int

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._request_tables: dict[str, Any] = {}
        self._prefix_index: dict[bytes, prefix_index.PrefixEntry] = {}
        # Tables that fetch_cache took references for, until the request is stored, released or cleared.
        self._fetched: dict[str, BlockTable] = {}

    def _hashes(self, tokens: Any, salts: Salts) -> list[bytes]:
        return block_hashes(tokens, self.block_size, self.paged_cache.model_name, *salts)

    def _block(self, block_id: int) -> CacheBlock | None:
        return self.paged_cache.allocated_blocks.get(block_id)

    def _table_hashes(self, table: BlockTable) -> list[bytes]:
        """The hashes of a table's blocks, up to the first whose record is free, holds nothing or something else."""
        found: list[bytes] = []
        with self.paged_cache._lock:
            for block in self.paged_cache._blocks_of(table):
                if block is None or block.block_hash is None:
                    break
                found.append(block.block_hash)
        return found

    def _acquire_indexed(self, hashes: Sequence[bytes], known: int) -> list[int]:
        """Ids of the blocks behind the first ``known`` that the prefix index has, with a reference on each.

        An id may have been given to other tokens since: only blocks that still carry the hash are taken.
        """
        if not self.paged_cache.enable_caching:
            return []
        entry = prefix_index.best(self._prefix_index, hashes[known:])
        if entry is None:
            return []
        taken: list[int] = []
        with self.paged_cache._lock:
            for block_id, value in zip(list(entry[1])[known:], hashes[known:], strict=False):
                block = self._block(block_id)
                if block is None or block.block_hash != value or not self.paged_cache.increment_ref(block_id):
                    break
                taken.append(block_id)
        return taken

    def _tables_of(self, request_id: str) -> list[BlockTable]:
        """The tables that are known under an id: nearly always one."""
        entry = self._request_tables.get(request_id)
        known = (
            self.paged_cache.get_block_table(request_id),
            self._fetched.get(request_id),
            entry and entry.block_table,
        )
        return list({id(table): table for table in known if table is not None}.values())

    def _give_back(self, request_id: str) -> None:
        """Gives back the references of a request, unless its caller did; its blocks stay findable."""
        table = self.paged_cache.get_block_table(request_id)
        entry = self._request_tables.get(request_id)
        if entry is not None and entry.block_table is table:
            del self._request_tables[request_id]
        self._fetched.pop(request_id, None)
        self.paged_cache.release_block_table(request_id)

    def _table_to_extend(self, request_id: str, hashes: Sequence[bytes]) -> BlockTable:
        """The request's table if it is still in use and holds the first blocks of these tokens, else a new one."""
        table = self.paged_cache.get_block_table(request_id)
        if table is not None and not self.paged_cache._is_over(table) and self._begins(table, hashes):
            return table
        self._give_back(request_id)
        return self.paged_cache.create_block_table(request_id)

    def _begins(self, table: BlockTable, hashes: Sequence[bytes]) -> bool:
        """Whether the blocks of a table are in use and, where their hashes are ours, those of the first tokens."""
        if len(table.block_ids) > len(hashes):
            return False
        with self.paged_cache._lock:
            for block, value in zip(self.paged_cache._blocks_of(table), hashes, strict=False):
                if block is None or block.is_null:
                    return False
                known = block.block_hash
                if known is not None and len(known) == HASH_LENGTH and known != value:
                    return False
        return True

    def _take_mapped(self, value: bytes) -> int | None:
        """The block that is mapped to this hash, with a reference; None if there is none."""
        with self._lock, self.paged_cache._lock:
            block = self.paged_cache._lookup(value)
            if block is None or not self.paged_cache._hold(block):
                return None
            block.touch()
            return block.block_id

    def _register(self, block: CacheBlock, value: bytes) -> int | None:
        """Makes a new block findable; its id. None, and no change, if the paged manager began anew meanwhile."""
        with self._lock, self.paged_cache._lock:
            if not self.paged_cache._is_own(block):
                return None
            block.block_hash, block.token_count = BlockHash(value), self.block_size
            if self.paged_cache.enable_caching:
                self.paged_cache.cached_block_hash_to_block.insert(BlockHash(value), block)
            return block.block_id

    def _continued(self, table: BlockTable, tokens: Any, hashes: list[bytes], salts: Salts) -> list[bytes]:
        """``hashes``, those behind the table chained to the hash that its last block carries."""
        known = len(table.block_ids)
        with self.paged_cache._lock:
            block = list(self.paged_cache._blocks_of(table))[-1] if known else None
        if block is None or block.block_hash is None or block.block_hash == hashes[known - 1]:
            return hashes
        found = hashes[: known - 1] + [block.block_hash]
        for number in range(known, len(hashes)):
            start, end = number * self.block_size, (number + 1) * self.block_size
            salt = resolve_block_extra_keys(end, *salts)
            found.append(compute_block_hash(found[-1], tokens[start:end], salt, self.paged_cache.model_name))
        return found

    def _extend(self, table: BlockTable, hashes: Sequence[bytes]) -> None:
        """Lets the table hold all blocks with these hashes, as far as the pool has room."""
        with self._lock, self.paged_cache._lock:
            known = len(table.block_ids)
            blocks = self.paged_cache._adopt(list(hashes[known:]), self.block_size)
            self.paged_cache._add_blocks(table, [block.block_id for block in blocks], self.block_size)

    def _shorten(self, table: BlockTable, count: int, sound: int) -> None:
        """Cuts a table to ``count`` blocks. Those from ``sound`` on have lost their tensors and are not found again;
        the others stay findable."""
        with self._lock, self.paged_cache._lock:
            blocks, released = list(self.paged_cache._blocks_of(table)), table._released
            sound = max(count, sound)
            kept = [block for block in blocks[max(count, released) : sound] if block is not None]
            self.paged_cache._drop_all([block for block in kept if block.ref_count > 0 and not block.is_null])
            for place, block in enumerate(blocks[sound:], sound):
                if block is None:
                    continue
                if block.block_hash is not None:
                    self.paged_cache.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
                # References that were given back are another's by now.
                if place >= released or block.ref_count <= 0:
                    self.paged_cache.free_block(block.block_id)
            del table.block_ids[count:]
            table.num_tokens = count * self.block_size
            table._released = min(released, count)
