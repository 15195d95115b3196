"""What a handler of oMLX's surface is: how one type of cache becomes a tuple of arrays and back.

Handlers are stateless and safe from every thread that may use the arrays; they read live caches and never change them.
Arrays are shared or sliced lazily; nothing is evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache._omlx import turboquant_states
from prefixcache._omlx.cache_types import CacheStateAxisInfo, CacheStateInfo, CacheType
from prefixcache._omlx.live_layers import bare, live_cache, meta_tuple

_ROWS = (CacheStateAxisInfo("keys", 2, True), CacheStateAxisInfo("values", 2, True))


class CacheTypeHandler(ABC):
    """One type of cache. A state is a dict of named arrays, or a tuple of them in the order of its axis info."""

    @property
    @abstractmethod
    def cache_type(self) -> CacheType:
        """The type that it handles."""

    @property
    @abstractmethod
    def supports_block_slicing(self) -> bool:
        """Whether the rows of any range of tokens can be cut out of a state, whatever the cache has seen since."""

    @abstractmethod
    def extract_state(self, cache: Any) -> dict[str, Any]:
        """The state of a live cache by name; {} if it holds nothing."""

    @abstractmethod
    def get_seq_len(self, state: Mapping[str, Any]) -> int:
        """The tokens that a state has rows of; 0 if it has no rows of tokens."""

    @abstractmethod
    def slice_state(self, state: Mapping[str, Any], start: int, end: int) -> dict[str, Any] | None:
        """The rows [start, end) that are there; None if there are none or states of this type cannot be cut."""

    @abstractmethod
    def concatenate_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state of successive ones: their rows joined, or the last one where rows cannot be cut. {} for none."""

    @abstractmethod
    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        """A new live cache, or None where state and meta state make none."""

    def get_state_info(self) -> CacheStateInfo:
        """Names and abilities in one record."""
        whole = not self.supports_block_slicing
        keys, meta_keys = self._get_state_keys(), self._get_meta_state_keys()
        return CacheStateInfo(self.cache_type.value, keys, meta_keys, self.supports_block_slicing, whole)

    def _get_state_keys(self) -> tuple[str, ...]:
        return ("keys", "values")

    def _get_meta_state_keys(self) -> tuple[str, ...]:
        return ("offset",)

    def get_state_axis_info(self) -> tuple[CacheStateAxisInfo, ...]:
        """One entry for each element of the state as a tuple."""
        return _ROWS

    def state_elements(self, state: Any) -> tuple[Any, ...]:
        """A state in any form, a live cache's own or a stored one, as the flat tuple that ``get_state_axis_info``
        describes; () if it holds nothing. Not among oMLX's."""
        return tuple(state) if isinstance(state, list | tuple) else ()

    def serialize_state(self, cache: Any) -> tuple[Any, ...]:
        """The state of a live cache as a tuple; () if it holds nothing."""
        return self.state_elements(getattr(cache, "state", None))

    def serialize_meta_state(self, cache: Any) -> tuple[Any, ...]:
        """Its meta state as a tuple: nothing gives (), a single value a tuple of one."""
        return meta_tuple(getattr(cache, "meta_state", None))

    def deserialize_state(self, elements: Sequence[Any], meta_state: Any = None) -> Any:
        """A new live cache of a state as a tuple, or None."""
        axes = self.get_state_axis_info()
        return self.reconstruct_cache({axis.name: e for axis, e in zip(axes, elements, strict=False)}, meta_state)

    def get_state_seq_len_from_tuple(self, state: Sequence[Any]) -> int:
        """The length of the first sliceable element along its own axis; 0 if there is none."""
        for axis, element in zip(self.get_state_axis_info(), state, strict=False):
            if axis.sliceable and axis.sequence_axis is not None and hasattr(element, "shape"):
                return int(element.shape[token_axis(axis, element)])
        return 0

    def is_variable_length_state(self) -> bool:
        """Whether the number of elements differs from cache to cache."""
        return False

    def is_composite_cache(self) -> bool:
        """Whether the cache is made of other caches."""
        return False


def token_axis(axis: CacheStateAxisInfo, array: Any) -> int:
    """Which axis of this array has one row a token: rows without a batch axis, rank 3, have them one axis earlier."""
    place = 2 if axis.sequence_axis is None else axis.sequence_axis
    return 1 if place == 2 and len(array.shape) == 3 else place


def cut_rows(array: Any, axis: CacheStateAxisInfo, start: int, end: int) -> Any:
    """Rows [start, end), those that are there, of an array or of a TurboQuant state; None if there are none."""
    if turboquant_states.is_state(array):
        return turboquant_states.sliced(array, start, end) if start < turboquant_states.token_count(array) else None
    place = token_axis(axis, array)
    end = min(end, array.shape[place])
    if start >= end:
        return None
    return array[(slice(None),) * place + (slice(start, end),)]


