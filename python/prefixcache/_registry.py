"""Which handler serves which cache class.

A live object is recognised by the module and the name of its exact class, so that no model package is imported here
and a subclass, which may behave differently, is never taken for its parent. Lookups may run in any thread; call
``register`` before caches are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixcache._handlers.arrays import ArraysCacheHandler
from prefixcache._handlers.base import Handler
from prefixcache._handlers.cache_list import CacheListHandler
from prefixcache._handlers.chunked import ChunkedKVCacheHandler
from prefixcache._handlers.deepseek_v41 import DeepseekV41Handler
from prefixcache._handlers.kv import ConcatenateKVCacheHandler, KVCacheHandler
from prefixcache._handlers.mlx_vlm import mlx_vlm_handlers
from prefixcache._handlers.quantized import QuantizedKVCacheHandler
from prefixcache._handlers.rotating import RotatingKVCacheHandler
from prefixcache._layer_state import LayerState, Reach, walk
from prefixcache.errors import Unsupported

_MLX_LM = "mlx_lm.models.cache"
# What makes an object a cache at all, known or not.
_PROTOCOL = ("update_and_fetch", "is_trimmable", "state", "offset")

_by_class: dict[tuple[str, str], Handler] = {}
_by_name: dict[str, Handler] = {}


def register(module: str, class_name: str, handler: Handler) -> None:
    """Lets ``handler`` serve instances of exactly this class. ValueError if the class or the type name is taken."""
    if (module, class_name) in _by_class:
        raise ValueError(f"{module}.{class_name} has a handler already")
    if _by_name.get(handler.type_name, handler) is not handler:
        raise ValueError(f"type name {handler.type_name!r} belongs to another handler")
    _by_class[(module, class_name)] = handler
    _by_name[handler.type_name] = handler


def registered() -> dict[tuple[str, str], Handler]:
    """A copy of the table: (module, class name) -> handler."""
    return dict(_by_class)


def handler_for(cache: object, where: str = "cache") -> Handler:
    """The handler of a live cache. ``Unsupported`` for an unknown cache class, TypeError for an object that is none."""
    kind = type(cache)
    if (handler := _by_class.get((kind.__module__, kind.__qualname__))) is not None:
        return handler
    # Models are dicts with a `state`; a class instead of an instance has every method of the protocol.
    if isinstance(cache, type | dict) or not any(hasattr(kind, name) or hasattr(cache, name) for name in _PROTOCOL):
        raise TypeError(f"{where}: expected a cache object, got {_short(cache)}")
    advice = "; extract each row first: extract(i)" if "Batch" in kind.__name__ else ""
    raise Unsupported("unsupported_type", f"{where}: no handler for {kind.__module__}.{kind.__qualname__}{advice}")


def handler_named(type_name: str, where: str = "cache") -> Handler:
    """The handler that wrote a stored state. ``Unsupported`` for a type name nobody registered."""
    handler = _by_name.get(type_name)
    if handler is None:
        raise Unsupported("unsupported_type", f"{where}: no handler is named {type_name!r}")
    return handler


register(_MLX_LM, "KVCache", KVCacheHandler())
register(_MLX_LM, "ConcatenateKVCache", ConcatenateKVCacheHandler())
register(_MLX_LM, "QuantizedKVCache", QuantizedKVCacheHandler())
_rotating = RotatingKVCacheHandler()
register(_MLX_LM, "RotatingKVCache", _rotating)
register("prefixcache._rotating_subclass", "PrefillReadyRotatingKVCache", _rotating)
register(_MLX_LM, "ChunkedKVCache", ChunkedKVCacheHandler())
register(_MLX_LM, "ArraysCache", ArraysCacheHandler())
register(_MLX_LM, "CacheList", CacheListHandler(handler_for, handler_named))
register("mlx_lm.models.deepseek_v41", "LayerCache", DeepseekV41Handler())
for _entry in mlx_vlm_handlers(handler_named):
    register(*_entry)


def convertible(type_name: str) -> bool:
    """Whether caches of this type have a quantised form of another type."""
    forms = [handler for handler in _by_name.values() if handler.quantised]
    return any(type_name in handler.prototypes and type_name != handler.type_name for handler in forms)


def describe_layers(caches: Sequence[Any]) -> list[LayerState]:
    """The state of every layer, in order; nothing is evaluated or copied.

    Raises ``Unsupported`` for a class or a field nobody knows; TypeError for something that is no list of caches;
    ValueError for an empty list and for a layer that contradicts itself. Messages name the layer.
    """
    states = []
    for where, cache in _labelled(caches):
        states.append(handler_for(cache, where).describe(cache, where))
    return states


def reaches_of(prototypes: Sequence[Any]) -> frozenset[Reach]:
    """The reaches of all slots that caches like these have once they hold tokens, children included.

    Raises as ``describe_layers``.
    """
    found: frozenset[Reach] = frozenset()
    return found.union(*(handler_for(cache, where).reaches(cache, where) for where, cache in _labelled(prototypes)))


def common_offset(states: Sequence[LayerState]) -> int | None:
    """The number of tokens that all counting layers, children included, stand at; None if none counts.

    A layer that holds nothing agrees with every other: some stay empty for ever. ValueError names the layers that
    disagree.
    """
    counting = [(path, state) for path, state in walk(states) if state.offset is not None]
    holding = [(path, state) for path, state in counting if state.slots or state.offset]
    if not holding:
        return 0 if counting else None
    first, *others = holding
    for path, state in others:
        if state.offset != first[1].offset:
            raise ValueError(
                f"layers disagree on the number of tokens: layer {first[0]} ({first[1].type_name}) stands at "
                f"{first[1].offset}, layer {path} ({state.type_name}) at {state.offset}"
            )
    return first[1].offset


def rebuild_layers(prototypes: Sequence[Any], states: Sequence[LayerState], n: int) -> list[Any]:
    """New caches that stand at n tokens and own the arrays of ``states``; ``prototypes`` (fresh caches of the model)
    give the classes and stay as they are.

    A layer that held nothing stays empty. Raises ``Unsupported`` where the stored layers do not fit the model's or
    none holds anything, ValueError where arrays do not fit n.
    """
    labelled = _labelled(prototypes)
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    if len(labelled) != len(states):
        raise Unsupported("structure_mismatch", f"{len(states)} layers are stored, the model has {len(labelled)}")
    if n > 0 and not any(state.slots for _, state in walk(states)):
        raise Unsupported("structure_mismatch", f"nothing is stored in any layer, expected {n} tokens")
    caches = []
    for (where, prototype), state in zip(labelled, states, strict=True):
        handler_for(prototype, where)
        caches.append(handler_named(state.type_name, where).rebuild(prototype, state, n, where))
    return caches


def _labelled(caches: Sequence[Any]) -> list[tuple[str, Any]]:
    if not isinstance(caches, list | tuple):
        raise TypeError(f"expected a list with one cache per layer, got {_short(caches)}")
    if not caches:
        raise ValueError("expected a list with one cache per layer, got an empty one")
    return [(f"layer {index} ({type(cache).__name__})", cache) for index, cache in enumerate(caches)]


def _short(value: object) -> str:
    # A model or a tensor has a repr of many pages.
    text = f" {value!r:.80}" if isinstance(value, type | str | int | float | None) else ""
    return f"{type(value).__name__}{text}"
