"""Handlers of cache types, under oMLX's names.

A handler turns a live cache into a dict or a flat tuple of arrays, cuts and joins such states where the type has one
row a token, and makes a live cache of them again. Importing this imports no cache class; making the first cache does.
Handlers are safe from every thread that may use the arrays.
"""

from __future__ import annotations

from prefixcache._omlx.cache_types import CacheStateAxisInfo, CacheStateInfo, CacheType
from prefixcache._omlx.handler_base import CacheTypeHandler
from prefixcache._omlx.handlers_rows import (
    ConcatenateKVCacheHandler,
    DefaultCacheHandler,
    KVCacheHandler,
    MiniMaxM3KVCacheHandler,
    QuantizedKVCacheHandler,
)
from prefixcache._omlx.handlers_whole import (
    ArraysCacheHandler,
    BatchKVCacheHandler,
    BatchPoolingCacheHandler,
    BatchRotatingKVCacheHandler,
    CacheListHandler,
    ChunkedKVCacheHandler,
    MiniMaxM3BatchKVCacheHandler,
    PoolingCacheHandler,
    RotatingKVCacheHandler,
)
from prefixcache._omlx.sized_arrays import SizedArraysCache

__all__ = [
    "ArraysCacheHandler",
    "BatchKVCacheHandler",
    "BatchPoolingCacheHandler",
    "BatchRotatingKVCacheHandler",
    "CacheListHandler",
    "CacheStateAxisInfo",
    "CacheStateInfo",
    "CacheType",
    "CacheTypeHandler",
    "ChunkedKVCacheHandler",
    "ConcatenateKVCacheHandler",
    "DefaultCacheHandler",
    "KVCacheHandler",
    "MiniMaxM3BatchKVCacheHandler",
    "MiniMaxM3KVCacheHandler",
    "PoolingCacheHandler",
    "QuantizedKVCacheHandler",
    "RotatingKVCacheHandler",
    "SizedArraysCache",
]
