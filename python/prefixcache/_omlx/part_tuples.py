"""Blocks that are stored as parts, in the tuple shapes that callers of ``load_block`` know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from prefixcache._core import BlockStore, Part, group_key
from prefixcache._handlers.turboquant import stored_states
from prefixcache._layer_state import LayerState, Reach, Slot, decode_structure, flatten
from prefixcache._omlx.tuples import NSTATE, TURBOQUANT, turboquant_module
from prefixcache._parts import head_group, window_group
from prefixcache.errors import Unsupported

_TURBOQUANT = "TurboQuantKVCache"
_OWNERS = ("keys", "values")
_QUANTISED = ("", ".scales", ".biases")


@dataclass(frozen=True)
class PartBlock:
    """The layers of a block that ends at ``end`` tokens, and the class name and ``meta_state`` of each."""

    layers: list[Any]
    types: list[str]
    metas: list[Any]
    end: int
    tokens: int
    from_ram: bool


def load_parts(store: BlockStore, key: bytes) -> PartBlock | None:
    """The block whose parts lie under ``key``; None if there is none (any more).

    A layer that the block alone cannot make stand at its end is a placeholder: a pair of arrays of shape (1,).
    ValueError for a structure that cannot be understood.
    """
    found = store.load(key, Part.kv)
    rows = store.presence([key])[0].get("kv") if found.status else None
    if rows is None:
        return None
    template = decode_structure(found.meta)
    start, end = rows[2:]
    arrays = found.take_slots()
    slots = [slot for _, slot in flatten(template)]
    for reach in {slot.reach for slot in slots if slot.reach.kind == "window"}:
        arrays |= _window(store, key, template, reach, end)
    if any(slot.reach.kind == "boundary" for slot in slots):
        state = store.load(key, Part.state)
        arrays |= state.take_slots() if state.status else {}
    mx.eval(list(arrays.values()))
    layers = [_layer(state, str(index), arrays) for index, state in enumerate(template)]
    metas = [_meta(state, end) for state in template]
    return PartBlock(layers, [_class_name(state) for state in template], metas, end, end - start, found.ram_blocks > 0)


def window_keys(store: BlockStore, key: bytes) -> list[bytes]:
    """The keys under which rows of the windows of a block may lie. Reads its part ``kv``, which names the windows."""
    found = store.load(key, Part.kv)
    try:
        template = decode_structure(found.meta) if found.status else []
    except ValueError:
        return []
    reaches = {slot.reach for _, slot in flatten(template) if slot.reach.kind == "window"}
    return [group_key(key, group(reach)) for reach in reaches for group in (window_group, head_group)]


def _window(
    store: BlockStore, key: bytes, template: Sequence[LayerState], reach: Reach, end: int
) -> dict[str, mx.array]:
    """The rows of a window that stands at ``end``, if this block holds all of them."""
    first = reach.first_row(end)
    if reach.keep and first:
        return {}
    key = group_key(key, window_group(reach))
    found = store.load(key, Part.win)
    rows = store.presence([key])[0].get("win") if found.status else None
    if rows is None or rows[2] > first or rows[3] != end:
        return {}
    axes = {name: slot.seq_axis or 0 for name, slot in flatten(template)}
    return {
        name: mx.contiguous(mx.take(array, mx.arange(first - rows[2], end - rows[2]), axis=axes[name]))
        for name, array in found.take_slots().items()
    }


def _layer(state: LayerState, path: str, arrays: Mapping[str, mx.array]) -> Any:
    if state.children:
        return [_layer(child, f"{path}/{index}", arrays) for index, child in enumerate(state.children)]
    held = {slot.name: arrays.get(f"{path}/{slot.name}") for slot in state.slots}
    if not held or any(array is None for array in held.values()):
        return _placeholder()
    name = _class_name(state)
    if name == _TURBOQUANT:
        return _turboquant(state, path, arrays)
    if "size" in state.meta and all(slot.seq_axis is None for slot in state.slots):
        elements: list[Any] = [held.get(str(index)) for index in range(int(state.meta["size"] or 0))]
    elif set(held) == {owner + part for owner in _OWNERS for part in _QUANTISED}:
        elements = [tuple(held[owner + part] for part in _QUANTISED) for owner in _OWNERS]
    else:
        elements = list(held.values())
    plain = len(elements) == 2 and not any(isinstance(element, tuple) for element in elements)
    return tuple(elements) if plain else (NSTATE, name, elements)


def _turboquant(state: LayerState, path: str, arrays: Mapping[str, mx.array]) -> Any:
    slots = tuple(Slot(slot.name, arrays[f"{path}/{slot.name}"], 2, slot.reach) for slot in state.slots)
    rows = slots[0].data.shape[2]
    filled = LayerState(state.type_name, slots, state.meta, offset=rows)
    module = turboquant_module()
    if module is None:
        return _placeholder()  # without mlx-vlm nobody could use it
    try:
        states = stored_states(filled, module, int(state.meta["seed"] or 0), rows, f"layer {path}")
    except Unsupported as refusal:
        raise ValueError(str(refusal)) from None
    return (TURBOQUANT, tuple(value for value, _ in states))


def _placeholder() -> tuple[mx.array, mx.array]:
    return (mx.zeros((1,)), mx.zeros((1,)))


def _meta(state: LayerState, end: int) -> Any:
    meta = state.meta
    if state.children:
        return ([_class_name(child) for child in state.children], [_meta(child, end) for child in state.children])
    if "max_size" in meta:
        held = min(end, int(meta["max_size"] or 0))
        return (str(meta["keep"]), str(meta["max_size"]), str(end), str(held))
    if "chunk_size" in meta:
        return (str(meta["chunk_size"]), str(max(0, end - int(meta["chunk_size"] or 0))))
    if _class_name(state) == _TURBOQUANT:
        return (str(end), str(meta["bits"]), str(meta["seed"]))
    if {"group_size", "bits"} <= meta.keys():
        return (str(end), str(meta["group_size"]), str(meta["bits"]))
    return () if state.offset is None else (str(end),)


def _class_name(state: LayerState) -> str:
    return state.type_name.rpartition(".")[2]
