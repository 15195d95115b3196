"""Rotating caches: which rows a ring still has at every phase, room, settings and caches that contradict themselves."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache
from parts import RowsMissing, through_parts

from prefixcache._layer_state import LayerState, Slot, window_of
from prefixcache._registry import describe_layers, rebuild_layers
from prefixcache.errors import Unsupported


def _positions(start: int, count: int) -> tuple[mx.array, mx.array]:
    """Rows that say where they belong."""
    ramp = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, -1, 1)
    return mx.broadcast_to(ramp, (1, 2, count, 3)), mx.broadcast_to(-ramp, (1, 2, count, 1))


def _ring(max_size: int, keep: int, *chunks: int) -> Any:
    cache, start = RotatingKVCache(max_size, keep), 0
    for count in chunks:
        mx.eval(cache.update_and_fetch(*_positions(start, count)))
        start += count
    return cache


def _held(array: mx.array) -> list[int]:
    return [int(x) for x in array[0, 0, :, 0].tolist()]


def _rows(slot: Slot, offset: int) -> list[int]:
    """The positions that a slot says it has, after checking them against the rows themselves."""
    sign = -1 if slot.name == "values" else 1
    behind = _held(slot.data * sign)[: offset - slot.first_row]
    assert behind == list(range(slot.first_row, offset))
    head = [] if slot.head is None else _held(slot.head * sign)
    assert head == list(range(len(head)))
    return head + behind


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("max_size", [8, 300])
def test_rows_that_are_still_there(max_size: int, keep: int) -> None:
    window = max_size - keep
    first, tail = max_size + 5, max_size - 1 - keep
    cases: list[tuple[tuple[int, ...], int]] = [
        ((3,), 0),
        ((max_size - 1, 1), 0),
        ((max_size,), 0),
        ((first,), 0),  # the first chunk is kept whole
        ((3, max_size), 0),
        ((max_size, 6), max_size - tail),
        ((first, 6), first - tail),
        ((first, 6, 2), first + 6 - tail),
        *(((first, *[1] * k), first + k - window) for k in (1, 2, window - 1, window, window + 1, 2 * window)),
        *(((first, *[1] * k, 2), first + k - tail) for k in (1, window)),
        ((first, 1, 1, 9, 1), first + 12 - window),
    ]
    for chunks, oldest in cases:
        offset = sum(chunks)
        (state,) = describe_layers([_ring(max_size, keep, *chunks)])
        assert state.offset == offset
        expected = list(range(offset)) if oldest == 0 else [*range(keep), *range(oldest, offset)]
        for slot in state.slots:
            assert slot.reach == window_of(max_size, keep)
            assert _rows(slot, offset) == expected, chunks


@pytest.mark.parametrize("keep", [0, 4])
def test_single_tokens_only(keep: int) -> None:
    """A buffer that grew in steps: what is behind the offset is padding."""
    cache = RotatingKVCache(300, keep)
    for position in range(310):
        cache.update_and_fetch(*_positions(position, 1))
        if position + 1 in (1, 255, 256, 257, 299, 300, 301, 310):
            (state,) = describe_layers([cache])
            n = position + 1
            expected = list(range(n)) if n <= 300 else [*range(keep), *range(n - 300 + keep, n)]
            assert [_rows(slot, n) for slot in state.slots] == [expected] * 2
            mx.eval(cache.keys, cache.values)


def test_nothing_is_copied_where_rows_are_in_order() -> None:
    cache = _ring(8, 0, 20, 5)
    (state,) = describe_layers([cache])
    assert [slot.data for slot in state.slots] == [cache.keys, cache.values]
    assert state.slots[0].data is cache.keys


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("chunks", [(3,), (20,), (20, 5), (20, 1), (20, *[1] * 4), (20, *[1] * 8), (20, *[1] * 9)])
def test_earliest_n(keep: int, chunks: tuple[int, ...]) -> None:
    """Exactly where the rows for n are gone, n is refused."""
    offset, window = sum(chunks), 8 - keep
    cache = _ring(8, keep, *chunks)
    states = describe_layers([cache])
    held = set(_rows(states[0].slots[0], offset))
    reached = []
    for n in range(1, offset + 1):
        needed = set(range(n)) if n <= 8 else {*range(keep), *range(n - window, n)}
        if needed <= held:
            (rebuilt,) = rebuild_layers([RotatingKVCache(8, keep)], through_parts(states, n), n)
            assert (_held(rebuilt.keys), _held(-rebuilt.values)) == (sorted(needed), sorted(needed))
            assert (rebuilt.offset, rebuilt._idx) == (n, len(needed))
            reached.append(n)
        else:
            with pytest.raises(RowsMissing):
                through_parts(states, n)
    assert reached[-1] == offset
    assert (1 in reached) == (0 in held)


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("n", [1, 6, 7, 8, 9, 30])
def test_room_is_never_beyond_the_window(keep: int, n: int) -> None:
    for spare in (0, 1, 100):
        states = through_parts(describe_layers([_ring(8, keep, n)]), n, spare)
        (rebuilt,) = rebuild_layers([RotatingKVCache(8, keep)], states, n)
        assert rebuilt.keys.shape[2] == min(8, n + spare) == rebuilt.values.shape[2]
        assert rebuilt.max_size == 8
        assert rebuilt.keep == keep


def test_too_much_room_is_refused() -> None:
    (state,) = through_parts(describe_layers([_ring(8, 0, 5)]), 5)
    slots = tuple(Slot(s.name, mx.zeros((1, 2, 9, 3)), 2, s.reach) for s in state.slots)
    with pytest.raises(ValueError, match=r"layer 0 .*keys must have at most 8 rows, got shape \(1, 2, 9, 3\)"):
        rebuild_layers([RotatingKVCache(8)], [LayerState(state.type_name, slots, state.meta, offset=5)], 5)


def test_too_few_rows() -> None:
    states = through_parts(describe_layers([_ring(8, 0, 5)]), 5)
    with pytest.raises(ValueError, match="layer 0 .* 6 is beyond the 5 rows"):
        rebuild_layers([RotatingKVCache(8)], states, 6)
    with pytest.raises(ValueError, match="layer 0 .* 8 is beyond the 5 rows"):
        rebuild_layers([RotatingKVCache(8)], states, 100)


@pytest.mark.parametrize("prototype", [(9, 4), (7, 4), (8, 0), (8, 3)])
def test_other_settings_than_the_models(prototype: tuple[int, int]) -> None:
    states = through_parts(describe_layers([_ring(8, 4, 20)]), 20)
    with pytest.raises(Unsupported, match="layer 0 .*'keep': 4, 'max_size': 8.*own") as caught:
        rebuild_layers([RotatingKVCache(*prototype)], states, 20)
    assert caught.value.reason == "structure_mismatch"


def test_a_batch_loses_the_kept_rows() -> None:
    """extract() forgets that rows were kept, although they are still there: the settings tell."""
    batch = BatchRotatingKVCache.merge([_ring(8, 4, 6), _ring(8, 4, 5)])
    row = batch.extract(0)
    (state,) = describe_layers([row])
    assert state.meta == {"max_size": 8, "keep": 0}
    with pytest.raises(Unsupported, match="'keep': 0.*'keep': 4") as caught:
        rebuild_layers([RotatingKVCache(8, 4)], through_parts([state], 6), 6)
    assert caught.value.reason == "structure_mismatch"


@pytest.mark.parametrize("lengths", [(3, 6), (8, 20), (20, 5)])
@pytest.mark.parametrize("turned", [0, 1, 5, 9])
def test_rows_of_a_batch(lengths: tuple[int, int], turned: int) -> None:
    """Extracted from a batch, of two lengths and after the batch's ring has turned."""
    batch = BatchRotatingKVCache.merge([_ring(8, 0, n) for n in lengths])
    for k in range(turned):
        keys, values = zip(*(_positions(n + k, 1) for n in lengths), strict=True)
        batch.update_and_fetch(mx.concatenate(keys), mx.concatenate(values))
    for index, length in enumerate(lengths):
        n = length + turned
        row = batch.extract(index)
        (state,) = describe_layers([row])
        assert _rows(state.slots[0], n)[-min(n, 8) :] == list(range(max(0, n - 8), n))
        (rebuilt,) = rebuild_layers([RotatingKVCache(8)], through_parts([state], n, 3), n)
        seen = rebuilt.update_and_fetch(*_positions(n, 2))
        assert _held(seen[0]) == list(range(max(0, n - 7), n + 2))


