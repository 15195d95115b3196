"""The registry: every name of oMLX has its type, what is not known is taken for plain rows, and nothing raises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import child_environment
from mlx_lm.models import cache as lm
from mlx_vlm.models import cache as vlm
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.turboquant import TurboQuantKVCache
from omlx_layers import plain, states, window

from prefixcache._omlx.cache_types import canonical, type_value
from prefixcache._rotating_subclass import PrefillReadyRotatingKVCache
from prefixcache.type_handlers import (
    ArraysCacheHandler,
    CacheType,
    DefaultCacheHandler,
    KVCacheHandler,
    RotatingKVCacheHandler,
    SizedArraysCache,
)
from prefixcache.type_registry import CacheTypeRegistry

# The table that oMLX's callers know, and whether blocks of rows can be cut.
OF_OMLX = {
    "KVCache": (CacheType.KVCACHE, True),
    "RotatingKVCache": (CacheType.ROTATING_KVCACHE, False),
    "PrefillReadyRotatingKVCache": (CacheType.ROTATING_KVCACHE, False),
    "BatchKVCache": (CacheType.BATCH_KVCACHE, False),
    "BatchRotatingKVCache": (CacheType.BATCH_ROTATING_KVCACHE, False),
    "ArraysCache": (CacheType.ARRAYS_CACHE, False),
    "SizedArraysCache": (CacheType.ARRAYS_CACHE, False),
    "QuantizedKVCache": (CacheType.QUANTIZED_KVCACHE, True),
    "CacheList": (CacheType.CACHE_LIST, False),
    "TurboQuantKVCache": (CacheType.KVCACHE, True),
    "BatchTurboQuantKVCache": (CacheType.KVCACHE, True),
    "PoolingCache": (CacheType.POOLING_CACHE, False),
    "BatchPoolingCache": (CacheType.BATCH_POOLING_CACHE, False),
    "MiniMaxM3KVCache": (CacheType.MINIMAX_M3_KVCACHE, True),
    "MiniMaxM3BatchKVCache": (CacheType.MINIMAX_M3_BATCH_KVCACHE, False),
}


@pytest.fixture
def registry() -> Iterator[type[CacheTypeRegistry]]:
    before = CacheTypeRegistry._handlers
    yield CacheTypeRegistry
    CacheTypeRegistry._handlers = before


@pytest.mark.parametrize("name", OF_OMLX)
def test_names_of_omlx(name: str) -> None:
    kind, sliceable = OF_OMLX[name]
    handler = CacheTypeRegistry.get_handler_by_class_name(name)
    assert handler.cache_type is kind
    assert handler.supports_block_slicing is sliceable
    assert CacheTypeRegistry.get_handler(kind) is handler
    assert CacheTypeRegistry.is_rotating_family(name) is ("Rotating" in name)
    assert type_value(name) == kind.value


@pytest.mark.parametrize("name", ["NoSuchCache", "", "kvcache", None, 7])
def test_an_unknown_name_means_plain_rows(name: Any) -> None:
    handler = CacheTypeRegistry.get_handler_by_class_name(name)
    assert type(handler) is DefaultCacheHandler
    assert handler.supports_block_slicing
    assert not CacheTypeRegistry.is_rotating_family(name)


def test_an_unknown_type_means_plain_rows(registry: type[CacheTypeRegistry]) -> None:
    registry._handlers = {}
    assert type(registry.get_handler(CacheType.POOLING_CACHE)) is DefaultCacheHandler
    assert type(registry.get_handler_by_class_name("PoolingCache")) is DefaultCacheHandler
    assert registry.get_handler("no type") is registry._default  # type: ignore[arg-type]
    assert registry.list_registered_types() == []


LIVE = [
    (plain(3), CacheType.KVCACHE),
    (vlm.KVCache(), CacheType.KVCACHE),
    (lm.ConcatenateKVCache(), CacheType.CONCATENATE_KVCACHE),
    (lm.QuantizedKVCache(), CacheType.QUANTIZED_KVCACHE),
    (lm.ChunkedKVCache(256), CacheType.CHUNKED_KVCACHE),
    (window(3), CacheType.ROTATING_KVCACHE),
    (PrefillReadyRotatingKVCache(8), CacheType.ROTATING_KVCACHE),
    (lm.BatchKVCache([0, 1]), CacheType.BATCH_KVCACHE),
    (lm.BatchRotatingKVCache(8, [0]), CacheType.BATCH_ROTATING_KVCACHE),
    (states((1, 2)), CacheType.ARRAYS_CACHE),
    (SizedArraysCache(states((1, 2)), 3), CacheType.ARRAYS_CACHE),
    (lm.CacheList(plain(3)), CacheType.CACHE_LIST),
    (vlm.PoolingCache(4), CacheType.POOLING_CACHE),
    (vlm.BatchPoolingCache(4, [0]), CacheType.BATCH_POOLING_CACHE),
    (MiniMaxM3KVCache(), CacheType.MINIMAX_M3_KVCACHE),
    (TurboQuantKVCache(4), CacheType.KVCACHE),
    # By what they have, where the name says nothing.
    (SimpleNamespace(caches=[plain(3)]), CacheType.CACHE_LIST),
    (SimpleNamespace(caches=(plain(3),), keys=1, values=2), CacheType.CACHE_LIST),
    (SimpleNamespace(caches=[], keys=1, values=2), CacheType.KVCACHE),
    (SimpleNamespace(max_size=4, _idx=0, keys=1, values=2), CacheType.ROTATING_KVCACHE),
    (SimpleNamespace(max_size=4, keys=1, values=2), CacheType.KVCACHE),
    (SimpleNamespace(cache=[1, 2]), CacheType.ARRAYS_CACHE),
    (SimpleNamespace(cache=(1, 2)), CacheType.KVCACHE),
    (object(), CacheType.KVCACHE),
    (None, CacheType.KVCACHE),
]


@pytest.mark.parametrize(("cache", "kind"), LIVE, ids=[f"{i}-{kind.value}" for i, (_, kind) in enumerate(LIVE)])
def test_live_caches(cache: Any, kind: CacheType) -> None:
    assert CacheTypeRegistry.detect_cache_type(cache) is kind
    handler = CacheTypeRegistry.get_handler_for_object(cache)
    assert handler.cache_type is kind
    assert CacheTypeRegistry.is_sliceable(cache) is handler.supports_block_slicing


def test_classes_of_types() -> None:
    assert CacheTypeRegistry.get_class_name_for_type(CacheType.KVCACHE) == "KVCache"
    assert CacheTypeRegistry.get_class_name_for_type(CacheType.ROTATING_KVCACHE) == "RotatingKVCache"
    for kind in CacheType:
        assert CacheTypeRegistry.get_class_name_for_type(kind) == kind.value
    assert set(CacheTypeRegistry.list_registered_types()) == set(CacheType)
    known = CacheTypeRegistry.list_known_class_names()
    assert len(known) == len(set(known))
    assert set(OF_OMLX) - {"SizedArraysCache"} <= set(known)


def test_a_handler_of_a_callers_own(registry: type[CacheTypeRegistry]) -> None:
    class Sliceable(ArraysCacheHandler):
        _sliceable = True

    mine = Sliceable()
    registry.register(mine)
    assert registry.get_handler(CacheType.ARRAYS_CACHE) is mine
    assert registry.get_handler_by_class_name("SizedArraysCache") is mine
    assert registry.is_sliceable(states((1, 2)))
    assert type(registry.get_handler(CacheType.KVCACHE)) is KVCacheHandler
    assert type(registry.get_handler(CacheType.ROTATING_KVCACHE)) is RotatingKVCacheHandler


def test_it_is_as_it_was_after_a_handler_of_a_callers_own() -> None:
    assert type(CacheTypeRegistry.get_handler(CacheType.ARRAYS_CACHE)) is ArraysCacheHandler


def test_dressed_classes_are_stored_under_the_plain_name() -> None:
    assert canonical("SizedArraysCache") == "ArraysCache"
    assert canonical("PrefillReadyRotatingKVCache") == "RotatingKVCache"
    assert canonical("TurboQuantKVCache") == "TurboQuantKVCache"
    assert type_value("NoSuchCache") == "NoSuchCache"


def test_no_server_and_no_model_library_is_imported() -> None:
    program = (
        "import sys\n"
        "from prefixcache.type_registry import CacheTypeRegistry\n"
        "CacheTypeRegistry.get_handler_by_class_name('KVCache')\n"
        "CacheTypeRegistry.detect_cache_type(object())\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not found & {'omlx', 'fastapi', 'mlx_lm', 'mlx_vlm', 'transformers'}, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=child_environment(), timeout=120)
