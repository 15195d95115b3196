"""mlx-vlm's windows that differ from mlx-lm's: one with room to take back a rejected draft, and chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from prefixcache._handlers.base import (
    check_enough,
    check_fields,
    check_rows,
    is_empty,
    same_settings,
    stored_arrays,
    token_count,
    whole_number,
)
from prefixcache._handlers.chunked import ChunkedKVCacheHandler
from prefixcache._handlers.rotating import RotatingKVCacheHandler
from prefixcache._layer_state import LayerState, Reach, Slot

_SLOTS = ("keys", "values")
_OF_A_ROTATING_CACHE = frozenset({"keys", "values", "offset", "max_size", "keep", "_idx"})
_FIELDS = _OF_A_ROTATING_CACHE | {"buffer_size", "start_position"}


class BufferedRotatingKVCacheHandler(RotatingKVCacheHandler):
    """Row 0 of the buffer is token ``start_position``, its first ``_idx`` rows are valid, and it is never a ring.

    With kept rows the class behaves as a rotating cache does. A rebuilt one has the rows of the window and no older
    ones: masks hide those.
    """

    type_name: ClassVar[str] = "mlx_vlm.BufferedRotatingKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("BufferedRotatingKVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        (reach,) = self.reaches(cache, where)
        if reach.keep:
            return super().describe(_as_rotating(cache), where)
        offset, meta = token_count(cache, where), _meta(reach)
        arrays = {"keys": cache.keys, "values": cache.values}
        if is_empty(arrays, offset, where):
            return LayerState(self.type_name, meta=meta, offset=0)
        start, held = (whole_number(cache, name, 0, where) for name in ("start_position", "_idx"))
        if start + held != offset:
            raise ValueError(f"{where}: offset {offset} does not fit start_position={start} and _idx={held}")
        check_enough(check_rows(arrays, where), held, offset, where)
        slots = tuple(Slot(name, array, array.ndim - 2, reach, start) for name, array in arrays.items())
        return LayerState(self.type_name, slots, meta, offset=offset)

    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        check_fields(cache, _FIELDS, where)
        return super().reaches(_as_rotating(cache), where)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        (reach,) = self.reaches(prototype, where)
        same_settings(state, _meta(reach), where)
        held = min(n, reach.window)
        arrays = stored_arrays(state, _SLOTS, held, where)
        cache = type(prototype)(reach.window, reach.keep, whole_number(prototype, "buffer_size", 0, where))
        for name, array in arrays.items():
            # Where rows are kept, an append would throw some away to make a longer buffer fit.
            if array.shape[-2] > reach.window:
                raise ValueError(f"{where}: {name} must have at most {reach.window} rows, got shape {array.shape}")
            setattr(cache, name, array)
        if arrays:
            cache.offset, cache._idx = n, held
            cache.start_position = 0 if reach.keep else n - held
        return cache


class VlmChunkedKVCacheHandler(ChunkedKVCacheHandler):
    """mlx-lm's class of 0.32, though it still has the ``meta_state`` that tells the older ones."""

    type_name: ClassVar[str] = "mlx_vlm.ChunkedKVCache"

    def describe(self, cache: Any, where: str) -> LayerState:
        return super().describe(SimpleNamespace(**vars(cache)), where)

    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        return super().reaches(SimpleNamespace(**vars(cache)), where)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        chunk_size = whole_number(prototype, "chunk_size", 1, where)
        same_settings(state, {"chunk_size": chunk_size}, where)
        held = min(n, chunk_size)
        arrays = stored_arrays(state, _SLOTS, held, where)
        cache = type(prototype)(chunk_size)
        for name, array in arrays.items():
            setattr(cache, name, array)
        if arrays:
            cache.offset, cache.start_position = n, n - held
        return cache


def _as_rotating(cache: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(cache, name) for name in _OF_A_ROTATING_CACHE})


def _meta(reach: Reach) -> dict[str, int]:
    return {"max_size": reach.window, "keep": reach.keep}
