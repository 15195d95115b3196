"""DeepSeek V4.1's layer cache: a window, closed groups of compressed rows, and the rows of the group still open.

How many groups are closed depends on where the prompt began to be pooled, so all of it is stored whole, as it was at
the token where it was captured.
"""

from __future__ import annotations

from typing import Any, ClassVar

from prefixcache._handlers.arrays import check_one_sequence, stored_whole, whole_slots
from prefixcache._handlers.base import Handler, check_fields, same_settings, token_count, whole_number
from prefixcache._layer_state import BOUNDARY, LayerState, Reach

_SLOTS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
_FIELDS = frozenset({*_SLOTS, "window_size", "offset"})


class DeepseekV41Handler(Handler):
    """Arrays ``[1, rows, dim]``; which of them a layer has depends on its part in the model and on the length."""

    type_name: ClassVar[str] = "DeepseekV41LayerCache"
    prototypes: ClassVar[tuple[str, ...]] = ("LayerCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        offset = token_count(cache, where)
        meta = {"window_size": whole_number(cache, "window_size", 1, where)}
        slots = whole_slots({name: getattr(cache, name) for name in _SLOTS}, where)
        check_one_sequence(slots, where)
        if slots or offset:
            _check_window(cache.window, offset, meta["window_size"], where)
        return LayerState(self.type_name, slots, meta, offset=offset)

    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        return frozenset({BOUNDARY})

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        window_size = whole_number(prototype, "window_size", 1, where)
        same_settings(state, {"window_size": window_size}, where)
        arrays = stored_whole(state, _SLOTS, where)
        cache = type(prototype)(window_size)
        if arrays:
            _check_window(arrays.get("window"), n, window_size, where)
            cache.offset = n
        for name, array in arrays.items():
            setattr(cache, name, array)
        return cache


def _check_window(window: Any, offset: int, window_size: int, where: str) -> None:
    """ValueError unless the window holds exactly the rows it has after ``offset`` tokens."""
    shape = None if window is None else window.shape
    if shape is None or len(shape) != 3 or shape[1] != min(offset, window_size):
        raise ValueError(
            f"{where}: a window of shape {shape} does not fit offset {offset} and window_size={window_size}"
        )
