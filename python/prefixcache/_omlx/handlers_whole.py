"""Handlers of caches that are stored whole: windows, chunks, recurrent states, pools and batches.

Their state is that of one token count; of successive states the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._omlx.cache_types import CacheStateAxisInfo, CacheType, canonical
from prefixcache._omlx.handler_base import LayerHandler, attempt
from prefixcache._omlx.layer_dicts import newest, ready, temporal, write_state
from prefixcache._omlx.live_layers import bare, class_named, meta_tuple
from prefixcache._omlx.sized_arrays import SizedArraysCache

_WHOLE_ROWS = (CacheStateAxisInfo("keys", 2, False), CacheStateAxisInfo("values", 2, False))
_OF_BATCH = (
    *_WHOLE_ROWS,
    CacheStateAxisInfo("offset", None, False),
    CacheStateAxisInfo("left_padding", None, False),
)
_POOL = tuple(CacheStateAxisInfo(name, 1, False) for name in ("buf_kv", "buf_gate", "pooled"))


class RotatingKVCacheHandler(LayerHandler):
    """A sliding window in temporal order, at most ``max_size`` rows; the meta state counts all tokens."""

    _type: ClassVar[CacheType] = CacheType.ROTATING_KVCACHE
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = _WHOLE_ROWS
    _metas: ClassVar[tuple[str, ...]] = ("keep", "max_size", "offset", "_idx")

    def _write(self, cache: Any) -> tuple[Any, Any]:
        return write_state(self._type.value, cache)

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        return tuple(state[:2]) if isinstance(state, list | tuple) and state and state[0] is not None else ()

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        """A ``PrefillReadyRotatingKVCache`` with the rows that are there, never padded; ``_idx`` is their number."""
        cache = super().reconstruct_cache(state, meta_state)
        if cache is None or cache.keys is None or len(meta_tuple(meta_state)) not in (0, 4):
            return None
        for name in ("keys", "values"):
            rows = getattr(cache, name)
            # Only a full ring has an index inside it; a shared meta state may have any.
            if rows.shape[-2] == cache.max_size < cache.offset and cache.keep < cache._idx:
                rows = temporal(rows, cache)
            setattr(cache, name, mx.contiguous(newest(rows, cache.max_size, cache.keep)))
        cache._idx = cache.keys.shape[-2]
        return ready(cache)


class ChunkedKVCacheHandler(LayerHandler):
    """Rows from ``start_position`` on: those of earlier tokens are gone once the front was cut.

    The meta state has the offset as a third element: rows alone do not tell it behind a cut front.
    """

    _type: ClassVar[CacheType] = CacheType.CHUNKED_KVCACHE
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = _WHOLE_ROWS
    _metas: ClassVar[tuple[str, ...]] = ("chunk_size", "start_position", "offset")

    def _write(self, cache: Any) -> tuple[Any, Any]:
        state, meta = write_state(self._type.value, cache)
        return state, (*meta, str(cache.offset))

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        meta = meta_tuple(meta_state) or tuple(state[name] for name in self._metas if name in state)
        if state.get("keys") is None:
            return None
        count = {"token_count": attempt(lambda: int(meta[2]))} if len(meta) > 2 else {}
        return self._live((state.get("keys"), state.get("values")), meta[:2], **count)


class ArraysCacheHandler(LayerHandler):
    """Any number of arrays, each may be None. The class does not count tokens: ``token_count`` comes from outside."""

    _type: ClassVar[CacheType] = CacheType.ARRAYS_CACHE
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = ()
    _metas: ClassVar[tuple[str, ...]] = ()

    def _get_state_keys(self) -> tuple[str, ...]:
        return ("states",)

    def _write(self, cache: Any) -> tuple[Any, Any]:
        return write_state(self._type.value, cache)

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        if not isinstance(state, list | tuple):
            return ()
        inside = len(state) == 3 and isinstance(state[0], list | tuple)
        return tuple(state[0] if inside else state)

    def extract_state(self, cache: Any) -> dict[str, Any]:
        states = list(self.serialize_state(cache))
        return {"states": states} if states else {}

    def is_variable_length_state(self) -> bool:
        return True

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None, token_count: int = 0) -> Any:
        """A ``SizedArraysCache`` with every array of ``state["states"]``; its size is ``token_count``."""
        states = state.get("states")
        cache = self._live(list(states), ()) if isinstance(states, list | tuple) else None
        return None if cache is None else SizedArraysCache(cache, token_count)

    def deserialize_state(self, elements: Sequence[Any], meta_state: Any = None, token_count: int = 0) -> Any:
        return self.reconstruct_cache({"states": list(elements)}, meta_state, token_count)


class CacheListHandler(LayerHandler):
    """Several caches of one layer. Its elements are their states, its meta state their class names and meta states."""

    _type: ClassVar[CacheType] = CacheType.CACHE_LIST
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = ()
    _metas: ClassVar[tuple[str, ...]] = ("class_names", "sub_meta_states")

    def _get_state_keys(self) -> tuple[str, ...]:
        return ("sub_states",)

    def _write(self, cache: Any) -> tuple[Any, Any]:
        return write_state(self._type.value, cache)

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        if not isinstance(state, list | tuple):
            return ()
        named = [len(item) == 2 and isinstance(item[1], str) for item in state if isinstance(item, list | tuple)]
        return tuple(item[0] for item in state) if len(named) == len(state) and all(named) else tuple(state)

    def serialize_meta_state(self, cache: Any) -> tuple[Any, ...]:
        meta = super().serialize_meta_state(cache)
        return meta if len(meta) < 2 else ([canonical(name) for name in meta[0]], list(meta[1]))

    def extract_state(self, cache: Any) -> dict[str, Any]:
        states = list(self.serialize_state(cache))
        return {"sub_states": states, **dict(zip(self._metas, self.serialize_meta_state(cache), strict=False))}

    def get_seq_len(self, state: Mapping[str, Any]) -> int:
        """The rows of the first cache in it that has rows of four axes."""
        for sub in state.get("sub_states") or ():
            if isinstance(sub, list | tuple) and sub and len(getattr(sub[0], "shape", ())) == 4:
                return int(sub[0].shape[2])
        return 0

    def is_composite_cache(self) -> bool:
        return True

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        """A ``CacheList`` of all caches, whole arrays among them bare; None without a name and a meta state of each."""
        meta = meta_tuple(meta_state) or tuple(state[name] for name in self._metas if name in state)
        subs = state.get("sub_states")
        if not isinstance(subs, list | tuple) or len(meta) < 2:
            return None
        if any(not isinstance(part, list | tuple) or len(part) != len(subs) for part in meta[:2]):
            return None
        cache = self._live(list(subs), meta[:2])
        return None if cache is None else ready(cache)

    def deserialize_state(self, elements: Sequence[Any], meta_state: Any = None) -> Any:
        return self.reconstruct_cache({"sub_states": list(elements)}, meta_state)


class BatchKVCacheHandler(LayerHandler):
    """Rows of several sequences behind their left padding: no range of rows belongs to the same tokens in all."""

    _type: ClassVar[CacheType] = CacheType.BATCH_KVCACHE
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = _OF_BATCH
    _metas: ClassVar[tuple[str, ...]] = ()

    def _write(self, cache: Any) -> tuple[Any, Any]:
        if cache.keys is None:
            return (), ()
        return (cache.keys[..., : cache._idx, :], cache.values[..., : cache._idx, :], *_of_rows(cache)), ()

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        return attempt(lambda: self._make(state))

    def _make(self, state: Mapping[str, Any]) -> Any:
        cache = class_named(self._type.value, None, "layer")(left_padding=[0])
        _fill(cache, state)
        cache._idx = cache.keys.shape[2]
        return cache


class BatchRotatingKVCacheHandler(BatchKVCacheHandler):
    """Windows of several sequences, one ring for all."""

    _type: ClassVar[CacheType] = CacheType.BATCH_ROTATING_KVCACHE
    _metas: ClassVar[tuple[str, ...]] = ("max_size", "_offset", "_idx", "rotated")

    def _write(self, cache: Any) -> tuple[Any, Any]:
        meta = tuple(str(getattr(cache, name)) for name in self._metas)
        if cache.keys is None:
            return (), meta
        held = min(cache._offset, cache.keys.shape[2])
        return (cache.keys[..., :held, :], cache.values[..., :held, :], *_of_rows(cache)), meta

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        meta = meta_tuple(meta_state) or tuple(state[name] for name in self._metas if name in state)
        return attempt(lambda: self._make_window(state, *meta)) if len(meta) == 4 else None

    def _make_window(self, state: Mapping[str, Any], max_size: Any, offset: Any, idx: Any, rotated: Any) -> Any:
        cache = class_named(self._type.value, None, "layer")(int(max_size), left_padding=[0])
        _fill(cache, state)
        cache._offset, cache._idx = int(offset), min(int(idx), cache.keys.shape[2])
        cache.rotated = str(rotated) == "True"
        return cache


def _of_rows(cache: Any) -> tuple[Any, Any]:
    # A batch counts on in place.
    return mx.array(cache.offset), mx.array(cache.left_padding)


def _fill(cache: Any, state: Mapping[str, Any]) -> None:
    values = {axis.name: state[axis.name] for axis in _OF_BATCH}
    missing = [name for name, value in values.items() if not isinstance(value, mx.array)]
    if missing:
        raise ValueError(f"{missing} are no arrays")
    for name, value in values.items():
        # A batch counts on in place, and would change the state.
        setattr(cache, name, value if name in ("keys", "values") else mx.array(value))


class MiniMaxM3BatchKVCacheHandler(BatchKVCacheHandler):
    """MiniMax M3's batch: the four elements of its rows, and index keys."""

    _type: ClassVar[CacheType] = CacheType.MINIMAX_M3_BATCH_KVCACHE
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = (*_OF_BATCH, CacheStateAxisInfo("index_keys", 2, False))
    _metas: ClassVar[tuple[str, ...]] = ("index_offset",)

    def _write(self, cache: Any) -> tuple[Any, Any]:
        rows, _ = super()._write(cache.kv_cache)
        index = None if cache.index_keys is None else cache.index_keys[..., : cache.index_offset, :]
        return (*rows, index) if rows else (), (cache.index_offset,)

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        if not isinstance(state, list | tuple) or not state or state[0] is None:
            return ()
        flat = (*state[0][:4], state[1]) if isinstance(state[0], list | tuple) else tuple(state)
        return () if flat[0] is None else flat

    def _make(self, state: Mapping[str, Any]) -> Any:
        keys, index = state["keys"], state.get("index_keys")
        padding = mx.array([0]) if state.get("left_padding") is None else state["left_padding"]
        counts = mx.array([keys.shape[2]] * keys.shape[0]) if state.get("offset") is None else state["offset"]
        cache = class_named(self._type.value, None, "layer")(padding.tolist())
        _fill(cache.kv_cache, {**state, "offset": counts, "left_padding": padding})
        cache.kv_cache._idx = keys.shape[2]
        if index is not None:
            cache.index_keys, cache.index_offset = index, index.shape[2]
        return cache


