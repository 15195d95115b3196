"""One process of test_lines.py: fetches, stores and fetches again under the MLX of its environment.

Standard input: ``{"directory": ..., "doors": {name: whether to store}}``; the door "model" takes its namespace from a
model, any other name is a namespace. Standard output: the releases and, for each door, what was found.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from support import coded_rows

from prefixcache import PrefixCache
from prefixcache._build_info import MLX_VERSION

TOKENS = [(7 * i * i + 3 * i) % 1000 for i in range(45)]
NEXT = [5, 6, 7, 8, 9]


class Model(nn.Module):
    """Equal in both lines, but for the MLX that runs it. Its caches stand for all reaches: rows, windows and states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.arange(12, dtype=mx.float32)

    def make_cache(self) -> list[Any]:
        return [
            KVCache(),
            RotatingKVCache(12),
            RotatingKVCache(16, keep=4),
            ArraysCache(3),
            QuantizedKVCache(group_size=32, bits=4),
            ConcatenateKVCache(),
            CacheList(RotatingKVCache(60), ArraysCache(1)),
        ]


def feed(caches: Sequence[Any], tokens: Sequence[int], start: int, layer: int = 0) -> list[mx.array]:
    """Appends ``tokens`` as a model would that runs them; what the model gets to see."""
    seen = []
    for number, cache in enumerate(caches, layer):
        if isinstance(cache, CacheList):
            seen += feed(cache.caches, tokens, start, number + 10)
            continue
        keys, values = (coded_rows(number, is_value, tokens, start) for is_value in (False, True))
        if isinstance(cache, ArraysCache):
            # The last slot stays empty where there are three.
            for slot in range(min(2, len(cache.cache))):
                before = 0 if cache[slot] is None else cache[slot]
                cache[slot] = (keys.sum(axis=2) + slot).astype(mx.bfloat16) + before
            seen += [array for array in cache.cache if array is not None]
        else:
            found = cache.update_and_fetch(keys, values)
            seen += [array for _, array in tree_flatten(list(found))]
    mx.eval(seen)
    return seen


def digest(array: mx.array) -> str:
    text = f"{array.dtype} {array.shape}".encode()
    return hashlib.sha256(text + bytes(memoryview(mx.contiguous(array.reshape(-1)).view(mx.uint8)))).hexdigest()


def donor() -> list[Any]:
    """The windows have wrapped, and are rings in the middle of a turn."""
    caches = Model().make_cache()
    feed(caches, TOKENS[:40], 0)
    for n in range(40, len(TOKENS)):
        feed(caches, TOKENS[n : n + 1], n)
    return caches


def fetched(cache: PrefixCache) -> dict[str, Any]:
    hit = cache.fetch([*TOKENS, *NEXT])
    n = hit.cached_tokens
    seen = [digest(array) for array in feed(hit.caches, NEXT, n)] if n == len(TOKENS) else []
    return {"n": n, "reason": hit.reason, "ssd": hit.tiers.get("ssd", 0), "seen": seen}


def main() -> None:
    order = json.load(sys.stdin)
    answers = {}
    for name, stores in order["doors"].items():
        choice: dict[str, Any] = {"namespace": name, "caches": Model().make_cache()}
        if name == "model":
            choice = {"model": Model()}
        with PrefixCache.open(Path(order["directory"]), block_size=16, ram=0, **choice) as cache:
            answers[name] = {"namespace": cache.namespace, "before": fetched(cache)}
            if stores:
                caches = donor()
                answers[name]["stored"] = cache.store(TOKENS, caches, covers=len(TOKENS)).stored_tokens
                cache.flush()
                answers[name]["donor"] = [digest(array) for array in feed(caches, NEXT, len(TOKENS))]
                answers[name]["after"] = fetched(cache)
    versions = {"mlx": mx.__version__, "built_for": MLX_VERSION, "mlx_lm": mlx_lm.__version__}
    print(json.dumps({"versions": versions, "doors": answers}))


if __name__ == "__main__":
    main()
