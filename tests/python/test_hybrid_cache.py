"""What a model's configuration says of its layers."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_vlm.turboquant import TurboQuantKVCache
from omlx_layers import plain, rows, states, window

from prefixcache.hybrid_cache import LayerCacheConfig, ModelCacheConfig, create_default_kvcache_config
from prefixcache.type_handlers import CacheType, KVCacheHandler, RotatingKVCacheHandler, SizedArraysCache


def mixed() -> list[Any]:
    return [plain(5), window(5, 16), SizedArraysCache(states((1, 2)), 5), CacheList(plain(5), window(5, 64)), plain(5)]


def test_from_live_caches() -> None:
    config = ModelCacheConfig.from_cache_list(mixed(), "some-model")
    assert config.model_name == "some-model"
    assert config.num_layers == 5
    assert config.is_hybrid
    assert config.sliceable_layer_count == 2
    assert config.get_sliceable_layers() == [0, 4]
    assert config.get_non_sliceable_layers() == [1, 2, 3]
    assert not config.supports_full_block_slicing()
    assert config.has_rotating_layers()
    assert config.get_max_window_size() == 64  # inside the list
    assert config.get_type_names() == ["KVCache", "RotatingKVCache", "SizedArraysCache", "CacheList", "KVCache"]
    assert [config.get_layer_type(i) for i in range(5)] == [
        CacheType.KVCACHE,
        CacheType.ROTATING_KVCACHE,
        CacheType.ARRAYS_CACHE,
        CacheType.CACHE_LIST,
        CacheType.KVCACHE,
    ]
    assert config.layer_configs[1] == LayerCacheConfig(1, CacheType.ROTATING_KVCACHE, False, "RotatingKVCache")
    assert type(config.layer_configs[1].handler) is RotatingKVCacheHandler
    assert type(config.get_layer_handler(0)) is KVCacheHandler


@pytest.mark.parametrize("index", [-1, 5, 99])
def test_layers_that_the_model_does_not_have(index: int) -> None:
    config = ModelCacheConfig.from_type_list(["RotatingKVCache"] * 5)
    assert config.get_layer_type(index) is CacheType.KVCACHE
    assert type(config.get_layer_handler(index)) is KVCacheHandler


def test_from_names() -> None:
    names = ["KVCache", "TurboQuantKVCache", "NoSuchCache", "QuantizedKVCache"]
    config = ModelCacheConfig.from_type_list(names, model_name="m")
    assert config.get_type_names() == names
    assert [config.get_layer_type(i) for i in range(3)] == [CacheType.KVCACHE] * 3
    assert config.get_layer_type(3) is CacheType.QUANTIZED_KVCACHE
    assert config.supports_full_block_slicing()
    assert config.sliceable_layer_count == 4
    windows = ModelCacheConfig.from_type_list(["RotatingKVCache", "RotatingKVCache"])
    assert windows.has_rotating_layers()
    assert not windows.is_hybrid
    assert windows.get_max_window_size() == 0
    assert not ModelCacheConfig.from_type_list(["BatchRotatingKVCache"]).has_rotating_layers()


def test_a_model_without_layers() -> None:
    for config in (
        ModelCacheConfig(),
        ModelCacheConfig.from_cache_list([]),
        ModelCacheConfig.from_type_list([]),
        create_default_kvcache_config(0),
    ):
        assert config == ModelCacheConfig()
        assert (config.num_layers, config.layer_configs, config.is_hybrid) == (0, [], False)
        assert config.get_max_window_size() == 0
        assert config.get_meta_states([]) == []
    assert ModelCacheConfig.from_cache_list([], "m").model_name == "m"


def test_the_default() -> None:
    config = create_default_kvcache_config(3, "m")
    assert config == ModelCacheConfig.from_cache_list([KVCache(), KVCache(), KVCache()], "m")
    assert not config.is_hybrid
    assert config.supports_full_block_slicing()
    assert not config.has_rotating_layers()


def test_windows_of_all_kinds_and_the_setting() -> None:
    caches = [RotatingKVCache(8), BatchRotatingKVCache(32, [0]), CacheList(CacheList(RotatingKVCache(128)))]
    config = ModelCacheConfig.from_cache_list(caches)
    assert config.get_max_window_size() == 128
    config._max_window_size = 7
    assert config.get_max_window_size() == 7


def test_meta_states() -> None:
    quantised = QuantizedKVCache(32, 4)
    quantised.update_and_fetch(rows(5, dim=64), rows(5, dim=64))
    turbo = TurboQuantKVCache(4, seed=3)
    turbo.update_and_fetch(rows(5, dim=64), rows(5, dim=64))
    caches = [*mixed(), quantised, turbo]
    metas = ModelCacheConfig.from_cache_list(caches).get_meta_states(caches)
    assert metas[:3] == [(5,), ("0", "16", "5", "5"), ()]
    assert metas[3] == (["KVCache", "RotatingKVCache"], [(5,), ("0", "64", "5", "5")])
    assert metas[5] == ("5", "32", "4")
    assert metas[6][:3] == ("5", "4.0", "3")
    # More caches than layers: each is taken for what it is.
    assert ModelCacheConfig().get_meta_states(caches) == metas


def test_what_it_shows() -> None:
    text = repr(ModelCacheConfig.from_type_list(["KVCache"] * 4 + ["RotatingKVCache"] * 4, "m"))
    assert "model_name='m'" in text
    assert "num_layers=8" in text
    assert text.count("KVCache") == 5
    assert "..." in text
