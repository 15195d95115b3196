"""From the state of one layer, in any of the forms that callers hand over, to a live cache object.

Arrays are shared, nothing is evaluated. Callers see ``ValueError``, ``Unsupported`` among it, and nothing else.
"""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from prefixcache._omlx import turboquant_states
from prefixcache._omlx.cache_types import canonical
from prefixcache._omlx.sized_arrays import SizedArraysCache
from prefixcache._registry import handler_for, registered
from prefixcache.errors import Unsupported

_MLX_LM = "mlx_lm.models.cache"
# Batches are not stored, but have handlers of their own.
_BATCHES = {
    "MiniMaxM3BatchKVCache": "mlx_vlm.models.minimax_m3_vl.language",
    "BatchPoolingCache": "mlx_vlm.models.cache",
}
_NOT_ALL_IN_STATE = frozenset({"LayerCache", "HybridQuantKVCache", "DeepseekV41Cache"})


@dataclass(frozen=True)
class Layer:
    """What is known of one layer. ``meta``: as a tuple. ``count``: its number of tokens, if its maker said so."""

    where: str
    kind: Any
    state: Any
    meta: tuple[Any, ...]
    prototype: Any
    count: int | None
    source: Mapping[str, Any]

    def elements(self) -> tuple[Any, ...]:
        """The elements of the state; () for a state of Nones and numbers alone: a cache that holds nothing."""
        if self.state is None:
            return ()
        if not isinstance(self.state, list | tuple):
            raise self.bad(f"expected a tuple or a list as its state, got {type(self.state).__name__}")
        held = any(not isinstance(item, int | float | None) for item in self.state)
        return tuple(self.state) if held else ()

    def setting(self, name: str, place: int, told: Sequence[Any]) -> int:
        """A setting: element ``place`` of ``told`` if there is one, else the model's own cache's."""
        if len(told) > place:
            return self.number(told[place], name)
        if self.prototype is not None and hasattr(self.prototype, name):
            return self.number(getattr(self.prototype, name), name)
        raise self.bad(f"{name} is not known")

    def number(self, value: Any, name: str) -> int:
        try:
            return int(value)
        except (TypeError, ValueError):
            raise self.bad(f"{name} must be a whole number, got {value!r:.40}") from None

    def rows(self, *arrays: Any) -> int:
        """The rows of arrays ``[..., rows, dim]``, the fewest of all."""
        for array in arrays:
            if not isinstance(array, mx.array) or array.ndim < 2:
                raise self.bad(f"expected arrays with rows, got {type(array).__name__}")
        counts: list[int] = [array.shape[-2] for array in arrays]
        return min(counts)

    def bad(self, what: str) -> ValueError:
        return ValueError(f"{self.where}: {what}")


def class_named(name: str, prototype: Any, where: str) -> Any:
    """The prototype's class if it has this (canonical) name, else mlx-lm's, else the registered one of this name."""
    if prototype is not None and type(prototype).__name__ == name:
        return type(prototype)
    if not name.isidentifier():
        raise Unsupported("unsupported_type", f"{where}: {name!r:.40} is no name of a class")
    modules = [_MLX_LM, *(module for module, known in registered() if known == name)]
    modules += [_BATCHES[name]] if name in _BATCHES else []
    for module in dict.fromkeys(modules):
        try:
            found = pkgutil.resolve_name(f"{module}:{name}")
        except (ImportError, AttributeError, ValueError, OSError, RuntimeError):
            continue
        if isinstance(found, type):
            return found
    raise Unsupported("unsupported_type", f"{where}: no cache class is named {name!r}")


def bare(cache: Any) -> Any:
    """The cache inside a ``SizedArraysCache``, or the cache itself."""
    return cache._inner if isinstance(cache, SizedArraysCache) else cache


def live_cache(layer: Mapping[str, Any], prototype: Any, where: str) -> Any:
    """A live cache of one layer. ``Unsupported`` or ValueError, with ``where`` in it, if it is not understood."""
    if not isinstance(layer, Mapping):
        raise ValueError(f"{where}: expected a dict with a state, got {type(layer).__name__}")
    prototype = bare(prototype)
    given = layer.get("class_name") or layer.get("cache_type") or (type(prototype).__name__ if prototype else None)
    if not isinstance(given, str):
        raise ValueError(f"{where}: class_name must be a string, got {given!r:.40}")
    name = canonical(given)
    where = f"{where} ({name})"
    if prototype is not None and canonical(type(prototype).__name__) != name:
        prototype = None
    count = layer.get("token_count")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise ValueError(f"{where}: token_count must be a whole number, got {count!r:.40}")
    kind = class_named(name, prototype, where)
    known = Layer(where, kind, layer.get("state"), meta_tuple(layer.get("meta_state")), prototype, count, layer)
    try:
        return _BUILDERS.get(name, _any_class)(known)
    except Unsupported:
        raise
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, ImportError) as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {error!r:.200}") from None


def meta_tuple(meta: Any) -> tuple[Any, ...]:
    """A meta state as a tuple: nothing gives (), a single value a tuple of one."""
    if meta is None or (isinstance(meta, str) and not meta):
        return ()
    return tuple(meta) if isinstance(meta, list | tuple) else (meta,)


