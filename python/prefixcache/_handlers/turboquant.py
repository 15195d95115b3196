"""TurboQuant in mlx-vlm: rows as norms and packed codes, in named tuples that may hold one another."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._handlers.base import Handler, check_enough, check_fields, is_empty, several_sequences, token_count
from prefixcache._handlers.turboquant_codecs import Codec, codec_of
from prefixcache._layer_state import ALL, LayerState, Slot
from prefixcache.errors import Unsupported

_OWNERS = {"keys": "key_codec", "values": "value_codec"}
_BITS = ("bits", "key_bits", "value_bits")
_UNUSED = ("_shadow_keys", "_shadow_values")
_FIELDS = frozenset(
    {*_OWNERS, *_OWNERS.values(), *_BITS, *_UNUSED, "seed", "offset", "_cached_state", "_cached_state_offset"}
)


class TurboQuantKVCacheHandler(Handler):
    """Slots are named by their path and their codec, such as ``keys.low.norms.1f3a90b2``; their token axis is 2."""

    type_name: ClassVar[str] = "mlx_vlm.TurboQuantKVCache"
    prototypes: ClassVar[tuple[str, ...]] = ("TurboQuantKVCache", "KVCache")

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, _FIELDS, where)
        if any(getattr(cache, name) is not None for name in _UNUSED):
            raise Unsupported("unknown_field", f"{where}: {' or '.join(_UNUSED)} is set")
        offset, meta = token_count(cache, where), _settings(vars(cache), where)
        held = {name: getattr(cache, name) for owner in _OWNERS.items() for name in owner}
        if is_empty(held, offset, where):
            return LayerState(self.type_name, meta=meta, offset=0)
        slots: tuple[Slot, ...] = ()
        for step, (owner, codec_name) in enumerate(_OWNERS.items()):
            codec = codec_of(held[codec_name], sys.modules[type(cache).__module__], cache.seed + step, where)
            slots += state_slots(owner, held[owner], codec, offset, where)
            meta |= codec.meta(owner)
        return LayerState(self.type_name, slots, meta, offset=offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        module, settings = module_beside(prototype, where), _settings(state.meta, where)
        if isinstance(prototype, module.TurboQuantKVCache):
            own = _settings(vars(prototype), where)
            if own != settings:
                raise Unsupported("structure_mismatch", f"{where}: stored with {settings}, the model uses {own}")
        cache = module.TurboQuantKVCache(**settings)
        if state.slots:
            restored = stored_states(state, module, settings["seed"], n, where)
            for (owner, codec_name), (value, codec) in zip(_OWNERS.items(), restored, strict=True):
                setattr(cache, owner, value)
                setattr(cache, codec_name, codec)
            cache.offset = n
        return cache


def _settings(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    settings = {name: values.get(name) for name in (*_BITS, "seed")}
    for name, value in settings.items():
        if not isinstance(value, int if name == "seed" else int | float) or isinstance(value, bool):
            raise ValueError(f"{where}: {name} must be a number, got {value!r}")
    return settings


def module_beside(prototype: Any, where: str) -> Any:
    """mlx-vlm's module of quantised caches, for a prototype that comes from mlx-vlm itself."""
    module = type(prototype).__module__
    if module.partition(".")[0] != "mlx_vlm":
        raise Unsupported("structure_mismatch", f"{where}: {module} has no TurboQuant caches")
    return importlib.import_module("mlx_vlm.turboquant")


def state_slots(owner: str, state: Any, codec: Codec, offset: int, where: str) -> tuple[Slot, ...]:
    """The slots of a live state. ``Unsupported`` for one that its codec would not make."""
    arrays = dict(_leaves(owner, state, where))
    _check(owner, arrays, codec, offset, "unsupported_type", where)
    return tuple(Slot(f"{name}.{codec.tag}", array, 2, ALL) for name, array in arrays.items())


def stored_states(
    state: LayerState, module: Any, seed: int, n: int, where: str, owners: tuple[str, ...] = tuple(_OWNERS)
) -> list[tuple[Any, Any]]:
    """For each owner its state and its codec, made anew from ``seed``, ``seed + 1``."""
    restored, rest = [], state.arrays()
    if state.children:
        raise Unsupported("structure_mismatch", f"{where}: stored with {len(state.children)} children")
    for step, owner in enumerate(owners):
        codec = Codec.from_meta(state.meta, owner, where)
        ours = [name for name in rest if name.startswith(f"{owner}.") and name.endswith(f".{codec.tag}")]
        arrays = {name.removesuffix(f".{codec.tag}"): rest.pop(name) for name in ours}
        _check(owner, arrays, codec, n, "structure_mismatch", where)
        by_path = {name[len(owner) + 1 :]: array for name, array in arrays.items()}
        restored.append((codec.state(module, by_path), codec.make(module, seed + step, where)))
    if rest:
        raise Unsupported("structure_mismatch", f"{where}: stored slots {list(rest)} not expected")
    return restored


def _leaves(path: str, value: Any, where: str) -> Iterator[tuple[str, mx.array]]:
    if isinstance(value, mx.array):
        yield path, value
    elif isinstance(value, tuple):
        names = getattr(type(value), "_fields", range(len(value)))
        for name, item in zip(names, value, strict=True):
            yield from _leaves(f"{path}.{name}", item, where)
    else:
        raise Unsupported("unsupported_type", f"{where}: {path} must be an mx.array, not {type(value).__name__}")


def _check(owner: str, arrays: Mapping[str, mx.array], codec: Codec, offset: int, reason: str, where: str) -> None:
    expected = {f"{owner}.{path}": width for path, width in codec.leaves().items()}
    if list(arrays) != list(expected):
        raise Unsupported(reason, f"{where}: arrays {list(arrays)}, a codec {codec.kind} makes {list(expected)}")
    shapes = {name: array.shape for name, array in arrays.items()}
    for name, width in expected.items():
        shape = shapes[name]
        if len(shape) != (3 if width is None else 4) or width not in (None, shape[-1]):
            raise ValueError(f"{where}: {name} of shape {shape} does not fit {codec.bits} bits of {codec.dim}")
        if shape[0] != 1:
            raise several_sequences(f"{name} holds {shape[0]} sequences, shape {shape}", where)
    rows = {shape[2] for shape in shapes.values()}
    if len(rows) > 1:
        raise ValueError(f"{where}: arrays of different lengths: {shapes}")
    check_enough(rows.pop(), offset, offset, where)
