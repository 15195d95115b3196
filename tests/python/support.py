"""Caches whose rows tell which layer, head, token and position they belong to, and an independent model of a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache

from prefixcache import Hit, PrefixCache

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = mx.default_device() == mx.Device(mx.cpu)

LAYERS, HEADS, DIM = 2, 2, 32
STEP = 256  # mlx-lm's caches grow by this many rows
KINDS = {
    "kv": KVCache,
    "concatenate": ConcatenateKVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
}


def coded_rows(layer: int, is_value: bool, tokens: Sequence[int], start: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Rows ``[1, HEADS, T, DIM]`` for ``tokens`` at positions ``start``...: no two positions, layers, heads or tokens
    have equal rows. All numbers are whole and below 256, so every float type holds them exactly."""
    ids = np.asarray(tokens, dtype=np.int64)
    positions = np.arange(start, start + len(ids))
    code = np.zeros((1, HEADS, len(ids), 8), dtype=np.float32)
    for column, part in enumerate((ids, ids >> 8, ids >> 16, ids >> 24, positions, positions >> 8)):
        code[..., column] = part & 255
    code[..., 6] = 1 + layer * 2 + is_value
    code[0, :, :, 7] = 1 + np.arange(HEADS)[:, None]
    return mx.array(np.tile(code, DIM // 8)).astype(dtype)


def make_caches(kind: str = "kv", layers: int = LAYERS) -> list[Any]:
    return [KINDS[kind]() for _ in range(layers)]


def extend(caches: Sequence[Any], tokens: Sequence[int], dtype: mx.Dtype = mx.float32) -> None:
    """Appends the rows of ``tokens``, as a model would that runs them."""
    start = caches[0].offset
    for layer, cache in enumerate(caches):
        rows = (coded_rows(layer, is_value, tokens, start, dtype) for is_value in (False, True))
        mx.eval(cache.update_and_fetch(*rows))


def filled(tokens: Sequence[int], kind: str = "kv", dtype: mx.Dtype = mx.float32, layers: int = LAYERS) -> list[Any]:
    caches = make_caches(kind, layers)
    if len(tokens):
        extend(caches, tokens, dtype)
    return caches


def arrays_of(cache: Any) -> list[mx.array]:
    """All arrays of a cache, padding included."""
    return [
        array
        for owner in (cache.keys, cache.values)
        for array in (owner if isinstance(owner, list | tuple) else (owner,))
        if array is not None
    ]


def all_arrays(caches: Sequence[Any]) -> list[mx.array]:
    return [array for cache in caches for array in arrays_of(cache)]


def check_caches(caches: Sequence[Any], tokens: Sequence[int], kind: str = "kv", dtype: mx.Dtype = mx.float32) -> None:
    """The caches hold exactly the rows of ``tokens``, bit for bit, and zeros in the room behind them."""
    n = len(tokens)
    assert [type(cache) for cache in caches] == [type(cache) for cache in make_caches(kind, len(caches))]
    assert [cache.offset for cache in caches] == [n] * len(caches)
    if n == 0:
        assert all_arrays(caches) == []
        return
    for number, (cache, donor) in enumerate(zip(caches, filled(tokens, kind, dtype, len(caches)), strict=True)):
        for found, expected in zip(arrays_of(cache), arrays_of(donor), strict=True):
            assert found.dtype == expected.dtype
            rows, spare = found[..., :n, :], found[..., n:, :]
            assert mx.array_equal(rows, expected[..., :n, :]).item(), f"layer {number}: other rows than were stored"
            assert not spare.size or not mx.any(spare != 0).item(), f"layer {number}: spare rows are not zero"


def check_hit(hit: Hit, tokens: Sequence[int], kind: str = "kv", dtype: mx.Dtype = mx.float32) -> None:
    """Everything a hit promises, whatever its length."""
    n = hit.cached_tokens
    assert list(hit.remaining) == list(tokens[n:])
    assert n == 0 or n < len(tokens)
    assert bool(hit) == (n > 0)
    assert sum(hit.tiers.values()) == n
    check_caches(hit.caches, tokens[:n], kind, dtype)


def open_cache(directory: Path | None, kind: str = "kv", **options: Any) -> PrefixCache:
    """A small cache of the test's namespace. Nothing but the options given differs from a real one."""
    settings: dict[str, Any] = {"namespace": "test", "block_size": 8, "ram": "64MB", "disk": "1GB", "threads": 2}
    caches = options.pop("caches", None) or make_caches(kind)
    return PrefixCache.open(directory, caches=caches, **{**settings, **options})


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@dataclass
class ShadowStore:
    """What a store must answer, worked out from the list of everything stored and nothing else."""

    stored: list[list[int]] = field(default_factory=list)

    def expected(self, tokens: Sequence[int]) -> tuple[int, str, int | None]:
        """cached_tokens, reason and diverged_at of a fetch of ``tokens``."""
        if len(tokens) < 2:
            return 0, "too_short", None
        limit = len(tokens) - 1
        reach = max((common_prefix(one, tokens[:limit]) for one in self.stored), default=0)
        if reach == limit:
            return reach, "complete", None
        goes_on = any(len(one) > reach and common_prefix(one, tokens) == reach for one in self.stored)
        if reach == 0:
            return 0, "no_match", 0 if goes_on else None
        return (reach, "diverged", reach) if goes_on else (reach, "end_of_stored", None)


def part_files(directory: Path) -> list[Path]:
    """The files of all parts below a cache directory, in a stable order."""
    return sorted(directory.glob("v1/*/*/*.safetensors"))


def chain_files(directory: Path) -> list[Path]:
    """The same, from the first block of a sequence to the last."""
    return sorted(part_files(directory), key=lambda path: int(path.name.split("-")[2].split(".")[0]))


def all_files(directory: Path) -> Iterator[Path]:
    """Every file below but the one in which stores count their bytes."""
    return (path for path in directory.rglob("*") if path.is_file() and path.name != ".usage")
