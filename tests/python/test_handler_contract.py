"""What every handler must do, whatever the cache class. A new class joins by adding its cases to CASES.

The reference is always an untouched deep copy of the donor, or a donor fed to the same n; the rebuilt cache must be
indistinguishable from it by anything a model can do with a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from handler_cases import CASES, HandlerCase, leaves, no_change
from parts import RowsMissing, same, through_parts

from prefixcache._layer_state import BOUNDARY, LayerState, decode_structure, encode_structure, flatten, unflatten, walk
from prefixcache._registry import common_offset, describe_layers, reaches_of, rebuild_layers, registered
from prefixcache.errors import Unsupported

# Buffers grow in steps of 256: just below, at and above a step.
LENGTHS = (1, 255, 256, 257, 300)
# Appended behind a restore: single tokens first, or a chunk first.
SINGLES = (*[1] * 10, 5, 1, 20)
CHUNKS = (5, 1, 1, 256, 20, 1, 2)

Plan = Sequence[int]


def _plans(case: HandlerCase) -> dict[str, Plan]:
    """The chunks in which a donor is fed, by name: every phase of a window, and every step of growth."""
    p = case.period
    plans: dict[str, Plan] = {}
    for n in sorted({n for n in (1, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1) if n > 0} if p else LENGTHS):
        plans[f"{n}"] = [n]
        size = min(100, p // 2 + 2) if p else 100
        plans[f"{n} in {size}s"] = [min(size, n - start) for start in range(0, n, size)]
    if 0 < p <= 32:
        plans |= {f"{k} singles": [1] * k for k in {1, 2, p, p + 1, 2 * p, 2 * p + 1} if k <= 40}
        plans |= {f"{p + 3} and {k} singles": [p + 3] + [1] * k for k in {1, 2, p - 1, p, p + 1} if k > 0}
    else:
        plans |= {"250 and 8 singles": [250] + [1] * 8, "8 singles": [1] * 8}
        plans |= {f"{p - 5} and {k} singles": [p - 5] + [1] * k for k in (4, 5, 6, 20) if p}
        plans |= {f"{p + 40} and 3 singles": [p + 40, 1, 1, 1]} if p else {}
    # The children of a list have been at every phase on their own.
    step = 3 if case.id.startswith("list-") else 1
    return {name: plans[name] for name in list(plans)[::step]}


def _each(choose: Callable[[HandlerCase], bool] = lambda case: True) -> Any:
    chosen = [case for case in CASES if choose(case)]
    return pytest.mark.parametrize("case", chosen, ids=[case.id for case in chosen])


def _has_keys(case: HandlerCase) -> bool:
    return hasattr(case.make(), "keys")


def _rows_only(case: HandlerCase) -> bool:
    return BOUNDARY not in reaches_of([case.make()])


def _feed(case: HandlerCase, plan: Plan) -> Any:
    cache, start = case.make(), 0
    for count in plan:
        mx.eval(case.feed(cache, start, count))
        start += count
    return cache


def _all_leaves(cache: Any) -> list[mx.array]:
    children = getattr(cache, "caches", ())
    return [*leaves(vars(cache)), *(leaf for child in children for leaf in _all_leaves(child))]


def _all_fields(cache: Any) -> list[Any]:
    """The types and names that make an object what it is, children included."""
    return [type(cache), vars(cache).keys(), [_all_fields(child) for child in getattr(cache, "caches", ())]]


def _bytes(array: mx.array) -> bytes:
    # Python has no bfloat16.
    return memoryview(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def _rebuild(case: HandlerCase, donor: Any, n: int, spare: int = 0) -> Any:
    (cache,) = rebuild_layers([case.fresh()], through_parts(describe_layers([donor]), n, spare), n)
    return cache


def _play(case: HandlerCase, cache: Any, n: int, counts: Plan) -> Iterator[tuple[str, Any]]:
    """Everything a model sees of a cache while tokens n, n + 1, ... are appended."""
    for count in counts:
        for number, mask in enumerate(case.masks(cache, count)):
            yield f"mask {number} of {count} at {n}", mask
        for number, array in enumerate(case.feed(cache, n, count)):
            yield f"array {number} after {count} at {n}", array
        n += count
        yield f"offset after {count}", getattr(cache, "offset", None)


def _check_play(case: HandlerCase, cache: Any, reference: Any, n: int, counts: Plan) -> None:
    seen, expected = (list(_play(case, one, n, counts)) for one in (cache, reference))
    mx.eval([value for _, value in (*seen, *expected) if isinstance(value, mx.array)])
    assert [what for what, _ in seen] == [what for what, _ in expected]
    for (what, left), (_, right) in zip(seen, expected, strict=True):
        assert same(left, right), what


def test_every_handler_is_covered() -> None:
    covered = {state.type_name for case in CASES for _, state in walk(describe_layers([case.make()]))}
    there = {(module, name) for module, name in registered() if module.startswith("mlx_lm.") and find_spec(module)}
    assert {registered()[key].type_name for key in there} <= covered
    assert len({case.id for case in CASES}) == len(CASES)


# In the short form lengths are fed at once and in chunks by turns: the first, the fourth and the fifth plan, and so on.
_PHASES = [
    pytest.param(case, plan, id=f"{case.id}: {name}", marks=[] if place % 4 in (0, 3) else pytest.mark.long)
    for case in CASES
    for place, (name, plan) in enumerate(_plans(case).items())
]


@pytest.mark.parametrize(("case", "plan"), _PHASES)
def test_rebuilt_behaves_like_the_donor(case: HandlerCase, plan: Plan) -> None:
    n, donor = sum(plan), _feed(case, plan)
    states = describe_layers([donor])
    assert common_offset(states) in (n, None)
    for spare, counts in ((0, SINGLES), (7, CHUNKS), (300, SINGLES)):
        rebuilt = _rebuild(case, donor, n, spare)
        assert _all_fields(rebuilt) == _all_fields(donor)
        # A ring that has turned hands rows out in another order than a buffer in temporal order, until a chunk of
        # several tokens puts it in order: only for single tokens the reference is put in order first.
        reference = copy.deepcopy(donor) if counts is CHUNKS else case.ordered(donor)
        _check_play(case, rebuilt, reference, n, counts)


@_each(lambda case: case.temporal is not no_change and _has_keys(case))
def test_single_tokens_see_the_rows_that_a_ring_shows(case: HandlerCase) -> None:
    """The order differs from that of the untouched donor, the rows do not."""

    def rows(array: mx.array) -> list[bytes]:
        return sorted(_bytes(array[:, :, i]) for i in range(array.shape[2]))

    for turned in range(case.period + 2) if case.period < 10 else (0, 1, 3):
        donor = _feed(case, [case.period + 3] + [1] * turned)
        n = case.period + 3 + turned
        rebuilt, reference = _rebuild(case, donor, n), copy.deepcopy(donor)
        for start in (n, n + 1):
            seen, expected = (case.feed(cache, start, 1) for cache in (rebuilt, reference))
            assert [rows(array) for array in seen] == [rows(array) for array in expected]


@_each(_rows_only)
def test_stands_at_tokens_before_the_end(case: HandlerCase) -> None:
    """While a chunk of 30 is prefilled, the rows before each of its tokens are there."""
    before = [case.period + 3, case.period + 20, 1]
    donor = _feed(case, [*before, 30])
    states, start = describe_layers([donor]), sum(before)
    for n in (start + 1, start + 13, start + 29):
        (rebuilt,) = rebuild_layers([case.fresh()], through_parts(states, n, 9), n)
        reference = case.ordered(_feed(case, [*before, n - start]))
        _check_play(case, rebuilt, reference, n, (1, 1, 5, 1))


@_each()
def test_donor_and_prototype_stay_as_they_are(case: HandlerCase) -> None:
    donor, prototype = _feed(case, [255, 1, 1, 3]), case.fresh()
    before, identities = copy.deepcopy(donor), [id(leaf) for leaf in _all_leaves(donor)]
    fresh = _all_fields(prototype), _all_leaves(prototype), getattr(prototype, "offset", None)
    (rebuilt,) = rebuild_layers([prototype], through_parts(describe_layers([donor]), 260, 8), 260)
    list(_play(case, rebuilt, 260, CHUNKS))
    assert [id(leaf) for leaf in _all_leaves(donor)] == identities
    assert all(same(a, b) for a, b in zip(_all_leaves(donor), _all_leaves(before), strict=True))
    _check_play(case, donor, before, 260, SINGLES)
    assert fresh == (_all_fields(prototype), _all_leaves(prototype), getattr(prototype, "offset", None))


@_each()
def test_rebuilt_of_rebuilt(case: HandlerCase) -> None:
    donor = _feed(case, [290, 1, 1, 8])
    once = _rebuild(case, donor, 300, 40)
    twice = _rebuild(case, once, 300, 5)
    _check_play(case, twice, _rebuild(case, donor, 300, 5), 300, SINGLES)


@_each()
def test_rebuilt_owns_the_arrays_it_was_given(case: HandlerCase) -> None:
    """A copy here would cost a second pass over the bytes and a second owner would copy again at the next append."""
    # 256 rows in all: mlx-lm before 0.32 needs whole steps in chunked caches.
    states = through_parts(describe_layers([_feed(case, [10])]), 10, 246)
    (rebuilt,) = rebuild_layers([case.fresh()], states, 10)
    given = [slot.data for _, slot in flatten(states)]
    assert sorted(id(leaf) for leaf in _all_leaves(rebuilt)) == sorted(id(array) for array in given)


@_each(lambda case: not case.structure_grows)
def test_structure_does_not_change_with_length(case: HandlerCase) -> None:
    texts = {encode_structure(describe_layers([_feed(case, plan)])) for plan in ([1], [256], [257, *[1] * 43], [700])}
    assert len(texts) == 1


@_each()
def test_settings_and_reaches_are_known_before_the_first_token(case: HandlerCase) -> None:
    """A store compares the settings with those of the model's own caches, which are empty."""
    empty, donor = describe_layers([case.make()]), describe_layers([_feed(case, [600])])
    assert [(path, s.type_name, s.meta) for path, s in walk(empty)] == [
        (path, s.type_name, s.meta) for path, s in walk(donor)
    ]
    assert reaches_of([case.make()]) == {slot.reach for _, slot in flatten(donor)}


