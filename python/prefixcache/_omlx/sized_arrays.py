"""A cache of whole arrays that knows for how many tokens it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SizedArraysCache:
    """Dresses an ``ArraysCache``, which does not count tokens, with a ``size()``: ``token_count``.

    Everything else is the inner cache's: reading, writing, state, batches. An attribute that is set on it is set on
    the inner cache, and it passes for an instance of the inner cache's class. Not safe from several threads, as every
    cache.
    """

    _inner: Any
    _token_count: int

    def __init__(self, inner: Any, token_count: int = 0) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_token_count", token_count)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Some models write to a cache only if it is one of these; others would run on with a state that stands still.
        return type(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return SizedArraysCache, (self._inner, self._token_count)

    def size(self) -> int:
        """The number of tokens that it was made with."""
        return self._token_count

    @property
    def state(self) -> Any:
        """The inner cache's state, in the form of its mlx-lm."""
        return self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self._inner.state = value

    @property
    def cache(self) -> Any:
        """The inner cache's list of arrays."""
        return self._inner.cache

    @cache.setter
    def cache(self, value: Any) -> None:
        self._inner.cache = value

    def extend(self, other: Any) -> None:
        """Appends the rows of ``other``, dressed or not."""
        self._inner.extend(_bare(other))

    def extract(self, idx: int) -> SizedArraysCache:
        """Row ``idx``, dressed again."""
        return SizedArraysCache(self._inner.extract(idx), self._token_count)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> SizedArraysCache:
        """One cache with a row for each; it stands at the first one's token count."""
        inner = [_bare(cache) for cache in caches]
        first = caches[0]
        return cls(type(inner[0]).merge(inner), first._token_count if isinstance(first, SizedArraysCache) else 0)

    def __getitem__(self, idx: Any) -> Any:
        return self._inner[idx]

    def __setitem__(self, idx: Any, value: Any) -> None:
        self._inner[idx] = value

    def __len__(self) -> int:
        return len(self._inner.cache)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask before there is an inner cache.
        if name in ("_inner", "_token_count") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_inner", "_token_count", "state", "cache"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)


def _bare(cache: Any) -> Any:
    return cache._inner if isinstance(cache, SizedArraysCache) else cache
