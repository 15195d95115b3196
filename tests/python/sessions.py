"""Requests on layers of every reach whose contents follow from the tokens alone, so that a wrong row or state shows."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache
from support import coded_rows

from prefixcache import PrefixCache

MODELS: dict[str, Callable[[], list[Any]]] = {
    "rows": lambda: [KVCache(), KVCache()],
    "window": lambda: [KVCache(), RotatingKVCache(12), RotatingKVCache(12)],
    "windows": lambda: [RotatingKVCache(5), KVCache(), RotatingKVCache(20), RotatingKVCache(5)],
    "windows only": lambda: [RotatingKVCache(6), RotatingKVCache(17)],
    "kept rows": lambda: [RotatingKVCache(12, keep=4), RotatingKVCache(12, keep=4)],
    "kept rows over blocks": lambda: [RotatingKVCache(16, keep=10), KVCache()],
    "chunks": lambda: [KVCache(), ChunkedKVCache(12)],
    "state": lambda: [ArraysCache(2), ArraysCache(3)],
    "state and rows": lambda: [ArraysCache(2), KVCache(), ArraysCache(1)],
    "everything": lambda: [KVCache(), ArraysCache(3), CacheList(RotatingKVCache(9), ArraysCache(2))],
}
STATES = frozenset({"state", "state and rows", "everything"})
if hasattr(ChunkedKVCache, "meta_state"):
    del MODELS["chunks"]
    warnings.warn("mlx-lm before 0.32 loses rows of chunks of 12 tokens: requests on them are left out", stacklevel=1)


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches without the lists that hold them."""
    found = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def fold(state: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """A recurrent state: each token changes all of it, in a way that depends on all before."""
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (1 << 32)
    return state


def state_after(layer: int, slot: int, tokens: Sequence[int]) -> np.ndarray:
    return fold(np.full((1, 2, 3), 7 * layer + slot, dtype=np.uint64), tokens)


def feed(caches: Sequence[Any], tokens: Sequence[int], start: int) -> None:
    """Runs ``tokens``, at positions ``start``..., as one chunk: what a model would do."""
    for layer, cache in enumerate(leaves(caches)):
        if isinstance(cache, ArraysCache):
            # The last slot stays empty where there are three.
            for slot in range(min(2, len(cache.cache))):
                old = cache[slot]
                before = state_after(layer, slot, []) if old is None else np.array(old).astype(np.uint64)
                cache[slot] = mx.array(fold(before, tokens).astype(np.uint32))
            mx.eval([array for array in cache.cache if array is not None])
            continue
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        rows = [coded_rows(layer, is_value, tokens, start) for is_value in (False, True)]
        mx.eval(cache.update_and_fetch(*rows))


def check(caches: Sequence[Any], tokens: Sequence[int]) -> None:
    """The caches are those of a run of exactly these tokens: what any later step can see of them."""
    n = len(tokens)
    for layer, cache in enumerate(leaves(caches)):
        if isinstance(cache, ArraysCache):
            assert len(cache.cache) in (1, 2, 3)
            assert cache.lengths is None
            assert cache.left_padding is None
            for slot, array in enumerate(cache.cache):
                if slot == 2 or n == 0:
                    assert array is None
                else:
                    assert array.dtype == mx.uint32
                    assert np.array_equal(np.array(array), state_after(layer, slot, tokens)), f"layer {layer}"
            continue
        assert cache.offset == n, f"layer {layer}"
        positions = visible(cache, n)
        for is_value, array in ((False, cache.keys), (True, cache.values)):
            if n == 0:
                assert array is None
                continue
            expected = mx.take(coded_rows(layer, is_value, tokens, 0), mx.array(positions), axis=2)
            assert mx.array_equal(array[..., : len(positions), :], expected).item(), f"layer {layer}: other rows"


def visible(cache: Any, n: int) -> list[int]:
    """Positions of the rows of a restored cache, in the order in which they lie."""
    if isinstance(cache, RotatingKVCache):
        assert cache._idx == min(n, cache.max_size)
        if n > cache.max_size:
            return [*range(cache.keep), *range(n - (cache.max_size - cache.keep), n)]
    if isinstance(cache, ChunkedKVCache):
        assert cache.start_position == max(0, n - cache.chunk_size)
        return list(range(cache.start_position, n))
    return list(range(n))


def open_for(model: str, directory: Path | None, **options: Any) -> PrefixCache:
    settings: dict[str, Any] = {
        "namespace": model.replace(" ", "-"),
        "block_size": 8,
        "ram": "64MB",
        "disk": "1GB",
        "threads": 2,
        "caches": MODELS[model](),
    }
    return PrefixCache.open(directory, **{**settings, **options})


def serve(
    cache: PrefixCache,
    prompt: Sequence[int],
    answer: Sequence[int] = (),
    *,
    most: int | None = None,
    record: bool = True,
    stop_at: int | None = None,
    finish: bool = True,
) -> Any:
    """One request: fetch, check, prefill in chunks of at most ``most`` tokens (all but the last token of the prompt),
    decode ``answer`` token by token. ``stop_at``: the prefill is cancelled there. Returns the hit; its caches have
    moved on."""
    hit = cache.fetch(prompt)
    n = hit.cached_tokens
    check(hit.caches, prompt[:n])
    recorder = cache.record(prompt, hit) if record else None
    end = len(prompt) - 1 if stop_at is None else min(stop_at, len(prompt) - 1)
    while n < end:
        cut = n + (most or 16) if recorder is None else recorder.next_cut(n, most)
        cut = min(cut, end)
        feed(hit.caches, prompt[n:cut], n)
        n = cut
        if recorder is not None:
            recorder.advance(n)
    if stop_at is None:
        for taken, new in zip([prompt[-1], *answer], [*answer, None], strict=True):
            feed(hit.caches, [taken], n)
            n += 1
            if recorder is not None:
                recorder.advance(n, tokens=[] if new is None else [new])
    if recorder is not None and finish:
        recorder.finish(n)
    elif recorder is None:
        cache.store([*prompt, *answer][:n], hit.caches, covers=n)
    return hit


def prompt(chance: random.Random) -> list[int]:
    """Prompts that share beginnings: a few roots, a few ways on."""
    tokens: list[int] = []
    for _ in range(chance.randrange(1, 4)):
        start = 100 * chance.randrange(3)
        tokens += range(start, start + chance.randrange(2, 25))
    return tokens
