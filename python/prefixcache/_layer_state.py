"""LayerState: the one record that stands for a cache object of any class.

A handler turns a live cache into a ``LayerState`` and back. Everything between the two (keys, parts, files) sees only
named slots. The structure of a list of layers, without its arrays and without any token count, has a canonical text
that is stored beside the rows and read back, strictly, before a restore.

Values are immutable and hold references to arrays; nothing here evaluates or copies an array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import mlx.core as mx

MetaValue: TypeAlias = bool | int | float | str | None
Json: TypeAlias = MetaValue | list["Json"] | dict[str, "Json"]

_NAME = re.compile(r"[A-Za-z0-9_.]+")
# Real models have tens of layers and at most two levels of children; the text may come from a damaged file.
_MAX_TEXT = 1 << 20
_MAX_NESTING = 8
_MAX_RANK = 16


@dataclass(frozen=True)
class Reach:
    """Which blocks a slot must be read from to stand at n tokens.

    ``kind`` is ``"all"`` (every row up to n), ``"window"`` (at most ``window`` rows: the first ``keep`` of the sequence
    and the last ones before n) or ``"boundary"`` (only what was captured at n). Use ``ALL``, ``BOUNDARY`` and
    ``window_of``.
    """

    kind: str
    window: int = 0
    keep: int = 0

    def first_row(self, n: int) -> int:
        """The first row behind the kept ones that is needed to stand at n; rows [0, n) are all needed if it is 0."""
        return 0 if self.kind != "window" or n <= self.window else n - (self.window - self.keep)


ALL = Reach("all")
BOUNDARY = Reach("boundary")


def window_of(window: int, keep: int = 0) -> Reach:
    """The reach of a sliding window of ``window`` rows, the first ``keep`` rows of the sequence among them."""
    if window < 1 or not 0 <= keep < window:
        raise ValueError(f"a window needs at least 1 row and keep in [0, window), got window={window}, keep={keep}")
    return Reach("window", window, keep)


@dataclass(frozen=True, eq=False)
class Slot:
    """One named array of a layer.

    ``array`` may be padded and may have any strides: row i along ``seq_axis`` is token position ``first_row + i``, and
    rows up to the layer's offset are valid. ``seq_axis`` is None for an array that is stored whole (reach
    ``BOUNDARY``). ``head``: rows [0, keep) of a window that keeps them, where ``array`` begins behind them. In a
    template (``decode_structure``) ``array`` is None.
    """

    name: str
    array: mx.array | None
    seq_axis: int | None
    reach: Reach
    first_row: int = 0
    head: mx.array | None = None

    @property
    def data(self) -> mx.array:
        """The array. ValueError in a template."""
        if self.array is None:
            raise ValueError(f"slot {self.name!r} belongs to a template and has no array")
        return self.array


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer: ``type_name`` names its handler, ``meta`` holds settings that do not change with the token count.

    ``offset`` is the number of tokens the layer stands at, or None if it does not count tokens. In a template it is 0
    for a layer that counts.
    """

    type_name: str
    slots: tuple[Slot, ...] = ()
    meta: Mapping[str, MetaValue] = field(default_factory=dict)
    children: tuple[LayerState, ...] = ()
    offset: int | None = None

    def arrays(self) -> dict[str, mx.array]:
        """The layer's own arrays by slot name. ValueError in a template."""
        return {slot.name: slot.data for slot in self.slots}


def walk(states: Sequence[LayerState]) -> Iterator[tuple[str, LayerState]]:
    """Every layer and child with its path (``"3"``, ``"7/1"``), parents before children."""
    for index, state in enumerate(states):
        yield str(index), state
        for path, child in walk(state.children):
            yield f"{index}/{path}", child


def flatten(states: Sequence[LayerState]) -> list[tuple[str, Slot]]:
    """Every slot with its global name: ``"3/keys"``, ``"3/keys.scales"``, ``"7/1/values"`` for child 1 of layer 7."""
    return [(f"{path}/{slot.name}", slot) for path, state in walk(states) for slot in state.slots]


def unflatten(template: Sequence[LayerState], arrays: Mapping[str, mx.array], offset: int) -> list[LayerState]:
    """Fills a template with arrays by global slot name; layers that count tokens then stand at ``offset``,
    or at 0 if they hold nothing.

    Row 0 of every array is token position 0. ValueError if an array is missing, left over or lacks the sequence axis.
    """
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
    left = dict(arrays)
    missing: list[str] = []
    states = [_fill(state, str(index), left, missing, offset) for index, state in enumerate(template)]
    if missing or left:
        raise ValueError(
            f"arrays do not match the stored structure: missing {sorted(missing)}, not expected {sorted(left)}"
        )
    return states


