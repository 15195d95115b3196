"""Whole arrays: any number, None among them, any rank and dtype; what belongs to a running request is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache
from parts import through_parts

from prefixcache._layer_state import BOUNDARY, LayerState, Slot, flatten, walk
from prefixcache._registry import common_offset, describe_layers, rebuild_layers
from prefixcache.errors import Unsupported

DTYPES = [mx.bool_, mx.uint8, mx.int16, mx.uint32, mx.int64, mx.float16, mx.bfloat16, mx.float32, mx.complex64]


def _with(*arrays: Any) -> Any:
    cache = ArraysCache(len(arrays))
    for index, array in enumerate(arrays):
        cache[index] = array
    return cache


def _through(cache: Any, n: int = 7) -> Any:
    other = KVCache()
    other.update_and_fetch(mx.ones((1, 1, n, 2)), mx.ones((1, 1, n, 2)))
    states = through_parts(describe_layers([other, cache]), n)
    return rebuild_layers([KVCache(), ArraysCache(len(cache.cache))], states, n)[1]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 12])
def test_any_number_of_slots(size: int) -> None:
    """Also ten and more, which a text would sort otherwise."""
    cache = _with(*(mx.full((1, i + 1), i, mx.int32) for i in range(size)))
    (state,) = describe_layers([cache])
    assert [slot.name for slot in state.slots] == [str(i) for i in range(size)]
    assert all((slot.seq_axis, slot.reach, slot.first_row) == (None, BOUNDARY, 0) for slot in state.slots)
    assert (state.meta, state.offset) == ({"size": size}, None)
    rebuilt = _through(cache)
    assert type(rebuilt.cache) is list
    assert [array.tolist() for array in rebuilt.cache] == [[[i] * (i + 1)] for i in range(size)]
    assert (rebuilt.left_padding, rebuilt.lengths) == (None, None)


@pytest.mark.parametrize("present", [(), (0,), (2,), (1, 3), (0, 1, 2, 3)])
def test_slots_of_none(present: tuple[int, ...]) -> None:
    cache = _with(*(mx.full((1, 2), i) if i in present else None for i in range(4)))
    (state,) = describe_layers([cache])
    assert [slot.name for slot in state.slots] == [str(i) for i in present]
    assert state.meta == {"size": 4}
    rebuilt = _through(cache)
    assert [None if array is None else array.tolist() for array in rebuilt.cache] == [
        [[i, i]] if i in present else None for i in range(4)
    ]
    assert rebuilt.empty() == cache.empty()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 3), (1, 0, 4), (1, 2, 3, 4, 5)], ids=str)
def test_ranks_and_dtypes(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    array = (mx.random.uniform(shape=shape) * 200).astype(dtype)
    rebuilt = _through(_with(array))[0]
    assert (rebuilt.shape, rebuilt.dtype) == (array.shape, array.dtype)
    assert mx.array_equal(rebuilt, array).item()


def test_no_slots_at_all() -> None:
    assert _through(ArraysCache(0)).cache == []


@pytest.mark.parametrize("name", ["lengths", "left_padding"])
@pytest.mark.parametrize("filled", [False, True])
def test_a_running_request_is_refused(name: str, filled: bool) -> None:
    cache = _with(mx.ones((1, 2)) if filled else None)
    setattr(cache, name, mx.array([3]))
    with pytest.raises(Unsupported, match=rf"layer 0 .*{name} is set.*extract\(i\)") as caught:
        describe_layers([cache])
    assert caught.value.reason == "running_request"
    cache.finalize()
    describe_layers([cache])


def test_a_running_batch_is_refused_until_its_row_is_extracted() -> None:
    batch = ArraysCache.merge([_with(mx.full((1, 2), i), mx.full((1, 3), i)) for i in range(2)])
    assert batch.batch_size == 2
    with pytest.raises(ValueError, match=r"layer 0 .*0 holds 2 sequences, shape \(2, 2\).*extract the row first"):
        describe_layers([batch])
    batch.prepare(lengths=[4, 5])
    with pytest.raises(Unsupported, match=r"lengths is set"):
        describe_layers([batch])
    assert [slot.data.tolist() for _, slot in flatten(describe_layers([batch.extract(1)]))] == [[[1, 1]], [[1, 1, 1]]]


def test_a_scalar_has_no_batch_axis() -> None:
    """The first array with axes tells how many sequences there are."""
    describe_layers([_with(mx.array(3), mx.ones((1, 4)))])
    describe_layers([_with(None, mx.array(3))])
    with pytest.raises(ValueError, match=r"layer 0 .*2 holds 4 sequences"):
        describe_layers([_with(None, mx.array(3), mx.ones((4, 4)))])


@pytest.mark.parametrize("leaf", [[1, 2], (mx.ones(1),), 3, "state", {"a": mx.ones(1)}], ids=repr)
def test_other_leaves_are_refused(leaf: Any) -> None:
    with pytest.raises(Unsupported, match=rf"layer 0 .*1 must be an mx.array or None, not {type(leaf).__name__}") as e:
        describe_layers([_with(mx.ones((1, 1)), leaf)])
    assert e.value.reason == "unsupported_type"


@pytest.mark.parametrize("entries", [None, mx.ones(3), {"0": mx.ones(3)}, "ab"], ids=lambda e: type(e).__name__)
def test_entries_of_another_kind(entries: Any) -> None:
    cache = ArraysCache(2)
    cache.cache = entries
    with pytest.raises(TypeError, match=rf"layer 0 .*cache must be a list of arrays, not {type(entries).__name__}"):
        describe_layers([cache])


def test_it_counts_no_tokens() -> None:
    full = _with(mx.ones((1, 2)))
    assert common_offset(describe_layers([full])) is None
    rows = KVCache()
    rows.update_and_fetch(mx.ones((1, 1, 7, 2)), mx.ones((1, 1, 7, 2)))
    assert common_offset(describe_layers([full, rows])) == 7


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_slots_than_the_models(size: int) -> None:
    states = describe_layers([_with(mx.ones((1, 2)), None)])
    with pytest.raises(Unsupported, match=r"layer 0 .*'size': 2.*'size'") as caught:
        rebuild_layers([ArraysCache(size)], states, 5)
    assert caught.value.reason == "structure_mismatch"


@pytest.mark.parametrize("names", [("2",), ("1", "0"), ("00",), ("keys",), ("-1",), ("0", "1", "2")])
def test_stored_slots_of_other_names(names: tuple[str, ...]) -> None:
    slots = tuple(Slot(name, mx.ones((1, 2)), None, BOUNDARY) for name in names)
    with pytest.raises(Unsupported, match="layer 0 .*expected some of") as caught:
        rebuild_layers([ArraysCache(2)], [LayerState("ArraysCache", slots, {"size": 2})], 5)
    assert caught.value.reason == "structure_mismatch"


def test_stored_as_another_kind() -> None:
    states = describe_layers([_with(mx.ones((1, 2)))])
    with pytest.raises(Unsupported, match="layer 0 .*ArraysCache cannot be rebuilt for a model that uses KVCache"):
        rebuild_layers([KVCache()], states, 5)
    children = LayerState("ArraysCache", states[0].slots, {"size": 1}, (LayerState("KVCache", offset=0),))
    with pytest.raises(Unsupported, match="layer 0"):
        rebuild_layers([ArraysCache(1)], [children], 5)
    assert len(list(walk([children]))) == 2
