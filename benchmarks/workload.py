"""The model geometry that is measured, and what a server does with its caches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from prefixcache import PrefixCache

# "8B": what models of eight billion parameters have.
LAYERS, HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 256
ROW_BYTES = LAYERS * 2 * HEADS * HEAD_SIZE * 2
VOCABULARY = 128_000


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=tokens)


def empty_caches(layers: int = LAYERS) -> list[Any]:
    return [KVCache() for _ in range(layers)]


def filled_caches(tokens: int, room: int = 0) -> list[Any]:
    """Caches as a prefill of ``tokens`` leaves them, with room for more rows behind; fp16, every layer different."""
    shape = (1, HEADS, tokens + room, HEAD_SIZE)
    base = mx.random.randint(0, 30_000, shape).astype(mx.uint16)
    mx.eval(base)
    caches = empty_caches()
    for i, cache in enumerate(caches):
        cache.keys, cache.values = (base ^ (2 * i)).view(mx.float16), (base ^ (2 * i + 1)).view(mx.float16)
        cache.offset = tokens
        mx.eval(cache.keys, cache.values)
    return caches


def append_one(caches: Sequence[Any]) -> None:
    """What one decoded token does to every layer."""
    row = mx.ones((1, HEADS, 1, HEAD_SIZE), dtype=mx.float16)
    mx.eval([cache.update_and_fetch(row, row) for cache in caches])


def result_bytes(caches: Sequence[Any]) -> int:
    """Bytes of the buffers, room to grow included."""
    return sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)


@contextmanager
def opened(directory: Path | None, ram: int, **options: Any) -> Iterator[PrefixCache]:
    """A cache for the geometry; ``directory`` None: RAM only."""
    write = "ram_only" if directory is None else "through"
    with PrefixCache.open(
        directory, namespace="bench", caches=empty_caches(), block_size=BLOCK, ram=ram, write=write, **options
    ) as cache:
        yield cache


def ram_for(tokens: int) -> int:
    """A RAM tier that holds a prompt, and little more."""
    blocks = -(-tokens // BLOCK)
    return (blocks + 1) * (BLOCK * ROW_BYTES + (2 << 20))


def fill_directory(directory: Path, tokens: int, seed: int = 0) -> list[int]:
    """Stores a prompt of which nothing stays in this process. Returns its tokens."""
    stored = prompt(tokens, seed)
    with opened(directory, ram=0) as cache:
        report = cache.store(stored, filled_caches(tokens))
        if report.stored_tokens != tokens:
            raise RuntimeError(f"stored {report.stored_tokens} of {tokens} tokens: {report.reason} {report.detail}")
        cache.flush()
    return stored


def check_hit(hit: Any, tokens: int) -> None:
    """A benchmark of a miss would look very good."""
    if hit.cached_tokens != tokens:
        raise RuntimeError(f"{hit.cached_tokens} of {tokens} tokens were restored: {hit.reason}")
