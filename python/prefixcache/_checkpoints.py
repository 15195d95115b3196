"""Which recurrent states are worth their bytes.

A state serves only the n it was captured at. Kept are the two newest of a branch (the end of its prompt and the end of
its answer, as a rule), those at every ``interval`` tokens, and those at or before the deepest point where something
else that is stored leaves the branch: others may need them.
"""

from __future__ import annotations

from collections.abc import Collection

from prefixcache._core import BlockStore, KeyChain, Part

_TIPS = 2


def checkpoints(store: BlockStore, chain: KeyChain, limit: int) -> list[tuple[int, bytes]]:
    """The stored states of this sequence up to ``limit`` tokens, deepest first: (tokens, key of the block or tail)."""
    found = []
    while (point := store.deepest_state(chain, limit)) is not None:
        found.append(point)
        limit = point[0] - 1
    return found


def drop_superseded(
    store: BlockStore,
    chain: KeyChain,
    n: int,
    interval: int,
    given: Collection[int] = frozenset(),
    prompt_end: int | None = None,
) -> int:
    """Deletes states before ``n`` that newer ones of the same branch make useless. Returns how many.

    ``given``: token counts of states that the caller asked for. ``prompt_end``: that of one of the two newest, whatever
    lies behind it: the same prompt may come again with another answer.
    """
    tips = [point for point in checkpoints(store, chain, n) if point[0] % interval and point[0] not in given]
    others = [point for point in tips if point[0] != prompt_end]
    old = others[_TIPS - (len(tips) - len(others)) :]
    if not old:
        return 0
    # What leaves at n itself counts too.
    fork = store.deepest_fork(chain, n + 1)
    keys = [key for depth, key in old if depth > fork]
    if keys:
        store.erase(keys, [Part.state])
    return len(keys)


def drop_at(store: BlockStore, chain: KeyChain, n: int) -> int:
    """Deletes the state for ``n`` tokens. Returns how many there were: 0 or 1."""
    found = store.deepest_state(chain, n)
    if found is None or found[0] != n:
        return 0
    store.erase([found[1]], [Part.state])
    return 1
