"""Layer dicts, which schedulers hand over and get, to live cache objects and back.

A layer dict is ``{"state", "meta_state", "class_name", "cache_type"}``, and of our own, all optional:
``"token_count"`` (the state is that of so many tokens), ``"codecs"`` (TurboQuant: what makes the codecs again) and
``"sub_extras"`` (these two for each cache of a ``CacheList``).

Arrays are shared, nothing is evaluated or copied. Functions are safe from every thread that may use the arrays; caches
themselves belong to one thread at a time.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from prefixcache._handlers.turboquant_codecs import codec_of
from prefixcache._omlx import turboquant_states
from prefixcache._omlx.cache_types import canonical, type_value
from prefixcache._omlx.live_layers import bare, live_cache, meta_tuple, sub_layers
from prefixcache._omlx.sized_arrays import SizedArraysCache
from prefixcache.errors import Unsupported

__all__ = [
    "bare",
    "layer_dict",
    "live_caches",
    "omlx_form",
    "sub_layers",
    "undressed",
    "with_offset",
    "wrap_restored",
    "write_state",
]

# What stands at a token, besides rows, is known of these only.
_MOVABLE = frozenset(
    {
        "KVCache",
        "ConcatenateKVCache",
        "SimpleKVCache",
        "HyV4KVCache",
        "QuantizedKVCache",
        "TurboQuantKVCache",
        "MiniMaxM3KVCache",
        "RotatingKVCache",
        "ChunkedKVCache",
    }
)
_EXTRAS = ("token_count", "codecs", "sub_extras")


def live_caches(layers: Sequence[Mapping[str, Any]], prototypes: Sequence[Any] | None = None) -> list[Any]:
    """Live caches, ready for ``describe_layers``, from one layer dict each.

    States may have the form of any supported mlx-lm or mlx-vlm, or of a stored tuple. ``prototypes``: the model's own
    fresh caches, if known; each gives the class where the names agree, and settings that a state does not say. The
    offset in a plain cache's meta state is not read: its rows count. ``Unsupported`` or another ValueError names the
    layer that is not understood; nothing else is raised.
    """
    if not isinstance(layers, list | tuple):
        raise ValueError(f"expected a list with one dict per layer, got {type(layers).__name__}")
    if prototypes is not None and len(prototypes) != len(layers):
        raise ValueError(f"{len(layers)} layers, the model has {len(prototypes)}")
    own = [None] * len(layers) if prototypes is None else prototypes
    return [live_cache(layer, own[i], f"layer {i}") for i, layer in enumerate(layers)]


def omlx_form(layer: Mapping[str, Any], prototype: Any = None) -> dict[str, Any]:
    """The same layer with its state and meta state in the form of ``layer_dict``, whatever form they have now.

    A layer that is not understood, such as one with stand-ins for arrays, comes back as it is.
    """
    try:
        form = layer_dict(live_cache(layer, prototype, "layer"))
    except ValueError:
        return dict(layer)
    return {**form, **layer, "state": form["state"], "meta_state": form["meta_state"]}


def with_offset(cache: Any, n: int) -> Any:
    """The same rows as a cache that stands at ``n`` tokens: the cache itself, or a shallow copy with its own offset.

    A cache that does not count tokens is returned as it is: only the caller knows whether its state is that of n.
    ``Unsupported`` if it holds fewer rows or what it needs at n is gone; ValueError for a negative n.
    """
    if n < 0:
        raise ValueError(f"a token count must not be negative, got {n}")
    cache = bare(cache)
    children = getattr(cache, "caches", None)
    if isinstance(children, list | tuple):
        moved = [with_offset(child, n) for child in children]
        return cache if all(a is b for a, b in zip(moved, children, strict=True)) else type(cache)(*moved)
    name = "cache_length" if hasattr(cache, "cache_length") else "offset"
    at = getattr(cache, name, None)
    # A pool's ``offset`` counts pooled rows.
    if at is None or canonical(type(cache).__name__) in ("ArraysCache", "PoolingCache") or at == n or _is_empty(cache):
        return cache
    if not isinstance(at, int) or n > at or canonical(type(cache).__name__) not in _MOVABLE:
        raise Unsupported("structure_mismatch", f"{type(cache).__name__} stands at {at}, asked for {n} tokens")
    return _moved(cache, name, at, n)


def _moved(cache: Any, name: str, at: int, n: int) -> Any:
    shorter = copy.copy(cache)
    if hasattr(cache, "kv_cache"):
        shorter.kv_cache = copy.copy(cache.kv_cache)
        shorter.kv_cache.offset = n
        shorter.index_offset = min(cache.index_offset, n)
        return shorter
    if hasattr(cache, "_idx"):
        if cache._idx != at:
            raise Unsupported("structure_mismatch", f"{type(cache).__name__}: rows before token {n} are gone")
        # Behind its end such a cache has no rows.
        shorter._idx, shorter.keys, shorter.values = n, _cut(cache.keys, n), _cut(cache.values, n)
    if getattr(cache, "start_position", 0) > n:
        raise Unsupported("structure_mismatch", f"{type(cache).__name__}: rows before token {n} are gone")
    setattr(shorter, name, n)
    return shorter


def _is_empty(cache: Any) -> bool:
    holder = getattr(cache, "kv_cache", cache)
    return getattr(holder, "keys", None) is None


def layer_dict(cache: Any) -> dict[str, Any]:
    """The layer dict of a live cache, in oMLX's form on either line of mlx-lm: states cut to the rows that count, a
    window in temporal order and at most ``max_size`` rows, with four strings as its meta state.

    ``Unsupported`` for a TurboQuant codec that cannot be made again; ValueError for a cache without a state.
    """
    name = type(cache).__name__
    inner = bare(cache)
    write = _WRITERS.get(canonical(name), _any_state)
    try:
        state, meta, extras = write(inner)
    except (AttributeError, TypeError, IndexError) as error:
        raise ValueError(f"{name} has no state to hand over: {error}") from None
    return {"state": state, "meta_state": meta, "class_name": name, "cache_type": type_value(name), **extras}


def write_state(class_name: str, cache: Any) -> tuple[Any, Any]:
    """State and meta state of a live cache as those of this class. AttributeError, TypeError or IndexError if it is
    not like one."""
    return _WRITERS[class_name](cache)[:2]


_Written = tuple[Any, Any, dict[str, Any]]


def _cut(array: mx.array, count: int) -> mx.array:
    return array if count >= array.shape[-2] else array[..., :count, :]


def _plain_state(cache: Any) -> _Written:
    if cache.keys is None:
        return (), (), {}
    count = getattr(cache, "cache_length", None)
    count = cache.offset if count is None else count
    return (_cut(cache.keys, count), _cut(cache.values, count)), (count,), {}


def _window_state(cache: Any) -> _Written:
    if cache.keys is None:
        return (), tuple(map(str, (cache.keep, cache.max_size, cache.offset, cache._idx))), {}
    state = tuple(temporal(array, cache) for array in (cache.keys, cache.values))
    meta = (cache.keep, cache.max_size, cache.offset, state[0].shape[-2])
    return state, tuple(map(str, meta)), {}


def temporal(array: mx.array, cache: Any) -> mx.array:
    """The rows of a rotating cache's keys or values, oldest first behind the kept ones, at most ``max_size``."""
    keep, end, rows = cache.keep, cache._idx, array.shape[-2]
    if end < min(cache.offset, rows):
        array = mx.concatenate([array[..., :keep, :], array[..., end:, :], array[..., keep:end, :]], axis=-2)
    elif end < rows:
        array = array[..., :end, :]
    return newest(array, cache.max_size, keep)