@_each()
def test_empty_cache(case: HandlerCase) -> None:
    states = describe_layers([case.make()])
    assert flatten(states) == []
    assert common_offset(states) in (0, None)
    restored = unflatten(decode_structure(encode_structure(states)), {}, 0)
    (rebuilt,) = rebuild_layers([case.fresh()], restored, 0)
    assert _all_leaves(rebuilt) == []
    _check_play(case, rebuilt, case.make(), 0, CHUNKS)


@_each()
def test_a_layer_that_held_nothing_stays_empty(case: HandlerCase) -> None:
    """Beside layers that hold tokens. nemotron-nas has such layers."""
    other = CASES[0]
    states = through_parts(describe_layers([_feed(other, [20]), case.make()]), 20)
    _, rebuilt = rebuild_layers([other.fresh(), case.fresh()], states, 20)
    assert _all_leaves(rebuilt) == []
    _check_play(case, rebuilt, case.make(), 0, SINGLES)


@_each()
def test_nothing_stored_cannot_stand_at_one(case: HandlerCase) -> None:
    states = describe_layers([case.make()])
    with pytest.raises(Unsupported, match="nothing is stored in any layer, expected 1 tokens") as caught:
        rebuild_layers([case.fresh()], states, 1)
    assert caught.value.reason == "structure_mismatch"


