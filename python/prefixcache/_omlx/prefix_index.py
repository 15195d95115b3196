"""From the hash of a prefix to the blocks that held it last.

It answers where the paged manager's own map does not: blocks that were unmapped, but are still a request's. Entries
are plain tuples in a plain dict, which callers may read and write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import overload

# (tokens of the prefix, its block ids, their number)
PrefixEntry = tuple[int, Sequence[int], int]
PrefixIndex = MutableMapping[bytes, PrefixEntry]


class ChainedIds(Sequence[int]):
    """Block ids of a prefix: its own last one, and those of the prefix before it, so that an index is linear in blocks.

    Immutable; equal to any sequence of the same ids.
    """

    __slots__ = ("_before", "_count", "_last")

    def __init__(self, before: ChainedIds | None, last: int) -> None:
        self._before = before
        self._last = last
        self._count: int = 1 if before is None else len(before) + 1

    def continues(self, before: ChainedIds | None, last: int) -> bool:
        """Whether it is what these two would make."""
        return self._before is before and self._last == last

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return list(self)[index]

    def __iter__(self) -> Iterator[int]:
        ids = []
        node: ChainedIds | None = self
        while node is not None:
            ids.append(node._last)
            node = node._before
        return reversed(ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(list(self))


def add(index: PrefixIndex, hashes: Sequence[bytes], ids: Sequence[int], block_size: int, most: int) -> None:
    """Enters every prefix of whole blocks; the oldest entries go beyond ``most``."""
    before: ChainedIds | None = None
    for count, (value, block_id) in enumerate(zip(hashes, ids, strict=False), 1):
        # The newest stand last.
        known = index.pop(value, None)
        node = None if known is None else known[1]
        if not isinstance(node, ChainedIds) or not node.continues(before, block_id):
            node = ChainedIds(before, block_id)
        index[value] = (count * block_size, node, count)
        before = node
    while len(index) > max(most, len(ids)):
        del index[next(iter(index))]


def best(index: Mapping[bytes, PrefixEntry], hashes: Sequence[bytes]) -> PrefixEntry | None:
    """The entry of the longest prefix among these chained hashes."""
    for value in reversed(hashes):
        entry = index.get(value)
        if entry is not None:
            return entry
    return None
