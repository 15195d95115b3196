"""DeepSeek V4.1's layer cache: stored whole, with the rows of the group that is still open."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import mlx.core as mx
import pytest
from parts import RowsMissing, through_parts

from prefixcache._layer_state import BOUNDARY, LayerState, flatten
from prefixcache._registry import common_offset, describe_layers, rebuild_layers
from prefixcache.errors import Unsupported

if importlib.util.find_spec("mlx_lm.models.deepseek_v41") is None:
    pytest.skip("this mlx-lm has no deepseek_v41", allow_module_level=True)

from architectures.harness import build
from mlx_lm.models.deepseek_v41 import LayerCache

WINDOW = 24


@pytest.fixture(scope="module")
def model() -> Any:
    mx.random.seed(3)
    return build("deepseek_v41")


def _tokens(count: int) -> mx.array:
    return mx.random.randint(0, 128, (1, count), key=mx.random.key(9))


def _run(model: Any, caches: list[Any], start: int, stop: int) -> mx.array:
    logits: mx.array = model(_tokens(200)[:, start:stop], cache=caches)
    mx.eval(logits)
    return logits


def _donor(model: Any, n: int) -> list[Any]:
    caches = model.make_cache()
    for start in range(0, n, 16):
        _run(model, caches, start, min(n, start + 16))
    return list(caches)


def _fields(cache: Any) -> dict[str, Any]:
    return {name: getattr(cache, name) for name in ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, WINDOW - 1, WINDOW, WINDOW + 1, 30, 63, 64])
def test_logits_after_a_restore(model: Any, n: int) -> None:
    """At every phase of a group of 4 tokens, against an untouched deep copy."""
    donor = _donor(model, n)
    reference = copy.deepcopy(donor)
    assert {type(cache) for cache in donor} == {LayerCache}
    states = describe_layers(donor)
    assert common_offset(states) == n
    restored = rebuild_layers(model.make_cache(), through_parts(states, n), n)
    for ours, theirs in zip(restored, donor, strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert (ours.offset, ours.window_size) == (n, WINDOW)
        assert [a is None for a in _fields(ours).values()] == [a is None for a in _fields(theirs).values()]
    for start, stop in ((n, n + 1), (n + 1, n + 3), (n + 3, n + 4), (n + 4, n + 40)):
        assert mx.array_equal(_run(model, restored, start, stop), _run(model, reference, start, stop)).item()


def test_slots_are_whole(model: Any) -> None:
    donor = _donor(model, 50)
    states = describe_layers(donor)
    assert all((slot.seq_axis, slot.reach) == (None, BOUNDARY) for _, slot in flatten(states))
    for cache, state in zip(donor, states, strict=True):
        assert (state.type_name, state.meta, state.offset) == ("DeepseekV41LayerCache", {"window_size": WINDOW}, 50)
        assert list(state.arrays()) == [name for name, array in _fields(cache).items() if array is not None]
        assert all(state.arrays()[name] is array for name, array in _fields(cache).items() if array is not None)
    # Layers play different parts, so they hold different arrays.
    assert len({tuple(state.arrays()) for state in states}) > 1


def test_it_stands_only_where_it_was_captured(model: Any) -> None:
    states = describe_layers(_donor(model, 50))
    for n in (49, 51):
        with pytest.raises(RowsMissing):
            through_parts(states, n)


def test_window_and_offset_must_agree(model: Any) -> None:
    donor = _donor(model, 10)
    for offset in (9, 11, 0):
        donor[1].offset = offset
        with pytest.raises(ValueError, match=rf"layer 1 .*window of shape \(1, 10, 32\) does not fit offset {offset}"):
            describe_layers(donor)
    donor[1].offset, donor[1].window = 10, None
    with pytest.raises(ValueError, match="layer 1 .*window of shape None does not fit offset 10"):
        describe_layers(donor)
    states = through_parts(describe_layers(_donor(model, 10)), 10)
    with pytest.raises(ValueError, match="layer 0 .*does not fit offset 11"):
        rebuild_layers(model.make_cache(), states, 11)
    empty = LayerCache(WINDOW)
    empty.offset = 3
    with pytest.raises(ValueError, match="layer 0 .*window of shape None does not fit offset 3"):
        describe_layers([empty])


def test_another_model(model: Any) -> None:
    states = through_parts(describe_layers(_donor(model, 10)), 10)
    with pytest.raises(Unsupported, match="layer 0 .*'window_size': 24.*'window_size': 25") as caught:
        rebuild_layers([LayerCache(WINDOW + 1)] * len(states), states, 10)
    assert caught.value.reason == "structure_mismatch"
    (number,) = [i for i, state in enumerate(states) if len(state.slots) == 5][:1]
    other = LayerState(states[number].type_name, tuple(reversed(states[number].slots)), states[number].meta, offset=10)
    with pytest.raises(Unsupported, match="layer 0 .*expected some of"):
        rebuild_layers([LayerCache(WINDOW)], [other], 10)


@pytest.mark.parametrize("size", [0, -1, None, 8.0, True])
def test_bad_window_size(size: Any) -> None:
    cache = LayerCache(WINDOW)
    cache.window_size = size
    with pytest.raises((ValueError, TypeError), match="layer 0 .*window_size"):
        describe_layers([cache])
