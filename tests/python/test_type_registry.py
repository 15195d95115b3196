"""Which object gets which handler, and what a list of layers is refused for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as mlx_lm_cache
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from prefixcache._handlers.kv import KVCacheHandler
from prefixcache._layer_state import BOUNDARY, LayerState, Slot, flatten, walk
from prefixcache.errors import Unsupported
from prefixcache.type_registry import (
    common_offset,
    describe_layers,
    handler_for,
    handler_named,
    rebuild_layers,
    register,
    registered,
)


class OwnCache(KVCache):
    """A subclass may behave differently, so it is not its parent."""


def _filled(n: int, cls: Any = KVCache) -> Any:
    cache = cls()
    if n:
        cache.update_and_fetch(mx.ones((1, 2, n, 64)), mx.ones((1, 2, n, 64)))
    return cache


def test_registered_classes_exist() -> None:
    for (module, name), handler in registered().items():
        assert module == mlx_lm_cache.__name__
        assert hasattr(mlx_lm_cache, name)
        assert handler_named(handler.type_name) is handler


def test_lookup_imports_no_model_package() -> None:
    code = (
        "import sys, prefixcache.type_registry;"
        "print([m for m in ('mlx_lm', 'transformers', 'numpy', 'mlx.nn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "cache",
    [OwnCache(), RotatingKVCache(8), ArraysCache(2), CacheList(KVCache()), mlx_lm_cache.ChunkedKVCache(8)],
    ids=lambda cache: type(cache).__name__,
)
def test_unknown_classes_are_unsupported(cache: Any) -> None:
    with pytest.raises(Unsupported, match=rf"layer 1 .*{type(cache).__name__}") as caught:
        describe_layers([KVCache(), cache])
    assert caught.value.reason == "unsupported_type"


def test_batch_classes_come_with_advice() -> None:
    with pytest.raises(Unsupported, match=r"layer 0 .*extract\(i\)") as caught:
        describe_layers([BatchKVCache([0, 1])])
    assert caught.value.reason == "unsupported_type"


@pytest.mark.parametrize(
    "thing",
    [None, 3, "cache", [KVCache()], (1, 2), {"keys": 1}, object(), mx.ones((1, 2, 3, 4)), KVCache, nn.Linear(2, 2)],
    ids=lambda thing: type(thing).__name__,
)
def test_things_that_are_no_cache(thing: Any) -> None:
    with pytest.raises(TypeError, match=rf"layer 1 .*expected a cache object, got {type(thing).__name__}"):
        describe_layers([KVCache(), thing])


@pytest.mark.parametrize("caches", [None, KVCache(), "caches", 4, nn.Linear(2, 2), iter([KVCache()])])
def test_describe_wants_a_list(caches: Any) -> None:
    with pytest.raises(TypeError, match="one cache per layer"):
        describe_layers(caches)


def test_describe_wants_a_layer() -> None:
    with pytest.raises(ValueError, match="empty"):
        describe_layers([])


def test_describe_names_the_layer_that_is_wrong() -> None:
    bad = _filled(5)
    bad.offset = 999
    with pytest.raises(ValueError, match=r"layer 2 \(KVCache\): offset 999 .* 256 rows"):
        describe_layers([_filled(5), _filled(5), bad])


def test_common_offset() -> None:
    assert common_offset(describe_layers([_filled(7), _filled(7, QuantizedKVCache)])) == 7
    assert common_offset(describe_layers([KVCache(), KVCache()])) == 0
    assert common_offset([LayerState("State", (Slot("0", mx.ones(3), None, BOUNDARY),))]) is None
    with pytest.raises(ValueError, match=r"layer 0 \(KVCache\) stands at 7, layer 1 \(KVCache\) at 6"):
        common_offset(describe_layers([_filled(7), _filled(6)]))


def test_common_offset_looks_at_children() -> None:
    states = [LayerState("KVCache", offset=4), LayerState("List", children=(LayerState("KVCache", offset=3),))]
    with pytest.raises(ValueError, match=r"layer 0 .* 4, layer 1/0 .* 3"):
        common_offset(states)


def test_rebuild_layers() -> None:
    donors = [_filled(300), _filled(300, QuantizedKVCache)]
    prototypes = [KVCache(), QuantizedKVCache()]
    states = describe_layers(donors)
    rebuilt = rebuild_layers(prototypes, states, 300)
    assert [type(cache) for cache in rebuilt] == [KVCache, QuantizedKVCache]
    assert [cache.offset for cache in rebuilt] == [300, 300]
    assert all(prototype.empty() for prototype in prototypes)
    assert not {id(cache) for cache in rebuilt} & {id(cache) for cache in prototypes + donors}


def test_rebuild_layers_refuses_another_model() -> None:
    states = describe_layers([_filled(4), _filled(4)])
    with pytest.raises(Unsupported, match="2 layers are stored, the model has 3") as caught:
        rebuild_layers([KVCache()] * 3, states, 4)
    assert caught.value.reason == "structure_mismatch"
    with pytest.raises(Unsupported, match=r"layer 1 .*ConcatenateKVCache") as caught:
        rebuild_layers([KVCache(), ConcatenateKVCache()], states, 4)
    assert caught.value.reason == "structure_mismatch"
    with pytest.raises(Unsupported, match=r"layer 1 .*RotatingKVCache") as caught:
        rebuild_layers([KVCache(), RotatingKVCache(8)], states, 4)
    assert caught.value.reason == "unsupported_type"
    with pytest.raises(Unsupported, match="layer 0 .*'Future'") as caught:
        rebuild_layers([KVCache()], [LayerState("Future", offset=4)], 4)
    assert caught.value.reason == "unsupported_type"
    with pytest.raises(ValueError, match="-1"):
        rebuild_layers([KVCache()] * 2, states, -1)


def test_register_refuses_what_is_taken() -> None:
    before = registered()
    with pytest.raises(ValueError, match=r"mlx_lm.models.cache.KVCache has a handler"):
        register("mlx_lm.models.cache", "KVCache", KVCacheHandler())
    with pytest.raises(ValueError, match="'KVCache' belongs to another handler"):
        register("elsewhere", "KVCache", KVCacheHandler())
    assert registered() == before


def test_lookup_does_not_touch_state() -> None:
    class Jealous(KVCache):
        @property
        def state(self) -> Any:
            raise AssertionError("state was read")

    with pytest.raises(Unsupported):
        handler_for(Jealous())


def test_walk_and_flatten_agree_with_handlers() -> None:
    states = describe_layers([_filled(4)])
    assert [path for path, _ in walk(states)] == ["0"]
    assert [name for name, _ in flatten(states)] == ["0/keys", "0/values"]


def test_reasons_are_closed() -> None:
    with pytest.raises(ValueError, match="'because'"):
        Unsupported("because", "no")
