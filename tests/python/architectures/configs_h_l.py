"""Tiny models of the modules whose names begin with h to l."""

from __future__ import annotations

from architectures.harness import MLX_LM, WINDOW, Config, sized

_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_KDA = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 8,
    "short_conv_kernel_size": 4,
}
_LFM2 = sized(
    num_hidden_layers=4,
    layer_types=["conv", "full_attention", "conv", "full_attention"],
    norm_eps=1e-5,
    conv_bias=True,
    conv_L_cache=3,
    block_dim=32,
    block_ff_dim=48,
    block_multiple_of=8,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=True,
    use_expert_bias=True,
    num_dense_layers=1,
)
_LONGCAT = sized(
    attention_method="MLA",
    zero_expert_type="identity",
    ffn_hidden_size=48,
    moe_topk=2,
    expert_ffn_hidden_size=16,
    zero_expert_num=2,
    num_layers=2,
    mla_scale_q_lora=True,
    mla_scale_kv_lora=True,
    router_bias=True,
)

CONFIGS: dict[str, Config] = {
    "Klear": Config(sized(mlp_only_layers=[0], decoder_sparse_step=1)),
    "helium": Config(sized()),
    "hunyuan": Config(
        sized(
            num_hidden_layers=4,
            moe_topk=2,
            num_shared_expert=1,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            use_cla=True,
            cla_share_factor=2,
            rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 2.0},
        ),
        note="every second layer stores the rows that the one before computed",
    ),
    "hunyuan_v1_dense": Config(sized(rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 2.0})),
    "internlm2": Config(sized()),
    "internlm3": Config(sized(bias=True, qkv_bias=True)),
    "iquestloopcoder": Config(
        sized(loop_window_size=WINDOW), note="two caches for a layer: all rows, and a window for its second pass"
    ),
    "jamba": Config(
        sized(
            num_hidden_layers=4,
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_offset=1,
            expert_layer_period=2,
            mamba_d_conv=4,
            mamba_d_state=8,
            mamba_expand=2,
            mamba_proj_bias=True,
        )
    ),
    "kimi_k25": Config({"model_type": "tiny", "text_config": sized()}),
    "kimi_k3": Config(
        {
            "model_type": "tiny",
            "text_config": sized(
                num_hidden_layers=4,
                linear_attn_config=_KDA,
                attn_res_block_size=2,
                activation_situ_beta=1.0,
                activation_situ_linear_beta=1.0,
                mla_use_output_gate=True,
                num_experts_per_token=2,
            ),
        }
    ),
    "kimi_linear": Config(
        sized(num_hidden_layers=4, linear_attn_config=_KDA, model_max_length=512, num_experts_per_token=2)
    ),
    "kimi_vl": Config({"model_type": "tiny", "text_config": sized()}),
    "laguna": Config(
        sized(
            num_hidden_layers=4,
            layer_types=_ALTERNATING,
            num_attention_heads_per_layer=[4, 2, 4, 2],
            shared_expert_intermediate_size=16,
            qkv_bias=True,
        )
    ),
    "lfm2": Config(_LFM2),
    "lfm2-vl": Config({"model_type": "tiny", "text_config": _LFM2}),
    "lfm2_moe": Config(_LFM2),
    "lille-130m": Config(sized(block_size=256, n_embd=64, n_head=4, n_kv_heads=2, n_layer=2)),
    "llama": Config(sized(num_hidden_layers=4, layer_types=_ALTERNATING)),
    "llama4": Config(
        {
            "model_type": "tiny",
            "text_config": sized(
                num_hidden_layers=4,
                attention_chunk_size=WINDOW if MLX_LM >= (0, 32) else 256,
                interleave_moe_layer_step=2,
                intermediate_size_mlp=48,
                num_experts_per_tok=1,
                rope_scaling=None,
                use_qk_norm=True,
                floor_scale=16,
            ),
        },
        note="three of four layers attend to chunks of tokens; mlx-lm before 0.32 loses rows of short chunks",
    ),
    "llama4_text": Config(
        sized(num_hidden_layers=4, intermediate_size_mlp=48, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True)
    ),
    "longcat_flash": Config(_LONGCAT),
    "longcat_flash_ngram": Config(
        {**_LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
        note="keeps the last two token numbers, as int64",
    ),
}
