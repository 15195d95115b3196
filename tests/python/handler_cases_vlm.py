"""What a model does with each of mlx-vlm's cache classes: how it appends, and what it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_vlm import turboquant
from mlx_vlm.kv_quant import KVQuantPolicy, KVQuantSpec
from mlx_vlm.models import cache as vlm
from mlx_vlm.models.base import scaled_dot_product_attention
from mlx_vlm.models.deepseek_v41.language import DeepseekV41Cache
from mlx_vlm.models.hy_v4.cache import HyV4KVCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.qwen4_exp.language import QSAKVCache, Qwen4ExpQSAIndexer
from mlx_vlm.models.unlimited_ocr.language import RingSlidingKVCache
from mlx_vlm.models.z1t.config import ModelConfig as Z1TConfig
from mlx_vlm.models.z1t.language import AFTConv, Z1TCache

TOKENS = 700
Seen = Iterator[tuple[str, Any]]


@lru_cache(maxsize=64)
def _every(seed: int, dim: int, heads: int, dtype: mx.Dtype) -> mx.array:
    array = mx.random.normal((1, heads, TOKENS, dim), key=mx.random.key(seed)).astype(dtype)
    mx.eval(array)
    return array


def rows(seed: int, dim: int, start: int, stop: int, heads: int = 2, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Rows ``[1, heads, stop - start, dim]`` of tokens [start, stop), the same whenever they are asked for."""
    return _every(seed, dim, heads, dtype)[:, :, start:stop]


def flat(seed: int, dim: int, start: int, stop: int) -> mx.array:
    """The same as ``[1, stop - start, dim]``."""
    return rows(seed, dim, start, stop, heads=1)[:, 0]


@dataclass(frozen=True)
class Case:
    """``append(cache, start, stop)`` runs tokens [start, stop) and yields all that a model sees of the cache.

    ``counts``: the class knows how many tokens it holds. ``shortest``: fewer are refused, since a first append of one
    begins to decode. ``settle`` brings a deep copy into the order of rows that a rebuilt cache begins with.
    """

    type_name: str
    make: Callable[[], Any]
    append: Callable[[Any, int, int], Seen]
    prototype: Callable[[], Any] | None = None
    settle: Callable[[Any], None] = lambda cache: None
    counts: bool = True
    shortest: int = 1

    def fresh(self) -> Any:
        return (self.prototype or self.make)()

    def donor(self, n: int, step: int = 40) -> Any:
        cache = self.make()
        for start in range(0, n, step):
            seen = [value for _, value in self.append(cache, start, min(n, start + step))]
            mx.eval([value for value in seen if isinstance(value, mx.array)], arrays_of(cache))
        return cache

    def play(self, cache: Any, n: int, steps: tuple[int, ...] = (1, 1, 5, 1, 20)) -> Seen:
        for count in steps:
            for what, value in self.append(cache, n, n + count):
                for name, leaf in tree_flatten(value):
                    yield f"{what}{name} after {count} at {n}", leaf
            n += count


def arrays_of(cache: Any) -> list[mx.array]:
    """Every array that a cache holds, children included."""
    if isinstance(cache, mx.array):
        return [cache]
    if isinstance(cache, list | tuple):
        return [array for item in cache for array in arrays_of(item)]
    return arrays_of(list(vars(cache).values())) if type(cache).__module__.startswith("mlx_vlm") else []


def keys_and_values(k_dim: int = 8, v_dim: int = 8, dtype: mx.Dtype = mx.float32) -> Callable[[Any, int, int], Seen]:
    def append(cache: Any, start: int, stop: int) -> Seen:
        for as_array in (False, True) if hasattr(cache, "make_mask") else ():
            yield f"mask {as_array}", cache.make_mask(stop - start, return_array=as_array, window_size=None)
        pair = rows(1, k_dim, start, stop, dtype=dtype), rows(2, v_dim, start, stop, dtype=dtype)
        yield "keys and values", cache.update_and_fetch(*pair)
        yield "emptiness", cache.empty()
        yield "offset", getattr(cache, "offset", None)

    return append


def in_order(cache: Any) -> None:
    """A ring in temporal order, cut to its window: the order decides only where the next token goes."""
    for name in ("keys", "values"):
        array = cache._temporal_order(getattr(cache, name))
        room = cache.max_size - cache.keep
        if array.shape[2] > cache.max_size:
            array = mx.concatenate([array[:, :, : cache.keep], array[:, :, -room:]], axis=2)
        setattr(cache, name, array)
    cache._idx = cache.keys.shape[2]


def only_the_window(cache: Any) -> None:
    """What is behind the window is masked; a rebuilt cache does not have it."""
    if cache.keep:
        return in_order(cache)
    held = min(cache.offset, cache.max_size)
    cache.keys, cache.values = (a[:, :, cache._idx - held : cache._idx] for a in (cache.keys, cache.values))
    cache._idx, cache.start_position = held, cache.offset - held
    return None


