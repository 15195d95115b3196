"""Which object gets which handler, and what a list of layers is refused for."""

from __future__ import annotations

import importlib
import importlib.util
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
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from prefixcache._handlers.kv import KVCacheHandler
from prefixcache._layer_state import (
    ALL,
    BOUNDARY,
    LayerState,
    Slot,
    decode_structure,
    encode_structure,
    flatten,
    unflatten,
    walk,
    window_of,
)
from prefixcache._registry import (
    common_offset,
    describe_layers,
    handler_for,
    handler_named,
    reaches_of,
    rebuild_layers,
    register,
    registered,
)
from prefixcache.errors import Unsupported


class OwnCache(KVCache):
    """A subclass may behave differently, so it is not its parent."""


class OwnList(CacheList):
    """Of caches that are known."""


class OwnRing(RotatingKVCache):
    """A ring that may turn the other way."""


def _filled(n: int, cls: Any = KVCache) -> Any:
    cache = cls()
    if n:
        cache.update_and_fetch(mx.ones((1, 2, n, 64)), mx.ones((1, 2, n, 64)))
    return cache


def test_registered_classes_exist() -> None:
    missing = set()
    for (module, name), handler in registered().items():
        assert handler_named(handler.type_name) is handler
        if importlib.util.find_spec(module.split(".")[0]) is None or importlib.util.find_spec(module) is None:
            missing.add(module)
        else:
            assert hasattr(importlib.import_module(module), name), (module, name)
    # One came with 0.32, and the other package is optional.
    assert all(module == "mlx_lm.models.deepseek_v41" or module.startswith("mlx_vlm.") for module in missing)


def test_lookup_imports_no_model_package() -> None:
    code = (
        "import sys, prefixcache._registry;"
        "print([m for m in ('mlx_lm', 'transformers', 'numpy', 'mlx.nn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "cache",
    [OwnCache(), OwnRing(8), OwnList(KVCache()), CacheList(KVCache(), OwnCache()), CacheList(CacheList(OwnRing(8)))],
    ids=lambda cache: type(cache).__name__,
)
def test_unknown_classes_are_unsupported(cache: Any) -> None:
    with pytest.raises(Unsupported, match=rf"layer 1 .*{type(cache).__name__}") as caught:
        describe_layers([KVCache(), cache])
    assert caught.value.reason == "unsupported_type"


BATCHED = {
    "BatchKVCache": lambda: BatchKVCache([0, 1]),
    "BatchRotatingKVCache": lambda: BatchRotatingKVCache(8, [0, 1]),
}


def test_all_batch_classes_are_known_here() -> None:
    assert {name for name in vars(mlx_lm_cache) if name.startswith("Batch")} == BATCHED.keys()


@pytest.mark.parametrize("name", BATCHED)
def test_batch_classes_come_with_advice(name: str) -> None:
    for cache in (BATCHED[name](), CacheList(KVCache(), BATCHED[name]())):
        with pytest.raises(Unsupported, match=rf"layer 0 .*{name}; extract each row first: extract\(i\)") as caught:
            describe_layers([cache])
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


def test_empty_layers_agree_with_every_offset() -> None:
    """One of nemotron-nas's layers never holds anything."""
    for empty in (KVCache(), RotatingKVCache(8), QuantizedKVCache(), CacheList(KVCache(), RotatingKVCache(8))):
        assert common_offset(describe_layers([empty, _filled(7), empty])) == 7
        assert common_offset(describe_layers([_filled(7), empty])) == 7
        assert common_offset(describe_layers([empty, ArraysCache(2)])) == 0
    assert common_offset(describe_layers([ArraysCache(2)])) is None
    trimmed = _filled(7)
    trimmed.trim(7)
    with pytest.raises(ValueError, match="layer 0 .* at 0, layer 1 .* at 7"):
        common_offset(describe_layers([trimmed, _filled(7)]))


def test_empty_layers_stay_empty() -> None:
    prototypes = [KVCache(), KVCache(), RotatingKVCache(8), CacheList(KVCache(), ConcatenateKVCache(), ArraysCache(1))]
    states = describe_layers([prototypes[0], _filled(7), *prototypes[2:]])
    template = decode_structure(encode_structure(states))
    stored = unflatten(template, {name: slot.data for name, slot in flatten(states)}, 7)
    assert [state.offset for _, state in walk(stored)] == [0, 7, 0, None, 0, 0, None]
    rebuilt = rebuild_layers(prototypes, stored, 7)
    assert [cache.empty() for cache in rebuilt] == [True, False, True, True]
    assert [cache.offset for cache in [*rebuilt[:3], *rebuilt[3].caches[:2]]] == [0, 7, 0, 0, 0]


def test_reaches_of() -> None:
    assert reaches_of([KVCache(), QuantizedKVCache(), ConcatenateKVCache()]) == {ALL}
    mixed = [CacheList(ArraysCache(2), CacheList(RotatingKVCache(16, 4), KVCache())), ChunkedKVCache(256)]
    assert reaches_of(mixed) == {BOUNDARY, ALL, window_of(16, 4), window_of(256)}
    assert reaches_of([CacheList()]) == frozenset()
    assert reaches_of([RotatingKVCache(8), RotatingKVCache(9)]) == {window_of(8), window_of(9)}
    with pytest.raises(Unsupported, match="layer 1 .*OwnCache"):
        reaches_of([KVCache(), CacheList(OwnCache())])
    with pytest.raises(TypeError, match="layer 0"):
        reaches_of([None])
    with pytest.raises(ValueError, match="empty"):
        reaches_of([])


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
    assert caught.value.reason == "structure_mismatch"
    with pytest.raises(Unsupported, match=r"layer 1 .*OwnCache") as caught:
        rebuild_layers([KVCache(), OwnCache()], states, 4)
    assert caught.value.reason == "unsupported_type"
    with pytest.raises(Unsupported, match="layer 0 .*'Future'") as caught:
        rebuild_layers([KVCache()], [LayerState("Future", states[0].slots, offset=4)], 4)
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
