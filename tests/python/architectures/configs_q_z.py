"""Tiny models of the modules whose names begin with q to z."""

from __future__ import annotations

from architectures.harness import WINDOW, Config, sized
from architectures.starts import slow_recurrent_gemma, slow_rwkv7, started

_SLIDING, _FULL = "sliding_attention", "full_attention"
_MIXED = {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING]}
_QWEN3_MOE = sized(decoder_sparse_step=1, mlp_only_layers=[0])
# Every second layer attends, the others are recurrent.
_GATED_DELTA = {
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
_QWEN3_5 = {
    **_GATED_DELTA,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_HYBRID = "recurrent and full attention"

CONFIGS: dict[str, Config] = {
    "qwen": Config(sized(kv_channels=8, layer_norm_epsilon=1e-5)),
    "qwen2": Config(sized()),
    "qwen2_moe": Config(sized(shared_expert_intermediate_size=16)),
    "qwen2_vl": Config({"model_type": "qwen2_vl", "text_config": sized()}),
    "qwen3": Config(sized()),
    "qwen3_5": Config({"model_type": "qwen3_5", "text_config": sized(**_QWEN3_5, num_experts=0)}, note=_HYBRID),
    "qwen3_5_moe": Config(
        {"model_type": "qwen3_5_moe", "text_config": sized(**_QWEN3_5, shared_expert_intermediate_size=16)},
        note=_HYBRID,
    ),
    "qwen3_moe": Config(_QWEN3_MOE),
    "qwen3_next": Config(
        sized(**_GATED_DELTA, decoder_sparse_step=1, mlp_only_layers=[0], shared_expert_intermediate_size=16),
        note=_HYBRID,
    ),
    "qwen3_vl": Config({"model_type": "qwen3_vl", "text_config": sized()}),
    "qwen3_vl_moe": Config({"model_type": "qwen3_vl_moe", "text_config": _QWEN3_MOE}),
    "recurrent_gemma": Config(
        sized(
            num_hidden_layers=4,
            conv1d_width=4,
            logits_soft_cap=30.0,
            attention_window_size=WINDOW,
            block_types=["recurrent", "recurrent", "attention"],
        ),
        shim=started(slow_recurrent_gemma),
        note="recurrent and windows, no full attention",
    ),
    "rwkv7": Config(
        sized(
            norm_eps=1e-5,
            a_low_rank_dim=8,
            v_low_rank_dim=8,
            gate_low_rank_dim=8,
            decay_low_rank_dim=8,
        ),
        shim=started(slow_rwkv7),
        note="recurrent only, three arrays a layer: no layer counts tokens",
    ),
    "seed_oss": Config(sized(attention_out_bias=True)),
    "smollm3": Config(sized(no_rope_layer_interval=2)),
    "solar_open": Config(sized(partial_rotary_factor=0.5, use_qk_norm=True)),
    "spark2_5": Config(
        sized(**_MIXED, rope_parameters={_SLIDING: {"rope_theta": 1000.0}, _FULL: {"partial_rotary_factor": 0.5}}),
        note="windows and full attention",
    ),
    "stablelm": Config(sized(use_qkv_bias=True, partial_rotary_factor=0.5, qk_layernorm=True)),
    "starcoder2": Config(sized()),
    "step3p5": Config(
        sized(
            **_MIXED,
            num_attention_groups=2,
            attention_other_setting={"num_attention_heads": 6, "num_attention_groups": 3},
            partial_rotary_factors=[1.0, 0.5, 1.0, 1.0],
            moe_num_experts=4,
            moe_top_k=2,
            share_expert_dim=16,
            swiglu_limits=[0.0, 7.0, 0.0, 7.0],
        ),
        note="windows and full attention with different numbers of heads",
    ),
    "talkie": Config(sized()),
    "telechat3": Config(sized()),
    "youtu_llm": Config(sized(num_key_value_heads=4), note="keys wider than values"),
}