def cut_front(cache: Any) -> None:
    cache.maybe_trim_front()


def append_chunked(cache: Any, start: int, stop: int) -> Seen:
    cache.maybe_trim_front()
    yield "start", cache.start_position
    pair = rows(1, 8, start, stop), rows(2, 8, start, stop)
    yield "keys and values", cache.update_and_fetch(*pair)
    yield "offset", cache.offset


def append_arrays(cache: Any, start: int, stop: int) -> Seen:
    """As a hybrid model does: a window of a convolution, and a state that every token changes."""
    yield "mask", cache.make_mask(stop - start)
    x = flat(1, 6, start, stop)
    window = mx.zeros((1, 3, 6)) if cache[0] is None else cache[0]
    yield "window", cache.update_window(0, mx.concatenate([window, x], axis=1), 3)

    def scan(state: mx.array | None, _: Any) -> tuple[mx.array, mx.array]:
        state = mx.zeros((1, 6), dtype=mx.float32) if state is None else state
        for i in range(x.shape[1]):
            state = state * 0.5 + x[:, i]
        return state, state

    yield "state", cache.update_recurrent(len(cache.cache) - 1, stop - start, scan)
    cache.advance(stop - start)


def append_pooled(cache: Any, start: int, stop: int) -> Seen:
    yield "mask", cache.make_mask(stop - start, start)
    kv, gate, base = cache.accumulate_windows(flat(1, 12, start, stop), flat(2, 4, start, stop), start)
    yield "windows", (kv, gate)
    yield "base", base
    pooled = mx.unflatten(kv, 1, (-1, cache.ratio)).mean(axis=2) if kv.size else mx.zeros((1, 0, 12))
    yield "pooled", cache.update_and_fetch(pooled)
    yield "counts", [cache.remainder, cache.size(), cache.offset]


def append_list(cache: Any, start: int, stop: int) -> Seen:
    """As DeepSeek V4 does: a window and what has left it, pooled."""
    window, *pools = cache.caches
    yield from keys_and_values()(window, start, stop)
    for pool in pools:
        yield from append_pooled(pool, start, stop)


def append_minimax(cache: Any, start: int, stop: int) -> Seen:
    yield from keys_and_values()(cache, start, stop)
    yield "index", cache.update_index_and_fetch(rows(3, 16, start, stop, heads=1))


class _Rotary:
    def apply_rotary(self, q: mx.array, k: mx.array, position_ids: mx.array, unsqueeze_dim: int) -> Any:
        positions = position_ids if position_ids.ndim == 2 else position_ids[0]
        angles = positions[:, None, :, None].astype(mx.float32)
        return q * mx.cos(angles), k * mx.cos(angles)


def _indexer() -> Any:
    config = SimpleNamespace(
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=16,
        indexer_compress_ratio=4,
        hidden_size=12,
        rms_norm_eps=1e-6,
    )
    mx.random.seed(3)
    indexer = Qwen4ExpQSAIndexer(config, _Rotary())
    indexer.update(tree_map(_coarse, indexer.parameters()))
    return indexer


def _coarse(array: mx.array) -> mx.array:
    """With few bits, so that sums of products are exact: no row depends on the chunk in which it was computed."""
    return mx.round(array * 64) / 64


def qsa(with_positions: int) -> Callable[[Any, int, int], Seen]:
    """The model's own indexer; positions of rank 2 (text) or 3 (images)."""
    indexer = _indexer()

    def append(cache: Any, start: int, stop: int) -> Seen:
        positions = mx.arange(start, stop)[None]
        if with_positions == 3:
            positions = mx.stack([positions, positions + 1, positions + 2])
        selection = indexer.select(_coarse(flat(4, 12, start, stop)), cache, positions)
        yield "selection", [] if selection is None else list(vars(selection).values())
        yield "indexer", (cache.index_keys, cache.index_position_ids)
        yield from keys_and_values()(cache, start, stop)

    return append


def append_deepseek(cache: Any, start: int, stop: int) -> Seen:
    """As DeepSeek V4.1 does: a layer with a window alone, one with closed groups and one that is still open."""
    for layer in range(cache.n_layers):
        x = flat(5 + layer, 6, start, stop)
        window = x if cache.window[layer] is None else mx.concatenate([cache.window[layer], x], axis=1)
        cache.window[layer] = window[:, -5:]
        yield f"window {layer}", window
        if layer == 0:
            continue
        pending = x if cache.kv_state[layer] is None else mx.concatenate([cache.kv_state[layer], x], axis=1)
        closed = pending.shape[1] // 4 * 4
        cache.kv_state[layer], cache.score_state[layer] = pending[:, closed:], pending[:, closed:] * 2
        if closed:
            groups = pending[:, :closed].reshape(1, -1, 4, 6).mean(axis=2)
            yield "groups", cache.append_compressed(layer, groups)
            yield "index", cache.append_index_keys(layer, groups * 3)
            cache.compress_kv, cache.index_k = cache.compress[layer], cache.keys[layer]
    cache.engram = mx.arange(max(0, stop - 3), stop)[None]
    cache.advance(stop - start)
    yield "handed on", [a for a in (cache.compress_kv, cache.index_k, cache.engram) if a is not None]
    yield "offset", cache.offset


