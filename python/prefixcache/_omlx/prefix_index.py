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


class FirstIds(Sequence[int]):
    """The first ``count`` of block ids that many prefixes share, so that an index is linear in blocks. Immutable."""

    __slots__ = ("_count", "_ids")

    def __init__(self, ids: tuple[int, ...], count: int) -> None:
        self._ids = ids
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self._ids[: self._count][index]
        if not -self._count <= index < self._count:
            raise IndexError(f"block {index} of {self._count}")
        return self._ids[index if index >= 0 else self._count + index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids[: self._count])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Sequence) and not isinstance(other, str | bytes):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._ids[: self._count])

    def __repr__(self) -> str:
        return repr(list(self))


def add(index: PrefixIndex, hashes: Sequence[bytes], ids: Sequence[int], block_size: int, most: int) -> None:
    """Enters every prefix of whole blocks; the oldest entries go beyond ``most``."""
    shared = tuple(ids)
    for count, value in enumerate(hashes[: len(shared)], 1):
        # The newest stand last.
        index.pop(value, None)
        index[value] = (count * block_size, FirstIds(shared, count), count)
    while len(index) > max(most, len(shared)):
        del index[next(iter(index))]


def best(index: Mapping[bytes, PrefixEntry], hashes: Sequence[bytes]) -> PrefixEntry | None:
    """The entry of the longest prefix among these chained hashes."""
    for value in reversed(hashes):
        entry = index.get(value)
        if entry is not None:
            return entry
    return None
