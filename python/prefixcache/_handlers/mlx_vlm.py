"""Which handler serves which cache class of mlx-vlm. Nothing of mlx-vlm is imported here."""

from __future__ import annotations

from collections.abc import Callable

from prefixcache._handlers.base import Handler
from prefixcache._handlers.minimax_m3 import MiniMaxM3KVCacheHandler
from prefixcache._handlers.mlx_vlm_kv import HyV4KVCacheHandler, RingSlidingKVCacheHandler, SimpleKVCacheHandler
from prefixcache._handlers.mlx_vlm_qsa import QSAKVCacheHandler
from prefixcache._handlers.mlx_vlm_rotating import BufferedRotatingKVCacheHandler, VlmChunkedKVCacheHandler
from prefixcache._handlers.mlx_vlm_states import (
    DeepseekV41CacheHandler,
    PoolingCacheHandler,
    VlmArraysCacheHandler,
    Z1TCacheHandler,
)
from prefixcache._handlers.turboquant import TurboQuantKVCacheHandler
from prefixcache._handlers.turboquant_hybrid import HybridQuantKVCacheHandler

_MODELS = "mlx_vlm.models"
_CACHE = f"{_MODELS}.cache"
# Other classes than mlx-lm's of these names, with the same attributes and rows: one handler serves both.
_ALIKE = ("KVCache", "ConcatenateKVCache", "QuantizedKVCache", "RotatingKVCache", "CacheList")


def mlx_vlm_handlers(named: Callable[[str], Handler]) -> list[tuple[str, str, Handler]]:
    """Module, class name and handler of each; ``named`` finds the handlers of mlx-lm's classes."""
    return [
        *((_CACHE, name, named(name)) for name in _ALIKE),
        (_CACHE, "SimpleKVCache", SimpleKVCacheHandler()),
        (_CACHE, "BufferedRotatingKVCache", BufferedRotatingKVCacheHandler()),
        (_CACHE, "ChunkedKVCache", VlmChunkedKVCacheHandler()),
        (_CACHE, "ArraysCache", VlmArraysCacheHandler()),
        (_CACHE, "PoolingCache", PoolingCacheHandler()),
        ("mlx_vlm.turboquant", "TurboQuantKVCache", TurboQuantKVCacheHandler()),
        ("mlx_vlm.turboquant", "HybridQuantKVCache", HybridQuantKVCacheHandler()),
        (f"{_MODELS}.minimax_m3_vl.language", "MiniMaxM3KVCache", MiniMaxM3KVCacheHandler()),
        (f"{_MODELS}.qwen4_exp.language", "QSAKVCache", QSAKVCacheHandler()),
        (f"{_MODELS}.hy_v4.cache", "HyV4KVCache", HyV4KVCacheHandler()),
        (f"{_MODELS}.unlimited_ocr.language", "RingSlidingKVCache", RingSlidingKVCacheHandler()),
        (f"{_MODELS}.deepseek_v41.language", "DeepseekV41Cache", DeepseekV41CacheHandler()),
        (f"{_MODELS}.z1t.language", "Z1TCache", Z1TCacheHandler()),
    ]
