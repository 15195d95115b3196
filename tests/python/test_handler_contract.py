"""What every handler must do, whatever the cache class. A new family joins by adding one line to FAMILIES.

The reference is always a deep copy of the donor that was cut to the same n by the family's own means; the rebuilt
cache must be indistinguishable from it by anything a model can do with a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

from prefixcache._layer_state import ALL, LayerState, decode_structure, encode_structure, flatten, unflatten
from prefixcache.errors import Unsupported
from prefixcache.type_registry import common_offset, describe_layers, handler_named, rebuild_layers

# Buffers grow in steps of 256: just below, at and above a step.
LENGTHS = [1, 255, 256, 257, 300]
TOKENS = 900


def _rows(heads: int, k_dim: int, v_dim: int, dtype: mx.Dtype) -> Callable[[int, int], tuple[mx.array, mx.array]]:
    """Keys and values of tokens [start, stop), the same whenever they are asked for."""
    keys = mx.random.normal((1, heads, TOKENS, k_dim), key=mx.random.key(1)).astype(dtype)
    values = mx.random.normal((1, heads, TOKENS, v_dim), key=mx.random.key(2)).astype(dtype)
    mx.eval(keys, values)
    return lambda start, stop: (keys[:, :, start:stop], values[:, :, start:stop])


def _trim(cache: Any, n: int) -> None:
    cache.trim(cache.offset - n)


def _slice(cache: Any, n: int) -> None:
    # trim() of this class leaves the rows in place, and the next append would keep them.
    cache.keys, cache.values, cache.offset = cache.keys[..., :n, :], cache.values[..., :n, :], n


@dataclass(frozen=True)
class Family:
    type_name: str
    make: Callable[[], Any]
    rows: Callable[[int, int], tuple[mx.array, mx.array]]
    cut: Callable[[Any, int], None] = _trim
    prototype: Callable[[], Any] | None = None

    def donor(self, n: int) -> Any:
        cache = self.make()
        for start in range(0, n, 100):
            cache.update_and_fetch(*self.rows(start, min(n, start + 100)))
        mx.eval([leaf for _, leaf in _leaves(cache)])
        return cache

    def fresh(self) -> Any:
        return (self.prototype or self.make)()

    def reference(self, donor: Any, n: int) -> Any:
        cache = copy.deepcopy(donor)
        self.cut(cache, n)
        return cache


FAMILIES = {
    "kv": Family("KVCache", KVCache, _rows(2, 8, 8, mx.float32)),
    "kv-bf16-mla": Family("KVCache", KVCache, _rows(1, 24, 8, mx.bfloat16)),
    "kv-no-values": Family("KVCache", KVCache, _rows(1, 16, 0, mx.float16)),
    "concatenate": Family("ConcatenateKVCache", ConcatenateKVCache, _rows(2, 8, 8, mx.float16), _slice),
    "quantized-8": Family("QuantizedKVCache", QuantizedKVCache, _rows(2, 64, 128, mx.float16)),
    "quantized-4": Family("QuantizedKVCache", lambda: QuantizedKVCache(32, 4), _rows(2, 64, 64, mx.float32)),
    "quantized-of-plain": Family(
        "QuantizedKVCache", lambda: QuantizedKVCache(64, 4), _rows(2, 64, 64, mx.float16), prototype=KVCache
    ),
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    result: Family = request.param
    return result


def _leaves(cache: Any) -> list[tuple[str, mx.array]]:
    return [(name, leaf) for name, leaf in tree_flatten(vars(cache)) if isinstance(leaf, mx.array)]


def _same(left: Any, right: Any) -> bool:
    """Bit for bit: type, shape, dtype and bytes."""
    if not isinstance(left, mx.array) or not isinstance(right, mx.array):
        return type(left) is type(right) and bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.size == 0:
        return True
    return bool(mx.array_equal(left.view(mx.uint8), right.view(mx.uint8)).item())


def _gather(states: list[LayerState], n: int, spare: int) -> list[LayerState]:
    """What a store does between the two ends: rows [0, n) into fresh arrays with zeroed room, through the text."""
    arrays = {}
    for name, slot in flatten(states):
        array = slot.data
        if slot.seq_axis is not None:
            assert slot.reach == ALL
            array = mx.split(array, [n], axis=slot.seq_axis)[0]
            room = list(array.shape)
            layer = states[int(name.split("/")[0])]
            room[slot.seq_axis] = spare if handler_named(layer.type_name).spare_rows else 0
            array = mx.concatenate([array, mx.zeros(room, array.dtype)], axis=slot.seq_axis)
        arrays[name] = mx.contiguous(array)
    mx.eval(arrays)
    return unflatten(decode_structure(encode_structure(states)), arrays, n)


def _rebuild(family: Family, donor: Any, n: int, spare: int) -> Any:
    (cache,) = rebuild_layers([family.fresh()], _gather(describe_layers([donor]), n, spare), n)
    return cache


def _play(family: Family, cache: Any, n: int) -> Iterator[tuple[str, Any]]:
    """Everything a model sees of a cache while tokens n, n + 1, ... are appended."""
    for count in (1, 1, 5, 1, 256, 20, 1):
        yield f"mask of {count} at {n}", cache.make_mask(count, return_array=True, window_size=None)
        yield f"causal mask of {count} at {n}", cache.make_mask(count, return_array=False, window_size=None)
        returned = cache.update_and_fetch(*family.rows(n, n + count))
        for name, leaf in tree_flatten(returned):
            yield f"returned {name} after {count} at {n}", leaf
        n += count
        yield f"offset after {count}", cache.offset
        yield f"emptiness at {n}", cache.empty()


@pytest.mark.parametrize("spare", [0, 1, 300])
@pytest.mark.parametrize("extra", [0, 37])
@pytest.mark.parametrize("n", LENGTHS)
def test_rebuilt_behaves_like_the_donor(family: Family, n: int, extra: int, spare: int) -> None:
    donor = family.donor(n + extra)
    rebuilt, reference = _rebuild(family, donor, n, spare), family.reference(donor, n)
    assert type(rebuilt) is type(reference)
    assert vars(rebuilt).keys() == vars(reference).keys()
    for (what, seen), (_, expected) in zip(_play(family, rebuilt, n), _play(family, reference, n), strict=True):
        assert _same(seen, expected), what


@pytest.mark.parametrize("n", LENGTHS)
def test_describe_gives_exact_rows(family: Family, n: int) -> None:
    donor = family.donor(n)
    states = describe_layers([donor])
    assert common_offset(states) == n
    returned = tree_flatten(copy.deepcopy(donor).update_and_fetch(*family.rows(n, n + 1)))
    for (_, slot), (_, seen) in zip(flatten(states), returned, strict=True):
        assert slot.first_row == 0
        rows = mx.split(slot.data, [n], axis=slot.seq_axis)[0]
        assert _same(rows, mx.split(seen, [n], axis=slot.seq_axis)[0])


def test_donor_and_prototype_stay_as_they_are(family: Family) -> None:
    donor, prototype = family.donor(260), family.fresh()
    before, fields = copy.deepcopy(donor), copy.deepcopy(vars(prototype))
    identities = [id(leaf) for _, leaf in _leaves(donor)]
    (rebuilt,) = rebuild_layers([prototype], _gather(describe_layers([donor]), 256, 8), 256)
    list(_play(family, rebuilt, 256))
    assert [id(leaf) for _, leaf in _leaves(donor)] == identities
    assert all(_same(a, b) for (_, a), (_, b) in zip(_leaves(donor), _leaves(before), strict=True))
    assert vars(prototype) == fields


def test_rebuilt_of_rebuilt(family: Family) -> None:
    donor = family.donor(300)
    twice = _rebuild(family, _rebuild(family, donor, 280, 40), 270, 5)
    once = _rebuild(family, donor, 270, 5)
    for (what, seen), (_, expected) in zip(_play(family, twice, 270), _play(family, once, 270), strict=True):
        assert _same(seen, expected), what


def test_rebuilt_owns_the_arrays_it_was_given(family: Family) -> None:
    """A copy here would cost a second pass over the bytes and a second owner would copy again at the next append."""
    states = _gather(describe_layers([family.donor(10)]), 10, 6)
    (rebuilt,) = rebuild_layers([family.fresh()], states, 10)
    given = [slot.data for _, slot in flatten(states)]
    assert [id(leaf) for _, leaf in sorted(_leaves(rebuilt))] == [id(array) for array in given]


def test_structure_does_not_change_with_length(family: Family) -> None:
    texts = {encode_structure(describe_layers([family.donor(n)])) for n in (1, 256, 300)}
    assert len(texts) == 1


def test_empty_cache(family: Family) -> None:
    states = describe_layers([family.make()])
    assert flatten(states) == []
    assert common_offset(states) == 0
    restored = unflatten(decode_structure(encode_structure(states)), {}, 0)
    (rebuilt,) = rebuild_layers([family.fresh()], restored, 0)
    assert rebuilt.empty()
    for (what, seen), (_, expected) in zip(_play(family, rebuilt, 0), _play(family, family.make(), 0), strict=True):
        assert _same(seen, expected), what


def test_nothing_stored_cannot_stand_at_one(family: Family) -> None:
    states = describe_layers([family.make()])
    with pytest.raises(Unsupported, match="nothing is stored in any layer, expected 1 tokens") as caught:
        rebuild_layers([family.fresh()], states, 1)
    assert caught.value.reason == "structure_mismatch"


def test_too_few_rows(family: Family) -> None:
    states = _gather(describe_layers([family.donor(10)]), 10, 0)
    with pytest.raises(ValueError, match=r"layer 0 .*11"):
        rebuild_layers([family.fresh()], states, 11)


@pytest.mark.parametrize("change", ["unknown", "missing"])
def test_other_fields_are_refused(family: Family, change: str) -> None:
    donor = family.donor(10)
    if change == "unknown":
        donor.rotation = 3
    else:
        del donor.offset
    with pytest.raises(Unsupported, match=r"layer 0 .*(rotation|offset)") as caught:
        describe_layers([donor])
    assert caught.value.reason == "unknown_field"


@pytest.mark.parametrize("offset", [-1, 10_000, True, 3.0, "3", None, mx.array(3)], ids=repr)
def test_bad_offset(family: Family, offset: Any) -> None:
    donor = family.donor(10)
    donor.offset = offset
    with pytest.raises((ValueError, TypeError), match=r"layer 0 .*offset"):
        describe_layers([donor])


def test_half_set_cache(family: Family) -> None:
    donor = family.donor(10)
    donor.values = None
    with pytest.raises(ValueError, match=r"layer 0 .*values not set at offset 10"):
        describe_layers([donor])
    empty = family.make()
    empty.offset = 4
    with pytest.raises(ValueError, match=r"layer 0 .*not set at offset 4"):
        describe_layers([empty])


def test_stored_slots_of_another_shape(family: Family) -> None:
    (state,) = _gather(describe_layers([family.donor(10)]), 10, 0)
    for slots in (state.slots[:-1], tuple(reversed(state.slots))):
        changed = LayerState(state.type_name, slots, state.meta, offset=10)
        with pytest.raises(Unsupported, match="layer 0") as caught:
            rebuild_layers([family.fresh()], [changed], 10)
        assert caught.value.reason == "structure_mismatch"
