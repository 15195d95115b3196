"""mlx-vlm's MiniMax M3 cache: a plain cache, and beside it the index keys by which sparse attention picks its rows."""

from __future__ import annotations

from typing import Any, ClassVar

from prefixcache._handlers.base import (
    Handler,
    check_fields,
    is_empty,
    row_slots,
    stored_arrays,
    token_count,
    whole_number,
)
from prefixcache._layer_state import LayerState
from prefixcache.errors import Unsupported

_FIELDS = frozenset({"kv_cache", "index_keys", "index_offset"})
_SLOTS = ("keys", "values")
_WITH_INDEX = (*_SLOTS, "index_keys")


class MiniMaxM3KVCacheHandler(Handler):
    """Three arrays ``[1, heads, rows, dim]``; layers with dense attention have no index keys."""

    type_name: ClassVar[str] = "mlx_vlm.MiniMaxM3KVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("MiniMaxM3KVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        inner, index_keys = cache.kv_cache, cache.index_keys
        kind = type(inner)
        if (kind.__module__, kind.__qualname__) != ("mlx_vlm.models.cache", "KVCache"):
            raise Unsupported(
                "unsupported_type",
                f"{where}: kv_cache must be mlx-vlm's KVCache, not {kind.__module__}.{kind.__name__}",
            )
        check_fields(inner, frozenset({"keys", "values", "offset"}), where)
        offset = token_count(inner, where)
        arrays = {"keys": inner.keys, "values": inner.values}
        counted = whole_number(cache, "index_offset", 0, where)
        if counted != (0 if index_keys is None else offset):
            raise ValueError(f"{where}: index_offset {counted} at offset {offset}")
        if is_empty(arrays, offset, where):
            if index_keys is not None:
                raise ValueError(f"{where}: keys not set beside index_keys")
            return LayerState(self.type_name, offset=0)
        slots = row_slots(arrays, offset, where)
        if index_keys is not None:
            # Its buffer grows by itself.
            slots += row_slots({"index_keys": index_keys}, offset, where)
        return LayerState(self.type_name, slots, offset=offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        names = _WITH_INDEX if len(state.slots) == len(_WITH_INDEX) else _SLOTS
        arrays = stored_arrays(state, names, n, where)
        cache = type(prototype)()
        if arrays:
            cache.kv_cache.keys, cache.kv_cache.values, cache.kv_cache.offset = arrays["keys"], arrays["values"], n
        if "index_keys" in arrays:
            cache.index_keys, cache.index_offset = arrays["index_keys"], n
        return cache
