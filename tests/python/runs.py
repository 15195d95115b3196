"""Runs of a model without a prefix cache, in chunks of stated shapes: what a restored cache is compared with."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

KvFormat = tuple[int, int, int]


def prefill(
    model: Any,
    tokens: Sequence[int],
    ends: Iterable[int],
    caches: list[Any] | None = None,
    start: int = 0,
    kv_format: KvFormat | None = None,
) -> list[Any]:
    """Runs `tokens[start:]` in chunks that end at `ends`; converts the caches as mlx-lm does under `kv_format`."""
    caches = make_prompt_cache(model) if caches is None else caches
    for end in ends:
        if end <= start:
            continue
        model(mx.array(tokens[start:end])[None], cache=caches)
        if kv_format is not None:
            bits, group_size, first = kv_format
            maybe_quantize_kv_cache(caches, first, group_size, bits)
        mx.eval([cache.state for cache in caches])
        start = end
    return caches


def trimmed_copy(caches: list[Any], n: int) -> list[Any]:
    """A deep copy that stands at `n`, and shares nothing with the original."""
    twin = copy.deepcopy(caches)
    for cache in twin:
        cache.trim(cache.offset - n)
    return twin


def following_logits(model: Any, caches: list[Any], tokens: Sequence[int], steps: int, chunk: int) -> list[mx.array]:
    """Logits of `steps` single tokens, then of `chunk` tokens at once. The caches move on."""
    logits = [model(mx.array([[token]]), cache=caches) for token in tokens[:steps]]
    if chunk:
        logits.append(model(mx.array(tokens[steps : steps + chunk])[None], cache=caches))
    mx.eval(logits)
    return logits


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Equal in shape, dtype and every bit (so -0.0 differs from 0.0, and a NaN equals itself)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(mx.array_equal(mx.contiguous(a).view(mx.uint8), mx.contiguous(b).view(mx.uint8)))


def assert_same_logits(ours: Sequence[mx.array], theirs: Sequence[mx.array], what: str = "") -> None:
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(a, b), f"{what}: step {i} differs by up to {mx.abs(a - b).max().item()}"


def rows_of(caches: Sequence[Any], n: int) -> list[mx.array]:
    """The keys and values of tokens [0, n) of every `KVCache`."""
    return [getattr(cache, name)[..., :n, :] for cache in caches for name in ("keys", "values")]


def digest_of(arrays: Sequence[mx.array]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(memoryview(mx.contiguous(array).view(mx.uint8)))
    return digest.hexdigest()
