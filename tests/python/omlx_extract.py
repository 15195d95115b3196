"""Layer dicts as a scheduler of oMLX hands them over: made from live caches of both lines of mlx-lm, without the
package's own handlers. Rows are trimmed to those that count; ``meta_state`` is what mlx-lm 0.31 gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, QuantizedKVCache, RotatingKVCache

from prefixcache.hybrid_cache import ModelCacheConfig
from prefixcache.type_registry import CacheTypeRegistry

LayerDict = dict[str, Any]

# What a boundary need not be kept of: the rows of every block can be cut out of the whole afterwards.
SLICEABLE = {
    "KVCache",
    "BatchKVCache",
    "QuantizedKVCache",
    "TurboQuantKVCache",
    "BatchTurboQuantKVCache",
    "ChunkedKVCache",
    "MiniMaxM3KVCache",
}
LEFT_OUT: LayerDict = {"state": (), "meta_state": (), "class_name": "KVCache", "cache_type": "KVCache"}


def is_sliceable(cache: Any) -> bool:
    """A CacheList is if all that it holds is."""
    if isinstance(cache, CacheList):
        return all(is_sliceable(inner) for inner in cache.caches)
    return type(cache).__name__ in SLICEABLE


def is_stateful(caches: Sequence[Any]) -> bool:
    return not all(is_sliceable(cache) for cache in caches)


def layer_dict(cache: Any, raw: bool = False) -> LayerDict:
    """``raw``: the state as this mlx-lm has it. ValueError for a cache without rows."""
    state, meta = (cache.state, getattr(cache, "meta_state", ())) if raw else _state(cache)
    return {
        "state": state,
        "meta_state": meta,
        "class_name": type(cache).__name__,
        "cache_type": CacheTypeRegistry.detect_cache_type(cache).value,
    }


def _state(cache: Any) -> tuple[Any, Any]:
    if isinstance(cache, CacheList):
        pairs = [_state(inner) for inner in cache.caches]
        names = [type(inner).__name__ for inner in cache.caches]
        return [state for state, _ in pairs], (names, [meta for _, meta in pairs])
    if isinstance(cache, ArraysCache) or hasattr(cache, "cache"):
        return list(cache.cache), ()
    if cache.keys is None:
        raise ValueError("a cache without rows")
    if isinstance(cache, RotatingKVCache):
        return _ring(cache)
    if isinstance(cache, QuantizedKVCache):
        rows = tuple(tuple(_rows(x, cache.offset) for x in owner) for owner in (cache.keys, cache.values))
        return rows, _strings(cache.offset, cache.group_size, cache.bits)
    if isinstance(cache, ChunkedKVCache):
        count = cache.offset - cache.start_position
        rows = (_rows(cache.keys, count), _rows(cache.values, count))
        return rows, _strings(cache.chunk_size, cache.start_position)
    return (_rows(cache.keys, cache.offset), _rows(cache.values, cache.offset)), ()


def _ring(cache: Any) -> tuple[Any, Any]:
    """In temporal order and cut to its window, unless it is of a class of which the scheduler has not heard."""
    if type(cache).__name__ != "RotatingKVCache":
        rows = (_rows(cache.keys, cache.offset), _rows(cache.values, cache.offset))
        return rows, _strings(cache.keep, cache.max_size, cache.offset, cache._idx)
    ordered = [cache._temporal_order(rows) for rows in (cache.keys, cache.values)]
    surplus = ordered[0].shape[2] - cache.max_size
    if surplus > 0:
        ordered = [
            mx.concatenate([rows[..., : cache.keep, :], rows[..., cache.keep + surplus :, :]], axis=2)
            for rows in ordered
        ]
    return tuple(ordered), _strings(cache.keep, cache.max_size, cache.offset, ordered[0].shape[2])


def _rows(array: mx.array, count: int) -> mx.array:
    """A new array object in any case: caches change theirs in place."""
    return array[..., :count, :] if count < array.shape[-2] else mx.array(array)


def _strings(*numbers: int) -> tuple[str, ...]:
    return tuple(str(number) for number in numbers)


def extract(
    caches: Sequence[Any], model_name: str = "", raw: bool = False
) -> tuple[list[LayerDict], ModelCacheConfig | None]:
    """All layers, or none if one of them cannot be extracted."""
    try:
        found = [layer_dict(cache, raw) for cache in caches]
    except ValueError:
        return [], None
    return found, ModelCacheConfig.from_cache_list(list(caches), model_name)


def extract_boundary(caches: Sequence[Any], raw: bool = False) -> tuple[list[LayerDict], None]:
    """``None`` stands for a layer whose rows are taken from the whole cache later."""
    return [dict(LEFT_OUT) if cache is None else layer_dict(cache, raw) for cache in caches], None


def evaluate(layers: Sequence[LayerDict]) -> None:
    """All arrays at once: another thread may read them afterwards."""
    mx.eval([leaf for _, leaf in tree_flatten([layer["state"] for layer in layers]) if isinstance(leaf, mx.array)])


def merged(boundary: Sequence[LayerDict], whole: Sequence[LayerDict]) -> list[LayerDict]:
    """The layers at a boundary; those that were left out, from the whole cache."""
    if len(boundary) != len(whole):
        return list(boundary)
    return [
        theirs if isinstance(own["state"], tuple) and own["state"] == () else own
        for own, theirs in zip(boundary, whole, strict=True)
    ]