def test_rows_behind_a_trimmed_end_are_garbage() -> None:
    for chunks in ((3,), (3, 1, 1), (1, 1, 1, 1, 1, 1)):
        cache = _ring(8, 0, *chunks)
        cache.trim(2)
        n = sum(chunks) - 2
        states = describe_layers([cache])
        assert states[0].offset == n
        with pytest.raises(RowsMissing):
            through_parts(states, n + 1)
        (rebuilt,) = rebuild_layers([RotatingKVCache(8)], through_parts(states, n, 4), n)
        for other in ((n, 1), (n + 1, 3)):
            seen, expected = (one.update_and_fetch(*_positions(*other)) for one in (rebuilt, cache))
            assert _held(seen[0]) == list(range(max(0, other[0] - 7), sum(other)))
            assert mx.array_equal(seen[0], expected[0]).item()
            assert mx.array_equal(seen[1], expected[1]).item()


def test_trimmed_to_nothing() -> None:
    cache = _ring(8, 0, 3)
    cache.trim(3)
    (state,) = describe_layers([cache])
    assert (state.offset, [slot.first_row for slot in state.slots]) == (0, [0, 0])


@pytest.mark.parametrize(
    ("chunks", "changes", "message"),
    [
        ((5,), {"_idx": 4}, "offset 5 does not fit _idx=4 and 5 rows with max_size=8, keep=2"),
        ((5,), {"offset": 6}, "offset 6 does not fit _idx=5 and 5 rows"),
        ((5,), {"_idx": -1}, "_idx must be at least 0, got -1"),
        ((5,), {"_idx": None}, "_idx must be an int, not NoneType"),
        ((5,), {"_idx": mx.array(5)}, "_idx must be an int, not array"),
        ((5,), {"offset": 20}, "offset 20 does not fit _idx=5 and 5 rows"),
        ((20,), {"_idx": 19}, "offset 20 does not fit _idx=19 and 20 rows"),
        ((20,), {"offset": 19}, "offset 19 does not fit _idx=20 and 20 rows"),
        ((20, 5), {"_idx": 11}, "offset 25 does not fit _idx=11 and 12 rows"),
        ((20, 1, 1), {"_idx": 1}, "offset 22 does not fit _idx=1 and 8 rows"),
        ((20, 1, 1), {"_idx": 9}, "offset 22 does not fit _idx=9 and 8 rows"),
        ((8,), {"_idx": 5}, "offset 8 does not fit _idx=5 and 8 rows"),
        ((5,), {"max_size": 0}, "max_size must be at least 1, got 0"),
        ((5,), {"max_size": "8"}, "max_size must be an int, not str"),
        ((5,), {"keep": -1}, "keep must be at least 0, got -1"),
        ((5,), {"keep": 8}, "keep must be below max_size, got 8 and 8"),
        ((5,), {"keep": True}, "keep must be an int, not bool"),
        ((20, 1, 1), {"_idx": 2}, "offset 22 does not fit _idx=2 and 8 rows"),
    ],
)
def test_caches_that_contradict_themselves(chunks: tuple[int, ...], changes: dict[str, Any], message: str) -> None:
    cache = _ring(8, 2, *chunks)
    describe_layers([cache])
    for name, value in changes.items():
        setattr(cache, name, value)
    with pytest.raises((ValueError, TypeError), match=f"layer 0 .*{message}"):
        describe_layers([cache])


@pytest.mark.parametrize("trimmed", [1, 3, 10, 20])
def test_a_ring_trimmed_against_the_rules(trimmed: int) -> None:
    """mlx-lm says that a full ring is not trimmable; what comes of it anyway is refused where it can be told."""
    cache = _ring(8, 0, 20, *[1] * 3)
    assert not cache.is_trimmable()
    cache.trim(trimmed)
    if trimmed == 1:
        # Its next append would go to the wrong place too: nothing in the object tells.
        assert cache._idx == 2
        return
    with pytest.raises(ValueError, match=r"layer 0 .*_idx"):
        describe_layers([cache])


def test_stored_settings_must_be_there() -> None:
    (state,) = through_parts(describe_layers([_ring(8, 0, 5)]), 5)
    with pytest.raises(Unsupported, match="layer 0 .*own"):
        rebuild_layers([RotatingKVCache(8)], [LayerState(state.type_name, state.slots, {}, offset=5)], 5)
