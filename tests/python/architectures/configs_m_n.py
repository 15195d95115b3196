"""Tiny models of the modules whose names begin with m or n."""

from __future__ import annotations

from architectures.harness import WINDOW, Config, sized
from architectures.muse_spark_on_cpu import plain_kernels
from architectures.starts import slow_mamba, started

_SLIDING, _FULL = "sliding_attention", "full_attention"
_MIXED = {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING]}
_MAMBA = {"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "state_size": 8}
# From position 32 on these models scale their queries by another factor.
_LLAMA4_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 32,
}
_MINISTRAL3 = sized(**_MIXED, model_type="ministral3", rope_parameters=_LLAMA4_ROPE)

CONFIGS: dict[str, Config] = {
    "mamba": Config(
        sized(**_MAMBA, time_step_rank=4),
        shim=started(slow_mamba),
        note="recurrent only: no layer counts tokens",
    ),
    "mamba2": Config(
        sized(
            **_MAMBA,
            num_heads=4,
            n_groups=2,
            layer_norm_epsilon=1e-5,
            time_step_rank="auto",
            time_step_limit=[0.0, 0.05],
        ),
        note="recurrent only: no layer counts tokens",
    ),
    "mellum": Config(
        sized(**_MIXED, rope_parameters={_SLIDING: {"rope_theta": 1000.0}, _FULL: {"rope_theta": 10000.0}}),
        note="windows and full attention",
    ),
    "mimo": Config(sized()),
    "mimo_v2_flash": Config(
        sized(
            num_hidden_layers=4,
            hybrid_layer_pattern=[0, 1, 1, 0],
            moe_layer_freq=[0, 1, 1, 1],
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            sliding_window_size=WINDOW,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            n_group=2,
            layernorm_epsilon=1e-5,
            swa_rope_theta=1000.0,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            head_dim=16,
            swa_head_dim=16,
            swa_v_head_dim=8,
            partial_rotary_factor=0.5,
        ),
        note="keys wider than values and more heads in windows; attention sinks",
    ),
    "minicpm": Config(sized(dim_model_base=16, scale_depth=1.4, scale_emb=4.0)),
    "minicpm3": Config(
        sized(
            num_key_value_heads=4,
            dim_model_base=16,
            scale_depth=1.4,
            scale_emb=4.0,
            qk_rope_head_dim=4,
            rope_scaling={
                "original_max_position_embeddings": 256,
                "short_factor": [1.0, 1.5],
                "long_factor": [1.0, 2.0],
            },
        ),
        note="keys wider than values",
    ),
    "minimax": Config(sized(shared_intermediate_size=32, rotary_dim=4)),
    "minimax_m3_vl": Config(
        {
            "model_type": "minimax_m3_vl",
            "text_config": sized(
                num_hidden_layers=3,
                dense_intermediate_size=64,
                shared_intermediate_size=32,
                rotary_dim=4,
                moe_layer_freq=[0, 1, 1],
                layer_types=[_FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
                # A query sees 3 blocks of 8 keys, so that the indexer's own keys matter.
                index_n_heads=2,
                index_head_dim=8,
                index_block_size=8,
                index_topk_blocks=3,
            ),
        },
        note="every layer is a list of one or two caches; the indexer's cache has values of width 0",
    ),
    "ministral3": Config(_MINISTRAL3, note="windows and full attention"),
    "mistral3": Config(
        {"model_type": "mistral3", "text_config": _MINISTRAL3},
        note="has windows but no make_cache: each layer keeps all rows",
    ),
    "mistral4": Config(
        sized(num_key_value_heads=4, head_dim=None, rope_parameters=_LLAMA4_ROPE),
        note="one head of latent rows: keys and values of different width",
    ),
    "mixtral": Config(sized()),
    "muse_glimmer": Config(sized(**_MIXED), note="windows and full attention"),
    "muse_spark": Config(
        {
            "model_type": "muse_spark",
            "text_config": sized(
                **_MIXED,
                post_norm_eps=1e-5,
                rope_parameters={"rope_theta": 10000.0},
                layer_rope_theta=[10000.0, 0.0, 10000.0, 10000.0],
                final_logit_softcapping=20.0,
                output_multiplier=0.5,
                num_shared_experts=0,
                moe_hidden_size=16,
            ),
        },
        shim=plain_kernels,
        note="windows and full attention; its fused kernels exist for Metal only",
    ),
    "nanbeige": Config(sized(num_loops=2), note="goes through its layers twice: more caches than layers"),
    "nanochat": Config(sized()),
    "nemotron": Config(sized(hidden_act="relu2", norm_eps=1e-5)),
    "nemotron-nas": Config(
        sized(
            num_hidden_layers=5,
            block_configs=[
                {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
                {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 0.5}},
            ],
        ),
        note="a layer without a cache; two caches, the first one too, that stay empty for ever",
    ),
    "nemotron_h": Config(
        sized(
            hybrid_override_pattern=["M", "-", "*", "E", "M", "*"],
            mamba_num_heads=4,
            mamba_head_dim=8,
            mamba_proj_bias=False,
            ssm_state_size=8,
            conv_kernel=4,
            n_groups=2,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
            time_step_limit=[0.0, 0.05],
            moe_shared_expert_intermediate_size=32,
        ),
        note="recurrent and full attention; two layers without a cache",
    ),
}