@_each(lambda case: _rows_only(case) and (case.period == 0 or case.period > 10))
def test_too_few_rows(case: HandlerCase) -> None:
    states = through_parts(describe_layers([_feed(case, [10])]), 10)
    with pytest.raises(ValueError, match=r"layer 0 .*11"):
        rebuild_layers([case.fresh()], states, 11)


@_each()
@pytest.mark.parametrize("change", ["unknown", "missing"])
def test_other_fields_are_refused(case: HandlerCase, change: str) -> None:
    donor = _feed(case, [10])
    known = next(iter(vars(donor)))
    if change == "unknown":
        donor.rotation = 3
    else:
        delattr(donor, known)
    with pytest.raises(Unsupported, match=rf"layer 0 .*(rotation|{known})") as caught:
        describe_layers([donor])
    assert caught.value.reason == "unknown_field"


@_each(lambda case: hasattr(case.make(), "offset"))
@pytest.mark.parametrize("offset", [-1, True, 3.0, "3", None, mx.array(3)], ids=repr)
def test_bad_offset(case: HandlerCase, offset: Any) -> None:
    donor = _feed(case, [10])
    donor.offset = offset
    with pytest.raises((ValueError, TypeError), match=r"layer 0 .*offset"):
        describe_layers([donor])


@_each(lambda case: hasattr(case.make(), "offset") and (case.period == 0 or case.period > 10))
def test_offset_beyond_the_rows(case: HandlerCase) -> None:
    donor = _feed(case, [10])
    donor.offset = 10_000
    with pytest.raises(ValueError, match=r"layer 0 .*offset 10000 .*"):
        describe_layers([donor])


