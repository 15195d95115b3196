"""The data of one block as oMLX's SSD managers take and give it: a list with one entry for each layer.

An entry is a pair of arrays, ``("__nstate__", class name, [elements])``, ``("__cache_list__", [entries])``, a
TurboQuant marker, or a placeholder (a pair of arrays of shape ``(1,)``) where the layer's state does not stand at this
block's end. Nothing here evaluates an array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from prefixcache._omlx import turboquant_states
from prefixcache._omlx.cache_types import canonical
from prefixcache._omlx.tuples import CACHE_LIST, NSTATE, TURBOQUANT
from prefixcache.type_registry import CacheTypeRegistry

_TURBOQUANT_CLASSES = ("TurboQuantKVCache", "BatchTurboQuantKVCache")
_COMPOSITE = "CacheList"


def layer_class(layer: Mapping[str, Any], index: int, config: Any = None) -> str:
    """The class name of a layer dict, as the model's configuration or the layer itself says it."""
    if config is not None:
        names = config.get_type_names()
        if index < len(names):
            return str(names[index])
    return str(layer.get("class_name") or layer.get("cache_type") or "KVCache")


def placeholder() -> tuple[mx.array, mx.array]:
    """What stands for a state that is not this block's."""
    return mx.zeros((1,)), mx.zeros((1,))


def is_placeholder(entry: Any) -> bool:
    """Whether an entry is a placeholder: a pair whose first array has the shape ``(1,)``."""
    if not isinstance(entry, tuple) or len(entry) != 2 or isinstance(entry[0], str):
        return False
    return tuple(getattr(entry[0], "shape", ())) == (1,)


def sequence_length(layers: Sequence[Mapping[str, Any]], config: Any = None) -> int:
    """The tokens that these layer dicts hold, as far as they tell: the rows of the first plain one; else those of a
    window's buffer, else those of the first 4-D array in a list; 0 if nothing tells."""
    fallback = 0
    for index, layer in enumerate(layers):
        name, state = canonical(layer_class(layer, index, config)), layer.get("state")
        if name == _COMPOSITE:
            fallback = fallback or _list_length(state)
            continue
        length = _rows_of(name, state)
        if CacheTypeRegistry.get_handler_by_class_name(name).supports_block_slicing and length:
            return length
        if CacheTypeRegistry.is_rotating_family(name):
            fallback = fallback or length
    return fallback


def _list_length(state: Any) -> int:
    for sub in state if isinstance(state, list | tuple) else ():
        if isinstance(sub, list | tuple) and sub and len(getattr(sub[0], "shape", ())) == 4:
            return int(sub[0].shape[2])
    return 0


def _rows_of(name: str, state: Any) -> int:
    if name in _TURBOQUANT_CLASSES:
        try:
            return turboquant_states.token_count(state[0])
        except (ValueError, TypeError, IndexError):
            return 0
    elements = CacheTypeRegistry.get_handler_by_class_name(name).state_elements(state)
    shape = tuple(getattr(elements[0], "shape", ())) if elements else ()
    return int(shape[-2]) if len(shape) in (3, 4) else 0


def block_slices(
    layers: Sequence[Mapping[str, Any]],
    start: int,
    end: int,
    config: Any = None,
    last: bool = False,
    snapshot: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any] | None:
    """The entries of tokens [start, end); None if a layer has no rows for them.

    ``last``: the layers' states may be taken for those of this block's end. ``snapshot``: the layer dicts as they were
    at ``end``; its states are preferred.
    """
    entries = []
    for index, layer in enumerate(layers):
        name = layer_class(layer, index, config)
        taken = snapshot[index] if snapshot is not None and index < len(snapshot) else None
        entry = _entry(layer, name, start, end, last, taken)
        if entry is None:
            # A shorter list would give every layer behind it another one's rows.
            return None
        entries.append(entry)
    return entries or None


def _entry(
    layer: Mapping[str, Any], name: str, start: int, end: int, last: bool, snapshot: Mapping[str, Any] | None
) -> Any:
    plain = canonical(name)
    if plain in _TURBOQUANT_CLASSES:
        return _turboquant(layer.get("state"), start, end)
    whole = layer.get("state") if last else None
    if snapshot is not None and snapshot.get("state"):
        whole = snapshot["state"]
    if plain == _COMPOSITE:
        return _composite(layer, start, end, whole)
    handler = CacheTypeRegistry.get_handler_by_class_name(plain)
    if handler.supports_block_slicing:
        return _rows(handler, plain, layer.get("state"), start, end)
    return placeholder() if whole is None else _whole(plain, whole)


def _turboquant(state: Any, start: int, end: int) -> Any:
    try:
        keys, values = (turboquant_states.sliced(part, start, end) for part in state)
        if turboquant_states.token_count(keys) and turboquant_states.token_count(values):
            return (TURBOQUANT, (keys, values))
    except (ValueError, TypeError):
        pass
    return placeholder()


def _rows(handler: Any, name: str, state: Any, start: int, end: int) -> Any:
    elements = handler.state_elements(state)
    axes = handler.get_state_axis_info()
    if not elements or len(elements) > len(axes):
        return None
    found: list[Any] = []
    for element, axis in zip(elements, axes, strict=False):
        if element is not None and not hasattr(element, "shape"):
            return None
        if element is None or not axis.sliceable:
            found.append(element)
            continue
        place = axis.sequence_axis if len(element.shape) == 4 else len(element.shape) - 2
        cut = _cut(element, place, start, end)
        if cut is None:
            return None
        found.append(cut)
    if not any(hasattr(element, "shape") for element in found):
        return None
    return (found[0], found[1]) if len(found) == 2 else (NSTATE, name, found)


