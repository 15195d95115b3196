"""Caches of whole arrays, such as recurrent states: exact only at the token where they were captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._handlers.base import Handler, check_fields, same_settings, several_sequences
from prefixcache._layer_state import BOUNDARY, LayerState, Reach, Slot
from prefixcache.errors import Unsupported

_FIELDS = frozenset({"cache", "left_padding", "lengths"})
# What describes the running request or its batch: restored, it would mask the next prompt.
_OF_THE_REQUEST = ("left_padding", "lengths")


class ArraysCacheHandler(Handler):
    """Any number of arrays, each of any shape and dtype or None. The class does not count tokens."""

    type_name: ClassVar[str] = "ArraysCache"
    prototypes: ClassVar[tuple[str, ...]] = ("ArraysCache",)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        for name in _OF_THE_REQUEST:
            if getattr(cache, name) is not None:
                raise Unsupported(
                    "running_request", f"{where}: {name} is set for a running batch; extract the row first: extract(i)"
                )
        arrays = _entries(cache, where)
        slots = whole_slots({str(index): array for index, array in enumerate(arrays)}, where)
        check_one_sequence(slots, where)
        return LayerState(self.type_name, slots, {"size": len(arrays)})

    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        return frozenset({BOUNDARY})

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        size = len(_entries(prototype, where))
        same_settings(state, {"size": size}, where)
        cache = type(prototype)(size)
        for name, array in stored_whole(state, [str(index) for index in range(size)], where).items():
            cache.cache[int(name)] = array
        return cache


def _entries(cache: Any, where: str) -> Sequence[Any]:
    entries = cache.cache
    if not isinstance(entries, list | tuple):
        raise TypeError(f"{where}: cache must be a list of arrays, not {type(entries).__name__}")
    return entries


def whole_slots(arrays: dict[str, Any], where: str) -> tuple[Slot, ...]:
    """Slots of arrays that are stored whole; None gives none. ``Unsupported`` for anything that is no MLX array."""
    for name, array in arrays.items():
        if array is not None and not isinstance(array, mx.array):
            raise Unsupported(
                "unsupported_type", f"{where}: {name} must be an mx.array or None, not {type(array).__name__}"
            )
    return tuple(Slot(name, array, None, BOUNDARY) for name, array in arrays.items() if array is not None)


def check_one_sequence(slots: Sequence[Slot], where: str) -> None:
    """ValueError if the arrays belong to several sequences. As in the class itself the first array tells, by its first
    axis; a 0-d array has none."""
    first = next((slot for slot in slots if slot.data.ndim > 0), None)
    if first is not None and first.data.shape[0] > 1:
        raise several_sequences(f"{first.name} holds {first.data.shape[0]} sequences, shape {first.data.shape}", where)


def stored_whole(state: LayerState, names: Sequence[str], where: str) -> dict[str, mx.array]:
    """The arrays of a stored state by name. ``Unsupported`` unless they are some of ``names``, in that order."""
    arrays = state.arrays()
    if state.children or [name for name in names if name in arrays] != list(arrays):
        raise Unsupported("structure_mismatch", f"{where}: stored slots {list(arrays)}, expected some of {names}")
    return arrays
