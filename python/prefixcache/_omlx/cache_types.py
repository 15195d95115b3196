"""The names of cache classes that schedulers hand over, and the kind of cache each of them means.

Constants only: safe from every thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class CacheType(Enum):
    """A kind of cache; the value is the name of its class."""

    KVCACHE = "KVCache"
    ROTATING_KVCACHE = "RotatingKVCache"
    BATCH_KVCACHE = "BatchKVCache"
    BATCH_ROTATING_KVCACHE = "BatchRotatingKVCache"
    ARRAYS_CACHE = "ArraysCache"
    QUANTIZED_KVCACHE = "QuantizedKVCache"
    CACHE_LIST = "CacheList"
    POOLING_CACHE = "PoolingCache"
    BATCH_POOLING_CACHE = "BatchPoolingCache"
    MINIMAX_M3_KVCACHE = "MiniMaxM3KVCache"
    MINIMAX_M3_BATCH_KVCACHE = "MiniMaxM3BatchKVCache"
    # Not among oMLX's: it takes both for plain rows.
    CHUNKED_KVCACHE = "ChunkedKVCache"
    CONCATENATE_KVCACHE = "ConcatenateKVCache"


@dataclass
class CacheStateInfo:
    """What a handler stores of a cache. ``supports_block_slicing``: rows of any range of tokens can be cut out."""

    cache_type: str
    state_keys: tuple[str, ...]
    meta_state_keys: tuple[str, ...]
    supports_block_slicing: bool
    is_full_state: bool = False


@dataclass
class CacheStateAxisInfo:
    """One element of a state. ``sequence_axis``: the axis with one row a token, None if there is none."""

    name: str
    sequence_axis: int | None
    sliceable: bool


# Classes that only dress another one: what is stored of them is that other one's.
_DRESSED = {"SizedArraysCache": "ArraysCache", "PrefillReadyRotatingKVCache": "RotatingKVCache"}

CLASS_TYPES: Mapping[str, CacheType] = MappingProxyType(
    {
        "KVCache": CacheType.KVCACHE,
        "RotatingKVCache": CacheType.ROTATING_KVCACHE,
        "PrefillReadyRotatingKVCache": CacheType.ROTATING_KVCACHE,
        "BatchKVCache": CacheType.BATCH_KVCACHE,
        "BatchRotatingKVCache": CacheType.BATCH_ROTATING_KVCACHE,
        "ArraysCache": CacheType.ARRAYS_CACHE,
        "QuantizedKVCache": CacheType.QUANTIZED_KVCACHE,
        "CacheList": CacheType.CACHE_LIST,
        "TurboQuantKVCache": CacheType.KVCACHE,
        "BatchTurboQuantKVCache": CacheType.KVCACHE,
        "PoolingCache": CacheType.POOLING_CACHE,
        "BatchPoolingCache": CacheType.BATCH_POOLING_CACHE,
        "MiniMaxM3KVCache": CacheType.MINIMAX_M3_KVCACHE,
        "MiniMaxM3BatchKVCache": CacheType.MINIMAX_M3_BATCH_KVCACHE,
        "ChunkedKVCache": CacheType.CHUNKED_KVCACHE,
        "ConcatenateKVCache": CacheType.CONCATENATE_KVCACHE,
    }
)


def canonical(class_name: str) -> str:
    """The name under which caches of this class are stored."""
    return _DRESSED.get(class_name, class_name)


def canonical_types(names: Sequence[str] | None) -> list[str] | None:
    """The names under which layers are compared. None stays None."""
    return None if names is None else [canonical(name) for name in names]


def type_value(class_name: str) -> str:
    """The ``cache_type`` of a layer dict: the value of the class's ``CacheType``, its own name if it has none."""
    found = CLASS_TYPES.get(canonical(class_name))
    return canonical(class_name) if found is None else found.value
