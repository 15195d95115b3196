"""Blocks in an SSD manager that is not ours: whole blocks by their hashes, in oMLX's shapes.

Only ``save_block``, ``load_block_with_metadata`` and ``forget_block`` are used, with the arguments that stand-ins know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from prefixcache._omlx import turboquant_states
from prefixcache._omlx.block_data import (
    is_placeholder,
    layer_class,
    problematic,
    sequence_length,
    valid,
    walk_back,
)
from prefixcache._omlx.cache_types import canonical, canonical_types
from prefixcache._omlx.layer_dicts import omlx_form, sub_layers
from prefixcache._omlx.tuples import CACHE_LIST, NSTATE, TURBOQUANT_NAMES
from prefixcache.errors import Unsupported
from prefixcache.type_handlers import SizedArraysCache
from prefixcache.type_registry import CacheTypeRegistry

# Classes whose settings mlx-lm 0.32 has moved into their states.
_RAW = ("RotatingKVCache", "QuantizedKVCache", "ChunkedKVCache", "CacheList")
# What a store or a handler of somebody else may raise in the request path: a shorter hit.
TROUBLE = (ValueError, TypeError, OSError, RuntimeError, KeyError, IndexError, AttributeError, MemoryError, Unsupported)


@dataclass
class Loaded:
    """Blocks that were loaded, the first of a table. ``rejected``: whether the one behind them is not this model's, so
    that it is to be forgotten."""

    data: list[list[Any]] = field(default_factory=list)
    metas: list[Mapping[str, Any]] = field(default_factory=list)
    types: list[str] | None = None
    rejected: bool = False


@dataclass(frozen=True)
class Expected:
    """What blocks must agree with; 0, "" and None agree with everything."""

    model_name: str
    layers: int
    block_size: int
    types: Sequence[str] | None

    def fits(self, meta: Mapping[str, Any], first_types: Sequence[str] | None) -> bool:
        """Whether a block with this metadata may follow blocks with ``first_types``."""
        name, layers, size = (meta.get(key) for key in ("model_name", "num_layers", "block_size"))
        if self.model_name and isinstance(name, str) and name and name != self.model_name:
            return False
        if self.layers and isinstance(layers, int) and layers > 0 and layers != self.layers:
            return False
        if self.block_size and isinstance(size, int) and size > 0 and size != self.block_size:
            return False
        types = told_types(meta.get("layer_cache_types"))
        return types is None or all(known is None or told_types(known) == types for known in (self.types, first_types))


def told_types(types: Any) -> list[str] | None:
    """The layer types that somebody else's object tells, as they are compared; None for what is no list of names."""
    return canonical_types([str(name) for name in types]) if isinstance(types, list | tuple) else None


def load(hashes: Sequence[bytes], load_one: Callable[[bytes], Any], expected: Expected) -> Loaded:
    """Loads blocks up to the first that is missing, damaged or another model's."""
    found = Loaded()
    for value in hashes:
        try:
            data, meta = load_one(value)
        except TROUBLE:
            break  # no pair
        if not isinstance(data, list | tuple):
            break
        meta = meta if isinstance(meta, Mapping) else {}
        types = told_types(meta.get("layer_cache_types"))
        first = found.data[0] if found.data else data
        fits = len(data) == (expected.layers or len(first)) and expected.fits(meta, found.types)
        if not fits or not valid(data, types or found.types):
            found.rejected = True
            break
        try:
            fits = _rows_fit(data, first, types or found.types, expected.block_size)
        except TROUBLE:
            fits = False  # entries of no known shape
        if not fits:
            found.rejected = True
            break
        if found.types is None and types is not None:
            found.types = types
        found.data.append(list(data))
        found.metas.append(meta)
    return found


def _rows_fit(data: Sequence[Any], first: Sequence[Any], types: Sequence[str] | None, block_size: int) -> bool:
    """Whether every plain layer has one row for each token, like those of the first block."""
    for index, (entry, before) in enumerate(zip(data, first, strict=True)):
        name = types[index] if types is not None and index < len(types) else "KVCache"
        handler = CacheTypeRegistry.get_handler_by_class_name(name)
        if isinstance(entry, list) and entry and not _list_fits(entry, block_size):
            return False
        if isinstance(entry, list) or not handler.supports_block_slicing:
            continue
        if isinstance(entry[0], str) and entry[0] in TURBOQUANT_NAMES:
            try:
                if any(turboquant_states.token_count(state) != block_size for state in entry[1]):
                    return False
            except (ValueError, TypeError, IndexError):
                return False
            continue
        axes = handler.get_state_axis_info()
        for element, other, axis in zip(elements_of(entry), elements_of(before), axes, strict=False):
            if (element is None) != (other is None):
                return False
            if element is None or not axis.sliceable:
                continue
            if getattr(element, "ndim", 0) not in (3, 4) or element.shape[-2] != block_size:
                return False
            if element.dtype != other.dtype or _other_sizes(element) != _other_sizes(other):
                return False
    return True


