"""Every cache class of mlx-lm with several settings, and how a model appends to it: what the contract runs over."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

TOKENS = 1400
# mlx-lm before 0.32 cuts chunked caches deeper than to the chunk: only what is never cut can be compared here.
OLD_CHUNKS = hasattr(ChunkedKVCache, "meta_state")
Rows = Callable[[int, int], tuple[mx.array, mx.array]]
Feed = Callable[[Any, int, int], list[mx.array]]


def no_change(cache: Any) -> None:
    """A cache whose rows have one order only."""


def masks(cache: Any, count: int) -> list[Any]:
    """Every mask a model can ask for before it appends ``count`` tokens."""
    if not hasattr(cache, "make_mask"):
        return []
    return [
        cache.make_mask(count, return_array=as_array, window_size=window)
        for as_array in (False, True)
        for window in (None, 3)
    ]


@dataclass(frozen=True)
class HandlerCase:
    """``make`` gives a fresh empty cache; ``feed(cache, start, count)`` appends tokens [start, start + count) as one
    chunk, as a model does, and gives every array that the model gets. Equal tokens have equal content.

    ``period``: the window or chunk size around which phases are tried, 0 if the length does not matter. ``prototype``:
    the model's own cache where it is of another class. ``temporal`` puts a cache into temporal order, in place.
    ``structure_grows``: slots appear as tokens are appended.
    """

    id: str
    make: Callable[[], Any]
    feed: Feed
    period: int = 0
    prototype: Callable[[], Any] | None = None
    temporal: Callable[[Any], None] = no_change
    masks: Callable[[Any, int], list[Any]] = masks
    structure_grows: bool = False

    def fresh(self) -> Any:
        return (self.prototype or self.make)()

    def ordered(self, cache: Any) -> Any:
        """A deep copy in temporal order."""
        cache = copy.deepcopy(cache)
        self.temporal(cache)
        return cache


def leaves(value: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(value) if isinstance(leaf, mx.array)]


def rows(heads: int, k_dim: int, v_dim: int, dtype: mx.Dtype, seed: int = 0) -> Rows:
    """Keys and values of tokens [start, stop), the same whenever they are asked for."""
    tables: list[mx.array] = []

    def of(start: int, stop: int) -> tuple[mx.array, mx.array]:
        if not tables:
            for number, dim in enumerate((k_dim, v_dim)):
                table = mx.random.normal((1, heads, TOKENS, dim), key=mx.random.key(2 * seed + number))
                tables.append(table.astype(dtype))
            mx.eval(tables)
        assert stop <= TOKENS
        return tables[0][:, :, start:stop], tables[1][:, :, start:stop]

    return of


def appends(content: Rows) -> Feed:
    return lambda cache, start, count: leaves(cache.update_and_fetch(*content(start, start + count)))


def _chunked(content: Rows) -> Feed:
    def feed(cache: Any, start: int, count: int) -> list[mx.array]:
        cache.maybe_trim_front()
        return appends(content)(cache, start, count)

    return feed


def ring_in_order(cache: Any) -> None:
    """The same rows, oldest first behind the kept ones: what a chunk of several tokens would find."""
    if cache.keys is not None:
        cache.keys, cache.values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        cache._idx = cache.keys.shape[2]


def rotating(max_size: int, keep: int, dtype: mx.Dtype = mx.float32, v_dim: int = 4) -> HandlerCase:
    return HandlerCase(
        f"rotating-{max_size}-keep-{keep}",
        lambda: RotatingKVCache(max_size, keep),
        appends(rows(2, 4, v_dim, dtype, seed=max_size)),
        period=max_size,
        temporal=ring_in_order,
    )


def chunked(chunk_size: int) -> HandlerCase:
    return HandlerCase(
        f"chunked-{chunk_size}",
        lambda: ChunkedKVCache(chunk_size),
        _chunked(rows(2, 4, 6, mx.float16, seed=chunk_size)),
        period=0 if OLD_CHUNKS else chunk_size,
    )


def _state_feed(*steps: Callable[[mx.array | None, mx.array], mx.array | None]) -> Feed:
    """Slot i becomes ``steps[i](what it was, the rows of the new tokens)``."""
    content = rows(2, 4, 4, mx.float32, seed=99)

    def feed(cache: Any, start: int, count: int) -> list[mx.array]:
        new = content(start, start + count)[0]
        for index, step in enumerate(steps):
            cache[index] = step(cache[index], new)
        return [array for array in cache.cache if array is not None]

    return feed


def _recurrent(state: mx.array | None, new: mx.array) -> mx.array:
    decayed = 0 if state is None else state * 0.5
    return decayed + new.swapaxes(2, 3) @ new


def _convolution(state: mx.array | None, new: mx.array) -> mx.array:
    before = mx.zeros((1, 3, 8), mx.bfloat16) if state is None else state
    flat = new.swapaxes(1, 2).reshape(1, -1, 8).astype(mx.bfloat16)
    return mx.contiguous(mx.concatenate([before, flat], axis=1)[:, -3:])


def _ids(state: mx.array | None, new: mx.array) -> mx.array:
    ids = (new[:, 0, :, 0] * 1000).astype(mx.int64)
    return (ids if state is None else mx.concatenate([state, ids], axis=1))[:, -5:]


def _counter(state: mx.array | None, new: mx.array) -> mx.array:
    return mx.array(new.shape[2], mx.uint32) if state is None else state + new.shape[2]


def _nothing(state: mx.array | None, new: mx.array) -> None:
    return None


def _no_rows(state: mx.array | None, new: mx.array) -> mx.array:
    return mx.zeros((1, 0, 8), mx.float16)


def state_masks(cache: Any, count: int) -> list[Any]:
    return [cache.make_mask(count)]


def arrays(name: str, *steps: Callable[[mx.array | None, mx.array], mx.array | None]) -> HandlerCase:
    return HandlerCase(
        f"arrays-{name}",
        lambda: ArraysCache(len(steps)),
        _state_feed(*steps),
        masks=state_masks,
    )


def listed(name: str, *children: HandlerCase) -> HandlerCase:
    """A CacheList of the children's caches, fed together."""

    def feed(cache: Any, start: int, count: int) -> list[mx.array]:
        pairs = zip(children, cache.caches, strict=True)
        return [array for child, one in pairs for array in child.feed(one, start, count)]

    def all_masks(cache: Any, count: int) -> list[Any]:
        pairs = zip(children, cache.caches, strict=True)
        return [mask for child, one in pairs for mask in child.masks(one, count)]

    def temporal(cache: Any) -> None:
        for child, one in zip(children, cache.caches, strict=True):
            child.temporal(one)

    return HandlerCase(
        f"list-{name}",
        lambda: CacheList(*(child.make() for child in children)),
        feed,
        max((child.period for child in children), default=0),
        lambda: CacheList(*(child.fresh() for child in children)),
        temporal,
        all_masks,
        any(child.structure_grows for child in children),
    )


