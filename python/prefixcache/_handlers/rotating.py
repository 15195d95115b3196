"""Rotating caches: the newest rows of a sliding window, and the first ones of the sequence if the window keeps them.

The buffer is in temporal order until it is full. Appends of single tokens then overwrite it as a ring; an append of
several puts it back in order and leaves up to ``max_size - 1`` rows before them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._handlers.base import (
    Handler,
    check_fields,
    check_rows,
    is_empty,
    same_settings,
    stored_arrays,
    token_count,
    whole_number,
)
from prefixcache._layer_state import LayerState, Reach, Slot, window_of

_SLOTS = ("keys", "values")
_FIELDS = frozenset({"keys", "values", "offset", "max_size", "keep", "_idx"})


class RotatingKVCacheHandler(Handler):
    """Stores every row that is still there, in temporal order; rebuilds the window in temporal order."""

    type_name: ClassVar[str] = "RotatingKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("RotatingKVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        offset, meta = token_count(cache, where), _settings(cache, where)
        arrays = {"keys": cache.keys, "values": cache.values}
        if is_empty(arrays, offset, where):
            return LayerState(self.type_name, meta=meta, offset=0)
        rows = check_rows(arrays, where)
        end = whole_number(cache, "_idx", 0, where)
        _check_phase(offset, end, rows, meta["max_size"], meta["keep"], where)
        reach = window_of(meta["max_size"], meta["keep"])
        slots = tuple(_slot(name, array, offset, end, reach) for name, array in arrays.items())
        return LayerState(self.type_name, slots, meta, offset=offset)

    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        check_fields(cache, _FIELDS, where)
        meta = _settings(cache, where)
        return frozenset({window_of(meta["max_size"], meta["keep"])})

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        meta = _settings(prototype, where)
        same_settings(state, meta, where)
        held = min(n, meta["max_size"])
        arrays = stored_arrays(state, _SLOTS, held, where)
        cache = self._fresh(prototype, where)
        for name, array in arrays.items():
            # An append would throw rows away to make a longer buffer fit.
            if array.shape[-2] > meta["max_size"]:
                raise ValueError(f"{where}: {name} must have at most {meta['max_size']} rows, got shape {array.shape}")
            setattr(cache, name, array)
        if arrays:
            cache.offset, cache._idx = n, held
        return cache

    def _fresh(self, prototype: Any, where: str) -> Any:
        """An empty cache with the settings of ``prototype``, which were checked."""
        return type(prototype)(prototype.max_size, prototype.keep)


def _settings(cache: Any, where: str) -> dict[str, int]:
    max_size, keep = whole_number(cache, "max_size", 1, where), whole_number(cache, "keep", 0, where)
    if keep >= max_size:
        raise ValueError(f"{where}: keep must be below max_size, got {keep} and {max_size}")
    return {"max_size": max_size, "keep": keep}


def _check_phase(offset: int, end: int, rows: int, max_size: int, keep: int, where: str) -> None:
    """ValueError unless ``rows`` rows, the newest before ``end``, can be those of a cache at ``offset``."""
    if offset < max_size or rows == end == offset:
        sound = end == offset <= rows  # nothing dropped yet
    elif end == rows:
        sound = max_size <= rows < offset  # in temporal order
    else:
        sound = rows == max_size < offset and keep < end < rows  # a ring
    if not sound:
        raise ValueError(
            f"{where}: offset {offset} does not fit _idx={end} and {rows} rows with max_size={max_size}, keep={keep}"
        )


def _slot(name: str, array: mx.array, offset: int, end: int, reach: Reach) -> Slot:
    axis, rows, keep = array.ndim - 2, array.shape[-2], reach.keep
    if end == offset:
        return Slot(name, array, axis, reach)
    head = array[..., :keep, :] if keep else None
    if end < rows:
        array = mx.concatenate([array[..., end:, :], array[..., keep:end, :]], axis=axis)
    elif keep:
        array = array[..., keep:, :]
    return Slot(name, array, axis, reach, offset - (rows - keep), head)
