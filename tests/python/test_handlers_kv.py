"""Plain key and value caches: shapes, padding and the trimmed ConcatenateKVCache."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache

from prefixcache._layer_state import LayerState, Slot, flatten
from prefixcache._registry import describe_layers, rebuild_layers


def _kv(keys: Any, values: Any, offset: Any, cls: Any = KVCache) -> Any:
    cache = cls()
    cache.keys, cache.values, cache.offset = keys, values, offset
    return cache


def _ones(*shape: int) -> mx.array:
    return mx.ones(shape)


def _rows(start: int, stop: int) -> tuple[mx.array, mx.array]:
    ramp = mx.arange(start, stop, dtype=mx.float32).reshape(1, 1, -1, 1)
    return mx.broadcast_to(ramp, (1, 2, stop - start, 4)), mx.broadcast_to(-ramp, (1, 2, stop - start, 4))


@pytest.mark.parametrize(
    ("keys", "values", "axis"),
    [
        (_ones(1, 8, 16, 64), _ones(1, 8, 16, 64), 2),
        (_ones(1, 1, 16, 576), _ones(1, 1, 16, 512), 2),
        (_ones(1, 1, 16, 64), _ones(1, 1, 16, 0), 2),
        (_ones(1, 3, 16, 80), _ones(1, 5, 16, 80), 2),
        (_ones(4, 16, 96), _ones(4, 16, 192), 1),
        (_ones(1, 8, 0, 4), _ones(1, 8, 0, 4), 2),
    ],
    ids=["gqa", "mla", "no values", "other heads", "rank 3", "no rows"],
)
def test_shapes_that_are_accepted(keys: mx.array, values: mx.array, axis: int) -> None:
    offset = min(keys.shape[-2], 9)
    (state,) = describe_layers([_kv(keys, values, offset)])
    assert [(slot.name, slot.seq_axis, slot.first_row) for slot in state.slots] == [
        ("keys", axis, 0),
        ("values", axis, 0),
    ]
    assert state.slots[0].data is keys
    assert state.slots[1].data is values
    assert state.offset == offset


@pytest.mark.parametrize(
    ("keys", "values", "offset", "error", "message"),
    [
        (_ones(2, 8, 16, 4), _ones(2, 8, 16, 4), 5, ValueError, r"keys holds 2 sequences, shape \(2, 8, 16, 4\)"),
        (_ones(0, 8, 16, 4), _ones(0, 8, 16, 4), 5, ValueError, "keys holds 0 sequences"),
        (_ones(1, 8, 16, 4), _ones(1, 8, 12, 4), 5, ValueError, "different lengths: {'keys': 16, 'values': 12}"),
        (_ones(1, 8, 16, 4), _ones(8, 16, 4), 5, ValueError, "different ranks"),
        (_ones(1, 8, 16, 4), _ones(1, 8, 16, 4), 17, ValueError, "offset 17 is beyond the 16 rows"),
        (_ones(16, 4), _ones(16, 4), 5, ValueError, r"rank 3 or 4, got shape \(16, 4\)"),
        (_ones(1, 1, 8, 16, 4), _ones(1, 1, 8, 16, 4), 5, ValueError, "rank 3 or 4"),
        ([[1.0]], _ones(1, 8, 16, 4), 1, TypeError, "keys must be an mx.array, not list"),
        (_ones(1, 8, 16, 4), "values", 1, TypeError, "values must be an mx.array, not str"),
        ((_ones(1, 8, 16, 4),) * 3, (_ones(1, 8, 16, 4),) * 3, 1, TypeError, "keys must be an mx.array, not tuple"),
    ],
)
@pytest.mark.parametrize("cls", [KVCache, ConcatenateKVCache])
def test_caches_that_contradict_themselves(
    cls: Any, keys: Any, values: Any, offset: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"layer 1 \({cls.__name__}\): .*{message}"):
        describe_layers([cls(), _kv(keys, values, offset, cls)])


def test_padding_is_not_copied_to_describe() -> None:
    cache = KVCache()
    cache.update_and_fetch(*_rows(0, 300))
    (state,) = describe_layers([cache])
    assert state.offset == 300
    assert state.slots[0].data.shape[-2] == 512


def test_lazy_arrays_stay_lazy() -> None:
    """Only the caller's own put() decides when something is evaluated."""
    lazy = mx.ones((1, 64, 4096, 64)) * 2
    before = mx.get_active_memory()
    describe_layers([_kv(lazy, lazy, 4096)])
    assert mx.get_active_memory() - before < 1 << 20
    mx.eval(lazy)
    assert mx.get_active_memory() - before > lazy.nbytes // 2


def test_trimmed_concatenate_cache_keeps_only_its_own_rows() -> None:
    """trim() leaves the rows in place and the class's own next append brings them back; a rebuilt one must not."""
    donor = ConcatenateKVCache()
    donor.update_and_fetch(*_rows(0, 10))
    donor.trim(4)
    (state,) = describe_layers([donor])
    assert state.offset == 6
    wrong, _ = copy.deepcopy(donor).update_and_fetch(*_rows(6, 7))
    assert wrong.shape[-2] == 11

    cut = tuple(Slot(slot.name, slot.data[..., :6, :], slot.seq_axis, slot.reach) for slot in state.slots)
    (rebuilt,) = rebuild_layers([ConcatenateKVCache()], [LayerState(state.type_name, cut, offset=6)], 6)
    keys, values = rebuilt.update_and_fetch(*_rows(6, 7))
    assert mx.array_equal(keys, _rows(0, 7)[0])
    assert mx.array_equal(values, _rows(0, 7)[1])
    assert rebuilt.offset == 7


def test_concatenate_cache_gets_no_spare_rows() -> None:
    donor = ConcatenateKVCache()
    donor.update_and_fetch(*_rows(0, 10))
    states = describe_layers([donor])
    with pytest.raises(ValueError, match=r"layer 0 .*keys must have exactly 6 rows, got shape \(1, 2, 10, 4\)"):
        rebuild_layers([ConcatenateKVCache()], states, 6)


def test_restored_room_is_used_without_a_new_buffer() -> None:
    donor = KVCache()
    donor.update_and_fetch(*_rows(0, 256))
    states = describe_layers([donor])
    roomy = tuple(
        Slot(slot.name, mx.concatenate([slot.data, mx.zeros((1, 2, 44, 4))], axis=2), slot.seq_axis, slot.reach)
        for slot in states[0].slots
    )
    (cache,) = rebuild_layers([KVCache()], [LayerState("KVCache", roomy, offset=256)], 256)
    cache.update_and_fetch(*_rows(256, 257))
    assert cache.keys.shape[-2] == 300
    assert [name for name, _ in flatten(states)] == ["0/keys", "0/values"]
