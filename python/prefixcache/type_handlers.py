"""Handlers of cache types, under oMLX's names."""

from __future__ import annotations

from prefixcache._omlx.cache_types import CacheStateAxisInfo, CacheStateInfo, CacheType
from prefixcache._omlx.sized_arrays import SizedArraysCache

__all__ = ["CacheStateAxisInfo", "CacheStateInfo", "CacheType", "SizedArraysCache"]
