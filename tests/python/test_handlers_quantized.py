"""Quantised caches: triples of arrays, settings, and which prototypes they are rebuilt for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

from prefixcache._layer_state import LayerState, decode_structure, encode_structure, flatten, unflatten
from prefixcache._registry import describe_layers, rebuild_layers
from prefixcache.errors import Unsupported


def _random(seed: int, rows: int, dim: int = 64) -> mx.array:
    return mx.random.normal((1, 2, rows, dim), key=mx.random.key(seed)).astype(mx.float16)


def _donor(rows: int = 20, group_size: int = 64, bits: int = 8) -> Any:
    cache = QuantizedKVCache(group_size, bits)
    cache.update_and_fetch(_random(1, rows), _random(2, rows, 128))
    return cache


def _stored(donor: Any, n: int) -> list[LayerState]:
    states = describe_layers([donor])
    arrays = {name: mx.contiguous(slot.data[..., :n, :]) for name, slot in flatten(states)}
    return unflatten(decode_structure(encode_structure(states)), arrays, n)


@pytest.mark.parametrize(
    ("group_size", "bits", "dim"), [(64, 8, 128), (64, 4, 64), (32, 2, 96), (128, 4, 256), (64, 3, 64), (64, 6, 64)]
)
def test_slots_and_settings(group_size: int, bits: int, dim: int) -> None:
    cache = QuantizedKVCache(group_size, bits)
    cache.update_and_fetch(_random(1, 5, dim), _random(2, 5, dim))
    (state,) = describe_layers([cache])
    assert [slot.name for slot in state.slots] == [
        "keys",
        "keys.scales",
        "keys.biases",
        "values",
        "values.scales",
        "values.biases",
    ]
    assert dict(state.meta) == {"bits": bits, "group_size": group_size}
    assert state.slots[0].data is cache.keys[0]
    assert state.slots[5].data is cache.values[2]


def test_cache_made_by_to_quantized() -> None:
    """mlx-lm converts a running cache in the middle of a request: lists instead of tuples, padded rows quantised."""
    plain = KVCache()
    plain.update_and_fetch(_random(1, 300), _random(2, 300))
    donor = plain.to_quantized(group_size=32, bits=4)
    (rebuilt,) = rebuild_layers([KVCache()], _stored(donor, 280), 280)
    donor.trim(20)
    assert (rebuilt.bits, rebuilt.group_size, rebuilt.offset) == (4, 32, 280) == (4, 32, donor.offset)
    for name in ("keys", "values"):
        for left, right in zip(getattr(rebuilt, name), getattr(donor, name), strict=True):
            assert mx.array_equal(left, right[..., :280, :])


def test_attention_over_a_rebuilt_cache() -> None:
    donor = QuantizedKVCache(64, 4)
    donor.update_and_fetch(_random(1, 40), _random(2, 40))
    (rebuilt,) = rebuild_layers([KVCache()], _stored(donor, 40), 40)
    outputs = []
    for cache in (donor, rebuilt):
        keys, values = cache.update_and_fetch(_random(3, 1), _random(4, 1))
        queries = mx.random.normal((1, 4, 1, 64), key=mx.random.key(5)).astype(mx.float16)
        outputs.append(scaled_dot_product_attention(queries, keys, values, cache, scale=0.125, mask=None))
    assert mx.array_equal(*outputs)


def test_prototype_gives_the_class() -> None:
    states = _stored(_donor(), 20)
    for prototype in (KVCache(), QuantizedKVCache(64, 8)):
        (rebuilt,) = rebuild_layers([prototype], states, 20)
        assert type(rebuilt) is QuantizedKVCache
        assert isinstance(rebuilt.keys, tuple)
    with pytest.raises(Unsupported, match="QuantizedKVCache cannot be rebuilt for a model that uses Concat") as caught:
        rebuild_layers([ConcatenateKVCache()], states, 20)
    assert caught.value.reason == "structure_mismatch"


def test_settings_of_the_model_must_agree() -> None:
    with pytest.raises(Unsupported, match=r"layer 0 .*'bits': 8.*'bits': 4") as caught:
        rebuild_layers([QuantizedKVCache(64, 4)], _stored(_donor(), 20), 20)
    assert caught.value.reason == "structure_mismatch"


@pytest.mark.parametrize("meta", [{}, {"bits": 8}, {"bits": 8, "group_size": 64, "mode": "affine"}])
def test_stored_settings_must_be_known(meta: dict[str, Any]) -> None:
    (state,) = _stored(_donor(), 20)
    with pytest.raises(Unsupported, match="stored settings") as caught:
        rebuild_layers([KVCache()], [LayerState(state.type_name, state.slots, meta, offset=20)], 20)
    assert caught.value.reason == "structure_mismatch"


@pytest.mark.parametrize("meta", [{"bits": "8", "group_size": 64}, {"bits": 4, "group_size": 64}])
def test_stored_settings_must_fit_the_arrays(meta: dict[str, Any]) -> None:
    (state,) = _stored(_donor(), 20)
    with pytest.raises(ValueError, match="layer 0 .*bits"):
        rebuild_layers([KVCache()], [LayerState(state.type_name, state.slots, meta, offset=20)], 20)


@pytest.mark.parametrize("bits", [0, -4, 4.0, True, None, "4"])
def test_bad_settings(bits: Any) -> None:
    donor = _donor()
    donor.bits = bits
    with pytest.raises(ValueError, match=rf"layer 0 .*bits must be a positive int, got {bits!r}"):
        describe_layers([donor])


def test_settings_that_do_not_fit() -> None:
    donor = _donor(bits=4)
    donor.bits = 8
    with pytest.raises(ValueError, match=r"layer 0 .*keys of shapes .*bits=8, group_size=64"):
        describe_layers([donor])


def test_bad_triples() -> None:
    donor = _donor()
    donor.keys = donor.keys[0]
    with pytest.raises(TypeError, match=r"layer 0 .*keys must be a tuple of arrays, not array"):
        describe_layers([donor])
    donor = _donor()
    donor.values = (donor.values[0], donor.values[1][..., :7, :], donor.values[2])
    with pytest.raises(ValueError, match=r"layer 0 .*different lengths: .*'values.scales': 7"):
        describe_layers([donor])
    donor = _donor()
    donor.keys = tuple(mx.concatenate([array, array]) for array in donor.keys)
    with pytest.raises(ValueError, match=r"layer 0 .*keys holds 2 sequences"):
        describe_layers([donor])
    donor = _donor()
    donor.keys = (donor.keys[0].astype(mx.int32), *donor.keys[1:])
    with pytest.raises(ValueError, match="int32"):
        describe_layers([donor])


def test_modes_without_biases_are_unsupported() -> None:
    donor = _donor()
    donor.keys = mx.quantize(_random(1, 20), mode="mxfp8")
    with pytest.raises(Unsupported, match=r"layer 0 .*keys has 2 arrays") as caught:
        describe_layers([donor])
    assert caught.value.reason == "unsupported_type"
