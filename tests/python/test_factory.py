"""The managers of one model from one value of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import make_tiny_llama
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.factory import CacheConfig, CacheFactory, MemoryMonitor
from prefixcache.paged_cache import PagedCacheManager
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache


def config(directory: Path | None, **settings: Any) -> CacheConfig:
    return CacheConfig(block_size=8, max_num_blocks=64, paged_ssd_cache_dir=directory, model_name="m", **settings)


def test_the_defaults() -> None:
    found = CacheConfig()
    assert (found.block_size, found.max_num_blocks, found.initial_blocks) == (64, 1024, 256)
    assert found.max_paged_ssd_cache_size == 100 * 2**30 and found.max_kv_cache_memory is None
    assert found.paged_ssd_cache_dir is None and found.model_name == ""


def test_without_a_directory_there_is_nothing() -> None:
    none = config(None)
    assert CacheFactory.create_full_cache_stack(none, make_tiny_llama(), 3) == {
        "paged_cache": None,
        "paged_ssd_cache": None,
        "prefix_cache": None,
        "memory_monitor": None,
    }
    assert CacheFactory.create_prefix_cache(none, None, None, None) is None


def test_each_manager_is_as_configured(tmp_path: Path) -> None:
    settings = config(tmp_path / "cache", max_paged_ssd_cache_size=1 << 20, initial_blocks=5)
    paged = CacheFactory.create_paged_cache(settings, num_layers=3)
    assert isinstance(paged, PagedCacheManager)
    assert (paged.block_size, paged.max_blocks, paged.initial_blocks, paged.model_name) == (8, 64, 5, "m")
    ssd = CacheFactory.create_paged_ssd_cache(settings)
    assert isinstance(ssd, PagedSSDCacheManager) and ssd.configured_max_size == 1 << 20
    assert ssd.get_stats_dict()["cache_dir"] == str(tmp_path / "cache")
    assert (ssd._expected_model_name, ssd._expected_block_size, ssd._expected_num_layers) == ("m", 8, 0)
    prefix = CacheFactory.create_prefix_cache(settings, make_tiny_llama(), paged, ssd)
    assert isinstance(prefix, BlockAwarePrefixCache) and prefix.paged_cache is paged and prefix.paged_ssd_cache is ssd
    ssd.close()


@pytest.mark.parametrize(
    ("name", "folder"),
    [("m", "m"), ("org/m", "org/m"), ("/models/m", "models/m"), ("../../m", "m"), ("a/./../b", "a/b"), ("..", "")],
)
def test_a_named_model_has_a_directory_below(tmp_path: Path, name: str, folder: str) -> None:
    ssd = CacheFactory.create_paged_ssd_cache(config(tmp_path), name)
    assert ssd is not None and ssd.get_stats_dict()["cache_dir"] == str(tmp_path / folder)
    assert ssd._expected_model_name == name
    ssd.close()


def test_the_memory_monitor(tmp_path: Path) -> None:
    monitor = CacheFactory.create_memory_monitor(config(tmp_path), None)
    assert isinstance(monitor, MemoryMonitor) and monitor.max_kv_cache_memory == 4 * 2**30
    monitor = CacheFactory.create_memory_monitor(config(tmp_path, max_kv_cache_memory=1 << 20), None)
    assert monitor is not None and monitor.max_kv_cache_memory == 1 << 20
    before = monitor.used_memory
    array = mx.zeros((1 << 20,), mx.float32)
    mx.eval(array)
    assert monitor.used_memory >= before + array.nbytes and monitor.utilization >= 4.0
    with pytest.raises(ValueError, match="max_kv_cache_memory is 0"):
        MemoryMonitor(0)


def test_the_whole_stack_serves_a_model_over_a_restart(tmp_path: Path) -> None:
    model, tokens = make_tiny_llama(), list(range(20))
    caches = make_prompt_cache(model)
    model(mx.array([tokens]), cache=caches)
    mx.eval([cache.keys for cache in caches], [cache.values for cache in caches])
    dicts = [
        {
            "state": (c.keys[:, :, :20], c.values[:, :, :20]),
            "meta_state": (),
            "class_name": "KVCache",
            "cache_type": "KVCache",
        }
        for c in caches
    ]
    stack = CacheFactory.create_full_cache_stack(config(tmp_path), model, 3)
    assert [type(stack[name]) for name in ("paged_cache", "paged_ssd_cache", "prefix_cache", "memory_monitor")] == [
        PagedCacheManager,
        PagedSSDCacheManager,
        BlockAwarePrefixCache,
        MemoryMonitor,
    ]
    assert stack["paged_ssd_cache"].get_stats_dict()["cache_dir"] == str(tmp_path / "m")
    table = stack["prefix_cache"].store_cache("one", tokens, dicts)
    assert table.num_tokens == 16
    stack["paged_ssd_cache"].close()
    again = CacheFactory.create_full_cache_stack(config(tmp_path), model, 3)
    table, rest = again["prefix_cache"].fetch_cache("two", [*tokens, 7])
    assert table.num_tokens == 16 and rest == [*tokens[16:], 7]
    restored = again["prefix_cache"].reconstruct_cache(table)
    for found, cache in zip(restored, caches, strict=True):
        assert found.offset == 16 and mx.array_equal(found.keys[:, :, :16], cache.keys[:, :, :16]).item()
        assert mx.array_equal(found.values[:, :, :16], cache.values[:, :, :16]).item()
    again["paged_ssd_cache"].close()
