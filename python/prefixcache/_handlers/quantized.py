"""Quantised key and value caches: each of keys and values is a triple of packed codes, scales and biases."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._handlers.base import Handler, check_fields, is_empty, row_slots, stored_arrays, token_count
from prefixcache._handlers.kv import KVCacheHandler
from prefixcache._layer_state import LayerState
from prefixcache.errors import Unsupported

_FIELDS = frozenset({"keys", "values", "offset", "group_size", "bits"})
_PARTS = ("", ".scales", ".biases")
_SLOTS = tuple(owner + part for owner in ("keys", "values") for part in _PARTS)
_META = ("bits", "group_size")


class QuantizedKVCacheHandler(Handler):
    """Codes with one scale and one bias for every ``group_size`` numbers of a row (affine quantisation)."""

    type_name: ClassVar[str] = "QuantizedKVCache"
    quantised: ClassVar[bool] = True
    prototypes: ClassVar[tuple[str, ...]] = ("QuantizedKVCache", KVCacheHandler.type_name)

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        offset = token_count(cache, where)
        meta = {name: _setting(getattr(cache, name), name, where) for name in _META}
        if is_empty({"keys": cache.keys, "values": cache.values}, offset, where):
            return LayerState(self.type_name, meta=meta, offset=0)
        arrays = _named("keys", cache.keys, where) | _named("values", cache.values, where)
        slots = row_slots(arrays, offset, where)
        _check_widths(arrays, meta, where)
        return LayerState(self.type_name, slots, meta, offset=offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        arrays = stored_arrays(state, _SLOTS, n, where)
        if state.meta.keys() != set(_META):
            raise Unsupported("structure_mismatch", f"{where}: stored settings {dict(state.meta)}, expected {_META}")
        meta = {name: _setting(state.meta[name], name, where) for name in _META}
        cache = _class_beside(prototype, self.type_name, where)(**meta)
        if type(prototype) is type(cache):
            own = {name: getattr(prototype, name) for name in _META}
            if own != meta:
                raise Unsupported("structure_mismatch", f"{where}: stored with {meta}, the model uses {own}")
        if arrays:
            _check_widths(arrays, meta, where)
            # The class assigns into the arrays, never into the tuples, and makes tuples itself.
            cache.keys = tuple(arrays["keys" + part] for part in _PARTS)
            cache.values = tuple(arrays["values" + part] for part in _PARTS)
        cache.offset = n if arrays else 0
        return cache


def _setting(value: Any, name: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {name} must be a positive int, got {value!r}")
    return value


def _named(owner: str, arrays: Any, where: str) -> dict[str, Any]:
    if not isinstance(arrays, list | tuple):
        raise TypeError(f"{where}: {owner} must be a tuple of arrays, not {type(arrays).__name__}")
    if len(arrays) != len(_PARTS):
        # Modes without biases give two arrays; the class itself never uses them.
        raise Unsupported(
            "unsupported_type", f"{where}: {owner} has {len(arrays)} arrays, expected codes, scales and biases"
        )
    return {owner + part: array for part, array in zip(_PARTS, arrays, strict=True)}


def _check_widths(arrays: Mapping[str, mx.array], meta: Mapping[str, int], where: str) -> None:
    """ValueError unless codes, scales and biases describe rows of one width under these settings."""
    for owner in ("keys", "values"):
        codes, scales, biases = (arrays[owner + part] for part in _PARTS)
        width = scales.shape[-1] * meta["group_size"]
        if codes.dtype != mx.uint32 or codes.shape[-1] * 32 != width * meta["bits"] or biases.shape != scales.shape:
            raise ValueError(
                f"{where}: {owner} of shapes {codes.shape}, {scales.shape}, {biases.shape} and codes of "
                f"{codes.dtype} do not fit bits={meta['bits']}, group_size={meta['group_size']}"
            )


def _class_beside(prototype: Any, name: str, where: str) -> Any:
    """The class of that name in the module of the prototype's class: packages have different ones of the same name."""
    module = type(prototype).__module__
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, type):
        raise Unsupported("structure_mismatch", f"{where}: module {module} has no class {name}")
    return found
