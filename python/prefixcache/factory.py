"""The managers of one model, wired together from one value of settings.

A scheduler that keeps several models in one directory makes its managers itself; here every model that is named gets
a directory of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from prefixcache.paged_cache import PagedCacheManager
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache

_DEFAULT_KV_MEMORY = 4 << 30


@dataclass
class CacheConfig:
    """``block_size`` in tokens, sizes in bytes. Without ``paged_ssd_cache_dir`` nothing is cached."""

    block_size: int = 64
    max_num_blocks: int = 1024
    initial_blocks: int = 256
    paged_ssd_cache_dir: str | os.PathLike[str] | None = None
    max_paged_ssd_cache_size: int = 100 << 30
    max_kv_cache_memory: int | None = None
    model_name: str = ""


class MemoryMonitor:
    """What MLX holds in this process beside a bound that the caller has set itself. It enforces nothing. Any thread."""

    def __init__(self, max_kv_cache_memory: int, paged_cache: PagedCacheManager | None = None) -> None:
        if max_kv_cache_memory <= 0:
            raise ValueError(f"max_kv_cache_memory is {max_kv_cache_memory!r}, expected bytes, 1 or more")
        self.max_kv_cache_memory = max_kv_cache_memory
        self.paged_cache = paged_cache

    @property
    def used_memory(self) -> int:
        """Bytes of all arrays of this process: KV, weights and whatever else is alive."""
        return mx.get_active_memory()

    @property
    def utilization(self) -> float:
        """``used_memory`` as a share of the bound; above 1.0 it is exceeded."""
        return self.used_memory / self.max_kv_cache_memory


class CacheFactory:
    """Makes managers from a ``CacheConfig``; each is None where no directory is configured."""

    @staticmethod
    def create_paged_cache(config: CacheConfig, num_layers: int | None = None) -> PagedCacheManager | None:
        """The manager of blocks. It needs no ``num_layers``."""
        if config.paged_ssd_cache_dir is None:
            return None
        return PagedCacheManager(
            block_size=config.block_size,
            max_blocks=config.max_num_blocks,
            model_name=config.model_name,
            initial_blocks=config.initial_blocks,
        )

    @staticmethod
    def create_paged_ssd_cache(config: CacheConfig, model_name: str | None = None) -> PagedSSDCacheManager | None:
        """The manager of what is stored; below the directory in one for ``model_name`` if that is given.

        Raises as ``PagedSSDCacheManager``.
        """
        if config.paged_ssd_cache_dir is None:
            return None
        directory = Path(config.paged_ssd_cache_dir)
        if model_name:
            # Never outside: a name may be a path.
            directory = directory.joinpath(*(part for part in model_name.split("/") if part not in ("", ".", "..")))
        return PagedSSDCacheManager(
            directory,
            config.max_paged_ssd_cache_size,
            expected_model_name=model_name or config.model_name,
            expected_block_size=config.block_size,
        )

    @staticmethod
    def create_prefix_cache(
        config: CacheConfig,
        model: Any,
        paged_cache: PagedCacheManager | None,
        paged_ssd_cache: PagedSSDCacheManager | None,
    ) -> BlockAwarePrefixCache | None:
        """The prefix cache over two managers, of which the first is told of the second."""
        if config.paged_ssd_cache_dir is None or paged_cache is None:
            return None
        paged_cache.set_paged_ssd_cache_manager(paged_ssd_cache)
        return BlockAwarePrefixCache(model, paged_cache, paged_ssd_cache)

    @staticmethod
    def create_memory_monitor(config: CacheConfig, paged_cache: PagedCacheManager | None) -> MemoryMonitor | None:
        """Of ``max_kv_cache_memory``, or of 4 GiB."""
        if config.paged_ssd_cache_dir is None:
            return None
        bound = _DEFAULT_KV_MEMORY if config.max_kv_cache_memory is None else config.max_kv_cache_memory
        return MemoryMonitor(bound, paged_cache)

    @staticmethod
    def create_full_cache_stack(config: CacheConfig, model: Any, num_layers: int) -> dict[str, Any]:
        """All four: ``paged_cache``, ``paged_ssd_cache``, ``prefix_cache``, ``memory_monitor``."""
        paged_cache = CacheFactory.create_paged_cache(config, num_layers)
        paged_ssd_cache = CacheFactory.create_paged_ssd_cache(config, config.model_name or None)
        return {
            "paged_cache": paged_cache,
            "paged_ssd_cache": paged_ssd_cache,
            "prefix_cache": CacheFactory.create_prefix_cache(config, model, paged_cache, paged_ssd_cache),
            "memory_monitor": CacheFactory.create_memory_monitor(config, paged_cache),
        }
