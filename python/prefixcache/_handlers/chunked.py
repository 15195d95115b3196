"""Chunked caches: the rows of the last ``chunk_size`` tokens, and of those appended since the front was cut."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx

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
from prefixcache.errors import Unsupported

_SLOTS = ("keys", "values")
_FIELDS = frozenset({"keys", "values", "offset", "chunk_size", "start_position"})


class ChunkedKVCacheHandler(Handler):
    """Row 0 of the buffer is token ``start_position``.

    A model cuts the front to the last ``chunk_size`` tokens before it appends, so a rebuilt cache starts where the
    donor would start: layers share one mask, and all of them must start at the same token.

    mlx-lm before 0.32 counts the padding when it cuts, and so cuts rows that it still needs unless the buffer ends at
    a multiple of its growth step. There a rebuilt cache gets such a buffer, for one more copy.
    """

    type_name: ClassVar[str] = "ChunkedKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("ChunkedKVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        offset, start = token_count(cache, where), whole_number(cache, "start_position", 0, where)
        meta = {"chunk_size": self._chunk_size(cache, where)}
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
        return frozenset({window_of(self._chunk_size(cache, where))})

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        chunk_size = self._chunk_size(prototype, where)
        same_settings(state, {"chunk_size": chunk_size}, where)
        arrays = stored_arrays(state, _SLOTS, min(n, chunk_size), where)
        cache = type(prototype)(chunk_size)
        if arrays:
            first = max(0, n - chunk_size)
            cache.offset, cache.start_position = n, first
            if self._counts_padding(prototype):
                end = -(-n // prototype.step) * prototype.step
                cache.start_position = max(0, end - chunk_size)
                arrays = {
                    name: _between(array, cache.start_position - first, n - first, end - n)
                    for name, array in arrays.items()
                }
        for name, array in arrays.items():
            setattr(cache, name, array)
        return cache

    def _counts_padding(self, cache: Any) -> bool:
        # This attribute went with the release that mended the cut.
        return hasattr(cache, "meta_state")

    def _chunk_size(self, cache: Any, where: str) -> int:
        chunk_size = whole_number(cache, "chunk_size", 1, where)
        if self._counts_padding(cache) and chunk_size % cache.step:
            raise Unsupported(
                "unsupported_type",
                f"{where}: this mlx-lm loses rows of chunks that are no multiple of {cache.step}, "
                f"and of {chunk_size} too",
            )
        return chunk_size


def _between(array: mx.array, first: int, stop: int, padding: int) -> mx.array:
    """Rows [first, stop) and zeros behind them; the array itself if that is what it is."""
    if first == 0 and array.shape[-2] == stop + padding:
        return array
    zeros = mx.zeros((*array.shape[:-2], padding, array.shape[-1]), array.dtype)
    return mx.concatenate([array[..., first:stop, :], zeros], axis=-2)
