"""A list of layer dicts as one JSON text and a list of arrays, and back with every type as it was.

Tuples stay tuples. What cannot come back as it was is refused: no element is ever dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

_MOST_NESTING = 32
# JSON has no such types; every other JSON object in the text would be ambiguous, so there is none.
_ARRAY, _TUPLE, _DICT, _BYTES = "array", "tuple", "dict", "bytes"


def slot_name(index: int) -> str:
    """The name under which array ``index`` is stored."""
    return str(index)


def encode_layers(layers: Sequence[Mapping[str, Any]]) -> tuple[str, list[mx.array]]:
    """ASCII text, and the arrays that it names. Evaluates and copies nothing.

    TypeError for an element that is no array, tuple, list, dict, number, string, bytes or None; ValueError for one
    that is nested too deeply.
    """
    arrays: list[mx.array] = []
    text = json.dumps([_encode(layer, arrays, 0) for layer in layers], separators=(",", ":"))
    return text, arrays


def decode_layers(text: str, arrays: Mapping[str, mx.array]) -> list[dict[str, Any]]:
    """The layer dicts, all new but for the arrays. ValueError, TypeError or KeyError for a text of another origin."""
    layers = json.loads(text)
    if not isinstance(layers, list):
        raise ValueError("snapshot text: not a list of layers")
    decoded = [_decode(layer, arrays) for layer in layers]
    if not all(isinstance(layer, dict) for layer in decoded):
        raise ValueError("snapshot text: a layer that is no dict")
    return decoded


def _encode(value: Any, arrays: list[mx.array], depth: int) -> Any:
    if depth > _MOST_NESTING:
        raise ValueError(f"state nested more than {_MOST_NESTING} deep")
    if isinstance(value, mx.array):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    # Exact types: a named tuple or a dict with a default would come back as something else.
    if type(value) is dict:
        return {_DICT: [[_encode(part, arrays, depth + 1) for part in item] for item in value.items()]}
    if type(value) in (tuple, list):
        items = [_encode(item, arrays, depth + 1) for item in value]
        return {_TUPLE: items} if type(value) is tuple else items
    raise TypeError(f"a snapshot cannot hold a {type(value).__module__}.{type(value).__qualname__}")


def _decode(value: Any, arrays: Mapping[str, mx.array]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _ARRAY:
        return arrays[slot_name(content)]
    if kind == _TUPLE:
        return tuple(_decode(item, arrays) for item in content)
    if kind == _DICT:
        return {_decode(key, arrays): _decode(item, arrays) for key, item in content}
    if kind == _BYTES:
        return bytes.fromhex(content)
    raise ValueError(f"snapshot text: unknown tag {kind!r}")
