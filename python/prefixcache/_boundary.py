"""How far a stored prefix reaches: decided from the index, before any tensor is read."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache._core import BlockStore, KeyChain


@dataclass(frozen=True)
class Boundary:
    """Rows [0, n) can be had from the blocks ``keys``. ``reason`` and ``diverged_at`` as in ``Hit``."""

    n: int
    keys: list[bytes]
    reason: str
    diverged_at: int | None


def deepest_boundary(store: BlockStore, chain: KeyChain, limit: int) -> Boundary:
    """The deepest n <= ``limit`` that stored rows reach, whole blocks first, then rows of the nearest child block.

    Cost: one index look-up a block, then a comparison of tokens with at most 64 children of the last block.
    """
    size = chain.block_size
    keys = chain.keys
    whole = store.longest_prefix(keys, chain.root, size)
    n = min(whole * size, limit)
    keys = keys[: -(-n // size)]
    if n == limit:
        return Boundary(n, keys, "complete", None)
    parent = keys[-1] if keys else chain.root
    child = store.longest_child(parent, n, chain.tokens.slice(n, limit), chain.content)
    if child is None:
        return Boundary(n, keys, "end_of_stored" if n else "no_match", None)
    key, _, rows, block_rows = child
    reached = n + rows
    if rows:
        keys = [*keys, key]
    if reached == limit:
        return Boundary(reached, keys, "complete", None)
    if rows == block_rows:
        return Boundary(reached, keys, "end_of_stored", None)
    return Boundary(reached, keys, "diverged" if reached else "no_match", reached)