def _list_fits(entry: Sequence[Any], block_size: int) -> bool:
    """Lists of rows are cut, or whole up to this block's end: whole blocks in either case."""
    shapes = [tuple(getattr(part, "shape", ())) for sub in entry for part in elements_of(sub)[:1]]
    return any(len(shape) != 4 for shape in shapes) or any(shape[2] and shape[2] % block_size == 0 for shape in shapes)


def _other_sizes(array: Any) -> tuple[int, ...]:
    shape = tuple(getattr(array, "shape", ()))
    return (*shape[:-2], *shape[-1:])


def usable(found: Loaded) -> int:
    """How many of the loaded blocks lead to an end at which every layer's state is real."""
    if not found.data:
        return 0
    cut = walk_back(found.data, found.types)
    count = len(found.data) if cut is None else cut + 1
    return 0 if any(problematic(found.data[count - 1], found.types)) else count


def rebuild(found: Loaded, count: int, block_size: int) -> list[Any] | None:
    """One cache a layer from the first ``count`` blocks; None if a layer cannot be rebuilt."""
    blocks, metas = found.data[:count], found.metas[:count]
    layers = len(blocks[0])
    if any(len(block) != layers for block in blocks):
        return None
    caches = []
    for index in range(layers):
        name = found.types[index] if found.types is not None and index < len(found.types) else "KVCache"
        entries = [block[index] for block in blocks]
        first, last = _meta(metas[0], index), _meta(metas[-1], index)
        try:
            cache = _layer(name, entries, first, last, count * block_size)
        except TROUBLE:
            return None
        if cache is None:
            return None
        caches.append(cache)
    return caches


def _meta(meta: Mapping[str, Any], index: int) -> Any:
    states = meta.get("layer_meta_states")
    return states[index] if isinstance(states, list | tuple) and index < len(states) else None


def _layer(name: str, entries: Sequence[Any], first: Any, last: Any, tokens: int) -> Any:
    if isinstance(entries[0], tuple) and entries[0] and entries[0][0] in TURBOQUANT_NAMES:
        keys, values = (turboquant_states.joined([entry[1][side] for entry in entries]) for side in (0, 1))
        return turboquant_states.rebuilt(keys, values, tuple(first or ()))
    if name == "CacheList":
        return _composite(entries, last, tokens)
    handler = CacheTypeRegistry.get_handler_by_class_name(name)
    if handler.supports_block_slicing:
        return handler.deserialize_state(_joined(handler, entries), first)
    elements = elements_of(entries[-1])
    if not elements or is_placeholder(entries[-1]):
        return None
    if name == "ArraysCache":
        # What was never set is stored as an empty array where there are two of them.
        elements = tuple(None if getattr(element, "shape", None) == (0,) else element for element in elements)
    cache = handler.deserialize_state(elements, last)
    if name == "ArraysCache" and cache is not None:
        inner = cache._inner if isinstance(cache, SizedArraysCache) else cache
        return SizedArraysCache(inner, tokens)
    return cache


def elements_of(entry: Any) -> tuple[Any, ...]:
    """The elements of an entry, whatever marks it."""
    if isinstance(entry, tuple) and len(entry) == 3 and entry[0] == NSTATE:
        return tuple(entry[2])
    return tuple(entry) if isinstance(entry, list | tuple) else ()


def _joined(handler: Any, entries: Sequence[Any]) -> tuple[Any, ...]:
    """The elements of all blocks: those with an axis of tokens joined along it, the others from the last block."""
    blocks = [elements_of(entry) for entry in entries]
    axes = handler.get_state_axis_info()
    found: list[Any] = []
    for place, parts in enumerate(zip(*blocks, strict=True)):
        axis = axes[place] if place < len(axes) else None
        if any(part is None for part in parts):
            found.append(None)
        elif axis is None or not axis.sliceable:
            found.append(parts[-1])
        else:
            along = axis.sequence_axis if parts[0].ndim == 4 else parts[0].ndim - 2
            found.append(parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=along))
    return tuple(found)