def _plain(layer: Layer) -> Any:
    cache, elements = layer.kind(), layer.elements()
    if not elements:
        return cache
    keys, values, *rest = elements
    rows = layer.rows(keys, values)
    if len(rest) > 1:
        raise layer.bad(f"expected keys, values and an offset, got {len(elements)} elements")
    cache.keys, cache.values = keys, values
    # The offset of a meta state may be that of a longer run. Where it is smaller, padding stands behind the rows.
    told = [int(value) for value in layer.meta[:1] if isinstance(value, str | int) and str(value).isdecimal()]
    count = layer.number(rest[0], "offset") if rest else min([rows, *(value for value in told if value > 0)])
    setattr(cache, "cache_length" if hasattr(cache, "cache_length") else "offset", count)
    return cache


def _rotating(layer: Layer) -> Any:
    elements = layer.elements()
    # mlx-lm 0.32 has all in the state: offset, keep, max_size, _idx.
    inside = list(layer.state[2:]) if isinstance(layer.state, list | tuple) and len(layer.state) == 6 else []
    told = [inside[1], inside[2], inside[0], inside[3]] if inside else list(layer.meta)
    if told and len(told) != 4:
        raise layer.bad(f"expected keep, max_size, offset and _idx, got {told!r:.80}")
    cache = layer.kind(layer.setting("max_size", 1, told), layer.setting("keep", 0, told))
    if not elements:
        return cache
    keys, values = elements[:2]
    rows = layer.rows(keys, values)
    cache.keys, cache.values = keys, values
    if told:
        cache.offset = layer.number(told[2], "offset")
        # A meta state that blocks share may count more rows than this block has.
        end = layer.number(told[3], "_idx")
        cache._idx = end if inside else min(end, rows)
    elif layer.count is not None or rows < cache.max_size:
        cache.offset, cache._idx = rows if layer.count is None else layer.count, rows
    else:
        raise layer.bad("a full window without its offset")
    return cache


def _arrays(layer: Layer) -> Any:
    state, padding, lengths = layer.state, None, None
    if isinstance(state, list | tuple) and len(state) == 3 and isinstance(state[0], list | tuple):
        state, padding, lengths = state
    if state is None:
        state = ()
    if not isinstance(state, list | tuple) or any(not isinstance(item, mx.array | None) for item in state):
        raise layer.bad("expected a list of arrays as its state")
    size = len(state) or len(layer.prototype.cache if layer.prototype is not None else ())
    cache = layer.kind(size)
    if state:
        cache.cache = list(state)
    if padding is not None:
        cache.left_padding = padding
    if lengths is not None:
        cache.lengths = lengths
    return cache


def _list(layer: Layer) -> Any:
    children = sub_layers(layer.source, layer.prototype, layer.where)
    models = [None] * len(children) if layer.prototype is None else list(layer.prototype.caches)
    if len(models) != len(children):
        raise layer.bad(f"{len(children)} caches, the model's own has {len(models)}")
    pairs = enumerate(zip(children, models, strict=True))
    return layer.kind(*(live_cache(child, model, f"{layer.where}, cache {i}") for i, (child, model) in pairs))


def sub_layers(layer: Mapping[str, Any], prototype: Any, where: str) -> list[dict[str, Any]]:
    """The layer dicts inside that of a ``CacheList``. ValueError if the classes of its caches are not known."""
    states, metas = layer.get("state"), meta_tuple(layer.get("meta_state"))
    if states is None:
        states = ()
    if not isinstance(states, list | tuple):
        raise ValueError(f"{where}: expected a list of states, got {type(states).__name__}")
    pairs = [item for item in states if isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[1], str)]
    if states and len(pairs) == len(states):
        return [{"state": state, "class_name": name} for state, name in pairs]
    names = metas[0] if len(metas) == 2 and isinstance(metas[0], list | tuple) else layer.get("sub_class_names")
    if not states:
        names = ()
    elif names is None and prototype is not None:
        names = [type(bare(child)).__name__ for child in prototype.caches]
    inner = metas[1] if len(metas) == 2 and isinstance(metas[1], list | tuple) else [()] * len(states)
    if not isinstance(names, list | tuple) or not len(names) == len(inner) == len(states):
        raise ValueError(f"{where}: {len(states)} states without as many class names and meta states")
    found = [
        {"state": state, "meta_state": meta, "class_name": name}
        for state, meta, name in zip(states, inner, names, strict=True)
    ]
    # What our own layer dicts say beside the metas.
    extras = layer.get("sub_extras")
    if isinstance(extras, list | tuple) and len(extras) == len(found):
        found = [{**extra, **one} for extra, one in zip(extras, found, strict=True)]
    counted = {"token_count": layer["token_count"]} if layer.get("token_count") is not None else {}
    return [{**counted, **one} for one in found]


