"""What the tests know about mlx-lm's caches, without the package under test: whether one counts tokens by rows, how it
looks inside, and how a deep copy is made to stand at fewer tokens or put in temporal order."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

# They keep a state, or parts of one, instead of a row for each token: they stand only where they were.
STATE_CLASSES = {"ArraysCache", "LayerCache"}


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches, with those of a CacheList in its place."""
    for cache in caches:
        if type(cache).__name__ == "CacheList":
            yield from leaves(cache.caches)
        else:
            yield cache


def kinds(caches: Sequence[Any]) -> str:
    """The classes that a model has, each once, those in a list in brackets."""
    return ", ".join(sorted({_kind(cache) for cache in caches}))


def _kind(cache: Any) -> str:
    if type(cache).__name__ == "CacheList":
        return f"[{', '.join(_kind(inner) for inner in cache.caches)}]"
    return type(cache).__name__


def has_state(caches: Sequence[Any]) -> bool:
    return any(type(leaf).__name__ in STATE_CLASSES for leaf in leaves(caches))


def standing(caches: Sequence[Any]) -> list[tuple[str, int | None]]:
    """The class of every cache, and how many tokens it counts."""
    return [
        (f"{type(leaf).__module__}.{type(leaf).__name__}", getattr(leaf, "offset", None)) for leaf in leaves(caches)
    ]


def evaluate(caches: Sequence[Any]) -> None:
    mx.eval([leaf for _, leaf in _contents(list(caches), "") if isinstance(leaf, mx.array)])


def frozen(caches: Sequence[Any]) -> dict[str, Any]:
    """Everything in the caches, padding included, as bytes and plain values by path."""
    return {
        path: (str(leaf.dtype), leaf.shape, np.array(leaf).tobytes()) if isinstance(leaf, mx.array) else leaf
        for path, leaf in _contents(list(caches), "")
    }


def _contents(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        yield path, (type(value).__name__, len(value))
        for index, item in enumerate(value):
            yield from _contents(item, f"{path}[{index}]")
    elif hasattr(value, "__dict__") and not isinstance(value, mx.array):
        yield path, f"{type(value).__module__}.{type(value).__qualname__}"
        for name, item in vars(value).items():
            yield from _contents(item, f"{path}.{name}")
    else:
        yield path, value


def cut(caches: Sequence[Any], n: int) -> list[Any]:
    """A deep copy that stands at n, fewer tokens than the caches stand at: the newest rows are dropped.

    ValueError where a cache does not hold what it needs to stand at n.
    """
    caches = copy.deepcopy(list(caches))
    for leaf in leaves(caches):
        _CUTS.get(type(leaf).__name__, _cut_nothing)(leaf, n)
    return caches


def _cut_nothing(cache: Any, n: int) -> None:
    raise ValueError(f"a {type(cache).__name__} was restored at {n} tokens, where it was never seen")


def _cut_rows(cache: Any, n: int) -> None:
    cache.offset = min(cache.offset, n)


def _cut_ring(cache: Any, n: int) -> None:
    dropped = cache.offset - n
    rows = cache._idx - dropped
    if cache._idx != cache.keys.shape[2] or rows < min(n, cache.max_size):
        raise ValueError(f"the copy at {cache.offset} has no {min(n, cache.max_size)} rows before {n}")
    cache.keys, cache.values = cache.keys[..., :rows, :], cache.values[..., :rows, :]
    cache.offset, cache._idx = n, rows


def _cut_chunked(cache: Any, n: int) -> None:
    if cache.start_position > max(0, n - cache.chunk_size):
        raise ValueError(f"the copy at {cache.offset} begins at {cache.start_position}, too late for {n}")
    cache.offset = n


_CUTS = {
    "KVCache": _cut_rows,
    "ConcatenateKVCache": _cut_rows,
    "RotatingKVCache": _cut_ring,
    "ChunkedKVCache": _cut_chunked,
}


def in_temporal_order(caches: Sequence[Any]) -> list[Any]:
    """A deep copy whose rings begin with their oldest row.

    mlx-lm sums over the rows in the order in which they lie, so a ring and the same rows in temporal order differ in
    the last bits when one token is decoded; several tokens put the ring in order first.
    """
    caches = copy.deepcopy(list(caches))
    for leaf in leaves(caches):
        if type(leaf).__name__ == "RotatingKVCache" and leaf.keys is not None:
            leaf.keys, leaf.values = leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values)
            leaf._idx = leaf.keys.shape[2]
    return caches


def without_room(caches: Sequence[Any]) -> list[Any]:
    """The same rows in arrays that end with them: how a GPU's attention rounds depends on how far apart heads lie."""
    for leaf in leaves(caches):
        if type(leaf).__name__ == "KVCache" and leaf.keys is not None:
            leaf.keys, leaf.values = (mx.contiguous(rows[..., : leaf.offset, :]) for rows in (leaf.keys, leaf.values))
    return list(caches)