def _cut(array: Any, axis: int, start: int, end: int) -> Any:
    """Rows [start, end), those that are there; None if none is."""
    rows = array.shape[axis]
    if start >= min(end, rows):
        return None
    index = [slice(None)] * len(array.shape)
    index[axis] = slice(start, min(end, rows))
    return array[tuple(index)]


def _composite(layer: Mapping[str, Any], start: int, end: int, whole: Any) -> Any:
    subs = layer.get("state")
    if not isinstance(subs, list | tuple) or not subs:
        return placeholder()
    names = sub_names(layer, len(subs))
    if is_cut(layer):
        elements = [_sub_elements(name, sub) for name, sub in zip(names, subs, strict=True)]
        return (CACHE_LIST, [_sub(name, _sub_cut(sub, start, end)) for name, sub in zip(names, elements, strict=True)])
    if not isinstance(whole, list | tuple) or len(whole) != len(names):
        return placeholder()
    return (CACHE_LIST, [_sub(name, _sub_elements(name, sub)) for name, sub in zip(names, whole, strict=True)])


def is_cut(layer: Mapping[str, Any]) -> bool:
    """Whether a list of caches is stored block by block: all of them have rows of four axes."""
    subs = layer.get("state")
    if not isinstance(subs, list | tuple) or not subs:
        return False
    names = sub_names(layer, len(subs))
    elements = [_sub_elements(name, sub) for name, sub in zip(names, subs, strict=True)]
    # A window's buffer has four axes too, but its rows are not those of this block.
    rows = all(sub and len(getattr(sub[0], "shape", ())) == 4 for sub in elements)
    return rows and all(name is None or _is_sliceable(name) for name in names)


def _sub_elements(name: str | None, state: Any) -> tuple[Any, ...]:
    if name is None:
        return tuple(state) if isinstance(state, list | tuple) else ()
    return tuple(CacheTypeRegistry.get_handler_by_class_name(canonical(name)).state_elements(state))


def _sub_cut(elements: Sequence[Any], start: int, end: int) -> list[Any]:
    rows = elements[0].shape[2]
    lo, hi = min(start, rows), min(end, rows)
    return [
        element[:, :, lo:hi] if len(getattr(element, "shape", ())) == 4 and element.shape[2] == rows else element
        for element in elements
    ]


def _sub(name: str | None, elements: Sequence[Any]) -> Any:
    return (elements[0], elements[1]) if len(elements) == 2 else (NSTATE, name, list(elements))


def sub_names(layer: Mapping[str, Any], count: int) -> list[str | None]:
    """The class names of the caches in a list, as far as the layer dict says them."""
    meta = layer.get("meta_state")
    inside = meta[0] if isinstance(meta, list | tuple) and len(meta) == 2 else None
    for given in (layer.get("sub_class_names"), inside):
        if isinstance(given, list | tuple) and len(given) == count:
            return [str(name) for name in given]
    return [None] * count


def _is_sliceable(name: str) -> bool:
    return bool(CacheTypeRegistry.get_handler_by_class_name(canonical(name)).supports_block_slicing)


def _whole(name: str, state: Any) -> Any:
    elements = CacheTypeRegistry.get_handler_by_class_name(name).state_elements(state)
    if not elements:
        return placeholder()
    if len(elements) == 2:
        return tuple(mx.zeros((0,)) if element is None else element for element in elements)
    return (NSTATE, name, list(elements))


def valid(data: Sequence[Any], types: Sequence[str] | None = None) -> bool:
    """Whether loaded entries can be those of one block: every key and value there, plain layers of one length."""
    if not data:
        return False
    lengths: set[int] = set()
    for index, entry in enumerate(data):
        name = canonical(types[index]) if types and index < len(types) else "KVCache"
        if isinstance(entry, list) or name == _COMPOSITE:
            continue
        if not isinstance(entry, tuple) or not entry:
            return False
        if isinstance(entry[0], str):
            continue
        if entry[0] is None or (len(entry) > 1 and entry[1] is None):
            return False
        if name == "KVCache":
            shapes = [tuple(getattr(part, "shape", ())) for part in entry[:2]]
            lengths.update(shape[-2] for shape in shapes if len(shape) in (3, 4))
    return len(lengths) <= 1


def kv_shape(all_data: Sequence[Sequence[Any]], types: Sequence[str] | None) -> tuple[int, int] | None:
    """(heads, head size) of the first 4-D keys in these blocks; None if there are none. Lists are passed over."""
    for data in all_data:
        for entry in data:
            if isinstance(entry, tuple) and len(entry) == 2 and len(getattr(entry[0], "shape", ())) == 4:
                return int(entry[0].shape[1]), int(entry[0].shape[3])
    return None


def problematic(entries: Sequence[Any], types: Sequence[str] | None) -> list[bool]:
    """For each layer whether its state must be real at the end of the last block, and is a placeholder here."""
    found = []
    for index, entry in enumerate(entries):
        name = canonical(types[index]) if types and index < len(types) else "KVCache"
        sliceable = CacheTypeRegistry.get_handler_by_class_name(name).supports_block_slicing
        found.append(not sliceable and is_placeholder(entry))
    return found


def walk_back(all_data: Sequence[Sequence[Any]], types: Sequence[str] | None) -> int | None:
    """The last block in which no layer has a placeholder for a state, if that is not the last of all; None if it is, or
    if there is none."""
    for index in reversed(range(len(all_data))):
        if not any(problematic(all_data[index], types)):
            return None if index == len(all_data) - 1 else index
    return None
