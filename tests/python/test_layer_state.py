"""LayerState: names, the canonical structure text, and what decode refuses."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache._layer_state import (
    ALL,
    BOUNDARY,
    LayerState,
    Reach,
    Slot,
    decode_structure,
    encode_structure,
    flatten,
    structure,
    unflatten,
    window_of,
)

_NAMES = st.text(alphabet="abcXYZ019_.", min_size=1, max_size=12)
_META = st.dictionaries(
    st.text(max_size=6),
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    max_size=3,
)
_WINDOWS = st.integers(1, 9).flatmap(lambda w: st.builds(window_of, st.just(w), st.integers(0, w - 1)))
_REACHES = st.just(ALL) | st.just(BOUNDARY) | _WINDOWS
_SLOTS = st.lists(
    st.builds(Slot, _NAMES, st.none(), st.none() | st.integers(0, 4), _REACHES),
    max_size=3,
    unique_by=lambda slot: slot.name,
).map(tuple)
_LAYERS = st.recursive(
    st.builds(LayerState, _NAMES, _SLOTS, _META, st.just(()), st.none() | st.just(0)),
    lambda inner: st.builds(LayerState, _NAMES, _SLOTS, _META, st.lists(inner, max_size=3).map(tuple), st.none()),
    max_leaves=6,
)


def _kv(offset: int, rows: int) -> LayerState:
    keys, values = mx.ones((1, 2, rows, 4)), mx.zeros((1, 2, rows, 4))
    return LayerState("KVCache", (Slot("keys", keys, 2, ALL), Slot("values", values, 2, ALL)), offset=offset)


def _nested(offset: int, rows: int) -> list[LayerState]:
    state = LayerState("State", (Slot("0", mx.ones((1, 3)), None, BOUNDARY),))
    return [_kv(offset, rows), LayerState("List", children=(state, _kv(offset, rows)))]


def _layer(**changes: object) -> str:
    layer = {"type": "K", "counts": True, "meta": {}, "slots": [], "children": [], **changes}
    return json.dumps([layer], sort_keys=True, separators=(",", ":"))


def test_flatten_names_layers_slots_and_children() -> None:
    assert [name for name, _ in flatten(_nested(3, 8))] == ["0/keys", "0/values", "1/0/0", "1/1/keys", "1/1/values"]


def test_structure_does_not_change_with_length() -> None:
    assert encode_structure(_nested(3, 8)) == encode_structure(_nested(200, 512))


def test_structure_text_is_fixed() -> None:
    # This text is on disk: another spelling would make every stored part unreadable.
    state = LayerState("T", (Slot("a.b", mx.ones((1, 1, 2, 2)), 2, window_of(4, 1)),), {"bits": 4}, offset=7)
    assert encode_structure([state]) == (
        '[{"children":[],"counts":true,"meta":{"bits":4},"slots":'
        '[{"name":"a.b","reach":["window",4,1],"seq_axis":2}],"type":"T"}]'
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(_LAYERS, max_size=3))
def test_structure_round_trip(states: list[LayerState]) -> None:
    text = encode_structure(states)
    assert structure(decode_structure(text)) == structure(states)
    assert encode_structure(decode_structure(text)) == text


def test_unflatten_restores_what_flatten_named() -> None:
    states = _nested(5, 8)
    arrays = {name: slot.data for name, slot in flatten(states)}
    restored = unflatten(decode_structure(encode_structure(states)), arrays, 5)
    assert [(name, slot.data is arrays[name], slot.seq_axis) for name, slot in flatten(restored)] == [
        (name, True, slot.seq_axis) for name, slot in flatten(states)
    ]
    assert restored[0].offset == 5
    assert restored[1].offset is None
    assert restored[1].children[0].offset is None
    assert restored[1].children[1].offset == 5


def test_unflatten_refuses_other_arrays() -> None:
    template = decode_structure(encode_structure([_kv(2, 4)]))
    array = mx.ones((1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"missing \['0/values'\]"):
        unflatten(template, {"0/keys": array}, 2)
    with pytest.raises(ValueError, match=r"not expected \['1/keys'\]"):
        unflatten(template, {"0/keys": array, "0/values": array, "1/keys": array}, 2)
    with pytest.raises(ValueError, match=r"0/values: axis 2 expected, the array has shape \(4, 4\)"):
        unflatten(template, {"0/keys": array, "0/values": mx.ones((4, 4))}, 2)
    with pytest.raises(ValueError, match="-1"):
        unflatten(template, {"0/keys": array, "0/values": array}, -1)


def test_template_slot_has_no_array() -> None:
    (template,) = decode_structure(encode_structure([_kv(2, 4)]))
    with pytest.raises(ValueError, match="'keys' belongs to a template"):
        template.arrays()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[",
        "[1]",
        "[[]]",
        "[null]",
        " []",
        "[]\n",
        "[" * 200_000,
        "[" * 5_000 + "]" * 5_000,
        _layer(type=""),
        _layer(type="a/b"),
        _layer(type=3),
        _layer(counts=1),
        _layer(counts=None),
        _layer(meta=[]),
        _layer(meta={"a": [1]}),
        _layer(meta={"a": {}}),
        _layer(meta={"a": float("nan")}),
        _layer(meta={"a": float("inf")}),
        _layer(slots={}),
        _layer(slots=[{"name": "k", "seq_axis": 2}]),
        _layer(slots=[{"name": "k", "seq_axis": -1, "reach": ["all", 0, 0]}]),
        _layer(slots=[{"name": "k", "seq_axis": True, "reach": ["all", 0, 0]}]),
        _layer(slots=[{"name": "k", "seq_axis": 2.0, "reach": ["all", 0, 0]}]),
        _layer(slots=[{"name": "k", "seq_axis": 99, "reach": ["all", 0, 0]}]),
        _layer(slots=[{"name": "k/l", "seq_axis": 2, "reach": ["all", 0, 0]}]),
        _layer(slots=[{"name": "k", "seq_axis": 2, "reach": "all"}]),
        _layer(slots=[{"name": "k", "seq_axis": 2, "reach": ["all", 0]}]),
        _layer(slots=[{"name": "k", "seq_axis": 2, "reach": ["all", 1, 0]}]),
        _layer(slots=[{"name": "k", "seq_axis": 2, "reach": ["some", 0, 0]}]),
        _layer(slots=[{"name": "k", "seq_axis": 2, "reach": ["window", 0, 4]}]),
        _layer(slots=[{"name": "k", "seq_axis": 2, "reach": ["window", 10**30, 0]}]),
        _layer(slots=[{"name": "k", "seq_axis": 2, "reach": ["all", 0, 0]}] * 2),
        _layer(children=[1]),
        _layer(extra=1),
        _layer().replace('"meta":{}', '"meta":{},"meta":{}'),
        _layer(meta={"a": 1.0}).replace("1.0", "1.00"),
        _layer(meta={"a": "x" * (1 << 20)}),
    ],
)
def test_decode_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode_structure(text)


def test_decode_refuses_deep_children() -> None:
    state = LayerState("leaf")
    for _ in range(12):
        state = LayerState("list", children=(state,))
    with pytest.raises(ValueError, match="nested"):
        decode_structure(encode_structure([state]))


def test_encode_refuses_nan() -> None:
    with pytest.raises(ValueError, match=r"(?i)nan|float"):
        encode_structure([LayerState("T", meta={"x": float("nan")})])


@pytest.mark.parametrize(("window", "keep"), [(0, 0), (-1, 0), (4, -1), (4, 4)])
def test_window_of_refuses(window: int, keep: int) -> None:
    with pytest.raises(ValueError, match=f"window={window}, keep={keep}"):
        window_of(window, keep)


def test_reach_values_compare() -> None:
    assert window_of(4) == Reach("window", 4, 0) != window_of(4, 1)
    assert ALL != BOUNDARY


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_decode_answers_any_damage_with_value_error(data: st.DataObject) -> None:
    text = encode_structure(_nested(3, 8))
    at = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(0, 4))
    damaged = text[:at] + data.draw(st.text(max_size=4)) + text[at + length :]
    try:
        states = decode_structure(damaged)
    except ValueError:
        return
    assert encode_structure(states) == damaged
