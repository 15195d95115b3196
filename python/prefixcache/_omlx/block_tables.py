"""The tables of requests over the pool of blocks: who holds which blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prefixcache._omlx.block_pool import BlockPool
from prefixcache._omlx.blocks import BlockTable, CacheBlock

_MOST_TABLES = 4096
_PRUNE_EVERY = 256


class BlockTables(BlockPool):
    """A block pool and the tables of requests. Any thread."""

    _prune_above = _MOST_TABLES

    def create_block_table(self, request_id: str) -> BlockTable:
        """A new, empty table for a request, in place of any it had. Takes and gives back no references."""
        with self._lock:
            self.request_tables.pop(request_id, None)
            table = self.request_tables[request_id] = BlockTable(request_id)
            self._prune_tables(table)
            return table

    def get_block_table(self, request_id: str) -> BlockTable | None:
        """The table of a request, or None."""
        with self._lock:
            return self.request_tables.get(request_id)

    def get_or_create_block_table(self, request_id: str) -> BlockTable:
        """The table of a request, made if there is none.

        A table whose references were given back is no longer that of a request under this id: it is made anew.
        """
        with self._lock:
            table = self.request_tables.get(request_id)
            return self.create_block_table(request_id) if table is None or self._is_released(table) else table

    def delete_block_table(self, request_id: str) -> None:
        """Drop a table and ``free_block`` each of its blocks: what nobody else uses is no longer found.

        Of a table whose references were given back before, only blocks that nobody has used since are freed. What a
        lookup found stays findable: a hit that is of no use to one request may be of use to the next.
        """
        with self._lock:
            table = self.request_tables.get(request_id)
            if table is not None and table._found:
                self.release_block_table(request_id)
                return
            self.request_tables.pop(request_id, None)
            if table is None:
                return
            if not self._is_released(table):
                self.free_block_ids(table.block_ids)
                return
            for block in self._blocks_of(table):
                if block is not None and block.ref_count <= 0:
                    self.free_block(block.block_id)

    def release_block_table(self, request_id: str) -> int:
        """Drop a table and give its references back, unless they were; its blocks stay findable.

        How many references were given back.
        """
        with self._lock:
            table = self.request_tables.pop(request_id, None)
            if table is None or self._is_released(table):
                return 0
            table._released = (len(table.block_ids), self._serial)
            return super().release_for_eviction(table.block_ids)

    def release_for_eviction(self, block_ids: Sequence[int]) -> int:
        with self._lock:
            table = self._table_with(block_ids)
            if table is not None:
                table._released = (len(table.block_ids), self._serial)
            return super().release_for_eviction(block_ids)

    release_for_eviction.__doc__ = BlockPool.release_for_eviction.__doc__

    def add_block_to_table(self, table: BlockTable, block: CacheBlock, num_tokens: int) -> None:
        """Append a block, whose reference the table takes over, with the ``num_tokens`` tokens it holds."""
        with self._lock:
            block.token_count = num_tokens
            table.add_block(block.block_id, num_tokens)
            self._count_tokens(block)

    def fork_block_table(self, source_table: BlockTable, new_request_id: str) -> BlockTable:
        """The same blocks for another request, with a reference of its own on each; up to the first that is gone."""
        with self._lock:
            kept: list[int] = []
            for block in self._blocks_of(source_table):
                if block is None:
                    break
                self.increment_ref(block.block_id)
                kept.append(block.block_id)
            table = self.create_block_table(new_request_id)
            table.block_ids, table.num_tokens = kept, source_table.num_tokens
            if len(kept) < len(source_table.block_ids):
                table.num_tokens = min(table.num_tokens, len(kept) * self.block_size)
            return table

    def get_blocks_for_generation(self, table: BlockTable) -> tuple[list[CacheBlock], bool]:
        """The blocks of a table, shared ones replaced by records of its own; whether any was.

        Data is found by hash, so none is copied. Where no record is left the shared block stays. Ids that are not
        allocated are passed over.
        """
        with self._lock:
            blocks, copied = [], False
            for place, block_id in enumerate(table.block_ids):
                block = self.allocated_blocks.get(block_id)
                if block is None:
                    continue
                own = self.allocate_block() if block.is_shared() and not block.is_null else None
                if own is not None:
                    own.block_hash, own.token_count = block.block_hash, block.token_count
                    self._count_tokens(own)
                    self._drop(block)
                    table.block_ids[place] = own.block_id
                    self.stats.cow_copies += 1
                    block, copied = own, True
                blocks.append(block)
            return blocks, copied

    def _prune_tables(self, newest: BlockTable) -> None:
        """Above a bound, drop the oldest tables whose blocks nobody uses any more."""
        tables = self.request_tables
        if len(tables) <= self._prune_above:
            return
        for request_id, table in list(tables.items()):
            if len(tables) <= _MOST_TABLES:
                break
            if table is not newest and (self._is_released(table) or not self._holds_references(table)):
                del tables[request_id]
        # Where many are in use, the next look waits until there is something new to see.
        self._prune_above = max(_MOST_TABLES, len(tables)) + _PRUNE_EVERY

    def _table_with(self, block_ids: Sequence[int]) -> BlockTable | None:
        """The table that owns this list. An equal list may be that of another request, which is still running."""
        for table in reversed(self.request_tables.values()):
            if table.block_ids is block_ids:
                return table
        return None

    def _is_released(self, table: BlockTable) -> bool:
        return table._released[0] == len(table.block_ids)

    def _blocks_of(self, table: BlockTable) -> Iterator[CacheBlock | None]:
        """The blocks of a table; None for those whose record may hold something else by now."""
        until = table._released[1] if self._is_released(table) else self._serial
        for block_id in list(table.block_ids):
            block = self.allocated_blocks.get(block_id)
            yield block if block is not None and block._serial <= until else None

    def _holds_references(self, table: BlockTable) -> bool:
        held = (self.allocated_blocks.get(block_id) for block_id in table.block_ids)
        return any(block is not None and block.ref_count > 0 and not block.is_null for block in held)