def _quantised(layer: Layer) -> Any:
    elements = layer.elements()
    in_state = isinstance(layer.state, list | tuple) and len(layer.state) == 5
    told = list(layer.state[2:]) if in_state else list(layer.meta)
    cache = layer.kind(layer.setting("group_size", 1, told), layer.setting("bits", 2, told))
    if not elements:
        return cache
    parts = elements if len(elements) == 6 else (*_triple(layer, elements[0]), *_triple(layer, elements[1]))
    rows = layer.rows(*parts)
    cache.keys, cache.values = tuple(parts[:3]), tuple(parts[3:])
    cache.offset = layer.number(told[0], "offset") if in_state else rows
    return cache


def _triple(layer: Layer, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise layer.bad("expected codes, scales and biases")
    return tuple(value)


def _chunked(layer: Layer) -> Any:
    elements = layer.elements()
    in_state = isinstance(layer.state, list | tuple) and len(layer.state) == 5
    told = list(layer.state[3:]) if in_state else list(layer.meta)
    cache = layer.kind(layer.setting("chunk_size", 0, told))
    if not elements:
        return cache
    keys, values = elements[:2]
    rows = layer.rows(keys, values)
    cache.keys, cache.values = keys, values
    cache.start_position = layer.number(told[1], "start_position") if len(told) > 1 else 0
    if in_state:
        cache.offset = layer.number(elements[2], "offset")
    elif layer.count is not None:
        cache.offset = layer.count
    elif cache.start_position == 0:
        cache.offset = rows
    else:
        # mlx-lm 0.31 leaves padding behind the rows of such a state and says nowhere how much.
        raise Unsupported("unsupported_type", f"{layer.where}: chunks behind a cut front without a token_count")
    return cache


def _minimax(layer: Layer) -> Any:
    cache, elements = layer.kind(), layer.elements()
    if not elements:
        return cache
    if elements[0] is None or isinstance(elements[0], list | tuple):
        inner, index = elements if len(elements) == 2 else (elements[0], None)
        pair = () if inner is None or inner[0] is None else tuple(inner)
    else:
        pair, index = elements[:2], elements[2] if len(elements) > 2 else None
    if pair:
        rows = layer.rows(pair[0], pair[1])
        count = layer.number(pair[2], "offset") if len(pair) > 2 else rows
        set_rows(cache.kv_cache, pair[0], pair[1], count)
    if index is not None:
        cache.index_keys, cache.index_offset = index, layer.rows(index)
    return cache


def set_rows(cache: Any, keys: mx.array, values: mx.array, count: int) -> None:
    """Lets a plain cache stand at ``count`` tokens of these rows, on either line of mlx-lm and in stand-ins."""
    if hasattr(cache, "keys") and hasattr(cache, "offset"):
        cache.keys, cache.values, cache.offset = keys, values, count
    else:
        cache.state = (keys, values)


def _pooling(layer: Layer) -> Any:
    ratio = layer.setting("ratio", 0, layer.meta)
    cache, elements = layer.kind(ratio), layer.elements()
    if not elements:
        return cache
    buffered, gates, *pooled = elements
    if buffered is not None:
        if layer.rows(buffered, gates) >= ratio:
            raise layer.bad(f"{layer.rows(buffered)} rows are pending of a ratio of {ratio}")
        # Pads them to a buffer of ``ratio`` rows.
        cache.accumulate_windows(buffered, gates, 0)
    if pooled and pooled[0] is not None:
        layer.rows(pooled[0])
        cache.pooled = pooled[0]
    return cache


def _turboquant(layer: Layer) -> Any:
    elements = layer.elements()
    if not elements:
        return turboquant_states.empty(layer.kind, layer.meta)
    codecs = layer.source.get("codecs")
    if codecs is not None and not isinstance(codecs, Mapping):
        raise layer.bad("codecs must be a dict")
    return turboquant_states.rebuilt(elements[0], elements[1], layer.meta, codecs=codecs)


def _any_class(layer: Layer) -> Any:
    """A class that only the registry knows: a fresh cache of the model's takes the state, else the class makes one."""
    if layer.kind.__name__ in _NOT_ALL_IN_STATE:
        raise Unsupported("unsupported_type", f"{layer.where}: its state does not say all that it holds")
    meta = layer.source.get("meta_state")
    if layer.prototype is not None:
        cache = copy.copy(layer.prototype)
        if layer.elements():
            cache.state = layer.state
            if meta and hasattr(cache, "meta_state"):
                cache.meta_state = meta
    else:
        told = (meta,) if hasattr(layer.kind, "meta_state") else ()
        cache = layer.kind.from_state(layer.state, *told)
    # The class took it; whether it is sound shows here.
    handler_for(cache, layer.where).describe(cache, layer.where)
    return cache


_BUILDERS: dict[str, Callable[[Layer], Any]] = {
    "KVCache": _plain,
    "ConcatenateKVCache": _plain,
    "SimpleKVCache": _plain,
    "HyV4KVCache": _plain,
    "RotatingKVCache": _rotating,
    "ArraysCache": _arrays,
    "CacheList": _list,
    "QuantizedKVCache": _quantised,
    "ChunkedKVCache": _chunked,
    "MiniMaxM3KVCache": _minimax,
    "PoolingCache": _pooling,
    "TurboQuantKVCache": _turboquant,
}
