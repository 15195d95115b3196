"""oMLX's tuple shapes for the states of layers, as named arrays and JSON, and back.

A layer is one of: a pair or a longer tuple of elements; ``('__nstate__', class name, [elements])``;
``('__cache_list__', [layers])``; ``('__turboquant_v2__', (keys, values))`` of NamedTuples. An element is an array,
None, a tuple or list of elements, or another ``'__nstate__'``. What comes back is what went in, bit for bit, in the
shapes that readers of these tuples know: see ``rebuild``.

Nothing here evaluates an array.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import mlx.core as mx

Json: TypeAlias = bool | int | float | str | None | list["Json"] | dict[str, "Json"]

NSTATE = "__nstate__"
CACHE_LIST = "__cache_list__"
TURBOQUANT = "__turboquant_v2__"
TURBOQUANT_NAMES = (TURBOQUANT, "__turboquant__")
# The text may come from a file that somebody else wrote.
_MAX_NESTING = 16


class NamedPair(tuple[Any, ...]):
    """A pair of elements that knows the class of the cache they are the state of. Otherwise a plain tuple of two."""

    class_name: str

    def __new__(cls, elements: Sequence[Any], class_name: str) -> NamedPair:
        """Of two elements."""
        pair = super().__new__(cls, elements)
        pair.class_name = class_name
        return pair


def flatten(cache_data: Sequence[Any], types: Sequence[str] | None = None) -> tuple[list[tuple[str, mx.array]], Json]:
    """The arrays of all layers by name, and the JSON from which ``rebuild`` knows their places.

    ``types``: the class name of each layer, kept with tuples that do not name their own. TypeError, naming the layer,
    for anything that is none of the shapes above.
    """
    arrays: list[tuple[str, mx.array]] = []
    names = list(types or [])
    layers: list[Json] = []
    for index, layer in enumerate(cache_data):
        class_name = names[index] if index < len(names) and isinstance(names[index], str) else None
        layers.append(_Writer(arrays, f"layer {index}").layer(layer, class_name))
    return arrays, layers


def rebuild(arrays: Mapping[str, mx.array], layers: Json) -> list[Any]:
    """The layers, from the arrays that ``flatten`` named.

    A state of exactly two elements that are arrays or None comes back as a pair (a ``NamedPair`` if it named its
    class), any other as ``('__nstate__', class name, [elements])``; a list of caches as a list. ValueError for JSON
    that ``flatten`` could not have written and for arrays that do not fit it.
    """
    reader = _Reader(arrays)
    out = [reader.layer(layer) for layer in _items(layers)]
    if reader.used != set(arrays):
        raise ValueError(f"arrays that no layer names: {sorted(set(arrays) - reader.used)[:5]}")
    return out


def is_placeholder(layer: Any) -> bool:
    """Whether a layer is the pair of arrays of shape (1,) that stands for a state which is not there."""
    return (
        isinstance(layer, tuple | list)
        and len(layer) == 2
        and all(isinstance(item, mx.array) and item.shape == (1,) for item in layer)
    )


def placeholders(cache_data: Sequence[Any]) -> frozenset[str]:
    """Where placeholders stand: ``"3"`` for layer 3, ``"3/1"`` for cache 1 of the list in it."""
    return frozenset(_placeholder_paths(cache_data))


def _placeholder_paths(layers: Sequence[Any], above: str = "") -> Iterator[str]:
    for index, layer in enumerate(layers):
        if is_placeholder(layer):
            yield f"{above}{index}"
        elif _is_marked(layer, (CACHE_LIST,), 2) and isinstance(layer[1], list | tuple):
            yield from _placeholder_paths(layer[1], f"{above}{index}/")


def encode_meta(value: Any) -> Json:
    """A ``meta_state`` as JSON in which tuples, lists and texts stay what they are. TypeError for other types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return ["t" if isinstance(value, tuple) else "l", [encode_meta(item) for item in value]]
    raise TypeError(f"a meta state holds a {type(value).__name__}, expected numbers, texts, tuples and lists")


