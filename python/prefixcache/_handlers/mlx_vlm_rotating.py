"""mlx-vlm's windows that differ from mlx-lm's: one with room to take back a rejected draft, and chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from prefixcache._handlers.base import (
    check_enough,
    check_fields,
    check_rows,
    is_empty,
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
        cache = super().rebuild(prototype, state, n, where)
        if cache.keys is not None:
            cache.start_position = 0 if cache.keep else n - cache._idx
        return cache

    def _fresh(self, prototype: Any, where: str) -> Any:
        check_fields(prototype, _FIELDS, where)
        buffer_size = whole_number(prototype, "buffer_size", 0, where)
        return type(prototype)(prototype.max_size, prototype.keep, buffer_size)


class VlmChunkedKVCacheHandler(ChunkedKVCacheHandler):
    """mlx-lm's class of 0.32, though it still has the ``meta_state`` that tells the older ones."""

    type_name: ClassVar[str] = "mlx_vlm.ChunkedKVCache"

    def _counts_padding(self, cache: Any) -> bool:
        return False


def _as_rotating(cache: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(cache, name) for name in _OF_A_ROTATING_CACHE})


def _meta(reach: Reach) -> dict[str, int]:
    return {"max_size": reach.window, "keep": reach.keep}
