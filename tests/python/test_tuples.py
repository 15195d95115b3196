"""States of layers as tuples become named arrays and JSON, and come back bit for bit."""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from parts import DTYPES, same

from prefixcache._omlx.tuples import (
    NamedPair,
    decode_meta,
    encode_meta,
    flatten,
    is_placeholder,
    placeholders,
    rebuild,
    turboquant_module,
)


def rows(*shape: int, dtype: mx.Dtype = mx.float16, seed: int = 3) -> mx.array:
    return (mx.random.uniform(0, 90, shape, key=mx.random.key(seed)) + 1).astype(dtype)


def through(cache_data: list[Any], types: list[str] | None = None) -> list[Any]:
    """As a store would: JSON as text, arrays that share nothing."""
    arrays, layers = flatten(cache_data, types)
    assert all(len(name) < 9 for name, _ in arrays)
    return rebuild({name: mx.array(array) for name, array in arrays}, json.loads(json.dumps(layers)))


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, and the same kinds of sequences."""
    if isinstance(left, tuple | list) and type(left) is type(right) and len(left) == len(right):
        return all(equal(a, b) for a, b in zip(left, right, strict=True))
    return same(left, right)


@pytest.mark.parametrize("dtype", [*DTYPES, mx.complex64], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: mx.Dtype) -> None:
    layer = (rows(1, 2, 3, 5, dtype=dtype), rows(1, 2, 3, 5, dtype=dtype, seed=4))
    assert equal(through([layer]), [layer])


@pytest.mark.parametrize("dtype", [*DTYPES, mx.complex64], ids=str)
def test_arrays_of_no_axes_and_of_no_items_keep_dtype_and_shape(dtype: mx.Dtype) -> None:
    layer = (mx.array(1).astype(dtype), mx.zeros((2, 0, 64), dtype))
    assert equal(through([layer]), [layer])


def test_complex_numbers_of_any_strides() -> None:
    numbers = mx.array([[1 + 2j, 3 - 1j], [0.5j, -4]], mx.complex64)
    assert equal(through([(numbers.T, numbers[:, 1])]), [(mx.contiguous(numbers.T), mx.contiguous(numbers[:, 1]))])


def test_pairs_and_longer_tuples() -> None:
    a, b, c = (rows(2, seed=seed) for seed in (1, 2, 3))
    out = through([(a, b), [a, b], (a, b, c), (a, None)], ["KVCache", "KVCache", "Other", "KVCache"])
    assert equal(out, [(a, b), (a, b), ("__nstate__", "Other", [a, b, c]), (a, None)])
    assert [type(layer) for layer in out] == [tuple] * 4
    assert equal(through([(a, b, c)]), [("__nstate__", None, [a, b, c])])


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_marked_state_keeps_its_class(count: int) -> None:
    layer = ("__nstate__", "ArraysCache", [rows(2, seed=seed) for seed in range(count)])
    assert equal(through([layer]), [layer])


def test_a_marked_pair_is_a_plain_pair_that_knows_its_class() -> None:
    a, b = rows(2, seed=1), rows(3, seed=2)
    (layer,) = through([("__nstate__", "ArraysCache", [a, b])])
    keys, values = layer
    assert isinstance(layer, tuple) and len(layer) == 2 and same(keys, a) and same(values, b)
    assert isinstance(layer, NamedPair) and layer.class_name == "ArraysCache"
    # It goes on knowing it.
    (again,) = through([layer])
    assert again.class_name == "ArraysCache" and same(again[0], a)
    (nameless,) = through([("__nstate__", None, [a, None])])
    assert type(nameless) is tuple and nameless[1] is None


def test_states_in_states() -> None:
    a, b, c = (rows(2, seed=seed) for seed in (1, 2, 3))
    inner = ("__nstate__", "Inner", [a, b])
    layer = ("__nstate__", "Outer", [(a, [b, None, (c,)]), inner, [], ()])
    assert equal(through([layer]), [layer])
    # Two elements, but not two arrays: not to be mistaken for keys and values.
    assert equal(through([((a, b), (c, None))], ["X"]), [("__nstate__", "X", [(a, b), (c, None)])])


def test_lists_of_caches() -> None:
    a, b, c = (rows(2, seed=seed) for seed in (1, 2, 3))
    marked = ("__cache_list__", [(a, b), ("__nstate__", "PoolingCache", [a, b, None]), (c, c)])
    (layer,) = through([marked], ["CacheList"])
    assert isinstance(layer, list)
    assert equal(layer, [(a, b), ("__nstate__", "PoolingCache", [a, b, None]), (c, c)])
    (empty,) = through([("__cache_list__", [])])
    assert empty == []
    (nested,) = through([("__cache_list__", [("__cache_list__", [(a, b)]), ("__nstate__", "ArraysCache", [a, c])])])
    assert equal(nested[0], [(a, b)]) and nested[1].class_name == "ArraysCache"


class Low(NamedTuple):
    norms: mx.array
    indices: mx.array


class Split(NamedTuple):
    low: Any
    high: Any


@pytest.mark.parametrize("marker", ["__turboquant_v2__", "__turboquant__"])
def test_named_tuples_inside_one_another(marker: str) -> None:
    low = Low(rows(1, 2, 4), rows(1, 2, 4, 3, dtype=mx.uint32))
    state = Split(low, Split(low, (rows(2), rows(3))))
    ((said, (keys, values)),) = through([(marker, (state, low))])
    assert said == "__turboquant_v2__"
    assert type(keys).__name__ == "Split" and keys._fields == ("low", "high")
    assert same(keys.low.norms, low.norms) and same(keys.high.low.indices, low.indices)
    assert same(keys.high.high[1], rows(3)) and isinstance(keys.high.high, tuple)
    assert values._fields == Low._fields and same(values.indices, low.indices)


def test_turboquant_states_come_back_in_their_own_classes() -> None:
    module = turboquant_module()
    if module is None:
        pytest.skip("mlx-vlm is not installed")
    mse = module.TurboQuantMSEState(rows(1, 2, 4), rows(1, 2, 4, 3, dtype=mx.uint32))
    polar = module.TurboQuantPolarState(rows(1, 2, 4), (rows(1, 2, 4, 1), rows(1, 2, 4, 2)))
    product = module.TurboQuantPolarProdState(rows(1, 2, 4), polar, rows(1, 2, 4), rows(1, 2, 4, 2, dtype=mx.uint32))
    split = module.TurboQuantSplitState(mse, product)
    ((_, found),) = through([("__turboquant_v2__", (split, polar))])
    assert equal(found, (split, polar))
    assert type(found[0].high.polar_state) is module.TurboQuantPolarState


def test_a_wrapped_state_is_unwrapped() -> None:
    low = Low(rows(4), rows(5))

    class Proxy:
        _state = low

    ((_, (keys, values)),) = through([("__turboquant_v2__", (Proxy(), low))])
    assert same(keys.norms, low.norms) and same(values.indices, low.indices)


def test_placeholders_are_found() -> None:
    missing = (mx.zeros((1,)), mx.zeros((1,)))
    real = (rows(1, 2, 4, 8), rows(1, 2, 4, 8))
    assert is_placeholder(missing) and is_placeholder(list(missing))
    assert not is_placeholder(real) and not is_placeholder(("__nstate__", "X", [missing[0]]))
    data = [real, missing, ("__cache_list__", [real, missing]), ("__nstate__", "X", [missing])]
    assert placeholders(data) == {"1", "2/1"}
    assert equal(through(data)[1], missing)


@pytest.mark.parametrize("item", [3, 2.5, "text", b"bytes", object(), {"a": 1}], ids=lambda item: type(item).__name__)
def test_other_elements_are_refused(item: Any) -> None:
    for layer in [(rows(1), item), ("__nstate__", "X", [(item,)]), ("__cache_list__", [(rows(1), item)]), item]:
        with pytest.raises(TypeError, match=r"layer 1: a \w+ is no array"):
            flatten([(rows(1), rows(1)), layer])


@pytest.mark.parametrize(
    "layer",
    [
        (),
        (mx.zeros(1),),
        ("__nstate__", 7, []),
        ("__nstate__", "X", 3),
        ("__cache_list__", 3),
        ("__turboquant_v2__", 3),
    ],
)
def test_other_layers_are_refused(layer: Any) -> None:
    with pytest.raises(TypeError, match="layer 0"):
        flatten([layer])


META = ("4", 4, -1, 2.5, None, True, ["a", ("b", 1), []], "text", ((), ""))


def test_meta_states_keep_their_types() -> None:
    found = decode_meta(json.loads(json.dumps(encode_meta(META))))
    assert found == META and repr(found) == repr(META)
    for value in ("", "text", 3, None, (), ["x"]):
        assert repr(decode_meta(json.loads(json.dumps(encode_meta(value))))) == repr(value)
    with pytest.raises(TypeError, match="a meta state holds a array"):
        encode_meta((mx.zeros(1),))


BAD_LAYERS: list[Any] = [
    None,
    {"k": 1},
    [3],
    [["x"]],
    [["p", None]],
    [["p", 5, [["n"], ["n"]]]],
    [["p", None, [["z"], ["n"]]]],
    [["p", None, [["a", "9"], ["n"]]]],
    [["p", None, [["a", "0"], ["a", "0"]]]],
    [["p", None, [["a", 0], ["n"]]]],
    [["p", None, [["n"], ["n"]]]],  # names no array
    [["q", [["a", "0"]]]],
    [["s", "X", [["m", "Name", ["a", "b"], [["a", "0"]]]]]],
    [["s", "X", [["m", "Name", ["a-b"], [["a", "0"]]]]]],
    [["s", "X", [["m", "not a name", ["a"], [["a", "0"]]]]]],
    [["s", "X", [["m", "Name", ["a", "a"], [["a", "0"], ["n"]]]]]],
    [["s", "X", [["c", "0", [True]]]]],
    [["s", "X", [["c", "0", [-1]]]]],
]


@pytest.mark.parametrize("layers", BAD_LAYERS, ids=str)
def test_json_that_nobody_wrote_is_refused(layers: Any) -> None:
    with pytest.raises(ValueError, match="."):
        rebuild({"0": rows(2, dtype=mx.float32)}, layers)


def test_deep_nesting_is_refused() -> None:
    node: Any = ["n"]
    for _ in range(100):
        node = ["t", [node]]
    with pytest.raises(ValueError, match="deep"):
        rebuild({}, [["s", "X", [node]]])
    with pytest.raises(ValueError, match="deep"):
        decode_meta(["t", [["t", [node]]]])


@pytest.mark.parametrize("value", [["x", []], ["t"], [], {"t": 1}, ["t", 3]], ids=str)
def test_meta_json_that_nobody_wrote_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="."):
        decode_meta(value)


def test_a_name_from_a_file_reaches_no_other_class() -> None:
    """Only named tuples of mlx-vlm with these very fields are made; for any other name a look-alike."""
    ((_, (found, _)),) = through(
        [("__turboquant_v2__", (namedtuple("TurboQuantKVCache", "bits seed")(rows(1), None), Low(rows(1), None)))]
    )
    assert type(found).__mro__[1] is tuple and type(found).__name__ == "TurboQuantKVCache"
