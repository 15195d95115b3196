"""Handlers of caches with one row for each token from the first on: blocks are slices of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from prefixcache._omlx import turboquant_states
from prefixcache._omlx.cache_types import CacheStateAxisInfo, CacheType
from prefixcache._omlx.handler_base import LayerHandler, attempt
from prefixcache._omlx.layer_dicts import write_state
from prefixcache._omlx.live_layers import meta_tuple


def _sliced(*names: str) -> tuple[CacheStateAxisInfo, ...]:
    return tuple(CacheStateAxisInfo(name, 2, True) for name in names)


class KVCacheHandler(LayerHandler):
    """Keys and values ``[B, heads, tokens, dim]`` or ``[heads, tokens, dim]``, or states of TurboQuant.

    A rebuilt cache stands at the number of its rows: a meta state, which all blocks of a prompt share, may say more.
    """

    _type: ClassVar[CacheType] = CacheType.KVCACHE
    _sliceable: ClassVar[bool] = True

    def _write(self, cache: Any) -> tuple[Any, Any]:
        if turboquant_states.is_state(cache.keys):
            return write_state("TurboQuantKVCache", cache)
        return write_state(self._type.value, cache)

    def serialize_meta_state(self, cache: Any) -> tuple[Any, ...]:
        return meta_tuple(getattr(cache, "meta_state", None))

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        if not isinstance(state, list | tuple) or not 2 <= len(state) <= 3 or state[0] is None:
            return ()
        keys, values = state[:2]
        if len(state) == 3 and isinstance(state[2], int) and not turboquant_states.is_state(keys):
            return keys[..., : state[2], :], values[..., : state[2], :]
        return keys, values

    def extract_state(self, cache: Any) -> dict[str, Any]:
        state = super().extract_state(cache)
        return state | {"offset": self.get_seq_len(state)} if state else {}

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        keys, values = state.get("keys"), state.get("values")
        if turboquant_states.is_state(keys):
            return attempt(lambda: turboquant_states.rebuilt(keys, values, meta_tuple(meta_state)))
        if keys is None or values is None:
            return None
        return self._live((keys, values), ())


class DefaultCacheHandler(KVCacheHandler):
    """Any class that is not registered: taken for plain keys and values, where it has a pair of them."""


class ConcatenateKVCacheHandler(KVCacheHandler):
    """Keys and values that are joined anew at every append."""

    _type: ClassVar[CacheType] = CacheType.CONCATENATE_KVCACHE


class QuantizedKVCacheHandler(LayerHandler):
    """Codes, scales and biases of keys, then of values: six arrays with one row a token."""

    _type: ClassVar[CacheType] = CacheType.QUANTIZED_KVCACHE
    _sliceable: ClassVar[bool] = True
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = _sliced(
        *(f"{owner}{part}" for owner in ("keys", "values") for part in ("", "_scales", "_biases"))
    )
    _metas: ClassVar[tuple[str, ...]] = ("offset", "group_size", "bits")

    def _write(self, cache: Any) -> tuple[Any, Any]:
        return write_state(self._type.value, cache)

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        if not isinstance(state, list | tuple) or not state or state[0] is None:
            return ()
        if not isinstance(state[0], list | tuple):
            return tuple(state)
        elements = (*state[0], *state[1])
        return tuple(element[..., : state[2], :] for element in elements) if len(state) == 5 else elements


class MiniMaxM3KVCacheHandler(LayerHandler):
    """Keys, values and the index keys of sparse attention, None in layers with dense attention."""

    _type: ClassVar[CacheType] = CacheType.MINIMAX_M3_KVCACHE
    _sliceable: ClassVar[bool] = True
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = _sliced("keys", "values", "index_keys")
    _metas: ClassVar[tuple[str, ...]] = ("index_offset",)

    def _write(self, cache: Any) -> tuple[Any, Any]:
        return write_state(self._type.value, cache)

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        if not isinstance(state, list | tuple) or not state:
            return ()
        if isinstance(state[0], list | tuple):
            keys, values, *offset = state[0]
            index = state[1] if len(state) > 1 else None
            if keys is not None and offset and isinstance(offset[0], int):
                keys, values = keys[..., : offset[0], :], values[..., : offset[0], :]
            return () if keys is None else (keys, values, index)
        return () if state[0] is None else (*state[:2], state[2] if len(state) > 2 else None)

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        if state.get("keys") is None or state.get("values") is None:
            return None
        cache = super().reconstruct_cache(state, meta_state)
        meta = meta_tuple(meta_state)
        if cache is not None and state.get("index_keys") is None and meta:
            # Nothing else says how far a layer without index keys has counted.
            cache.index_offset = attempt(lambda: int(meta[0])) or 0
        return cache
