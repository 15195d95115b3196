"""Lists of caches: children by their own handlers, whatever they are, with names that lead to them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from parts import through_parts

from prefixcache._layer_state import ALL, BOUNDARY, LayerState, encode_structure, flatten, walk, window_of
from prefixcache._registry import common_offset, describe_layers, reaches_of, rebuild_layers
from prefixcache.errors import Unsupported


def _append(cache: Any, start: int, count: int) -> Any:
    """Fills every child, however deep."""
    if isinstance(cache, CacheList):
        for child in cache.caches:
            _append(child, start, count)
    elif isinstance(cache, ArraysCache):
        cache[0] = mx.full((1, 2), start + count)
    else:
        ramp = mx.broadcast_to(
            mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, -1, 1), (1, 1, count, 32)
        )
        cache.update_and_fetch(ramp, ramp)
    return cache


def _mixed() -> Any:
    return CacheList(
        ArraysCache(2), KVCache(), CacheList(RotatingKVCache(8, 4), CacheList(), CacheList(QuantizedKVCache(32)))
    )


def test_names_lead_to_the_children() -> None:
    states = describe_layers([_append(KVCache(), 0, 20), _append(_mixed(), 0, 20)])
    assert [(path, state.type_name) for path, state in walk(states)] == [
        ("0", "KVCache"),
        ("1", "CacheList"),
        ("1/0", "ArraysCache"),
        ("1/1", "KVCache"),
        ("1/2", "CacheList"),
        ("1/2/0", "RotatingKVCache"),
        ("1/2/1", "CacheList"),
        ("1/2/2", "CacheList"),
        ("1/2/2/0", "QuantizedKVCache"),
    ]
    assert [name for name, _ in flatten(states)][2:7] == [
        "1/0/0",
        "1/1/keys",
        "1/1/values",
        "1/2/0/keys",
        "1/2/0/values",
    ]
    assert {slot.reach for _, slot in flatten(states)} == {ALL, BOUNDARY, window_of(8, 4)}
    assert states[1].offset is None
    assert common_offset(states) == 20


@pytest.mark.parametrize("spare", [0, 6])
def test_mixed_children(spare: int) -> None:
    donor = _append(_append(_mixed(), 0, 20), 20, 5)
    prototype = _mixed()
    (rebuilt,) = rebuild_layers([prototype], through_parts(describe_layers([donor]), 25, spare), 25)
    assert type(rebuilt.caches) is tuple
    assert _kinds(rebuilt) == _kinds(donor)
    assert rebuilt[0][0].tolist() == [[25, 25]]
    assert rebuilt[0][1] is None
    ring = rebuilt[2][0]
    assert (ring.max_size, ring.keep, ring.offset, ring._idx) == (8, 4, 25, 8)
    assert ring.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 21, 22, 23, 24]
    assert rebuilt[1].keys.shape[2] == 25 + spare
    assert rebuilt[2][2][0].offset == 25
    assert prototype.empty()
    assert all(child.empty() for child in (prototype[1], prototype[2][0], prototype[2][2][0]))


def _kinds(cache: Any) -> Any:
    return [type(cache), [_kinds(child) for child in getattr(cache, "caches", ())]]


def test_an_empty_list() -> None:
    other = _append(KVCache(), 0, 5)
    states = describe_layers([other, CacheList()])
    assert (states[1].children, states[1].slots, states[1].offset) == ((), (), None)
    rebuilt = rebuild_layers([KVCache(), CacheList()], through_parts(states, 5), 5)
    assert rebuilt[1].caches == ()


def test_children_may_be_in_a_list() -> None:
    """mlx-lm's loader leaves one."""
    cache = CacheList(KVCache(), RotatingKVCache(8))
    _append(cache, 0, 5)
    loaded = CacheList.__new__(CacheList)
    loaded.caches = list(cache.caches)
    assert encode_structure(describe_layers([loaded])) == encode_structure(describe_layers([cache]))


@pytest.mark.parametrize("children", [None, KVCache(), "ab", {"a": 1}], ids=lambda c: type(c).__name__)
def test_children_of_another_kind(children: Any) -> None:
    cache = CacheList()
    cache.caches = children
    with pytest.raises(TypeError, match=f"layer 0 .*caches must be a list of caches, not {type(children).__name__}"):
        describe_layers([cache])
    with pytest.raises(TypeError, match="layer 0 .*caches must be a list of caches"):
        reaches_of([cache])