@_each(_has_keys)
def test_half_set_cache(case: HandlerCase) -> None:
    donor = _feed(case, [10])
    donor.values = None
    with pytest.raises(ValueError, match=r"layer 0 .*values not set at offset 10"):
        describe_layers([donor])
    empty = case.make()
    empty.offset = 4
    with pytest.raises(ValueError, match=r"layer 0 .*not set at offset 4"):
        describe_layers([empty])


def _replace(value: Any, by: Callable[[mx.array], Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_replace(item, by) for item in value)
    return by(value) if isinstance(value, mx.array) else value


def _altered(case: HandlerCase, by: Callable[[mx.array], Any]) -> Any:
    donor = _feed(case, [10])
    for name, value in vars(donor).items():
        setattr(donor, name, _replace(value, by))
    return donor


@_each(lambda case: not case.id.startswith("list-"))
def test_two_sequences(case: HandlerCase) -> None:
    donor = _altered(case, lambda array: mx.concatenate([array, array]) if array.ndim else array)
    with pytest.raises(ValueError, match=r"layer 0 .* 2 sequences, .*extract the row first"):
        describe_layers([donor])


@_each(lambda case: not case.id.startswith("list-"))
@pytest.mark.parametrize("leaf", [np.zeros(3), 3.5, "text", {"a": 1}], ids=lambda leaf: type(leaf).__name__)
def test_leaves_of_another_type(case: HandlerCase, leaf: Any) -> None:
    with pytest.raises((TypeError, Unsupported), match=rf"layer 0 .*must be an mx.array.*{type(leaf).__name__}"):
        describe_layers([_altered(case, lambda _: leaf)])


@_each(_has_keys)
def test_stored_slots_of_another_shape(case: HandlerCase) -> None:
    (state,) = through_parts(describe_layers([_feed(case, [10])]), 10)
    for slots in (state.slots[:-1], tuple(reversed(state.slots))):
        changed = LayerState(state.type_name, slots, state.meta, offset=10)
        with pytest.raises(Unsupported, match="layer 0") as caught:
            rebuild_layers([case.fresh()], [changed], 10)
        assert caught.value.reason == "structure_mismatch"


@_each(_rows_only)
def test_rows_that_are_gone_are_not_given(case: HandlerCase) -> None:
    """Only rows that are there, and only those before the offset."""
    offset = 2 * case.period + 45
    states = describe_layers([_feed(case, [offset - 1, 1])])
    with pytest.raises(RowsMissing):
        through_parts(states, offset + 1)
    for name, slot in flatten(states):
        assert slot.seq_axis is not None
        assert slot.first_row + slot.data.shape[slot.seq_axis] >= offset, name
        assert slot.head is None or slot.head.shape[slot.seq_axis] == slot.reach.keep <= slot.first_row, name
