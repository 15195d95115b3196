"""Rows of small windows: they would leave their rings before their block is whole and seen.

While tokens are decoded one by one, a ring overwrites its oldest rows. Where it cannot hold a block and what may follow
it before the next call, the block's first rows are copied out in time and joined when it is stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from prefixcache._layer_state import LayerState, Reach, Slot
from prefixcache._parts import Needs


@dataclass
class _Run:
    """Rows [first, end) of one slot, in pieces."""

    first: int
    end: int
    pieces: list[mx.array]


class WindowRows:
    """Keeps rows of the unfinished block of one request. For one thread at a time."""

    def __init__(self, needs: Needs, block_size: int, n: int) -> None:
        # A call may come up to a block after a block's end.
        self._small = {reach for reach in needs.windows if _lasting(reach) < 2 * block_size - 1}
        self._every = min((_lasting(reach) for reach in self._small), default=0)
        self._block_size = block_size
        # Inside a block the rows before n are kept at once: they are in no block of this sequence yet.
        self._seen = n - self._every if n % block_size else n
        self._last = n
        # How many tokens lay between recent calls, and so may before the next: at first the most that is allowed, later
        # half of it at least.
        self._steps: deque[int] = deque([min(self._every, block_size)], maxlen=8)
        self._least_step = (self._every + 1) // 2
        self._runs: dict[tuple[int | str, ...], _Run] = {}

    def due(self, n: int) -> bool:
        """Whether rows must be kept now that the caches stand at ``n``, since they might be gone at the next call.

        To be asked at each call: steps of recent calls tell how far away the next one may be.
        """
        self._steps.append(min(n - self._last, self._every))
        self._last = n
        return bool(self._small) and n - self._seen + max(self._least_step, *self._steps) > self._every

    def keep(self, states: Sequence[LayerState], n: int) -> None:
        """Copies the rows of the unfinished block that were added since the last call."""
        start = n // self._block_size * self._block_size
        for path, slot in _slots(states, ()):
            if slot.reach not in self._small:
                continue
            run = self._runs.get(path)
            lo = max(start, slot.first_row)
            if run is not None and run.first >= start and slot.first_row <= run.end <= n:
                lo = run.end
            else:
                run = self._runs[path] = _Run(lo, lo, [])
            if lo < n:
                run.pieces.append(mx.contiguous(_rows(slot, lo, n)))
                run.end = n
        mx.eval([piece for run in self._runs.values() for piece in run.pieces[-1:]])
        self._seen = self._last = n

    def joined(self, states: Sequence[LayerState], n: int) -> list[LayerState]:
        """``states``, their windows with the rows that were kept in front of those the rings still hold."""
        if not self._runs:
            return list(states)
        return [self._join(state, (i,), n) for i, state in enumerate(states)]

    def _join(self, state: LayerState, path: tuple[int | str, ...], n: int) -> LayerState:
        slots = tuple(self._join_slot(slot, (*path, slot.name), n) for slot in state.slots)
        children = tuple(self._join(child, (*path, i), n) for i, child in enumerate(state.children))
        return replace(state, slots=slots, children=children)

    def _join_slot(self, slot: Slot, path: tuple[int | str, ...], n: int) -> Slot:
        run = self._runs.get(path)
        if run is None or not run.pieces or not run.first < slot.first_row <= run.end <= n:
            return slot
        axis = slot.seq_axis or 0
        array = mx.concatenate([*run.pieces, _rows(slot, run.end, n)], axis=axis)
        return replace(slot, array=array, first_row=run.first)


def _lasting(reach: Reach) -> int:
    """Tokens that may be appended one by one before a row leaves the window."""
    return reach.window - reach.keep


def _slots(states: Sequence[LayerState], above: tuple[int | str, ...]) -> list[tuple[tuple[int | str, ...], Slot]]:
    found: list[tuple[tuple[int | str, ...], Slot]] = []
    for i, state in enumerate(states):
        path = (*above, i)
        found += [((*path, slot.name), slot) for slot in state.slots]
        found += _slots(state.children, path)
    return found


def _rows(slot: Slot, lo: int, hi: int) -> mx.array:
    index = [slice(None)] * slot.data.ndim
    index[slot.seq_axis or 0] = slice(lo - slot.first_row, hi - slot.first_row)
    return slot.data[tuple(index)]
