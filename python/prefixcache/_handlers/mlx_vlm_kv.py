"""mlx-vlm's own key and value caches whose rows are all needed: one row a token, from the first."""

from __future__ import annotations

from typing import Any, ClassVar

from prefixcache._handlers.base import (
    check_fields,
    is_empty,
    row_slots,
    same_settings,
    stored_arrays,
    token_count,
    whole_number,
)
from prefixcache._handlers.kv import ConcatenateKVCacheHandler, KVCacheHandler
from prefixcache._layer_state import LayerState
from prefixcache.errors import Unsupported

_SLOTS = ("keys", "values")


class SimpleKVCacheHandler(ConcatenateKVCacheHandler):
    """Keys and values joined at every append; the token count is ``cache_length``."""

    type_name: ClassVar[str] = "mlx_vlm.SimpleKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("SimpleKVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, frozenset({"keys", "values", "cache_length"}), where)
        length = whole_number(cache, "cache_length", 0, where)
        arrays = {"keys": cache.keys, "values": cache.values}
        if is_empty(arrays, length, where):
            return LayerState(self.type_name, offset=0)
        slots = row_slots(arrays, length, where)
        if slots[0].data.shape[-2] != length:
            # update() replaces the rows and goes on counting.
            raise ValueError(f"{where}: cache_length {length} but {slots[0].data.shape[-2]} rows")
        return LayerState(self.type_name, slots, offset=length)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        cache = super().rebuild(prototype, state, n, where)
        cache.cache_length = cache.offset
        del cache.offset
        return cache


class HyV4KVCacheHandler(KVCacheHandler):
    """Grows by doubling; otherwise a plain cache."""

    type_name: ClassVar[str] = "mlx_vlm.HyV4KVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("HyV4KVCache",)


class RingSlidingKVCacheHandler(KVCacheHandler):
    """All rows of the prompt, then a ring of decoded ones, which knows where this request's prompt ended.

    Stored while the prompt is prefilled; afterwards it is refused: another request's prompt ends elsewhere.
    """

    type_name: ClassVar[str] = "mlx_vlm.RingSlidingKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("RingSlidingKVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        fields = frozenset({"keys", "values", "offset", "window_size", "prefill_length", "_ring_pos"})
        check_fields(cache, fields, where)
        if cache.prefill_length is not None or cache._ring_pos != 0:
            raise Unsupported("running_request", f"{where}: decoding has begun after {cache.prefill_length} tokens")
        offset, meta = token_count(cache, where), {"window_size": whole_number(cache, "window_size", 1, where)}
        arrays = {"keys": cache.keys, "values": cache.values}
        if is_empty(arrays, offset, where):
            return LayerState(self.type_name, meta=meta, offset=0)
        return LayerState(self.type_name, row_slots(arrays, offset, where), meta, offset=offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        window_size = whole_number(prototype, "window_size", 1, where)
        same_settings(state, {"window_size": window_size}, where)
        arrays = stored_arrays(state, _SLOTS, n, where)
        cache = type(prototype)(window_size)
        for name, array in arrays.items():
            setattr(cache, name, array)
        cache.offset = n if arrays else 0
        return cache
