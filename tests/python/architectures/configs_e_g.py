"""Tiny models of the modules whose names begin with e to g."""

from __future__ import annotations

from typing import Any

from architectures.harness import VOCABULARY, Config, sized

_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def _gemma4(**args: Any) -> dict[str, Any]:
    return sized(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        use_double_wide_mlp=True,
        tie_word_embeddings=True,
        **args,
    )


_GEMMA3 = sized(num_hidden_layers=6, sliding_window_pattern=3, query_pre_attn_scalar=8)

CONFIGS: dict[str, Config] = {
    "ernie4_5": Config(sized(use_bias=True)),
    "ernie4_5_moe": Config(
        sized(
            use_bias=True,
            num_hidden_layers=3,
            moe_num_experts=4,
            moe_k=2,
            moe_layer_start_index=1,
            moe_layer_interval=1,
            moe_num_shared_experts=1,
        )
    ),
    "exaone": Config(sized(num_layers=2, layer_norm_epsilon=1e-5)),
    "exaone4": Config(sized(num_hidden_layers=4, sliding_window_pattern="LLG", rope_scaling=None)),
    "exaone_moe": Config(sized(num_hidden_layers=4, layer_types=_ALTERNATING, is_moe_layer=[False, True, True, True])),
    "falcon_h1": Config(
        sized(
            mamba_d_conv=4,
            mamba_d_head=8,
            mamba_d_ssm=32,
            mamba_d_state=16,
            mamba_n_groups=2,
            mamba_n_heads=4,
            mamba_rms_norm=True,
            mamba_proj_bias=True,
            lm_head_multiplier=1.0,
        ),
        note="each layer is a list of two: a recurrent state and a cache of rows",
    ),
    "gear": Config(
        sized(
            num_hidden_layers=4,
            layer_types=["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
            final_logit_softcapping=30.0,
        )
    ),
    "gemma": Config(sized()),
    "gemma2": Config(sized(query_pre_attn_scalar=8.0)),
    "gemma3": Config({"model_type": "tiny", "vocab_size": VOCABULARY, "text_config": _GEMMA3}),
    "gemma3_text": Config(_GEMMA3),
    "gemma3n": Config(
        {
            "model_type": "tiny",
            "text_config": sized(
                num_hidden_layers=6,
                layer_types=["sliding_attention", "full_attention"] * 3,
                num_kv_shared_layers=2,
                intermediate_size=48,
                vocab_size_per_layer_input=VOCABULARY,
                hidden_size_per_layer_input=8,
                rope_local_base_freq=10000.0,
                final_logit_softcapping=30.0,
                activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
                altup_num_inputs=3,
                altup_coef_clip=120.0,
                altup_correct_scale=True,
                altup_active_idx=0,
                laurel_rank=4,
            ),
        },
        note="fewer caches than layers: the last layers use the rows of earlier ones",
    ),
    "gemma4": Config(
        {"model_type": "tiny", "vocab_size": VOCABULARY, "text_config": _gemma4()},
        note="fewer caches than layers; rows of two widths",
    ),
    "gemma4_text": Config(
        _gemma4(
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            enable_moe_block=True,
            top_k_experts=2,
        ),
        note="fewer caches than layers; rows of two widths",
    ),
    "glm": Config(sized()),
    "glm4": Config(sized(partial_rotary_factor=0.5)),
    "glm4_moe": Config(sized(rope_scaling=None, use_qk_norm=True, partial_rotary_factor=0.5, n_group=2)),
    "glm4_moe_lite": Config(sized(num_nextn_predict_layers=0)),
    "glm_moe_dsa": Config(
        sized(
            index_head_dim=16,
            index_n_heads=2,
            index_topk=20,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            moe_layer_freq=1,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        )
    ),
    "gpt2": Config(
        sized(n_ctx=256, n_embd=32, n_head=4, n_layer=2, n_positions=256, layer_norm_epsilon=1e-5)
        | {"num_key_value_heads": 4}
    ),
    "gpt_bigcode": Config(
        sized(n_embd=32, n_layer=2, n_inner=64, n_head=4, n_positions=256, layer_norm_epsilon=1e-5)
        | {"num_key_value_heads": 1},
        note="one head of keys for all queries",
    ),
    "gpt_neox": Config(sized(rotary_emb_base=10000, rotary_pct=0.5, num_key_value_heads=4)),
    "gpt_oss": Config(sized(num_hidden_layers=4, layer_types=_ALTERNATING), note="attention sinks"),
    "gptj": Config(sized(n_embd=32, layer_norm_epsilon=1e-5, n_positions=256, n_head=4, rotary_dim=4, n_layer=2)),
    "granite": Config(
        sized(logits_scaling=2.0, attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5)
    ),
    "granitemoe": Config(
        sized(logits_scaling=2.0, attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5)
    ),
    "granitemoehybrid": Config(
        sized(
            logits_scaling=2.0,
            attention_multiplier=0.3,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            num_hidden_layers=4,
            layer_types=["mamba", "attention", "mamba", "mamba"],
            shared_intermediate_size=16,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_proj_bias=True,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_n_groups=1,
            mamba_conv_bias=True,
        )
    ),
}