def z1t() -> Callable[[Any, int, int], Seen]:
    mx.random.seed(4)
    layer = AFTConv(Z1TConfig(hidden_size=8, aft_heads=2, aft_ksize=3))
    layer.w_conv = mx.random.normal(layer.w_conv.shape)

    def append(cache: Any, start: int, stop: int) -> Seen:
        yield "output", layer(flat(6, 8, start, stop), cache)
        yield "offset", cache.offset

    return append


def quantised(k_dim: int, v_dim: int) -> Callable[[Any, int, int], Seen]:
    """Codes, what they decode to, and attention over them."""

    def append(cache: Any, start: int, stop: int) -> Seen:
        mask = cache.make_mask(stop - start, return_array=False, window_size=None)
        yield "mask", mask
        pair = rows(1, k_dim, start, stop, dtype=mx.float16), rows(2, v_dim, start, stop, dtype=mx.float16)
        keys, values = cache.update_and_fetch(*pair)
        codes = [getattr(state, "_state", state) for state in (keys, values)]
        yield "codes", codes
        if hasattr(cache, "dequantize"):
            yield "rows", cache.dequantize()
        yield "offset", cache.offset
        if stop - start == 1:
            queries = rows(9, k_dim, start, stop, heads=4, dtype=mx.float16)
            yield "attention", scaled_dot_product_attention(queries, keys, values, cache, 0.1, mask)

    return append


def set_codecs(cache: Any, mode: str, dims: tuple[int, int]) -> None:
    """Codecs that other versions of mlx-vlm chose by themselves."""
    for step, (owner, dim) in enumerate(zip(("key", "value"), dims, strict=True)):
        bits = getattr(cache, f"{owner}_bits")
        if mode == "polar_prod":
            codec = turboquant._TurboQuantPolarProdCodec(dim, int(bits), cache.seed + step)
        else:
            first = rows(1 + step, dim, 0, 40, dtype=mx.float16)
            codec = turboquant._build_codec(first, bits, mode=mode, seed=cache.seed + step)
        setattr(cache, f"{owner}_codec", codec)


def turbo(bits: float, k_dim: int, v_dim: int, mode: str = "", **settings: Any) -> Case:
    def make() -> Any:
        return turboquant.TurboQuantKVCache(bits, **settings)

    append = turbo_rows(k_dim, v_dim, mode) if mode else quantised(k_dim, v_dim)
    return Case("mlx_vlm.TurboQuantKVCache", make, append)


def turbo_rows(k_dim: int, v_dim: int, mode: str) -> Callable[[Any, int, int], Seen]:
    """With codecs set before the first token. Values of these cannot be weighted, so rows are compared alone."""

    def append(cache: Any, start: int, stop: int) -> Seen:
        if cache.key_codec is None:
            set_codecs(cache, mode, (k_dim, v_dim))
        pair = rows(1, k_dim, start, stop, dtype=mx.float16), rows(2, v_dim, start, stop, dtype=mx.float16)
        yield "codes", [proxy._state for proxy in cache.update_and_fetch(*pair)]
        yield "rows", cache.dequantize()
        queries = rows(9, k_dim, start, stop, heads=2, dtype=mx.float32)[:, :, None]
        yield "scores", cache.key_codec.score(queries, cache.state[0])

    return append


def hybrid(key: tuple[str, float], value: tuple[str, float], prototype: Callable[[], Any] | None = None) -> Case:
    policy = KVQuantPolicy(4.0, KVQuantSpec(*key, group_size=32), KVQuantSpec(*value, group_size=32))

    def append(cache: Any, start: int, stop: int) -> Seen:
        yield "mask", cache.make_mask(stop - start, return_array=False, window_size=None)
        pair = rows(1, 64, start, stop, dtype=mx.float16), rows(2, 96, start, stop, dtype=mx.float16)
        yield "rows", cache.update_and_fetch(*pair)
        yield "offset", cache.offset

    def make() -> Any:
        return turboquant.HybridQuantKVCache(policy, seed=5)

    return Case("mlx_vlm.HybridQuantKVCache", make, append, prototype)


def plain() -> Any:
    return vlm.KVCache()


