"""The tables of requests over the pool of blocks: who holds which blocks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from prefixcache._omlx.block_pool import BlockPool
from prefixcache._omlx.blocks import BlockTable, CacheBlock

_MOST_TABLES = 4096
_PRUNE_EVERY = 256


class BlockTables(BlockPool):
    """A block pool and the tables of requests. Any thread.

    A table remembers which allocation each of its ids meant: once a record is used for something else, the id is
    passed over. References of a table are given back once. Ids that a caller appended are taken as they are.
    """

    _prune_above = _MOST_TABLES

    def _make_blocks(self) -> None:
        # What tables hold is of the records that end here.
        for table in [*self.request_tables.values(), *self._by_list.values()]:
            for block_id in table.block_ids[max(0, table._released) :]:
                if block_id not in table._serials:
                    self._note(table, block_id)
        super()._make_blocks()

    def create_block_table(self, request_id: str) -> BlockTable:
        """A new, empty table for a request, in place of any it had. Takes and gives back no references."""
        with self._lock:
            self.request_tables.pop(request_id, None)
            table = self.request_tables[request_id] = BlockTable(request_id)
            table._pool = weakref.ref(self)
            self._by_list[id(table.block_ids)] = table
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
            return self.create_block_table(request_id) if table is None or self._is_over(table) else table

    def delete_block_table(self, request_id: str) -> None:
        """Drop a table and ``free_block`` each of its blocks: what nobody else uses is no longer found.

        Of a table whose references were given back before, only blocks that nobody has used since are freed. What a
        lookup found stays findable: a hit that is of no use to one request may be of use to the next.
        """
        with self._lock:
            table = self.request_tables.pop(request_id, None)
            if table is not None:
                self._free_table(table)

    def release_block_table(self, request_id: str) -> int:
        """Drop a table and give its references back, unless they were; its blocks stay findable.

        How many references were given back. Those of a request that was cleared are its caller's to give back.
        """
        with self._lock:
            table = self.request_tables.get(request_id)
            if table is None or table._cleared:
                return 0
            del self.request_tables[request_id]
            return self._release_table(table)

    def release_for_eviction(self, block_ids: Sequence[int]) -> int:
        with self._lock:
            table = self._table_with(block_ids)
            return super().release_for_eviction(block_ids) if table is None else self._release_table(table)

    release_for_eviction.__doc__ = (
        f"{BlockPool.release_for_eviction.__doc__}\n        The list of a table is given back once.\n        "
    )

    def _free_table(self, table: BlockTable) -> None:
        """``delete_block_table`` of a table that may not be in the map of requests."""
        with self._lock:
            if table._found:
                self._release_table(table)
                return
            before = list(self._blocks_of(table))[: max(0, table._released)]
            self.free_block_ids(block.block_id for block in self._end(table))
            idle = [block for block in before if block is not None and block.ref_count <= 0]
            self.free_block_ids(block.block_id for block in idle if block.block_id in self.allocated_blocks)

    def _release_table(self, table: BlockTable) -> int:
        """Gives back the references that a table still holds; how many."""
        with self._lock:
            count = 0
            # A chain is of no use without its beginning, so its end goes first.
            for block in reversed(self._end(table)):
                if block.ref_count > 0:
                    self._drop(block)
                    count += 1
            return count

    def _end(self, table: BlockTable) -> list[CacheBlock]:
        """The blocks whose references a table holds, for the caller to give back: it holds none any more."""
        blocks = list(self._blocks_of(table))
        if None in blocks:
            _put_null(table, [place for place, block in enumerate(blocks) if block is None])
        held = [block for block in blocks[max(0, table._released) :] if block is not None and not block.is_null]
        # From here on one number tells what the ids meant.
        table._serials, table._until, table._released = {}, self._serial, len(table.block_ids)
        self._by_list[id(table.block_ids)] = table
        return held

    def _add_blocks(self, table: BlockTable, block_ids: Sequence[int], tokens_each: int) -> None:
        """``BlockTable.add_block`` for each id."""
        with self._lock:
            if table.block_ids:
                for block_id in block_ids:
                    self._note(table, block_id)
            else:
                table._serials = {block_id: self.allocated_blocks[block_id]._serial for block_id in block_ids}
            table.block_ids.extend(block_ids)
            table.num_tokens += tokens_each * len(block_ids)

    def _note(self, table: BlockTable, block_id: int) -> None:
        """Remember which allocation an id means that is about to be added to a table."""
        with self._lock:
            block = self.allocated_blocks.get(block_id)
            serial = -1 if block is None else block._serial
            if table._released > 0 or table._serials.get(block_id, serial) != serial:
                places = [place for place, known in enumerate(table.block_ids) if known == block_id]
                _put_null(table, [place for place in places if self._limit(table, place, block_id) < serial])
            table._serials[block_id] = serial

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
            self._add_blocks(table, kept, 0)
            table.num_tokens = source_table.num_tokens
            if len(kept) < len(source_table.block_ids):
                table.num_tokens = min(table.num_tokens, len(kept) * self.block_size)
            return table

    def get_blocks_for_generation(self, table: BlockTable) -> tuple[list[CacheBlock], bool]:
        """The blocks of a table, shared ones replaced by records of its own; whether any was.

        Data is found by hash, so none is copied. Where no record is left the shared block stays. Ids that are not
        allocated, or mean something else by now, are passed over, and a table that was given back gets no records.
        """
        with self._lock:
            blocks, copied = [], False
            for place, block in enumerate(list(self._blocks_of(table))):
                if block is None:
                    continue
                shared = block.is_shared() and not block.is_null and place >= table._released
                own = self.allocate_block() if shared else None
                if own is not None:
                    self._note(table, own.block_id)
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
            if table is not newest and (self._is_over(table) or not self._holds_references(table)):
                del tables[request_id]
        # Where many are in use, the next look waits until there is something new to see.
        self._prune_above = max(_MOST_TABLES, len(tables)) + _PRUNE_EVERY

    def _table_with(self, block_ids: Sequence[int]) -> BlockTable | None:
        """The table that owns this list, or whose references these must be."""
        table = self._by_list.get(id(block_ids))
        if table is not None and table.block_ids is block_ids:
            return table
        equal: list[BlockTable] = []
        for table in self.request_tables.values():
            if table.block_ids is block_ids:
                return table
            if table.block_ids == block_ids and table.block_ids and not self._is_released(table):
                equal.append(table)
        # An equal list may be that of a caller with references of its own, unless there are no more than the tables'.
        last = self.allocated_blocks.get(block_ids[-1]) if equal else None
        return equal[0] if last is not None and 0 < last.ref_count <= len(equal) else None

    def _is_released(self, table: BlockTable) -> bool:
        return len(table.block_ids) <= table._released

    def _is_over(self, table: BlockTable) -> bool:
        return table._cleared or self._is_released(table)

    def _limit(self, table: BlockTable, place: int, block_id: int) -> int:
        """The latest allocation that the id at a place of a table may mean."""
        return table._serials.get(block_id, table._until if place < table._released else self._serial)

    def _blocks_of(self, table: BlockTable) -> Iterator[CacheBlock | None]:
        """The blocks of a table; None for those whose record is free or holds something else by now."""
        for place, block_id in enumerate(list(table.block_ids)):
            block = self.allocated_blocks.get(block_id)
            yield block if block is not None and block._serial <= self._limit(table, place, block_id) else None

    def _holds_references(self, table: BlockTable) -> bool:
        return any(block is not None and block.ref_count > 0 and not block.is_null for block in self._blocks_of(table))


def _put_null(table: BlockTable, places: Sequence[int]) -> None:
    """Ids that mean nothing any more give way to the null block, which ends what a table can be used for."""
    for place in places:
        table.block_ids[place] = 0
