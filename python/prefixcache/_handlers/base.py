"""What a handler is, and the checks that handlers share.

Handlers are stateless and may be used from any thread. They read public attributes of live objects and neither change
them nor evaluate or copy their arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._layer_state import ALL, LayerState, Reach, Slot
from prefixcache.errors import Unsupported


class Handler(ABC):
    """Turns caches of one class into ``LayerState`` and back.

    ``type_name`` is stored with every part: do not change it once released. ``spare_rows`` says whether a rebuilt
    cache may be given arrays with more than n rows (the others zero) to grow into. ``quantised``: a model's plain
    caches are converted to this type when ``kv_format`` says so. ``prototypes`` names the classes
    of a model's own caches that this stored type may be rebuilt for.
    """

    type_name: ClassVar[str]
    spare_rows: ClassVar[bool] = True
    quantised: ClassVar[bool] = False
    prototypes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def describe(self, cache: Any, where: str) -> LayerState:
        """The state of a live cache. ``where`` names the layer in messages ("layer 3 (...)").

        A cache that holds nothing yet gives no slots and offset 0. Raises ``Unsupported`` for fields that the class is
        not known to have, ``ValueError`` or ``TypeError`` for a cache that contradicts itself.
        """

    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        """The reaches of the slots that a cache with these settings has once it holds tokens; it may be empty now.

        Raises as ``describe`` does for settings that the class cannot have.
        """
        return frozenset({ALL})

    @abstractmethod
    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        """A new cache that stands at n tokens and owns the arrays of ``state``; ``prototype`` is not touched.

        Slots of reach ALL have rows [0, n); slots of a window have min(n, window) rows in temporal order, the kept
        ones first. Either may be followed by spare rows, zero (in a window never beyond ``window`` rows in all), if
        ``spare_rows``. A layer that held nothing has no slots and stays empty, at offset 0, whatever n is.
        ``prototype`` is one of the model's own fresh caches and gives the class. Raises ``Unsupported`` if the stored
        state does not fit it, ``ValueError`` if the arrays do not fit n.
        """

    def check_prototype(self, prototype: Any, where: str) -> None:
        """``Unsupported`` unless the stored type may stand in for the model's own cache."""
        name = type(prototype).__name__
        if name not in self.prototypes:
            raise Unsupported(
                "structure_mismatch",
                f"{where}: a stored {self.type_name} cannot be rebuilt for a model that uses {name}",
            )


def check_fields(cache: Any, expected: frozenset[str], where: str) -> None:
    """``Unsupported`` unless the object's own attributes are exactly the expected ones."""
    found = vars(cache).keys()
    if found != expected:
        unknown, missing = sorted(found - expected), sorted(expected - found)
        raise Unsupported("unknown_field", f"{where}: unknown attributes {unknown}, missing attributes {missing}")


def token_count(cache: Any, where: str) -> int:
    """``cache.offset``, checked. TypeError unless it is an int, ValueError if it is negative."""
    offset = cache.offset
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise TypeError(f"{where}: offset must be an int, not {type(offset).__name__} {offset!r}")
    if offset < 0:
        raise ValueError(f"{where}: offset must not be negative, got {offset}")
    return offset


def is_empty(arrays: Mapping[str, Any], offset: int, where: str) -> bool:
    """True if the cache holds nothing yet. ValueError if only some arrays are set, or none at a positive offset."""
    absent = [name for name, array in arrays.items() if array is None]
    if not absent:
        return False
    if len(absent) < len(arrays) or offset != 0:
        raise ValueError(f"{where}: {', '.join(absent)} not set at offset {offset}")
    return True


def check_rows(arrays: Mapping[str, Any], where: str) -> int:
    """How many rows the arrays ``[1, heads, rows, dim]`` or ``[heads, rows, dim]`` have.

    Raises TypeError for something that is no MLX array; ValueError for another rank, more than one sequence, or arrays
    of different ranks or lengths.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in arrays.items():
        if not isinstance(array, mx.array):
            raise TypeError(f"{where}: {name} must be an mx.array, not {type(array).__name__}")
        shape = shapes[name] = array.shape
        if len(shape) not in (3, 4):
            raise ValueError(f"{where}: {name} must have rank 3 or 4, got shape {shape}")
        if len(shape) == 4 and shape[0] != 1:
            raise several_sequences(f"{name} holds {shape[0]} sequences, shape {shape}", where)
    first = next(iter(shapes.values()))
    for shape in shapes.values():
        if shape[-2] != first[-2]:
            raise ValueError(f"{where}: arrays of different lengths: { {n: s[-2] for n, s in shapes.items()} }")
        if len(shape) != len(first):
            raise ValueError(f"{where}: arrays of different ranks: {shapes}")
    return first[-2]


def several_sequences(what: str, where: str) -> ValueError:
    return ValueError(f"{where}: {what}; store one at a time (extract the row first)")


def row_slots(arrays: Mapping[str, Any], offset: int, where: str) -> tuple[Slot, ...]:
    """Slots of arrays ``[1, heads, rows, dim]`` or ``[heads, rows, dim]`` whose row i is token i.

    Raises as ``check_rows``; ValueError for fewer rows than ``offset``.
    """
    check_enough(check_rows(arrays, where), offset, offset, where)
    return tuple(Slot(name, array, array.ndim - 2, ALL) for name, array in arrays.items())


def check_enough(rows: int, needed: int, offset: int, where: str) -> None:
    """ValueError if there are fewer rows than a cache at ``offset`` must hold."""
    if needed > rows:
        raise ValueError(f"{where}: offset {offset} is beyond the {rows} rows of its arrays")


def stored_arrays(state: LayerState, names: tuple[str, ...], rows: int, where: str) -> dict[str, mx.array]:
    """The arrays of a stored state, checked like those of a live cache; empty if the layer held nothing.

    ``Unsupported`` for other slots than ``names``; ValueError for fewer than ``rows`` rows.
    """
    arrays = state.arrays()
    if state.children or (arrays and tuple(arrays) != names):
        raise Unsupported("structure_mismatch", f"{where}: stored slots {list(arrays)}, expected {list(names)}")
    if arrays:
        check_enough(check_rows(arrays, where), rows, rows, where)
    return arrays


def same_settings(state: LayerState, own: Mapping[str, Any], where: str) -> None:
    """``Unsupported`` unless the layer was stored with the settings that the model's own cache has."""
    if dict(state.meta) != dict(own):
        raise Unsupported(
            "structure_mismatch", f"{where}: stored with {dict(state.meta)}, the model's own has {dict(own)}"
        )


def whole_number(cache: Any, name: str, lowest: int, where: str) -> int:
    """The attribute ``name``. TypeError unless it is an int, ValueError if it is below ``lowest``."""
    value = getattr(cache, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{where}: {name} must be an int, not {type(value).__name__} {value!r}")
    if value < lowest:
        raise ValueError(f"{where}: {name} must be at least {lowest}, got {value}")
    return value
