"""Qwen's sparse attention in mlx-vlm: a plain cache, and beside it the keys and positions of an indexer.

The indexer's summaries of whole blocks are not stored: the class itself forgets them when it is trimmed, and the model
makes them anew from the keys.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._handlers.base import several_sequences
from prefixcache._handlers.kv import KVCacheHandler
from prefixcache._handlers.mlx_vlm_fields import check_fields_and_notes
from prefixcache._layer_state import ALL, LayerState, Slot

_PLAIN = frozenset({"keys", "values", "offset"})
_INDEX = ("index_keys", "index_position_ids")
_FIELDS = _PLAIN | {*_INDEX, "index_block_keys", "index_block_ratio"}


class QSAKVCacheHandler(KVCacheHandler):
    """``index_keys`` is ``[1, rows, dim]``, ``index_position_ids`` ``[1, rows]`` or ``[3, 1, rows]``."""

    type_name: ClassVar[str] = "mlx_vlm.QSAKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("QSAKVCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields_and_notes(cache, _FIELDS, where)
        plain = super().describe(SimpleNamespace(**{name: getattr(cache, name) for name in _PLAIN}), where)
        arrays = {name: getattr(cache, name) for name in _INDEX}
        absent = [name for name, array in arrays.items() if array is None]
        if len(absent) == len(arrays):
            return plain
        if absent or not plain.slots:
            raise ValueError(f"{where}: {absent or 'keys'} not set beside the rest of the indexer")
        slots = _index_slots(arrays, plain.offset or 0, where)
        return LayerState(self.type_name, plain.slots + slots, offset=plain.offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        split = 2 if tuple(slot.name for slot in state.slots[2:]) == _INDEX else len(state.slots)
        plain = LayerState(state.type_name, state.slots[:split], state.meta, state.children, state.offset)
        cache = super().rebuild(prototype, plain, n, where)
        index = {slot.name: slot.data for slot in state.slots[split:]}
        for slot in _index_slots(index, n, where) if index else ():
            # These are joined anew at every append, spare rows and all.
            setattr(cache, slot.name, slot.data[:, :n] if slot.name == "index_keys" else slot.data[..., :n])
        return cache


def _index_slots(arrays: dict[str, Any], offset: int, where: str) -> tuple[Slot, ...]:
    for name, array in arrays.items():
        if not isinstance(array, mx.array):
            raise TypeError(f"{where}: {name} must be an mx.array, not {type(array).__name__}")
    keys, positions = (arrays[name] for name in _INDEX)
    if keys.ndim != 3 or positions.ndim not in (2, 3):
        raise ValueError(f"{where}: indexer arrays of shapes {keys.shape} and {positions.shape}")
    if keys.shape[0] != 1 or positions.shape[-2] != 1:
        raise several_sequences(f"indexer arrays have shapes {keys.shape} and {positions.shape}", where)
    if min(keys.shape[1], positions.shape[-1]) < offset:
        raise ValueError(f"{where}: offset {offset} is beyond indexer arrays of {keys.shape} and {positions.shape}")
    return Slot("index_keys", keys, 1, ALL), Slot("index_position_ids", positions, positions.ndim - 1, ALL)
