"""mlx-vlm's cache whose keys and values are quantised each by their own scheme."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._handlers.base import (
    Handler,
    check_fields,
    is_empty,
    row_slots,
    same_settings,
    token_count,
)
from prefixcache._handlers.turboquant import module_beside, state_slots, stored_states
from prefixcache._handlers.turboquant_codecs import codec_of
from prefixcache._layer_state import LayerState, MetaValue, Slot
from prefixcache.errors import Unsupported

_OWNERS = {"keys": "key_quantizer", "values": "value_quantizer"}
_FIELDS = frozenset({*_OWNERS, *_OWNERS.values(), "policy", "seed", "offset"})
_PARTS = ("codes", "scales", "biases")
_TURBO, _UNIFORM = "turboquant", "uniform"
_SPEC = {"scheme": str, "scheme_bits": int | float, "group_size": int}


class HybridQuantKVCacheHandler(Handler):
    """TurboQuant states, or codes with a scale and a bias for every group of a row.

    Arrays are joined anew at every append, spare rows and all: a rebuilt cache gets exactly n.
    """

    type_name: ClassVar[str] = "mlx_vlm.HybridQuantKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("HybridQuantKVCache", "KVCache")
    spare_rows: ClassVar[bool] = False

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        offset, meta = token_count(cache, where), _settings(cache, where)
        held = {owner: getattr(cache, owner) for owner in _OWNERS}
        if is_empty(held, offset, where):
            return LayerState(self.type_name, meta=meta, offset=0)
        slots: tuple[Slot, ...] = ()
        for step, (owner, quantizer) in enumerate(_OWNERS.items()):
            if meta[f"{owner}.scheme"] == _TURBO:
                live = getattr(cache, quantizer).codec
                codec = codec_of(live, sys.modules[type(cache).__module__], cache.seed + step, where)
                slots += state_slots(owner, held[owner], codec, offset, where)
                meta |= codec.meta(owner)
            else:
                slots += _uniform(owner, held[owner], meta, offset, where)
        return LayerState(self.type_name, slots, meta, offset=offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        module, meta = module_beside(prototype, where), _stored_settings(state.meta, where)
        if isinstance(prototype, module.HybridQuantKVCache):
            same_settings(LayerState(self.type_name, meta=meta), _settings(prototype, where), where)
        cache = module.HybridQuantKVCache(_policy(meta), meta["seed"])
        rest = state.arrays()
        for step, (owner, quantizer) in enumerate(_OWNERS.items() if rest else ()):
            arrays = {name: rest.pop(name) for name in list(rest) if name.startswith(f"{owner}.")}
            _check_exact(arrays, n, where)
            if meta[f"{owner}.scheme"] == _TURBO:
                slots = tuple(slot for slot in state.slots if slot.name in arrays)
                part = LayerState(state.type_name, slots, state.meta, state.children)
                ((value, codec),) = stored_states(part, module, meta["seed"] + step, n, where, (owner,))
                getattr(cache, quantizer).codec = codec
            elif list(arrays) != [f"{owner}.{part}" for part in _PARTS]:
                raise Unsupported("structure_mismatch", f"{where}: stored slots {list(arrays)} of {owner}")
            else:
                value = tuple(slot.data for slot in _uniform(owner, tuple(arrays.values()), meta, n, where))
            setattr(cache, owner, value)
            cache.offset = n
        if rest or state.children:
            raise Unsupported("structure_mismatch", f"{where}: stored slots {list(rest)} not expected")
        return cache


def _check_exact(arrays: Mapping[str, mx.array], n: int, where: str) -> None:
    for name, array in arrays.items():
        if array.ndim > 2 and array.shape[2] != n:
            raise ValueError(f"{where}: {name} must have exactly {n} rows, got shape {array.shape}")


def _uniform(owner: str, arrays: Any, meta: Mapping[str, Any], offset: int, where: str) -> tuple[Slot, ...]:
    if not isinstance(arrays, list | tuple) or len(arrays) != len(_PARTS):
        raise Unsupported("unsupported_type", f"{where}: {owner} must be a tuple of codes, scales and biases")
    slots = row_slots({f"{owner}.{part}": a for part, a in zip(_PARTS, arrays, strict=True)}, offset, where)
    codes, scales, biases = (slot.data for slot in slots)
    width = scales.shape[-1] * meta[f"{owner}.group_size"]
    if codes.shape[-1] * 32 != width * meta[f"{owner}.scheme_bits"] or biases.shape != scales.shape:
        raise ValueError(f"{where}: {owner} of shapes {codes.shape}, {scales.shape}, {biases.shape} do not fit {meta}")
    return slots


def _settings(cache: Any, where: str) -> dict[str, Any]:
    policy = cache.policy
    meta: dict[str, MetaValue] = {"bits": policy.bits, "seed": cache.seed}
    for owner, spec in (("keys", policy.key), ("values", policy.value)):
        meta |= {f"{owner}.{name}": getattr(spec, name.removeprefix("scheme_")) for name in _SPEC}
    return _stored_settings(meta, where)


def _stored_settings(meta: Mapping[str, MetaValue], where: str) -> dict[str, Any]:
    types: dict[str, Any] = {"bits": int | float, "seed": int}
    types |= {f"{owner}.{name}": kind for owner in _OWNERS for name, kind in _SPEC.items()}
    settings = {name: meta.get(name) for name in types}
    for name, value in settings.items():
        if not isinstance(value, types[name]) or isinstance(value, bool):
            raise ValueError(f"{where}: {name} must not be {value!r}")
        if name.endswith(".scheme") and value not in (_TURBO, _UNIFORM):
            raise Unsupported("unsupported_type", f"{where}: {name} {value!r} is not known")
    return settings


def _policy(meta: Mapping[str, Any]) -> Any:
    quant = importlib.import_module("mlx_vlm.kv_quant")
    specs = (quant.KVQuantSpec(*(meta[f"{owner}.{name}"] for name in _SPEC)) for owner in _OWNERS)
    return quant.KVQuantPolicy(meta["bits"], *specs)
