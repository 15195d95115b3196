"""Blocks for tests of the SSD manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from parts import same
from support import part_files

from prefixcache._core import sha256
from prefixcache.paged_ssd_cache import PagedSSDCacheManager

BIG = 1 << 30
MISSING = (mx.zeros((1,)), mx.zeros((1,)))


def hash_of(number: int) -> bytes:
    return sha256(str(number).encode())


def rows(*shape: int, seed: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.random.uniform(-1, 1, shape, key=mx.random.key(seed)).astype(dtype)


def layers(seed: int, count: int = 2, tokens: int = 4) -> list[Any]:
    """Keys and values of plain layers; other ones for each seed."""
    pairs = [(2 * (100 * seed + i), 2 * (100 * seed + i) + 1) for i in range(count)]
    return [(rows(1, 2, tokens, 8, seed=k), rows(1, 2, tokens, 8, seed=v)) for k, v in pairs]


def two_layers(seed: int) -> list[Any]:
    """A plain layer, and one of other dtypes and shapes."""
    return [*layers(seed, 1, 16), (rows(1, 1, 5, 32, seed=seed, dtype=mx.bfloat16), rows(1, 1, 5, 3, seed=seed + 1))]


def state(seed: int) -> Any:
    """A recurrent state of three arrays."""
    return ("__nstate__", "ArraysCache", [rows(1, 3, 5, seed=900 + seed + i) for i in range(3)])


def open_manager(directory: Path | None, **options: Any) -> PagedSSDCacheManager:
    return PagedSSDCacheManager(directory, options.pop("max_size_bytes", BIG), **options)


def part_count(directory: Path) -> int:
    return len(part_files(directory))


def equal(left: Any, right: Any) -> bool:
    """Bit for bit, and the same kinds of sequences."""
    if isinstance(left, tuple | list) and type(left) is type(right) and len(left) == len(right):
        return all(equal(a, b) for a, b in zip(left, right, strict=True))
    return same(left, right)