def decode_meta(value: Json, depth: int = 0) -> Any:
    """The value of ``encode_meta``. ValueError for JSON that it could not have written."""
    if not isinstance(value, list | dict):
        return value
    kind, items = _node(value, 2, depth)
    found = [decode_meta(item, depth + 1) for item in _items(items)]
    if kind not in ("t", "l"):
        raise ValueError(f"unexpected kind of meta state {kind!r}")
    return tuple(found) if kind == "t" else found


class _Writer:
    """Turns one layer into JSON and appends its arrays."""

    def __init__(self, arrays: list[tuple[str, mx.array]], where: str) -> None:
        self._arrays = arrays
        self._where = where

    def layer(self, layer: Any, class_name: str | None) -> Json:
        if not isinstance(layer, tuple | list):
            raise self._refusal(layer)
        if _is_marked(layer, (CACHE_LIST,), 2):
            return ["k", [self.layer(sub, None) for sub in _sequence(layer[1], self)]]
        if _is_marked(layer, TURBOQUANT_NAMES, 2):
            keys, values = _sequence(layer[1], self)
            return ["q", [self.element(_unwrapped(keys)), self.element(_unwrapped(values))]]
        if _is_marked(layer, (NSTATE,), 3):
            return self._nstate(layer)
        if isinstance(layer, NamedPair):
            return ["s", layer.class_name, [self.element(item) for item in layer]]
        if len(layer) < 2:
            raise self._refusal(layer)
        # Of two elements the class is the caller's to know, as it always was.
        elements = [self.element(item) for item in layer]
        return ["p", None if len(layer) == 2 and _is_plain_pair(elements) else class_name, elements]

    def element(self, item: Any) -> Json:
        if item is None:
            return ["n"]
        if isinstance(item, mx.array):
            return self._array(item)
        if _is_marked(item, (NSTATE,), 3):
            return self._nstate(item)
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            fields: list[Json] = [str(name) for name in item._fields]
            return ["m", type(item).__name__, fields, [self.element(part) for part in item]]
        if isinstance(item, tuple | list):
            return ["t" if isinstance(item, tuple) else "l", [self.element(part) for part in item]]
        raise self._refusal(item)

    def refuse(self, value: Any) -> None:
        raise self._refusal(value)

    def _nstate(self, marked: Sequence[Any]) -> Json:
        class_name = marked[1]
        if class_name is not None and not isinstance(class_name, str):
            raise self._refusal(class_name)
        return ["s", class_name, [self.element(item) for item in _sequence(marked[2], self)]]

    def _array(self, array: mx.array) -> Json:
        name = str(len(self._arrays))
        if array.dtype == mx.complex64:
            # Files do not know complex numbers.
            shape: list[Json] = [int(length) for length in array.shape]
            self._arrays.append((name, mx.contiguous(array).reshape(-1).view(mx.float32)))
            return ["c", name, shape]
        self._arrays.append((name, array))
        return ["a", name]

    def _refusal(self, value: Any) -> TypeError:
        return TypeError(f"{self._where}: a {type(value).__name__} is no array, None, tuple or marked state")