CASES = {
    "kv": Case("KVCache", plain, keys_and_values()),
    "kv-bf16": Case("KVCache", plain, keys_and_values(24, 8, mx.bfloat16)),
    "kv-no-values": Case("KVCache", plain, keys_and_values(16, 0, mx.float16)),
    "concatenate": Case("ConcatenateKVCache", vlm.ConcatenateKVCache, keys_and_values()),
    "simple": Case("mlx_vlm.SimpleKVCache", vlm.SimpleKVCache, keys_and_values()),
    "quantized-8": Case("QuantizedKVCache", lambda: vlm.QuantizedKVCache(64, 8), quantised(64, 64)),
    "quantized-4-of-plain": Case(
        "QuantizedKVCache", lambda: vlm.QuantizedKVCache(32, 4), quantised(96, 96), prototype=plain
    ),
    "hy-v4": Case("mlx_vlm.HyV4KVCache", HyV4KVCache, keys_and_values()),
    "ring-sliding": Case("mlx_vlm.RingSlidingKVCache", lambda: RingSlidingKVCache(6), keys_and_values(), shortest=2),
    "minimax": Case("mlx_vlm.MiniMaxM3KVCache", MiniMaxM3KVCache, append_minimax),
    "minimax-dense": Case("mlx_vlm.MiniMaxM3KVCache", MiniMaxM3KVCache, keys_and_values()),
    "qsa": Case("mlx_vlm.QSAKVCache", QSAKVCache, qsa(2)),
    "qsa-image": Case("mlx_vlm.QSAKVCache", QSAKVCache, qsa(3)),
    "qsa-no-index": Case("mlx_vlm.QSAKVCache", QSAKVCache, keys_and_values()),
    **{
        f"rotating-{size}-{keep}": Case(
            "RotatingKVCache",
            lambda size=size, keep=keep: vlm.RotatingKVCache(size, keep),
            keys_and_values(),
            settle=in_order,
        )
        for size, keep in ((16, 0), (16, 4), (300, 0))
    },
    **{
        f"buffered-{size}-{keep}-{room}": Case(
            "mlx_vlm.BufferedRotatingKVCache",
            lambda size=size, keep=keep, room=room: vlm.BufferedRotatingKVCache(size, keep, room),
            keys_and_values(),
            settle=only_the_window,
        )
        for size, keep, room in ((16, 0, 0), (16, 0, 7), (300, 0, 64), (16, 4, 7))
    },
    "chunked-32": Case("mlx_vlm.ChunkedKVCache", lambda: vlm.ChunkedKVCache(32), append_chunked, settle=cut_front),
    "chunked-400": Case("mlx_vlm.ChunkedKVCache", lambda: vlm.ChunkedKVCache(400), append_chunked, settle=cut_front),
    **{
        f"arrays-{size}": Case(
            "mlx_vlm.ArraysCache", lambda size=size: vlm.ArraysCache(size), append_arrays, counts=False
        )
        for size in (2, 3, 5)
    },
    "pooling-4": Case("mlx_vlm.PoolingCache", lambda: vlm.PoolingCache(4), append_pooled),
    "pooling-128": Case("mlx_vlm.PoolingCache", lambda: vlm.PoolingCache(128), append_pooled),
    "list": Case(
        "CacheList",
        lambda: vlm.CacheList(vlm.KVCache(), vlm.PoolingCache(4), vlm.PoolingCache(128)),
        append_list,
    ),
    "z1t": Case("mlx_vlm.Z1TCache", Z1TCache, z1t()),
    "deepseek-v41": Case("mlx_vlm.DeepseekV41Cache", lambda: DeepseekV41Cache(3), append_deepseek),
    "turbo-4": turbo(4, 64, 64),
    "turbo-2-odd": turbo(2, 48, 80, seed=7),
    "turbo-3.5": turbo(3.5, 64, 64),
    "turbo-split": turbo(3, 64, 48, key_bits=2.5, value_bits=3.5, seed=3),
    "turbo-prod": turbo(3, 64, 48, "prod"),
    "turbo-prod-1": turbo(1, 64, 64, "prod"),
    "turbo-split-prod": turbo(4, 64, 64, "prod", key_bits=3.5, value_bits=2.5),
    "turbo-polar": turbo(4, 64, 32, "polar_prod"),
    "turbo-of-plain": Case(
        "mlx_vlm.TurboQuantKVCache",
        lambda: turboquant.TurboQuantKVCache(4.5),
        quantised(64, 64),
        prototype=plain,
    ),
    "hybrid": hybrid(("uniform", 8), ("turboquant", 3)),
    "hybrid-split": hybrid(("turboquant", 3.5), ("uniform", 4)),
    "hybrid-of-plain": hybrid(("turboquant", 4), ("turboquant", 2.5), prototype=plain),
}
