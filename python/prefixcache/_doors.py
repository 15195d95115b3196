"""What several front doors of one store share. Any thread."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar

Door = TypeVar("Door")

# A caller may ask for ever new ones; a door that is forgotten still works.
_REMEMBERED = 32


class Doors(Generic[Door]):
    """``closed``: the store is. The doors are remembered by their keys, and by the model that they were made for."""

    def __init__(self, keys: str, first: Door) -> None:
        self.closed = False
        # Not kept alive: a cache that its owner drops is to go at once.
        self._first = (keys, weakref.ref(first))
        self._lock = threading.Lock()
        self._by_keys: dict[str, Door] = {}
        # A model cannot be hashed; the reference tells whether its number still means it.
        self._by_model: dict[int, tuple[weakref.ref[Any], Door]] = {}

    def the_one(self, keys: str, door: Door) -> Door:
        """``door``, or the one that was remembered first under the same keys."""
        first = self._first[1]() if keys == self._first[0] else None
        if first is not None:
            return first
        with self._lock:
            door = self._by_keys.pop(keys, door)
            self._by_keys[keys] = door
            if len(self._by_keys) > _REMEMBERED:
                del self._by_keys[next(iter(self._by_keys))]
        return door

    def of_model(self, model: Any) -> Door | None:
        """What ``remember`` was given for this very object."""
        with self._lock:
            reference, door = self._by_model.get(id(model), (None, None))
        return door if reference is not None and reference() is model else None

    def remember(self, model: Any, door: Door) -> None:
        """Does not keep ``model`` alive."""
        with self._lock:
            self._by_model = {key: entry for key, entry in self._by_model.items() if entry[0]() is not None}
            self._by_model[id(model)] = (weakref.ref(model), door)
