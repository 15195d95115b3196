"""Which recurrent states are worth their bytes.

A state serves only the n it was captured at. Kept are the two newest of a branch (the end of its prompt and the end of
its answer, as a rule), those at every ``interval`` tokens, and those at or before the deepest point where something
else that is stored leaves the branch: others may need them.
"""

from __future__ import annotations

from prefixcache._core import BlockStore, KeyChain, Part

_TIPS = 2


def checkpoints(store: BlockStore, chain: KeyChain, limit: int) -> list[tuple[int, bytes]]:
    """The stored states of this sequence up to ``limit`` tokens, deepest first: (tokens, key of the block or tail)."""
    found = []
    while (point := store.deepest_state(chain, limit)) is not None:
        found.append(point)
        limit = point[0] - 1
    return found


def drop_superseded(store: BlockStore, chain: KeyChain, n: int, interval: int) -> int:
    """Deletes states before ``n`` that newer ones of the same branch make useless. Returns how many."""
    old = [point for point in checkpoints(store, chain, n)[_TIPS:] if point[0] % interval]
    if not old:
        return 0
    fork = store.deepest_fork(chain, n)
    keys = [key for depth, key in old if depth > fork]
    if keys:
        store.erase(keys, [Part.state])
    return len(keys)