def _fill(state: LayerState, path: str, left: dict[str, mx.array], missing: list[str], offset: int) -> LayerState:
    """A layer with its arrays, which are taken out of ``left``. Names of those that are not there go to ``missing``."""
    slots = []
    for slot in state.slots:
        name = f"{path}/{slot.name}"
        array = left.pop(name, None)
        if array is None:
            missing.append(name)
            continue
        if slot.seq_axis is not None and slot.seq_axis >= array.ndim:
            raise ValueError(f"{name}: axis {slot.seq_axis} expected, the array has shape {array.shape}")
        slots.append(Slot(slot.name, array, slot.seq_axis, slot.reach))
    children = tuple([_fill(child, f"{path}/{i}", left, missing, offset) for i, child in enumerate(state.children)])
    stands_at = None if state.offset is None else offset if slots else 0
    return LayerState(state.type_name, tuple(slots), state.meta, children, stands_at)


def structure(states: Sequence[LayerState]) -> list[Json]:
    """The JSON form of the layers: everything but arrays, rows and token counts, so equal for every length."""
    return [_layer_json(state) for state in states]


def _layer_json(state: LayerState) -> Json:
    return {
        "type": state.type_name,
        "counts": state.offset is not None,
        "meta": dict(state.meta),
        "slots": [
            {
                "name": slot.name,
                "seq_axis": slot.seq_axis,
                "reach": [slot.reach.kind, slot.reach.window, slot.reach.keep],
            }
            for slot in state.slots
        ],
        "children": [_layer_json(child) for child in state.children],
    }


def encode_structure(states: Sequence[LayerState]) -> str:
    """The canonical text of ``structure(states)``: ASCII, sorted keys, no spaces. ValueError for a NaN in ``meta``."""
    return _canonical(structure(states))


def _canonical(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def decode_structure(text: str) -> list[LayerState]:
    """Templates from the text of ``encode_structure``. ValueError for any text that it could not have written."""
    if len(text) > _MAX_TEXT:
        raise ValueError(f"structure text of {len(text)} characters, expected at most {_MAX_TEXT}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("structure text is nested too deeply") from None
    states = [_layer(item, 0) for item in _list(value, "structure")]
    # Refuses whatever json.loads forgives: repeated keys, other spellings of a number, spaces.
    if encode_structure(states) != text:
        raise ValueError("structure text is not in canonical form")
    return states


def _layer(value: Json, depth: int) -> LayerState:
    if depth > _MAX_NESTING:
        raise ValueError(f"layers nested more than {_MAX_NESTING} deep")
    fields = _dict(value, {"type", "counts", "meta", "slots", "children"}, "layer")
    counts, meta = fields["counts"], fields["meta"]
    if not isinstance(counts, bool):
        raise _bad("counts", counts)
    if not isinstance(meta, dict) or any(isinstance(item, list | dict) for item in meta.values()):
        raise _bad("meta", meta)
    slots = tuple(_slot(item) for item in _list(fields["slots"], "slots"))
    if len({slot.name for slot in slots}) != len(slots):
        raise _bad("slot names", [slot.name for slot in slots])
    children = tuple(_layer(item, depth + 1) for item in _list(fields["children"], "children"))
    return LayerState(_name(fields["type"], "type"), slots, _scalars(meta), children, 0 if counts else None)


def _slot(value: Json) -> Slot:
    fields = _dict(value, {"name", "seq_axis", "reach"}, "slot")
    axis = None if fields["seq_axis"] is None else _count(fields["seq_axis"], "seq_axis")
    if axis is not None and axis >= _MAX_RANK:
        raise _bad("seq_axis", axis)
    return Slot(_name(fields["name"], "slot name"), None, axis, _reach(fields["reach"]))


def _reach(value: Json) -> Reach:
    items = _list(value, "reach")
    if len(items) != 3 or not isinstance(items[0], str):
        raise _bad("reach", value)
    reach = Reach(items[0], _count(items[1], "reach"), _count(items[2], "reach"))
    if reach not in (ALL, BOUNDARY) and (reach.kind != "window" or not 0 <= reach.keep < reach.window):
        raise _bad("reach", value)
    return reach


def _scalars(meta: dict[str, Json]) -> dict[str, MetaValue]:
    return {key: item for key, item in meta.items() if not isinstance(item, list | dict)}


def _dict(value: Json, keys: set[str], what: str) -> dict[str, Json]:
    if not isinstance(value, dict) or value.keys() != keys:
        raise _bad(what, value)
    return value


def _list(value: Json, what: str) -> list[Json]:
    if not isinstance(value, list):
        raise _bad(what, value)
    return value


def _name(value: Json, what: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _bad(what, value)
    return value


def _count(value: Json, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise _bad(what, value)
    return value


def _bad(what: str, value: Json) -> ValueError:
    return ValueError(f"structure text: unexpected {what}: {str(value)[:200]!r}")
