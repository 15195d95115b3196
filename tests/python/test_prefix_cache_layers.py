"""How oMLX's prefix cache cuts each kind of layer into blocks, and what it looks at in blocks that it has loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import pytest
from omlx_doubles import (
    arrays_layer,
    build,
    check_pair,
    check_same,
    kv_layer,
    layer_dict,
    mock_ssd,
    pair,
    placeholder,
    rows,
    seed,
    state_at,
    window_layer,
)

from prefixcache.hybrid_cache import ModelCacheConfig
from prefixcache.prefix_cache import BlockAwarePrefixCache

KV, ARRAYS, LIST = "KVCache", "ArraysCache", "CacheList"


def shaped(*shape: int) -> Any:
    """A tensor of which only the shape can be asked."""
    return SimpleNamespace(shape=shape)


def shaped_pair(tokens: int, heads: int = 2, dim: int = 4) -> tuple[Any, Any]:
    return shaped(1, heads, tokens, dim), shaped(1, heads, tokens, dim)


ABSENT = (shaped(1), shaped(1))
REAL = (shaped(1, 3, 5), shaped(1, 4, 5))


@pytest.mark.parametrize(
    ("data", "types", "valid"),
    [
        ([], None, False),
        ([], [KV], False),
        ([(None, shaped(1, 2, 4, 4))], None, False),
        ([(shaped(1, 2, 4, 4), None)], None, False),
        ([(None, shaped(1, 2, 4, 4))], [KV], False),
        ([(shaped(1, 2, 4, 4), None)], [KV], False),
        ([shaped_pair(4)], None, True),
        ([shaped_pair(4), shaped_pair(4)], [KV, KV], True),
        ([shaped_pair(4), shaped_pair(5)], [KV, KV], False),
        ([shaped_pair(4), REAL, shaped_pair(4)], [KV, ARRAYS, KV], True),
        ([shaped_pair(4), ABSENT, shaped_pair(4)], [KV, ARRAYS, KV], True),
        ([shaped_pair(4), REAL, shaped_pair(5)], [KV, ARRAYS, KV], False),
        ([[shaped_pair(4), shaped_pair(4)], shaped_pair(4)], [LIST, KV], True),
        ([ABSENT, shaped_pair(4)], [LIST, KV], True),
        ([[shaped_pair(4)]], [LIST], True),
    ],
)
def test_validation_of_a_block(data: Any, types: list[str] | None, valid: bool) -> None:
    cache, _ = build()
    assert cache._validate_block_cache_data(data, types) is valid
    if types is None:
        assert cache._validate_block_cache_data(data) is valid


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (placeholder(), True),
        (ABSENT, True),
        (list(placeholder()), False),
        ([ABSENT], False),
        (pair(0, 4), False),
        (REAL, False),
        ((shaped(1), shaped(1), shaped(1)), False),
        ((MagicMock(), MagicMock()), False),
        (("__nstate__", "ArraysCache", [mx.zeros((1,))]), False),
        (("__cache_list__", [placeholder()]), False),
        ((), False),
        (None, False),
    ],
)
def test_what_a_placeholder_is(data: Any, expected: bool) -> None:
    assert BlockAwarePrefixCache._is_placeholder_state(data) is expected


def test_walk_back_finds_the_latest_block_with_every_state() -> None:
    cache, _ = build()
    find = cache._find_walk_back_truncation_point
    kv = shaped_pair(4)
    types = [KV, ARRAYS]
    assert find([[kv, REAL], [kv, REAL], [kv, ABSENT]], types) == 1
    assert find([[kv, REAL], [kv, ABSENT], [kv, ABSENT]], types) == 0
    assert find([[kv, ABSENT], [kv, ABSENT], [kv, REAL]], types) is None
    assert find([[kv, ABSENT], [kv, ABSENT]], types) is None
    assert find([[kv], [kv]], [KV]) is None
    assert find([[[kv], REAL], [[kv], REAL], [ABSENT, ABSENT]], [LIST, ARRAYS]) == 1
    two = [ARRAYS, ARRAYS]
    assert find([[REAL, REAL], [REAL, ABSENT], [ABSENT, ABSENT]], two) == 0
    assert find([[REAL, ABSENT], [ABSENT, REAL], [ABSENT, ABSENT]], two) is None


def test_walk_back_looks_at_layers_that_the_last_block_has() -> None:
    """A block that lacks what the last one has could not be restored."""
    cache, _ = build()
    blocks = [[REAL, REAL], [REAL, ABSENT], [ABSENT, REAL]]
    assert cache._find_walk_back_truncation_point(blocks, [ARRAYS, ARRAYS]) == 0


def test_shape_of_reference() -> None:
    cache, _ = build()
    types = [LIST, KV]
    blocks = [[[shaped_pair(4, 8, 16)], shaped_pair(4, 2, 32)], [[shaped_pair(4, 8, 16)], shaped_pair(4, 2, 32)]]
    assert tuple(cache._find_kv_shape_ref(blocks, types)) == (2, 32)
    real = [[[pair(0, 4, heads=3, dim=8)], pair(0, 4, heads=2, dim=4)]]
    assert tuple(cache._find_kv_shape_ref(real, types)) == (2, 4)


def test_length_of_a_sequence() -> None:
    cache, _ = build()
    length = cache._get_cache_seq_len
    assert length([arrays_layer(9), kv_layer(0, 8), kv_layer(0, 6)]) == 8
    assert length([window_layer(9), kv_layer(0, 8)]) == 8
    assert length([window_layer(9, size=3)]) == 3
    assert length([layer_dict(LIST, [pair(0, 7), pair(0, 7)])]) == 7
    assert length([layer_dict(LIST, [state_at(5), pair(0, 7)])]) == 7


def test_length_of_a_list_whose_values_are_mocks() -> None:
    cache, _ = build()
    assert cache._get_cache_seq_len([layer_dict(LIST, [(rows(0, 7), MagicMock())])]) == 7
    keys = MagicMock()
    keys.shape, keys.ndim = (1, 2, 7, 4), 4
    assert cache._get_cache_seq_len([layer_dict(LIST, [(keys, MagicMock())])]) == 7


def cut(layers: list[dict[str, Any]], start: int, stop: int, types: list[str] | None = None, **more: Any) -> Any:
    config = ModelCacheConfig.from_type_list(types) if types else None
    cache, _ = build()
    return cache._extract_block_tensor_slice(layers, start, stop, model_cache_config=config, **more)


@pytest.mark.parametrize("types", [None, [KV, KV]])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_rows_of_a_block(types: list[str] | None, dtype: mx.Dtype) -> None:
    layers = [kv_layer(0, 8, dtype=dtype), kv_layer(0, 8, 1, dtype=dtype)]
    for start, stop in ((0, 4), (4, 8), (1, 2), (0, 8)):
        for last in (False, True):
            found = cut(layers, start, stop, types, is_last_block=last)
            assert len(found) == 2
            for layer, one in enumerate(found):
                check_pair(one, pair(start, stop, layer, dtype=dtype))


def test_rows_are_cut_to_those_there_are() -> None:
    check_pair(cut([kv_layer(0, 7)], 4, 8, [KV])[0], pair(4, 7))


def test_rows_without_a_batch_are_cut_on_their_own_axis() -> None:
    keys, values = (array[0] for array in pair(0, 8))
    found = cut([layer_dict(KV, (keys, values))], 4, 8, [KV])
    check_pair(found[0], tuple(array[0] for array in pair(4, 8)))


@pytest.mark.parametrize("types", [None, [ARRAYS, KV]])
def test_a_recurrent_state_belongs_to_the_last_block(types: list[str] | None) -> None:
    layers = [arrays_layer(8), kv_layer(0, 8)]
    middle = cut(layers, 0, 4, types)
    assert [tuple(array.shape) for array in middle[0]] == [(1,), (1,)]
    assert BlockAwarePrefixCache._is_placeholder_state(middle[0]) is True
    check_pair(middle[1], pair(0, 4))
    last = cut(layers, 4, 8, types, is_last_block=True)
    check_pair(last[0], tuple(state_at(8)))
    check_pair(last[1], pair(4, 8))


@pytest.mark.parametrize("last", [False, True])
def test_a_snapshot_goes_before_the_final_state(last: bool) -> None:
    layers = [arrays_layer(8), window_layer(8, 1), kv_layer(0, 8, 2)]
    snapshot = [arrays_layer(4), window_layer(4, 1), layer_dict(KV, ())]
    types = [ARRAYS, "RotatingKVCache", KV]
    found = cut(layers, 0, 4, types, is_last_block=last, snapshot_cache_data=snapshot)
    check_pair(found[0], tuple(state_at(4)))
    check_pair(found[1], pair(0, 4, 1))
    check_pair(found[2], pair(0, 4, 2))


@pytest.mark.parametrize("name", ["RotatingKVCache", "BatchRotatingKVCache"])
def test_a_window_belongs_to_the_last_block(name: str) -> None:
    layers = [{**window_layer(8), "class_name": name, "cache_type": name}, kv_layer(0, 8, 1)]
    middle = cut(layers, 0, 4, [name, KV])
    assert BlockAwarePrefixCache._is_placeholder_state(middle[0]) is True
    last = cut(layers, 4, 8, [name, KV], is_last_block=True)
    check_pair(last[0], pair(4, 8))
    check_pair(last[1], pair(4, 8, 1))


def test_a_list_of_plain_rows_is_cut_per_block() -> None:
    layers = [layer_dict(LIST, [pair(0, 8), pair(0, 8, 1, heads=1)], ([KV, KV], [("8",), ("8",)]))]
    for start, stop, last in ((0, 4, False), (4, 8, True)):
        marker, subs = cut(layers, start, stop, [LIST], is_last_block=last)[0]
        assert marker == "__cache_list__"
        assert len(subs) == 2
        check_pair(subs[0], pair(start, stop))
        check_pair(subs[1], pair(start, stop, 1, heads=1))


def test_a_head_size_of_zero_stays() -> None:
    keys, values = rows(0, 8), mx.zeros((1, 2, 8, 0))
    layers = [layer_dict(LIST, [(keys, values)], ([KV], [("8",)]))]
    _, subs = cut(layers, 4, 8, [LIST], is_last_block=True)[0]
    check_same(subs[0][0], rows(4, 8))
    check_same(subs[0][1], mx.zeros((1, 2, 4, 0)))


def test_rows_past_the_end_of_a_list_are_none() -> None:
    layers = [layer_dict(LIST, [pair(0, 8), pair(0, 8, 1)], ([KV, KV], [("8",), ("8",)]))]
    _, subs = cut(layers, 8, 12, [LIST], is_last_block=True)[0]
    assert [tuple(array.shape) for sub in subs for array in sub] == [(1, 2, 0, 4)] * 4


def test_a_list_with_a_recurrent_state_belongs_to_the_last_block() -> None:
    meta = ([KV, ARRAYS], [("8",), ""])
    layers = [layer_dict(LIST, [pair(0, 8), tuple(state_at(8))], meta)]
    middle = cut(layers, 0, 4, [LIST])[0]
    assert BlockAwarePrefixCache._is_placeholder_state(middle) is True
    marker, subs = cut(layers, 4, 8, [LIST], is_last_block=True)[0]
    assert marker == "__cache_list__"
    check_pair(subs[0], pair(0, 8))
    check_pair(subs[1], tuple(state_at(8)))
    snapshot = [layer_dict(LIST, [pair(0, 4), tuple(state_at(4))], ([KV, ARRAYS], [("4",), ""]))]
    _, subs = cut(layers, 0, 4, [LIST], snapshot_cache_data=snapshot)[0]
    check_pair(subs[0], pair(0, 4))
    check_pair(subs[1], tuple(state_at(4)))


def test_rows_with_an_index_are_cut_together() -> None:
    keys, values = pair(0, 8)
    index = rows(0, 8, 9, heads=1)
    layers = [layer_dict("MiniMaxM3KVCache", (keys, values, index), ("999",))]
    for start, stop in ((0, 4), (4, 8)):
        marker, name, elements = cut(layers, start, stop, ["MiniMaxM3KVCache"])[0]
        assert (marker, name, len(elements)) == ("__nstate__", "MiniMaxM3KVCache", 3)
        check_pair((elements[0], elements[1]), pair(start, stop))
        check_same(elements[2], rows(start, stop, 9, heads=1))
    _, _, elements = cut([layer_dict("MiniMaxM3KVCache", (keys, values, None))], 0, 4, ["MiniMaxM3KVCache"])[0]
    check_pair((elements[0], elements[1]), pair(0, 4))
    assert elements[2] is None


def test_forgetting_a_block_needs_a_hash_and_a_manager() -> None:
    cache, paged = build()
    cache._forget_incompatible_ssd_block(b"hash1")
    cache._forget_incompatible_ssd_block(None)
    ssd = mock_ssd()
    cache, paged = build(ssd=ssd)
    cache._forget_incompatible_ssd_block(None)
    cache._forget_incompatible_ssd_block(None, 3)
    assert ssd.mock_calls == []
    table = seed(paged, "r", [b"hash1"])
    cache._forget_incompatible_ssd_block(b"hash1", table.block_ids[0])
    ssd.forget_block.assert_called_once_with(b"hash1")
    assert paged.cached_block_hash_to_block.get_block(b"hash1") is None
    cache._forget_incompatible_ssd_block(b"hash2")
    assert ssd.forget_block.call_count == 2
    ssd.delete_block.assert_not_called()
