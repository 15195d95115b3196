"""Plain key and value caches: every row is needed, none depends on the length."""

from __future__ import annotations

from typing import Any, ClassVar

from prefixcache._handlers.base import Handler, check_fields, is_empty, row_slots, stored_arrays, token_count
from prefixcache._layer_state import LayerState

_SLOTS = ("keys", "values")
_FIELDS = frozenset({"keys", "values", "offset"})


class KVCacheHandler(Handler):
    """Keys and values in buffers that grow in steps: rows behind the offset are padding."""

    type_name: ClassVar[str] = "KVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("KVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        offset = token_count(cache, where)
        arrays = {"keys": cache.keys, "values": cache.values}
        if is_empty(arrays, offset, where):
            return LayerState(self.type_name, offset=0)
        return LayerState(self.type_name, row_slots(arrays, offset, where), offset=offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        arrays = stored_arrays(state, _SLOTS, n, where)
        cache = type(prototype)()
        for name, array in arrays.items():
            setattr(cache, name, array)
        cache.offset = n if arrays else 0
        return cache


class ConcatenateKVCacheHandler(KVCacheHandler):
    """Keys and values joined anew at every append.

    An append keeps every row it finds, whatever the offset says, so a rebuilt cache gets exactly n rows. A trimmed
    cache still holds the trimmed rows: only those before its offset are stored.
    """

    type_name: ClassVar[str] = "ConcatenateKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("ConcatenateKVCache",)
    spare_rows: ClassVar[bool] = False

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        for slot in state.slots:
            if slot.data.ndim > 2 and slot.data.shape[-2] != n:
                raise ValueError(f"{where}: {slot.name} must have exactly {n} rows, got shape {slot.data.shape}")
        return super().rebuild(prototype, state, n, where)
