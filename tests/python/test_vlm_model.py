"""A model of mlx-vlm itself: DeepSeek V4, whose layers keep a window, and what has left it pooled by 4 and by 128."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.models.deepseek_v4.config import ModelConfig
from mlx_vlm.models.deepseek_v4.language import LanguageModel

from prefixcache import PrefixCache

TOKENS = [(i * i * 7 + 3 * i) % 64 for i in range(300)]
CHUNK = 64


def tiny_model() -> Any:
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        n_routed_experts=4,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        num_experts_per_tok=2,
        head_dim=16,
        compress_ratios=[0, 128, 4, 4],
        sliding_window=16,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        hc_mult=2,
        num_hash_layers=0,
        max_position_embeddings=1024,
    )
    mx.random.seed(0)
    model = LanguageModel(config)
    model.update(
        tree_map(lambda p: mx.random.normal(p.shape) * 0.2 if p.dtype == mx.float32 else p, model.parameters())
    )
    mx.eval(model.parameters())
    return model


def logits(model: Any, caches: list[Any], start: int, stop: int) -> mx.array:
    out: mx.array = model(mx.array(TOKENS[start:stop])[None], cache=caches).logits
    mx.eval(out)
    return out


@pytest.mark.long  # MLX compiles the model's kernels for half a minute
def test_logits_after_a_restore(tmp_path: Path) -> None:
    model, donors = tiny_model(), {}
    caches = model.make_cache()
    options: dict[str, Any] = {"namespace": "test", "block_size": 16, "ram": "64MB", "disk": "1GB"}
    with PrefixCache.open(tmp_path / "cache", caches=model.make_cache(), **options) as cache:
        recorder = cache.record(TOKENS[:256], caches)
        for n in range(CHUNK, 257, CHUNK):
            logits(model, caches, n - CHUNK, n)
            donors[n] = copy.deepcopy(caches)
            assert recorder.advance(n).state_at == n
    with PrefixCache.open(tmp_path / "cache", caches=model.make_cache(), **options) as cache:
        for asked, expected in ((TOKENS, 256), (TOKENS[:257], 256), ([*TOKENS[:200], 1, 2], 192)):
            hit = cache.fetch(asked)
            assert hit.cached_tokens == expected
            reference = copy.deepcopy(donors[expected])
            for start, stop in ((expected, expected + 3), (expected + 3, expected + 4), (expected + 4, expected + 12)):
                seen = [logits(model, one, start, stop) for one in (hit.caches, reference)]
                assert not mx.isnan(seen[0]).any().item()
                assert mx.array_equal(*seen).item(), f"logits of [{start}, {stop}) after a restore at {expected}"