def deepseek_v41(window: int, ratio: int) -> HandlerCase:
    """``ratio`` 0: a layer with a window only; else one that also pools groups of ``ratio`` tokens."""
    module = importlib.import_module("mlx_lm.models.deepseek_v41")
    content = rows(1, 8, 8, mx.float16, seed=window)

    def join(cached: mx.array | None, new: mx.array) -> mx.array:
        return new if cached is None else mx.concatenate([cached, new], axis=1)

    def feed(cache: Any, start: int, count: int) -> list[mx.array]:
        kv, gate = (part[:, 0] for part in content(start, start + count))
        seen = [cache.update_window(kv)]
        if ratio:
            kv, gate = join(cache.pending_kv, kv.astype(mx.float32)), join(cache.pending_gate, gate.astype(mx.float32))
            full = kv.shape[1] // ratio * ratio
            cache.pending_kv, cache.pending_gate = kv[:, full:], gate[:, full:]
            if full:
                weights = mx.softmax(gate[:, :full].reshape(1, -1, ratio, 8), axis=2)
                closed = (kv[:, :full].reshape(1, -1, ratio, 8) * weights).sum(axis=2)
                cache.compress_kv = join(cache.compress_kv, closed)
                cache.index_k = join(cache.index_k, closed.astype(mx.float16))
        return seen + [a for a in (cache.compress_kv, cache.index_k, cache.pending_kv) if a is not None]

    return HandlerCase(
        f"deepseek-v41-{window}-ratio-{ratio}",
        lambda: module.LayerCache(window),
        feed,
        period=window,
        structure_grows=ratio > 0,
    )


_KV = HandlerCase("kv", KVCache, appends(rows(2, 8, 8, mx.float32)))
CASES = [
    _KV,
    HandlerCase("kv-bf16-mla", KVCache, appends(rows(1, 24, 8, mx.bfloat16))),
    HandlerCase("kv-no-values", KVCache, appends(rows(1, 16, 0, mx.float16))),
    HandlerCase("concatenate", ConcatenateKVCache, appends(rows(2, 8, 8, mx.float16))),
    HandlerCase("quantized-8", QuantizedKVCache, appends(rows(2, 64, 128, mx.float16))),
    HandlerCase("quantized-4", lambda: QuantizedKVCache(32, 4), appends(rows(2, 64, 64, mx.float32))),
    HandlerCase(
        "quantized-of-plain", lambda: QuantizedKVCache(64, 4), appends(rows(2, 64, 64, mx.float16)), prototype=KVCache
    ),
    *(rotating(max_size, keep) for max_size in (8, 32, 256, 300) for keep in (0, 4)),
    rotating(1, 0),
    rotating(5, 4, mx.bfloat16, v_dim=0),
    *(chunked(chunk_size) for chunk_size in ((2048,) if OLD_CHUNKS else (1, 8, 256, 300))),
    arrays("1", _convolution),
    arrays("2", _convolution, _recurrent),
    arrays("3-none", _nothing, _recurrent, _ids),
    arrays("4-0d", _counter, _ids, _nothing, _convolution),
    arrays("5-no-rows", _recurrent, _no_rows, _counter, _convolution, _nothing),
    listed("kv-kv", _KV, HandlerCase("", KVCache, appends(rows(1, 4, 0, mx.float16, seed=3)))),
    listed("arrays-kv", arrays("2", _convolution, _recurrent), _KV),
    listed("windows", rotating(8, 4), chunked(2048 if OLD_CHUNKS else 16), rotating(32, 0)),
    listed("nested", listed("", rotating(8, 0), listed("", _KV)), arrays("1", _counter), listed("")),
]
if OLD_CHUNKS:
    warnings.warn("mlx-lm before 0.32 cuts chunked caches wrongly: only what is never cut is compared", stacklevel=1)
if importlib.util.find_spec("mlx_lm.models.deepseek_v41") is not None:
    CASES += [deepseek_v41(8, 0), deepseek_v41(8, 4), deepseek_v41(300, 128)]
else:
    warnings.warn("this mlx-lm has no deepseek_v41: its caches are not compared", stacklevel=1)