class _Reader:
    """Builds layers of JSON from arrays. ``used``: the arrays that were asked for."""

    def __init__(self, arrays: Mapping[str, mx.array]) -> None:
        self.used: set[str] = set()
        self._arrays = arrays

    def layer(self, node: Json, depth: int = 0) -> Any:
        kind = _kind(node, depth)
        if kind == "k":
            return [self.layer(sub, depth + 1) for sub in _items(_node(node, 2, depth)[1])]
        if kind == "q":
            keys, values = self._elements(_node(node, 2, depth)[1], depth, 2)
            return (TURBOQUANT, (keys, values))
        if kind not in ("s", "p"):
            raise ValueError(f"unexpected kind of layer {kind!r}")
        _, class_name, nodes = _node(node, 3, depth)
        if class_name is not None and not isinstance(class_name, str):
            raise ValueError(f"unexpected class name {class_name!r}")
        elements = self._elements(nodes, depth)
        if not _is_plain_pair(_items(nodes)):
            return (NSTATE, class_name, elements)
        return tuple(elements) if class_name is None else NamedPair(elements, class_name)

    def element(self, node: Json, depth: int) -> Any:
        kind = _kind(node, depth)
        if kind == "n":
            return None
        if kind in ("a", "c"):
            return self._array(node, kind, depth)
        if kind in ("t", "l"):
            elements = self._elements(_node(node, 2, depth)[1], depth)
            return tuple(elements) if kind == "t" else elements
        if kind == "s":
            _, class_name, nodes = _node(node, 3, depth)
            return (NSTATE, class_name, self._elements(nodes, depth))
        if kind == "m":
            _, name, fields, nodes = _node(node, 4, depth)
            return _named_tuple(name, _items(fields), self._elements(nodes, depth))
        raise ValueError(f"unexpected kind of element {kind!r}")

    def _elements(self, nodes: Json, depth: int, count: int | None = None) -> list[Any]:
        elements = [self.element(node, depth + 1) for node in _items(nodes)]
        if count is not None and len(elements) != count:
            raise ValueError(f"{len(elements)} elements, expected {count}")
        return elements

    def _array(self, node: Json, kind: str, depth: int) -> mx.array:
        name = _node(node, 2 if kind == "a" else 3, depth)[1]
        if not isinstance(name, str) or name not in self._arrays or name in self.used:
            raise ValueError(f"there is no array {name!r} left")
        self.used.add(name)
        array = self._arrays[name]
        if kind == "a":
            return array
        shape = _items(_items(node)[2])
        if array.dtype != mx.float32 or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"array {name!r} is not a complex one of shape {shape!r}")
        return array.view(mx.complex64).reshape([int(str(length)) for length in shape])


def _is_marked(value: Any, markers: Sequence[str], length: int) -> bool:
    return (
        isinstance(value, tuple | list) and len(value) == length and isinstance(value[0], str) and value[0] in markers
    )


def _is_plain_pair(nodes: Sequence[Json]) -> bool:
    return len(nodes) == 2 and all(isinstance(node, list) and node[:1] in (["a"], ["c"], ["n"]) for node in nodes)


def _sequence(value: Any, writer: _Writer) -> Sequence[Any]:
    if not isinstance(value, tuple | list):
        writer.refuse(value)
    return list(value)


def _unwrapped(state: Any) -> Any:
    # TurboQuant hands out its states in a wrapper.
    inner = getattr(state, "_state", None)
    return inner if isinstance(inner, tuple) else state


def _kind(node: Json, depth: int) -> str:
    if depth > _MAX_NESTING:
        raise ValueError(f"states nested more than {_MAX_NESTING} deep")
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise ValueError(f"unexpected state {str(node)[:100]!r}")
    return node[0]


def _node(node: Json, length: int, depth: int) -> list[Json]:
    _kind(node, depth)
    items = _items(node)
    if len(items) != length:
        raise ValueError(f"unexpected state {str(node)[:100]!r}")
    return items


def _items(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {str(value)[:100]!r}")
    return value


def _named_tuple(name: Json, fields: list[Json], elements: list[Any]) -> Any:
    names = tuple(field for field in fields if isinstance(field, str) and field.isidentifier())
    if (
        not isinstance(name, str)
        or not name.isidentifier()
        or len(names) != len(fields)
        or len(set(names)) != len(names)
    ):
        raise ValueError(f"unexpected named tuple {str(name)[:100]!r} {str(fields)[:100]}")
    if len(names) != len(elements):
        raise ValueError(f"{len(elements)} elements for the fields {names}")
    return _named_tuple_class(name, names)(*elements)


@cache
def turboquant_module() -> Any:
    """mlx-vlm's module of TurboQuant caches; None without mlx-vlm."""
    try:
        from mlx_vlm import turboquant
    except ImportError:
        return None
    return turboquant


def _named_tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    """mlx-vlm's own class of that name and these fields; else one that looks the same."""
    found = getattr(turboquant_module(), name, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    return _stand_in(name, fields)


@cache
def _stand_in(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)  # noqa: PYI024
