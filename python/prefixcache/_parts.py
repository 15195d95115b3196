"""What of a list of layers goes into which part, and under which keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from prefixcache._core import Part, Slots, sha256
from prefixcache._layer_state import ALL, BOUNDARY, LayerState, Reach, Slot, flatten


@dataclass(frozen=True)
class Needs:
    """What a model's layers must be given to stand somewhere: every row, the rows of some windows, a state."""

    rows: bool
    windows: tuple[Reach, ...]
    state: bool


def needs_of(reaches: Iterable[Reach]) -> Needs:
    """``Needs`` of layers that have slots of these reaches."""
    kinds = set(reaches)
    windows = sorted((reach for reach in kinds if reach.kind == "window"), key=lambda reach: (reach.window, reach.keep))
    return Needs(ALL in kinds, tuple(windows), BOUNDARY in kinds)


@cache
def window_group(reach: Reach) -> int:
    """The group of keys of a window's rows. It reaches the disk: do not change it."""
    return _group(f"window {reach.window} {reach.keep}")


@cache
def head_group(reach: Reach) -> int:
    """The group of keys of the first rows that a window keeps. It reaches the disk: do not change it."""
    return _group(f"head {reach.window} {reach.keep}")


def _group(text: str) -> int:
    return int.from_bytes(sha256(text.encode())[:8], "little")


@dataclass(frozen=True)
class PartSlots:
    """Slots that are put together. Rows [``first_row``, ``end``) of them can be had."""

    part: Part
    group: int
    slots: Slots
    first_row: int
    end: int


def part_slots(states: Sequence[LayerState], n: int) -> list[PartSlots]:
    """The parts that layers standing at ``n`` give, rows first, then windows; the state last.

    Evaluates arrays that are lazy, on the calling thread. Every list of layers has a part ``kv``, if without slots: it
    holds the tokens.
    """
    by_reach: dict[Reach, list[tuple[str, Slot]]] = {ALL: []}
    for name, slot in flatten(states):
        by_reach.setdefault(slot.reach, []).append((name, slot))
    state = by_reach.pop(BOUNDARY, [])
    parts = [PartSlots(Part.kv, 0, _slots(by_reach.pop(ALL)), 0, n)]
    for reach, slots in by_reach.items():
        first = max(slot.first_row for _, slot in slots)
        if first < n:
            parts.append(PartSlots(Part.win, window_group(reach), _slots(slots), first, n))
        if reach.keep:
            parts.append(PartSlots(Part.win, head_group(reach), _heads(slots), 0, min(reach.keep, n)))
    if state:
        parts.append(PartSlots(Part.state, 0, _slots(state), n, n))
    return parts


def _slots(slots: Sequence[tuple[str, Slot]]) -> Slots:
    return Slots([(name, slot.data, slot.seq_axis, slot.first_row) for name, slot in slots])


def _heads(slots: Sequence[tuple[str, Slot]]) -> Slots:
    rows = []
    for name, slot in slots:
        if slot.head is None and slot.first_row:
            raise ValueError(f"{name} begins at row {slot.first_row}, but its first {slot.reach.keep} rows are missing")
        rows.append((name, slot.data if slot.head is None else slot.head, slot.seq_axis, 0))
    return Slots(rows)
