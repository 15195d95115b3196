"""Chunked caches: the rows of the last ``chunk_size`` tokens, and of those appended since the front was cut."""

from __future__ import annotations

from typing import Any, ClassVar

from prefixcache._handlers.base import (
    Handler,
    check_enough,
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
_FIELDS = frozenset({"keys", "values", "offset", "chunk_size", "start_position"})


class ChunkedKVCacheHandler(Handler):
    """Row 0 of the buffer is token ``start_position``.

    A model cuts the front to the last ``chunk_size`` tokens before it appends, so a rebuilt cache starts where the
    donor would start: layers share one mask, and all of them must start at the same token.
    """

    type_name: ClassVar[str] = "ChunkedKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("ChunkedKVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        offset, start = token_count(cache, where), whole_number(cache, "start_position", 0, where)
        meta = {"chunk_size": whole_number(cache, "chunk_size", 1, where)}
        arrays = {"keys": cache.keys, "values": cache.values}
        if start > offset:
            raise ValueError(f"{where}: start_position {start} is beyond offset {offset}")
        if is_empty(arrays, offset, where):
            return LayerState(self.type_name, meta=meta, offset=0)
        check_enough(check_rows(arrays, where), offset - start, offset, where)
        reach = window_of(meta["chunk_size"])
        slots = tuple(Slot(name, array, array.ndim - 2, reach, start) for name, array in arrays.items())
        return LayerState(self.type_name, slots, meta, offset=offset)

    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        check_fields(cache, _FIELDS, where)
        return frozenset({window_of(whole_number(cache, "chunk_size", 1, where))})

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        chunk_size = whole_number(prototype, "chunk_size", 1, where)
        same_settings(state, {"chunk_size": chunk_size}, where)
        arrays = stored_arrays(state, _SLOTS, min(n, chunk_size), where)
        cache = type(prototype)(chunk_size)
        for name, array in arrays.items():
            setattr(cache, name, array)
        if arrays:
            cache.offset, cache.start_position = n, max(0, n - chunk_size)
        return cache
