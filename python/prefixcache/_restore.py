"""The restore line: from keys to live caches. Trouble makes the hit shorter; it never raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from prefixcache._boundary import deepest_boundary
from prefixcache._core import BlockStore, Gathered, KeyChain, Part, StatusCode
from prefixcache._layer_state import LayerState, decode_structure, unflatten
from prefixcache.errors import Unsupported
from prefixcache.type_registry import rebuild_layers

_REASONS = {
    StatusCode.NOT_FOUND: "lost",
    StatusCode.CORRUPT: "damaged",
    StatusCode.IO_ERROR: "io_error",
    StatusCode.FULL: "no_memory",
    StatusCode.CLOSED: "closed",
}
# Tokens decoded before the cache grows, as in mlx-lm.
_STEP = 256
# A prompt is usually prefilled in chunks of at most this many tokens.
_PREFILL_STEP = 2048

# A store holds one structure for each model and KV format.
_template = lru_cache(maxsize=32)(decode_structure)


@dataclass
class Restored:
    """``caches`` stand at ``n``; None at n = 0. The rest as in ``Hit``."""

    n: int
    caches: list[Any] | None
    reason: str
    diverged_at: int | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


def restore(
    store: BlockStore,
    chain: KeyChain,
    prototypes: Sequence[Any],
    own: Sequence[str] | None,
    limit: int,
    spare: int | None,
) -> Restored:
    """Caches for the longest stored prefix of at most ``limit`` tokens.

    ``own``: the type name of each layer, where no other form may be served. ``spare``: rows of room behind it; None:
    enough for the next chunk of the prompt and a step of decoding.

    A block that turns out bad shortens the result to the blocks before it.
    """
    boundary = deepest_boundary(store, chain, limit)
    n, keys, reason, diverged_at = boundary.n, boundary.keys, boundary.reason, boundary.diverged_at
    looked_again = False
    while n > 0:
        room = min(len(chain.tokens) - n, _PREFILL_STEP) + _STEP if spare is None else spare
        gathered = store.gather(keys, 0, n, n + room)
        if gathered.status:
            restored = _rebuild(gathered, prototypes, own, n, len(keys), chain.block_size, reason, diverged_at)
            if restored.n == 0:
                # Whatever it is, it is not this model's: it must not stand in the way of what is.
                store.erase(keys, [Part.kv])
            return restored
        if gathered.status.code == StatusCode.NOT_FOUND and not looked_again:
            # Evicted or taken over by a longer block since it was looked up: what is there now?
            looked_again = True
            boundary = deepest_boundary(store, chain, limit)
            reason, diverged_at = ("lost", None) if boundary.n < n else (boundary.reason, boundary.diverged_at)
            n, keys = boundary.n, boundary.keys
            continue
        reason, diverged_at = _REASONS[gathered.status.code], None
        keys = keys[: gathered.good]
        n = min(n - 1, len(keys) * chain.block_size)
    return Restored(0, None, reason, diverged_at)


def _rebuild(
    gathered: Gathered,
    prototypes: Sequence[Any],
    own: Sequence[str] | None,
    n: int,
    blocks: int,
    block_size: int,
    reason: str,
    diverged_at: int | None,
) -> Restored:
    try:
        states: list[LayerState] = unflatten(_template(gathered.meta), gathered.take_slots(), n)
        if own is not None and [state.type_name for state in states] != list(own):
            raise Unsupported("structure_mismatch", "rows of another form")
        caches = rebuild_layers(prototypes, states, n)
    except (Unsupported, ValueError):
        # The namespace promised equal structures; a caller's explicit one may have promised too much.
        return Restored(0, None, "structure_mismatch")
    # All blocks but the last are whole.
    ram = min(n, gathered.ram_blocks * block_size) if gathered.disk_blocks else n
    tiers = {"ram": ram if gathered.ram_blocks else 0, "ssd": n - ram if gathered.disk_blocks else 0}
    return Restored(n, caches, reason, diverged_at, tiers, gathered.ram_bytes + gathered.disk_bytes)
