"""Tiny models of the modules whose names begin with a to d."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx

from architectures.harness import Config, sized


def _bit_linear_on_cpu(module: ModuleType) -> None:
    """bitnet multiplies with a Metal kernel. Here its packed weights, four ternary numbers in a byte, are unpacked."""

    class BitLinear(module.BitLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            digits = mx.random.randint(0, 3, (4, *self.weight.shape)).astype(mx.uint8)
            self.weight = sum(digit << 2 * place for place, digit in enumerate(digits))

        def execute_matmul_kernel(self, x: mx.array, packed: mx.array) -> mx.array:
            weight = mx.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)]).astype(x.dtype) - 1
            scale = 1 / self.weight_scale if self.invert_weight_scales else self.weight_scale
            return x @ weight.T * scale

    module.BitLinear = BitLinear


_LINEAR = {"layer_group_size": 2, "group_norm_size": 2, "num_hidden_layers": 4, "num_key_value_heads": 4}

CONFIGS: dict[str, Config] = {
    "afm7": Config(
        sized(hidden_dim=32, num_layers=4, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2),
        note="the last layers use the keys and values of an earlier one",
    ),
    "afmoe": Config(
        sized(
            num_hidden_layers=4,
            num_dense_layers=1,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        )
    ),
    "apertus": Config(sized(post_norm=True, qk_norm=True)),
    "baichuan_m1": Config(
        sized(
            num_hidden_layers=4,
            sliding_window_layers=[1, 3],
            conv_window=2,
            num_swa_attention_heads=4,
            num_swa_key_value_heads=1,
        ),
        note="each layer is a list of two: the last key and value, and a cache of rows",
    ),
    "bailing_hybrid": Config(sized(**_LINEAR), note="linear attention beside latent attention"),
    "bailing_moe": Config(sized(use_bias=True, use_qkv_bias=True, use_qk_norm=True, topk_group=1)),
    "bailing_moe_linear": Config(sized(**_LINEAR, use_qk_norm=True, use_qkv_bias=True)),
    "bailing_moe_v3": Config(
        sized(num_hidden_layers=4, layer_group_size=2, moe_shared_expert_intermediate_size=16),
        note="delta attention with three convolutions beside latent attention",
    ),
    "bitnet": Config(sized(), shim=_bit_linear_on_cpu),
    "cohere": Config(sized(layer_norm_bias=True, use_qk_norm=True, logit_scale=1.0)),
    "cohere2": Config(sized(num_hidden_layers=4, sliding_window_pattern=2, layer_norm_bias=True, logit_scale=1.0)),
    "dbrx": Config(
        sized(
            d_model=32,
            n_layers=2,
            n_heads=4,
            ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        )
    ),
    "deepseek": Config(sized()),
    "deepseek_v2": Config(
        sized(
            topk_method="group_limited_greedy",
            n_group=2,
            topk_group=1,
            rope_scaling={
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
        )
    ),
    "deepseek_v3": Config(sized(n_group=2, topk_group=1)),
    "deepseek_v32": Config(
        sized(index_head_dim=16, index_n_heads=2, index_topk=20),
        note="attends to the 20 rows that an indexer with keys of its own picks",
    ),
    "deepseek_v41": Config(
        sized(
            num_hidden_layers=5,
            head_dim=32,
            o_groups=2,
            o_lora_rank=8,
            compress_ratios=(0, 1, 4, 4, 4),
            kv_source_layer_ids=(1, 2, 4),
            index_source_layer_ids=(1, 2, 4),
            candidate_source_layer_id=2,
            candidate_topk_blocks=2,
            candidate_block_size=2,
            index_n_heads=2,
            index_head_dim=32,
            index_topk=6,
            hc_mult=2,
            hc_sinkhorn_iters=3,
            rms_norm_eps=1e-6,
        ),
        note="a window, groups of 4 tokens pooled to one row, and the rows of the group that is still open",
    ),
    "dots1": Config(sized(scoring_func="noaux_tc")),
}