def newest(array: mx.array, max_size: int, keep: int) -> mx.array:
    """The first ``keep`` and the last rows of an array in temporal order, at most ``max_size`` in all."""
    excess = array.shape[-2] - max_size
    if excess <= 0:
        return array
    if keep == 0:
        return array[..., excess:, :]
    return mx.concatenate([array[..., :keep, :], array[..., keep + excess :, :]], axis=-2)


def _whole_state(cache: Any) -> _Written:
    return list(cache.cache), (), {}


def _list_state(cache: Any) -> _Written:
    children = [layer_dict(child) for child in cache.caches]
    metas = ([child["class_name"] for child in children], [child["meta_state"] for child in children])
    found = [{key: child[key] for key in _EXTRAS if key in child} for child in children]
    return [child["state"] for child in children], metas, {"sub_extras": found} if any(found) else {}


def _quantised_state(cache: Any) -> _Written:
    meta = tuple(map(str, (cache.offset, cache.group_size, cache.bits)))
    if cache.keys is None:
        return (), meta, {}
    pair = tuple(tuple(_cut(array, cache.offset) for array in owner) for owner in (cache.keys, cache.values))
    return pair, meta, {}


def _chunk_state(cache: Any) -> _Written:
    meta = tuple(map(str, (cache.chunk_size, cache.start_position)))
    if cache.keys is None:
        return (), meta, {}
    held = cache.offset - cache.start_position
    return (_cut(cache.keys, held), _cut(cache.values, held)), meta, {"token_count": cache.offset}


