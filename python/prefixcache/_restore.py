"""The restore line: from keys to live caches. Trouble makes the hit shorter; it never raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx

from prefixcache._boundary import Boundary
from prefixcache._core import BlockStore, Gathered, Part, StatusCode, group_key
from prefixcache._keys import Chain
from prefixcache._layer_state import LayerState, Reach, decode_structure, flatten, unflatten
from prefixcache._parts import Needs, head_group, window_group
from prefixcache._registry import rebuild_layers
from prefixcache.errors import Unsupported

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
# A bad part shortens the result; a disk that is failing must not be asked for ever.
_MOST_ATTEMPTS = 8

# A store holds one structure for each model and KV format.
_template = lru_cache(maxsize=32)(decode_structure)


@dataclass
class Restored:
    """``caches`` stand at ``n``; None at n = 0. ``rows_to``: how far stored tokens agree. The rest as in ``Hit``."""

    n: int
    caches: list[Any] | None
    reason: str
    diverged_at: int | None = None
    rows_to: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


def restore(
    store: BlockStore,
    chain: Chain,
    find: Callable[[int], Boundary],
    prototypes: Sequence[Any],
    own: Sequence[str] | None,
    needs: Needs,
    limit: int,
    spare: int | None,
) -> Restored:
    """Caches for the longest stored prefix of at most ``limit`` tokens.

    ``find`` decides from the index where layers can be made to stand: the deepest place up to so many tokens. ``own``:
    the type name of each layer, where no other form may be served. ``needs``: what the layers must be given. ``spare``:
    rows of room behind the prefix; None: enough for the next chunk of the prompt and a token more.

    A part that turns out bad shortens the result to what the rest can serve.
    """
    trouble: str | None = None
    lost_at = 0
    for _ in range(_MOST_ATTEMPTS):
        boundary = find(limit)
        if boundary.n < lost_at:
            trouble = trouble or "lost"
        if boundary.n == 0:
            break
        room = _room(boundary.n, len(chain.tokens)) if spare is None else spare
        reading = _Reading(store, chain, boundary, room)
        if reading.run(needs):
            return _rebuild(reading, needs, prototypes, own, trouble)
        if reading.failed == "lost" and not lost_at:
            # Evicted or taken over by a longer block since it was looked up: what is there now?
            lost_at = boundary.n
            continue
        trouble = reading.failed
        limit = reading.good
    else:
        return Restored(0, None, trouble or "lost")
    return Restored(0, None, trouble or boundary.reason, None if trouble else boundary.diverged_at, boundary.rows_to)


def _room(n: int, tokens: int) -> int:
    """Rows of room behind n of a prompt of so many tokens.

    Whole steps of growth, as mlx-lm's own caches have them: how a GPU's attention rounds depends on how far apart the
    heads of its arrays lie.
    """
    rows = min(tokens, n + _PREFILL_STEP)
    return (rows // _STEP + 1) * _STEP - n


class _Reading:
    """The parts that a boundary is made of, read into fresh arrays.

    ``failed``: why a part could not be had, and ``good``: tokens up to which another try makes sense.
    """

    def __init__(self, store: BlockStore, chain: Chain, boundary: Boundary, room: int) -> None:
        self.boundary = boundary
        self.failed: str | None = None
        self.good = 0
        self.meta = ""
        self.arrays: dict[str, mx.array] = {}
        self.heads: dict[str, mx.array] = {}
        self.bytes = 0
        self.tiers: dict[str, int] = {}
        self._store = store
        self._chain = chain
        self._room = room

    def run(self, needs: Needs) -> bool:
        """False if a part failed."""
        n, keys = self.boundary.n, self.boundary.keys
        if needs.rows:
            if not self._take(self._store.gather(keys, 0, n, n + self._room), self.arrays, 0):
                return False
        else:
            self._store.touch(keys[-1])
        for reach in needs.windows:
            if not self._read_window(reach):
                return False
        if self.boundary.state is not None and needs.state:
            return self._take(self._store.load(self.boundary.state, Part.state), self.arrays, n)
        return True

    def erase(self, needs: Needs) -> None:
        """Whatever was read is not this model's: it must not stand in the way of what is."""
        keys = self.boundary.keys
        self._store.erase(keys, [Part.kv])
        for reach in needs.windows:
            for group in (window_group(reach), head_group(reach)):
                self._store.erase([group_key(key, group) for key in keys], [Part.win])
        if self.boundary.state is not None:
            self._store.erase([self.boundary.state], [Part.state])

    def _read_window(self, reach: Reach) -> bool:
        n = self.boundary.n
        first = reach.first_row(n)
        room = min(self._room, reach.window - n) if n < reach.window else 0
        keys = self._keys(first, n, self.boundary.windows[reach])
        found = self._store.gather(keys, first, n, n - first + room, Part.win, group=window_group(reach))
        if not self._take(found, self.arrays, first // self._chain.block_size):
            return False
        if first == 0 or reach.keep == 0:
            return True
        keys = self._keys(0, reach.keep, self.boundary.heads[reach])
        found = self._store.gather(keys, 0, reach.keep, reach.keep, Part.win, group=head_group(reach))
        return self._take(found, self.heads, 0)

    def _keys(self, first: int, end: int, last: bytes) -> list[bytes]:
        size = self._chain.block_size
        return [self._chain.key(i) for i in range(first // size, (end - 1) // size)] + [last]

    def _take(self, found: Gathered, arrays: dict[str, mx.array], first_block: int) -> bool:
        if not found.status:
            self.failed = _REASONS[found.status.code]
            self.good = min(self.boundary.n - 1, (first_block + found.good) * self._chain.block_size)
            if found.status.code == StatusCode.FULL:
                self.good = 0
            return False
        self.meta = found.meta
        arrays.update(found.take_slots())
        self.bytes += found.ram_bytes + found.disk_bytes
        if not self.tiers:
            # The first part read speaks for all. All its blocks but the last are whole.
            n = self.boundary.n
            ram = min(n, found.ram_blocks * self._chain.block_size) if found.disk_blocks else n
            self.tiers = {"ram": ram, "ssd": n - ram}
        return True

    def joined(self, template: Sequence[LayerState]) -> dict[str, mx.array]:
        """The arrays by slot name, which leave this object; kept first rows stand before those of their window.
        ValueError where the two do not fit together."""
        arrays, self.arrays = self.arrays, {}
        if self.heads:
            axes = {name: slot.seq_axis for name, slot in flatten(template)}
            for name in self.heads.keys() & arrays.keys():
                head, rows, axis = self.heads[name], arrays[name], axes.get(name)
                # MLX would make one dtype of two, and an axis out of bounds an IndexError.
                if axis is None or axis >= min(head.ndim, rows.ndim) or head.dtype != rows.dtype:
                    raise ValueError(f"{name}: its first rows are of another form than those of its window")
                arrays[name] = mx.concatenate([head, rows], axis=axis)
            mx.eval(list(arrays.values()))
        return arrays


def _rebuild(
    reading: _Reading, needs: Needs, prototypes: Sequence[Any], own: Sequence[str] | None, trouble: str | None
) -> Restored:
    boundary = reading.boundary
    n = boundary.n
    try:
        template = _template(reading.meta)
        states: list[LayerState] = unflatten(template, reading.joined(template), n)
        if own is not None and [state.type_name for state in states] != list(own):
            raise Unsupported("structure_mismatch", "rows of another form")
        caches = rebuild_layers(prototypes, states, n)
    except (Unsupported, ValueError):
        # The namespace promised equal structures; a caller's explicit one may have promised too much.
        reading.erase(needs)
        return Restored(0, None, "structure_mismatch")
    reason, diverged_at = (boundary.reason, boundary.diverged_at) if trouble is None else (trouble, None)
    return Restored(n, caches, reason, diverged_at, boundary.rows_to, reading.tiers, reading.bytes)