def _composite(entries: Sequence[Any], meta: Any, tokens: int) -> Any:
    blocks = [list(entry[1]) if isinstance(entry, tuple) and entry[:1] == (CACHE_LIST,) else entry for entry in entries]
    last = blocks[-1]
    if not isinstance(last, list) or not isinstance(meta, list | tuple) or len(meta) != 2:
        return None
    names = [canonical(str(name)) for name in meta[0]]
    subs, sub_metas = [], list(meta[1])
    if len(names) != len(last) or len(sub_metas) != len(last):
        return None
    for place, name in enumerate(names):
        handler = CacheTypeRegistry.get_handler_by_class_name(name)
        elements = elements_of(last[place])
        if handler.supports_block_slicing:
            # A list is stored whole, with all rows, where one of its caches cannot be cut.
            if elements[0].shape[2] != tokens:
                if not all(isinstance(block, list) and len(block) == len(last) for block in blocks):
                    return None
                elements = _joined(handler, [block[place] for block in blocks])
            if elements[0].shape[2] != tokens:
                return None
            if isinstance(sub_metas[place], list | tuple) and sub_metas[place]:
                # The number of rows, which metas of a longer run overstate.
                sub_metas[place] = (str(elements[0].shape[2]), *sub_metas[place][1:])
        subs.append(elements)
    return CacheTypeRegistry.get_handler_by_class_name("CacheList").deserialize_state(subs, (names, sub_metas))


def block_metas(layers: Sequence[Mapping[str, Any]], snapshot: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """The meta state of each layer: a snapshot's where it has one, else the shared one."""
    metas = [layer.get("meta_state") or () for layer in layers]
    for index, layer in enumerate(snapshot or ()):
        if index < len(metas) and layer.get("meta_state"):
            metas[index] = layer["meta_state"]
    return metas


def type_names(layers: Sequence[Mapping[str, Any]], config: Any) -> list[str]:
    """The class name of each layer, as blocks record it."""
    return [canonical(layer_class(layer, index, config)) for index, layer in enumerate(layers)]


def as_omlx(layers: Sequence[Mapping[str, Any]], config: Any) -> list[Mapping[str, Any]]:
    """Layer dicts in oMLX's form. mlx-lm 0.32 has no meta states: what they said is in its states."""
    return [_as_omlx(layer, index, config) for index, layer in enumerate(layers)]


def _as_omlx(layer: Mapping[str, Any], index: int, config: Any) -> Mapping[str, Any]:
    name = canonical(layer_class(layer, index, config))
    raw = not layer.get("meta_state") and layer.get("state") and name in _RAW
    return omlx_form({**layer, "class_name": name}) | {"class_name": layer.get("class_name", name)} if raw else layer


def stand_at(layers: Sequence[Mapping[str, Any]], config: Any) -> int | None:
    """The tokens that the layers' states are those of, as far as anything tells: what a layer says of itself, the
    offset of a window, the number of rows of plain layers. None if nothing tells, -1 if they contradict one another."""
    told: set[int] = set()
    windows: set[int] = set()
    rows: set[int] = set()
    for index, layer in enumerate(layers):
        _counts(layer, canonical(layer_class(layer, index, config)), told, windows, rows)
    known = told or windows or rows
    return None if not known else known.pop() if len(known) == 1 else -1


def _counts(layer: Mapping[str, Any], name: str, told: set[int], windows: set[int], rows: set[int]) -> None:
    count = layer.get("token_count")
    if isinstance(count, int):
        told.add(count)
    elif name == "CacheList":
        try:
            inside = sub_layers(layer, None, name)
        except ValueError:
            return
        for sub in inside:
            _counts(sub, canonical(str(sub["class_name"])), told, windows, rows)
    elif CacheTypeRegistry.is_rotating_family(name):
        offset = _offset(layer)
        windows.update(() if offset is None else (offset,))
    elif CacheTypeRegistry.get_handler_by_class_name(name).supports_block_slicing:
        length = sequence_length([{**layer, "class_name": name}])
        rows.update((length,) if length else ())


def _offset(layer: Mapping[str, Any]) -> int | None:
    """The offset of a window: in its meta state, or in mlx-lm 0.32's state."""
    meta, state = layer.get("meta_state"), layer.get("state")
    told = meta if isinstance(meta, list | tuple) and len(meta) == 4 else None
    if told is None and isinstance(state, list | tuple) and len(state) == 6:
        return state[2] if isinstance(state[2], int) else None
    text = "" if told is None else str(told[2])
    return int(text) if text.isdecimal() else None