def join_rows(parts: Sequence[Any], axis: CacheStateAxisInfo) -> Any:
    """The rows of all, in order. ValueError if they do not fit each other."""
    if len(parts) == 1:
        return parts[0]
    if turboquant_states.is_state(parts[0]):
        return turboquant_states.joined(parts)
    return mx.concatenate(list(parts), axis=token_axis(axis, parts[0]))


class LayerHandler(CacheTypeHandler):
    """A handler built on layer dicts: ``_write`` gives the state of a live cache, ``live_cache`` takes it back."""

    _type: ClassVar[CacheType]
    _axes: ClassVar[tuple[CacheStateAxisInfo, ...]] = _ROWS
    _metas: ClassVar[tuple[str, ...]] = ("offset",)
    _sliceable: ClassVar[bool] = False

    @property
    def cache_type(self) -> CacheType:
        return self._type

    @property
    def supports_block_slicing(self) -> bool:
        return self._sliceable

    def _get_state_keys(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self._axes)

    def _get_meta_state_keys(self) -> tuple[str, ...]:
        return self._metas

    def get_state_axis_info(self) -> tuple[CacheStateAxisInfo, ...]:
        return self._axes

    def _write(self, cache: Any) -> tuple[Any, Any]:
        """State and meta state of a live cache, as in its layer dict."""
        raise NotImplementedError

    def _written(self, cache: Any) -> tuple[Any, Any]:
        cache = bare(cache)
        try:
            return self._write(cache)
        except (AttributeError, TypeError, IndexError):
            # Something that only looks like this cache, or an empty one of a class that then has no state.
            return _asked(cache, "state"), _asked(cache, "meta_state")

    def serialize_state(self, cache: Any) -> tuple[Any, ...]:
        return self.state_elements(self._written(cache)[0])

    def serialize_meta_state(self, cache: Any) -> tuple[Any, ...]:
        return meta_tuple(self._written(cache)[1])

    def extract_state(self, cache: Any) -> dict[str, Any]:
        elements = self.serialize_state(cache)
        if not elements:
            return {}
        state = {axis.name: element for axis, element in zip(self._axes, elements, strict=False)}
        metas = zip(self._metas, self.serialize_meta_state(cache), strict=False)
        return state | {name: value for name, value in metas if name not in state}

    def get_seq_len(self, state: Mapping[str, Any]) -> int:
        for axis in self._axes:
            array = state.get(axis.name)
            if axis.sequence_axis is not None and array is not None:
                if turboquant_states.is_state(array):
                    return turboquant_states.token_count(array)
                return int(array.shape[token_axis(axis, array)])
        return 0

    def slice_state(self, state: Mapping[str, Any], start: int, end: int) -> dict[str, Any] | None:
        if not self._sliceable or start < 0:
            return None
        found: dict[str, Any] = {}
        for axis in self._axes:
            element = state.get(axis.name)
            if element is None:
                found[axis.name] = None
                continue
            found[axis.name] = cut_rows(element, axis, start, end) if axis.sliceable else element
            if found[axis.name] is None:
                return None
        return found if any(element is not None for element in found.values()) else None

    def concatenate_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not states or not self._sliceable:
            return dict(states[-1]) if states else {}
        joined: dict[str, Any] = {}
        for axis in self._axes:
            parts = [state.get(axis.name) for state in states]
            if any(part is None for part in parts):
                joined[axis.name] = None
            else:
                joined[axis.name] = join_rows(parts, axis) if axis.sliceable else parts[-1]
        return joined

    def deserialize_state(self, elements: Sequence[Any], meta_state: Any = None) -> Any:
        flat = attempt(lambda: self.state_elements(elements))
        return None if flat is None else super().deserialize_state(flat, meta_state)

    def reconstruct_cache(self, state: Mapping[str, Any], meta_state: Any = None) -> Any:
        meta = meta_tuple(meta_state) or tuple(state[name] for name in self._metas if name in state)
        elements = tuple(state.get(axis.name) for axis in self._axes)
        return None if all(element is None for element in elements) else self._live(elements, meta)

    def _live(self, elements: Any, meta: tuple[Any, ...], **extras: Any) -> Any:
        layer = {"state": elements, "meta_state": meta, "class_name": self._type.value, **extras}
        return attempt(lambda: live_cache(layer, None, "layer"))


def attempt(make: Callable[[], Any]) -> Any:
    """What ``make`` makes, or None where the state does not fit."""
    try:
        return make()
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, ImportError):
        return None


def _asked(cache: Any, name: str) -> Any:
    try:
        return getattr(cache, name, None)
    except (TypeError, IndexError):
        return None
