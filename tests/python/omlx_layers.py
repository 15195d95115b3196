"""Filled caches of mlx-lm, and what it means that two lists of them are the same: for tests of oMLX's surface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from parts import same, through_parts

from prefixcache._layer_state import encode_structure, flatten
from prefixcache._registry import common_offset, describe_layers


def rows(count: int, start: int = 0, heads: int = 2, dim: int = 4) -> mx.array:
    """Numbers that differ from row to row."""
    table = mx.arange(start * dim, (start + count) * dim, dtype=mx.float32).reshape(1, 1, count, dim)
    return mx.concatenate([table + 10_000 * head for head in range(heads)], axis=1)


def plain(count: int) -> Any:
    cache = KVCache()
    cache.update_and_fetch(rows(count), -rows(count))
    return cache


def window(count: int, max_size: int = 8, keep: int = 0, singles: int = 0) -> Any:
    cache = RotatingKVCache(max_size, keep)
    cache.update_and_fetch(rows(count), -rows(count))
    for i in range(count, count + singles):
        cache.update_and_fetch(rows(1, i), -rows(1, i))
    return cache


def states(*shapes: tuple[int, ...]) -> Any:
    cache = ArraysCache(len(shapes))
    for index, shape in enumerate(shapes):
        cache[index] = mx.random.normal(shape)
    return cache


def check_same_layers(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Same classes, and bit for bit what a store would keep of them."""
    left, right = describe_layers(found), describe_layers(expected)
    assert encode_structure(left) == encode_structure(right)
    assert common_offset(left) == common_offset(right)
    n = common_offset(right) or 0
    pairs = zip(flatten(through_parts(left, n)), flatten(through_parts(right, n)), strict=True)
    for (name, one), (_, other) in pairs:
        assert same(one.data, other.data), name