def _indexed_state(cache: Any) -> _Written:
    inner, index = cache.kv_cache, cache.index_keys
    if inner.keys is None:
        return (), (cache.index_offset,), {}
    pair = _cut(inner.keys, inner.offset), _cut(inner.values, inner.offset)
    return (*pair, None if index is None else _cut(index, cache.index_offset)), (cache.index_offset,), {}


def _turboquant_state(cache: Any) -> _Written:
    meta = meta_tuple(cache.meta_state)
    if cache.keys is None:
        return (), meta, {}
    codecs: dict[str, Any] = {}
    for step, owner in enumerate(("keys", "values")):
        live = getattr(cache, f"{owner[:-1]}_codec")
        codecs |= codec_of(live, sys.modules[type(cache).__module__], cache.seed + step, owner).meta(owner)
    pair = tuple(turboquant_states.sliced(getattr(cache, owner), 0, cache.offset) for owner in ("keys", "values"))
    return pair, meta, {"codecs": codecs}


def _any_state(cache: Any) -> _Written:
    # As it is: only the class itself knows what it reads.
    return cache.state, getattr(cache, "meta_state", ()), {}


_WRITERS: dict[str, Callable[[Any], _Written]] = {
    "KVCache": _plain_state,
    "ConcatenateKVCache": _plain_state,
    "SimpleKVCache": _plain_state,
    "HyV4KVCache": _plain_state,
    "RotatingKVCache": _window_state,
    "ArraysCache": _whole_state,
    "CacheList": _list_state,
    "QuantizedKVCache": _quantised_state,
    "ChunkedKVCache": _chunk_state,
    "MiniMaxM3KVCache": _indexed_state,
    "TurboQuantKVCache": _turboquant_state,
}


def wrap_restored(caches: Sequence[Any], n: int) -> list[Any]:
    """What oMLX's callers get of restored caches that stand at ``n`` tokens: windows that know their rows, whole
    arrays that know their token count. Inside a ``CacheList`` whole arrays stay bare. Arrays are shared."""
    return [SizedArraysCache(bare(one), n) if _is_whole(one) else ready(one) for one in caches]


def undressed(cache: Any) -> Any:
    """The inverse of ``wrap_restored`` for one cache: plain classes, which ``describe_layers`` knows."""
    cache = bare(cache)
    children = getattr(cache, "caches", None)
    if isinstance(children, list | tuple):
        return type(cache)(*(undressed(child) for child in children))
    if type(cache).__name__ != "PrefillReadyRotatingKVCache":
        return cache
    return _window_like(type(cache).__mro__[1], cache)


def _is_whole(cache: Any) -> bool:
    return canonical(type(cache).__name__) == "ArraysCache"


def ready(cache: Any) -> Any:
    """The cache with its windows as ``PrefillReadyRotatingKVCache``, also inside a ``CacheList``.

    mlx-vlm's windows stay what they are: its models and batches know their own class.
    """
    children = getattr(cache, "caches", None)
    if isinstance(children, list | tuple):
        return type(cache)(*(bare(ready(child)) for child in children))
    if (type(cache).__module__, type(cache).__name__) != ("mlx_lm.models.cache", "RotatingKVCache"):
        return cache
    from prefixcache._rotating_subclass import PrefillReadyRotatingKVCache

    return _window_like(PrefillReadyRotatingKVCache, cache)


def _window_like(kind: Any, cache: Any) -> Any:
    window = kind(cache.max_size, cache.keep)
    window.keys, window.values, window.offset, window._idx = cache.keys, cache.values, cache.offset, cache._idx
    return window