class PoolingCacheHandler(LayerHandler):
    """Pooled rows, each of ``ratio`` tokens, and the tokens since the last one ``[B, rows, dim]``."""

    _type: ClassVar[CacheType] = CacheType.POOLING_CACHE
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = _POOL
    _metas: ClassVar[tuple[str, ...]] = ("ratio",)

    def _write(self, cache: Any) -> tuple[Any, Any]:
        return cache.state, cache.meta_state

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        known = isinstance(state, list | tuple) and any(element is not None for element in state)
        return tuple(state) if known else ()

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        """A pool of the ratio in ``meta_state``, 1 without one; the pooled rows may be left out of the state."""
        meta = meta_tuple(meta_state) or (state.get("ratio", 1),)
        return self._live(tuple(state.get(axis.name) for axis in _POOL), meta[:1])


class BatchPoolingCacheHandler(PoolingCacheHandler):
    """Pools of several sequences; the meta state says how far each of them is."""

    _type: ClassVar[CacheType] = CacheType.BATCH_POOLING_CACHE
    _metas: ClassVar[tuple[str, ...]] = ("ratio", "remainder", "pool_lengths", "processed")

    def serialize_meta_state(self, cache: Any) -> tuple[Any, ...]:
        # The lists are counted on in place.
        meta = super().serialize_meta_state(bare(cache))
        return tuple(list(part) if isinstance(part, list) else part for part in meta)

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        meta = meta_tuple(meta_state) or tuple(state[name] for name in self._metas if name in state)
        return attempt(lambda: self._make(state, meta)) if len(meta) in (4, 5) else None

    def _make(self, state: Mapping[str, Any], meta: tuple[Any, ...]) -> Any:
        counts = [list(part) for part in meta[1:]]
        cache = class_named(self._type.value, None, "layer")(int(meta[0]), [0] * len(counts[0]))
        cache.state = tuple(state.get(axis.name) for axis in _POOL)
        cache.meta_state = (int(meta[0]), *counts)
        return cache