@pytest.mark.parametrize("child", [None, 3, mx.ones(3), "cache", [KVCache()]], ids=lambda c: type(c).__name__)
def test_a_child_that_is_no_cache(child: Any) -> None:
    with pytest.raises(TypeError, match=r"layer 0 \(CacheList\), cache 1 .*expected a cache object"):
        describe_layers([CacheList(KVCache(), child)])


def test_messages_name_the_child() -> None:
    bad = _append(KVCache(), 0, 5)
    bad.offset = 999
    with pytest.raises(
        ValueError, match=r"layer 1 \(CacheList\), cache 2 \(CacheList\), cache 0 \(KVCache\): offset 999"
    ):
        describe_layers([KVCache(), CacheList(KVCache(), KVCache(), CacheList(bad))])
    batch = _append(CacheList(KVCache(), KVCache()), 0, 5)
    batch[1].keys = mx.concatenate([batch[1].keys] * 2)
    with pytest.raises(ValueError, match=r"layer 0 \(CacheList\), cache 1 \(KVCache\): keys holds 2 sequences"):
        describe_layers([batch])
    running = CacheList(KVCache(), ArraysCache(1, left_padding=[2]))
    with pytest.raises(Unsupported, match=r"cache 1 \(ArraysCache\): left_padding is set") as caught:
        describe_layers([running])
    assert caught.value.reason == "running_request"


def test_children_that_disagree() -> None:
    cache = CacheList(_append(KVCache(), 0, 5), _append(KVCache(), 0, 6))
    with pytest.raises(ValueError, match=r"layer 0/0 \(KVCache\) stands at 5, layer 0/1 \(KVCache\) at 6"):
        common_offset(describe_layers([cache]))


@pytest.mark.parametrize(
    ("prototype", "message"),
    [
        (CacheList(KVCache()), "stored with 2 caches, the model's own has 1"),
        (CacheList(KVCache(), RotatingKVCache(8), KVCache()), "stored with 2 caches, the model's own has 3"),
        (CacheList(RotatingKVCache(8), KVCache()), r"cache 0 \(RotatingKVCache\).*stored KVCache"),
        (CacheList(KVCache(), RotatingKVCache(9)), r"cache 1 \(RotatingKVCache\).*'max_size': 8.*'max_size': 9"),
        (CacheList(KVCache(), CacheList(RotatingKVCache(8))), r"cache 1 \(CacheList\).*stored RotatingKVCache"),
        (CacheList(KVCache(), ChunkedKVCache(8)), r"cache 1 \(ChunkedKVCache\).*stored RotatingKVCache"),
        (KVCache(), "stored CacheList cannot be rebuilt for a model that uses KVCache"),
    ],
)
def test_another_model(prototype: Any, message: str) -> None:
    states = through_parts(describe_layers([_append(CacheList(KVCache(), RotatingKVCache(8)), 0, 20)]), 20)
    with pytest.raises(Unsupported, match=f"layer 0 .*{message}") as caught:
        rebuild_layers([prototype], states, 20)
    assert caught.value.reason == "structure_mismatch"


def test_a_stored_child_of_a_type_nobody_knows() -> None:
    (state,) = through_parts(describe_layers([_append(CacheList(KVCache()), 0, 4)]), 4)
    future = LayerState("CacheList", children=(LayerState("Future", state.children[0].slots, offset=4),))
    with pytest.raises(Unsupported, match=r"layer 0 .*cache 0 .*'Future'") as caught:
        rebuild_layers([CacheList(KVCache())], [future], 4)
    assert caught.value.reason == "unsupported_type"


def test_a_model_with_a_child_that_nobody_knows() -> None:
    """A class of the same name from elsewhere may behave differently."""
    other = type("KVCache", (KVCache,), {})
    states = through_parts(describe_layers([_append(CacheList(KVCache()), 0, 4)]), 4)
    with pytest.raises(Unsupported, match=r"layer 0 .*cache 0 \(KVCache\): no handler") as caught:
        rebuild_layers([CacheList(other())], states, 4)
    assert caught.value.reason == "unsupported_type"


def test_a_child_may_be_quantised() -> None:
    donor = CacheList(_append(QuantizedKVCache(32, 4), 0, 20), _append(KVCache(), 0, 20))
    (rebuilt,) = rebuild_layers([CacheList(KVCache(), KVCache())], through_parts(describe_layers([donor]), 20), 20)
    assert [type(child) for child in rebuilt.caches] == [QuantizedKVCache, KVCache]
