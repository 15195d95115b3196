"""How far a stored prefix reaches: decided from the index, before any tensor is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixcache._core import BlockStore, KeyChain
from prefixcache._layer_state import Reach
from prefixcache._parts import Needs, head_group, window_group


@dataclass(frozen=True)
class Boundary:
    """Layers can be made to stand at ``n``.

    ``keys``: the blocks that cover tokens [0, n); ``state``: the block or tail whose state is that of n; ``windows``:
    for each window the last block to read, and for one that keeps first rows the last block that has them. ``reason``
    and ``diverged_at`` as in ``Hit``. ``rows_to``: how far the stored tokens agree with those asked for.
    """

    n: int
    keys: list[bytes]
    reason: str
    diverged_at: int | None
    rows_to: int = 0
    state: bytes | None = None
    windows: dict[Reach, bytes] = field(default_factory=dict)
    heads: dict[Reach, bytes] = field(default_factory=dict)


def deepest_boundary(store: BlockStore, chain: KeyChain, needs: Needs, limit: int) -> Boundary:
    """The deepest n <= ``limit`` that stored rows, windows and states agree on.

    Rows reach as far as tokens agree. From there each window and the states say how far they reach, until none goes
    further back. Cost: one index look-up a block, a comparison of tokens with the children of the last block, and for
    windows and states what lies near the end.
    """
    rows = _deepest_rows(store, chain, limit)
    n, why = rows.n, rows.reason
    state: bytes | None = None
    windows: dict[Reach, bytes] = {}
    heads: dict[Reach, bytes] = {}
    settled = False
    while n > 0 and not settled:
        settled = True
        if needs.state:
            found = store.deepest_state(chain, n)
            reached, state = (0, None) if found is None else found
            settled, n, why = reached == n, reached, why if reached == n else "no_checkpoint"
        for reach in needs.windows:
            if n == 0:
                break
            reached = _deepest_window(store, chain, reach, n, windows, heads)
            settled, n, why = settled and reached == n, reached, why if reached == n else "window_gone"
    if n == 0:
        return Boundary(0, [], why, rows.diverged_at, rows.n)
    keys = rows.keys[: -(-n // chain.block_size)]
    return Boundary(n, keys, why, rows.diverged_at, rows.n, state, windows, heads)


def _deepest_window(
    store: BlockStore, chain: KeyChain, reach: Reach, limit: int, windows: dict[Reach, bytes], heads: dict[Reach, bytes]
) -> int:
    n = limit
    if reach.keep and n > reach.window:
        head = store.deepest_window(chain, reach.keep, 0, head_group(reach), reach.keep)
        if head is None or head[0] < reach.keep:
            n = reach.window
        else:
            heads[reach] = head[1]
    found = store.deepest_window(chain, reach.window, reach.keep, window_group(reach), n)
    if found is None:
        return 0
    windows[reach] = found[1]
    return found[0]


def _deepest_rows(store: BlockStore, chain: KeyChain, limit: int) -> Boundary:
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
