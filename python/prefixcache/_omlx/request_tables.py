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
        """The hashes of a table's blocks, up to the first that is not in use any more or holds nothing."""
        found: list[bytes] = []
        for block_id in table.block_ids:
            block = self._block(block_id)
            if block is None or block.block_hash is None:
                break
            found.append(block.block_hash)
        return found

    def _acquire_indexed(self, hashes: Sequence[bytes], known: int) -> list[int]:
        """Ids of the blocks behind the first ``known`` that the prefix index has, with a reference on each.

        An id may have been given to other tokens since: only blocks that still carry the hash are taken.
        """
        entry = prefix_index.best(self._prefix_index, hashes[known:])
        if entry is None:
            return []
        taken: list[int] = []
        for block_id, value in zip(list(entry[1])[known:], hashes[known:], strict=False):
            block = self._block(block_id)
            if block is None or block.block_hash != value or not self.paged_cache.increment_ref(block_id):
                break
            taken.append(block_id)
        return taken

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
        if table is not None and not self.paged_cache._is_released(table) and self._begins(table, hashes):
            return table
        self._give_back(request_id)
        return self.paged_cache.create_block_table(request_id)

    def _begins(self, table: BlockTable, hashes: Sequence[bytes]) -> bool:
        """Whether the blocks of a table are in use and, where their hashes are ours, those of the first tokens."""
        if len(table.block_ids) > len(hashes):
            return False
        for block_id, value in zip(table.block_ids, hashes, strict=False):
            block = self._block(block_id)
            if block is None or (
                block.block_hash is not None and len(block.block_hash) == HASH_LENGTH and block.block_hash != value
            ):
                return False
        return True

    def _take_mapped(self, value: bytes) -> int | None:
        """The block that is mapped to this hash, with a reference; None if there is none."""
        with self._lock:
            block = self.paged_cache.cached_block_hash_to_block.get_block(value)
            if block is None or not self.paged_cache.increment_ref(block.block_id):
                return None
            return block.block_id

    def _register(self, block: CacheBlock, value: bytes) -> None:
        with self._lock, self.paged_cache._lock:
            block.block_hash, block.token_count = BlockHash(value), self.block_size
            if self.paged_cache.enable_caching:
                self.paged_cache.cached_block_hash_to_block.insert(BlockHash(value), block)

    def _continued(self, table: BlockTable, tokens: Any, hashes: list[bytes], salts: Salts) -> list[bytes]:
        """``hashes``, those behind the table chained to the hash that its last block carries."""
        known = len(table.block_ids)
        block = self._block(table.block_ids[-1]) if known else None
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
        with self._lock:
            known = len(table.block_ids)
            for block in self.paged_cache._adopt(list(hashes[known:]), self.block_size):
                table.add_block(block.block_id, self.block_size)

    def _shorten(self, table: BlockTable, count: int, sound: int) -> None:
        """Cuts a table to ``count`` blocks. Those from ``sound`` on have lost their tensors and are not found again;
        the others stay findable."""
        with self._lock, self.paged_cache._lock:
            kept = [self._block(block_id) for block_id in table.block_ids[count : max(count, sound)]]
            self.paged_cache._drop_all([block for block in kept if block is not None and block.ref_count > 0])
            for block_id in table.block_ids[max(count, sound) :]:
                block = self._block(block_id)
                if block is not None and block.block_hash is not None:
                    self.paged_cache.cached_block_hash_to_block.pop(block.block_hash, block_id)
                self.paged_cache.free_block(block_id)
            del table.block_ids[count:]
            table.num_tokens = count * self.block_size
