"""mlx-vlm's caches that are stored whole: recurrent states, pooled rows, and DeepSeek V4.1's one cache for all layers.

Pooled rows stand for several tokens each, so no row of theirs belongs to one token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._handlers.arrays import ArraysCacheHandler, check_one_sequence, stored_whole, whole_slots
from prefixcache._handlers.base import Handler, check_fields, same_settings, token_count, whole_number
from prefixcache._handlers.mlx_vlm_fields import check_fields_and_notes
from prefixcache._layer_state import BOUNDARY, LayerState, Reach
from prefixcache.errors import Unsupported


class _WholeHandler(Handler):
    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        return frozenset({BOUNDARY})


class VlmArraysCacheHandler(ArraysCacheHandler):
    """mlx-lm's class and what a draft leaves in it: a transaction that is open is refused, counters are not kept."""

    type_name: ClassVar[str] = "mlx_vlm.ArraysCache"
    _fields: ClassVar[frozenset[str]] = frozenset(
        {
            "cache",
            "_left_padding",
            "_left_padding_advance",
            "_lengths",
            "_lengths_advance",
            "_speculation",
            "_speculation_generation",
            "metadata_revision",
        }
    )

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields_and_notes(cache, self._fields, where)
        _check_no_draft(cache, where)
        view = SimpleNamespace(cache=cache.cache, left_padding=cache.left_padding, lengths=cache.lengths)
        return super().describe(view, where)


class PoolingCacheHandler(_WholeHandler):
    """``pooled`` has one row for every ``ratio`` tokens, the two buffers the ``remainder`` tokens since then."""

    type_name: ClassVar[str] = "mlx_vlm.PoolingCache"
    prototypes: ClassVar[tuple[str, ...]] = ("PoolingCache",)
    _slots: ClassVar[tuple[str, ...]] = ("buf_kv", "buf_gate", "pooled")
    _fields: ClassVar[frozenset[str]] = frozenset(
        {*_slots, "ratio", "remainder", "_speculation", "_speculation_generation"}
    )

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, self._fields, where)
        _check_no_draft(cache, where)
        ratio, remainder = whole_number(cache, "ratio", 1, where), whole_number(cache, "remainder", 0, where)
        slots = whole_slots({name: getattr(cache, name) for name in self._slots}, where)
        check_one_sequence(slots, where)
        arrays = {slot.name: slot.data for slot in slots}
        _check_pool(arrays, ratio, remainder, where)
        rows = arrays["pooled"].shape[1] if "pooled" in arrays else 0
        offset = rows * ratio + remainder
        return LayerState(self.type_name, slots if offset else (), {"ratio": ratio}, offset=offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        ratio = whole_number(prototype, "ratio", 1, where)
        same_settings(state, {"ratio": ratio}, where)
        arrays = stored_whole(state, self._slots, where)
        cache = type(prototype)(ratio)
        if arrays:
            rows, cache.remainder = divmod(n, ratio)
            _check_pool(arrays, ratio, cache.remainder, where)
            stored = arrays["pooled"].shape[1] if "pooled" in arrays else 0
            if stored != rows:
                raise ValueError(f"{where}: {stored} pooled rows of {ratio} tokens do not fit {n} tokens")
        for name, array in arrays.items():
            setattr(cache, name, array)
        return cache


def _check_pool(arrays: dict[str, mx.array], ratio: int, remainder: int, where: str) -> None:
    """ValueError unless the arrays can be those of a pool with ``remainder`` tokens in its buffers."""
    if remainder >= ratio:
        raise ValueError(f"{where}: remainder must be below ratio, got {remainder} and {ratio}")
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(len(shape) != 3 for shape in shapes.values()):
        raise ValueError(f"{where}: arrays must have rank 3, got shapes {shapes}")
    buffers = [shapes[name][1] for name in ("buf_kv", "buf_gate") if name in shapes]
    if len(buffers) == 1 or any(rows != ratio for rows in buffers) or (remainder and not buffers):
        raise ValueError(f"{where}: buffers of shapes {shapes} do not fit ratio={ratio}, remainder={remainder}")


class Z1TCacheHandler(_WholeHandler):
    """Two running sums and two short windows."""

    type_name: ClassVar[str] = "mlx_vlm.Z1TCache"
    prototypes: ClassVar[tuple[str, ...]] = ("Z1TCache",)
    _slots: ClassVar[tuple[str, ...]] = ("cum_eKV", "cum_eK", "win_eKV", "win_eK")

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, frozenset({*self._slots, "offset"}), where)
        slots = whole_slots({name: getattr(cache, name) for name in self._slots}, where)
        check_one_sequence(slots, where)
        return LayerState(self.type_name, slots, offset=token_count(cache, where))

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        arrays = stored_whole(state, self._slots, where)
        cache = type(prototype)()
        for name, array in arrays.items():
            setattr(cache, name, array)
        cache.offset = n if arrays else 0
        return cache


class DeepseekV41CacheHandler(_WholeHandler):
    """One object for all layers: lists with an array or None for each, and what one layer hands to the next."""

    type_name: ClassVar[str] = "mlx_vlm.DeepseekV41Cache"
    prototypes: ClassVar[tuple[str, ...]] = ("DeepseekV41Cache",)
    _lists: ClassVar[tuple[str, ...]] = ("window", "compress", "keys", "kv_state", "score_state")
    _single: ClassVar[tuple[str, ...]] = ("engram", "index_k", "candidates", "compress_kv", "topk_idxs")
    # Longer buffers that two of the lists are cut from.
    _buffers: ClassVar[dict[str, str]] = {"_compress_buffers": "compress", "_key_buffers": "keys"}
    _fields: ClassVar[frozenset[str]] = frozenset({*_lists, *_single, *_buffers, "offset", "n_layers"})

    def describe(self, cache: Any, where: str) -> LayerState:
        check_fields(cache, self._fields, where)
        offset, layers = token_count(cache, where), whole_number(cache, "n_layers", 0, where)
        arrays: dict[str, Any] = {}
        for name in self._lists:
            entries = getattr(cache, name)
            if not isinstance(entries, list) or len(entries) != layers:
                raise ValueError(f"{where}: {name} must be a list of {layers} arrays")
            arrays |= {f"{name}.{i}": entry for i, entry in enumerate(entries)}
        arrays |= {name: getattr(cache, name) for name in self._single}
        slots = whole_slots(arrays, where)
        check_one_sequence(slots, where)
        return LayerState(self.type_name, slots, {"n_layers": layers}, offset=offset)

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        layers = whole_number(prototype, "n_layers", 0, where)
        same_settings(state, {"n_layers": layers}, where)
        names = [f"{name}.{i}" for name in self._lists for i in range(layers)]
        arrays = stored_whole(state, [*names, *self._single], where)
        cache = type(prototype)(layers)
        for name, array in arrays.items():
            owner, _, index = name.partition(".")
            if index:
                getattr(cache, owner)[int(index)] = array
            else:
                setattr(cache, name, array)
        for buffers, owner in self._buffers.items():
            setattr(cache, buffers, list(getattr(cache, owner)))
        cache.offset = n if arrays else 0
        return cache


def _check_no_draft(cache: Any, where: str) -> None:
    if cache._speculation is not None:
        raise Unsupported("running_request", f"{where}: a draft is being verified; commit or abort it first")
