"""Records of the paged cache: blocks, tables of blocks, the list of free blocks, the map from hashes to blocks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, repr=False)
class CacheBlock:
    """What is known of one block of tokens; its tensors are in the SSD manager under ``block_hash``.

    Two records are equal only if they are one: their list pointers would make a comparison of fields walk the list.
    ``last_access``: seconds of the wall clock. Its manager's lock guards it.
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    prev_free_block: CacheBlock | None = None
    next_free_block: CacheBlock | None = None
    is_null: bool = False
    token_count: int = 0
    last_access: float = field(default_factory=time.time)
    _serial = 0  # of its latest allocation: tells whether a number still means what it meant; no field

    def is_full(self, block_size: int) -> bool:
        """Whether it holds at least ``block_size`` tokens."""
        return self.token_count >= block_size

    def is_shared(self) -> bool:
        """Whether more than one reference is held."""
        return self.ref_count > 1

    def reset_hash(self) -> None:
        """Forget what it holds."""
        self.block_hash = None

    def touch(self) -> None:
        """Note that it was used now."""
        self.last_access = time.time()

    def __repr__(self) -> str:
        before = None if self.prev_free_block is None else self.prev_free_block.block_id
        behind = None if self.next_free_block is None else self.next_free_block.block_id
        shown = None if self.block_hash is None else self.block_hash.hex()[:8]
        return (
            f"CacheBlock(id={self.block_id}, ref={self.ref_count}, tokens={self.token_count}, "
            f"prev={before}, next={behind}, hash={shown})"
        )


@dataclass
class BlockTable:
    """The blocks of one request in the order of its tokens. ``block_ids`` is the callers' to change."""

    request_id: str
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        # No fields: what its manager remembers of it.
        self._pool: weakref.ref[Any] | None = None
        self._serials: dict[int, int] = {}  # which allocation each id meant when it was added
        self._released = -1  # the references of so many blocks were given back,
        self._until = 0  # which were of allocations up to this one
        self._cleared = False  # its request is over; references that it holds are its caller's to give back
        self._found = False  # by a lookup: its blocks were findable before, and stay so

    def add_block(self, block_id: int, num_tokens: int) -> None:
        """Append a block that holds ``num_tokens`` more tokens."""
        pool = None if self._pool is None else self._pool()
        if pool is not None:
            pool._note(self, block_id)
        self.block_ids.append(block_id)
        self.num_tokens += num_tokens

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.block_ids)

    def copy(self, new_request_id: str) -> BlockTable:
        """The same blocks for another request, in a list of its own."""
        table = BlockTable(new_request_id, list(self.block_ids), self.num_tokens)
        table._pool = self._pool
        table._serials = dict.fromkeys(self.block_ids[: max(0, self._released)], self._until) | self._serials
        return table


class FreeKVCacheBlockQueue:
    """Free blocks, the least recently freed in front, linked through the blocks themselves. Not thread-safe."""

    def __init__(self, blocks: Iterable[CacheBlock]) -> None:
        """Takes ``blocks`` in their order; whatever list they were in before is forgotten."""
        self.num_free_blocks = 0
        self.fake_head = CacheBlock(block_id=-1)
        self.fake_tail = CacheBlock(block_id=-2)
        self.fake_head.next_free_block = self.fake_tail
        self.fake_tail.prev_free_block = self.fake_head
        for block in (taken := list(blocks)):
            block.prev_free_block = block.next_free_block = None
        self.append_n(taken)

    def popleft(self) -> CacheBlock:
        """Take the front block. ValueError if there is none."""
        block = self.fake_head.next_free_block
        if block is None or block is self.fake_tail:
            raise ValueError("no free blocks")
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[CacheBlock]:
        """Take ``n`` blocks from the front. AssertionError, and nothing taken, if there are fewer."""
        if n > self.num_free_blocks:
            raise AssertionError(f"{n} blocks wanted, {self.num_free_blocks} free")
        return [self.popleft() for _ in range(n)]

    def remove(self, block: CacheBlock) -> None:
        """Take a block out of the middle. RuntimeError if it is in no list."""
        before, behind = block.prev_free_block, block.next_free_block
        if before is None or behind is None:
            raise RuntimeError(f"block {block.block_id} is not in the free list")
        before.next_free_block, behind.prev_free_block = behind, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: CacheBlock) -> None:
        """Put a block at the back. One that is in the list already moves there."""
        if block.prev_free_block is not None and block.next_free_block is not None:
            self.remove(block)
        last = self.fake_tail.prev_free_block
        assert last is not None
        last.next_free_block, block.prev_free_block = block, last
        block.next_free_block, self.fake_tail.prev_free_block = self.fake_tail, block
        self.num_free_blocks += 1

    def append_n(self, blocks: Iterable[CacheBlock]) -> None:
        """Put blocks at the back in their order."""
        for block in blocks:
            self.append(block)

    def get_all_free_blocks(self) -> list[CacheBlock]:
        """All free blocks, front to back. A new list."""
        return list(self)

    def __iter__(self) -> Iterator[CacheBlock]:
        """Front to back. The list must not change meanwhile."""
        block = self.fake_head.next_free_block
        while block is not None and block is not self.fake_tail:
            yield block
            block = block.next_free_block


class BlockHashToBlockMap:
    """Which block holds what: a hash to the blocks registered under it, in the order of insertion. Not thread-safe."""

    def __init__(self) -> None:
        # Nearly every hash has one block; a dict is made for the second.
        self._cache: dict[bytes, CacheBlock | dict[int, CacheBlock]] = {}

    def get_block(self, block_hash: bytes) -> CacheBlock | None:
        """A block with this hash, the first one inserted, or None."""
        found = self._cache.get(block_hash)
        return next(iter(found.values())) if isinstance(found, dict) else found

    def insert(self, block_hash: bytes, block: CacheBlock) -> None:
        """Add a block under a hash."""
        found = self._cache.get(block_hash)
        if found is None:
            self._cache[block_hash] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._cache[block_hash] = {found.block_id: found, block.block_id: block}

    def pop(self, block_hash: bytes, block_id: int) -> CacheBlock | None:
        """Remove this block from under the hash and return it; None, and no change, if it is not there."""
        found = self._cache.get(block_hash)
        if not isinstance(found, dict):
            if found is None or found.block_id != block_id:
                return None
            del self._cache[block_hash]
            return found
        block = found.pop(block_id, None)
        if not found:
            del self._cache[block_hash]
        return block

    def __len__(self) -> int:
        """The number of different hashes."""
        return len(self._cache)

    def clear(self) -> None:
        """Forget everything."""
        self._cache.clear()
