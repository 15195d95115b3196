"""What a store does between ``describe`` and ``rebuild``, in plain Python and for one sequence of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from prefixcache._layer_state import LayerState, Reach, Slot, decode_structure, encode_structure, unflatten, walk
from prefixcache._registry import handler_named

# All that every kind of file can hold; complex64 is the other one.
DTYPES = [
    mx.bool_,
    mx.uint8,
    mx.uint16,
    mx.uint32,
    mx.uint64,
    mx.int8,
    mx.int16,
    mx.int32,
    mx.int64,
    mx.float16,
    mx.bfloat16,
    mx.float32,
]


def same(left: Any, right: Any) -> bool:
    """Bit for bit: type, shape, dtype and bytes."""
    if not isinstance(left, mx.array) or not isinstance(right, mx.array):
        return type(left) is type(right) and bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.size == 0:
        return True
    return bool(mx.array_equal(left.reshape(-1).view(mx.uint8), right.reshape(-1).view(mx.uint8)).item())


class RowsMissing(LookupError):
    """The layers no longer hold a row that is needed to stand at n."""


def rows_to_stand_at(reach: Reach, n: int) -> list[int]:
    """The positions of the rows that a slot must have to stand at n, in the order in which they are joined."""
    if reach.kind == "all" or n <= reach.window:
        return list(range(n))
    return [*range(reach.keep), *range(n - (reach.window - reach.keep), n)]


def through_parts(states: Sequence[LayerState], n: int, spare: int = 0) -> list[LayerState]:
    """The layers as they come back from a store that was asked for n tokens and ``spare`` rows of room.

    The structure goes through its text; every slot becomes a new array. RowsMissing if a row is gone.
    """
    arrays = {}
    for path, state in walk(states):
        room = spare if handler_named(state.type_name).spare_rows else 0
        for slot in state.slots:
            assert (slot.seq_axis is None) == (slot.reach.kind == "boundary")
            name = f"{path}/{slot.name}"
            if slot.seq_axis is None:
                if state.offset not in (None, n):
                    raise RowsMissing(f"{name} was captured at {state.offset}, not at {n}")
                arrays[name] = mx.contiguous(slot.data)
            else:
                assert state.offset is not None
                arrays[name] = _rows(slot, slot.seq_axis, state.offset, n, room, name)
    mx.eval(arrays)
    return unflatten(decode_structure(encode_structure(states)), arrays, n)


def _rows(slot: Slot, axis: int, offset: int, n: int, room: int, name: str) -> mx.array:
    pieces: list[tuple[mx.array, list[int]]] = []
    for position in rows_to_stand_at(slot.reach, n):
        source, index = _find(slot, axis, offset, position, name)
        if pieces and pieces[-1][0] is source:
            pieces[-1][1].append(index)
        else:
            pieces.append((source, [index]))
    # Contiguous: MLX 0.31 takes a single row of a transposed array wrongly.
    joined = [mx.take(mx.contiguous(source), mx.array(indices), axis=axis) for source, indices in pieces]
    held = sum(len(indices) for _, indices in pieces)
    if slot.reach.kind == "window":
        room = min(room, slot.reach.window - held)
    if room > 0:
        shape = list(slot.data.shape)
        shape[axis] = room
        joined.append(mx.zeros(shape, slot.data.dtype))
    return mx.contiguous(mx.concatenate(joined, axis=axis))


def _find(slot: Slot, axis: int, offset: int, position: int, name: str) -> tuple[mx.array, int]:
    """The array that holds the row of ``position``, and where."""
    behind = slot.first_row + slot.data.shape[axis]
    if slot.first_row <= position < min(offset, behind):
        return slot.data, position - slot.first_row
    if slot.head is not None and position < slot.head.shape[axis]:
        return slot.head, position
    raise RowsMissing(f"{name}: row {position} is gone; rows [{slot.first_row}, {min(offset, behind)}) are there")
