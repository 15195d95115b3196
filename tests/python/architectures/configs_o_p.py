"""Tiny models of the modules whose names begin with o or p."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx

from architectures.harness import VOCABULARY, Config, sized
from architectures.starts import started

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


def _added_mask(module: ModuleType) -> None:
    """olmo adds its mask to the scores, but gets the word "causal" instead of numbers."""
    make_mask = module.create_attention_mask

    def create_attention_mask(h: mx.array, cache: Any) -> mx.array | None:
        seen = make_mask(h, cache, return_array=True)
        return None if seen is None else mx.where(seen, 0.0, -mx.inf)

    module.create_attention_mask = create_attention_mask


def _small_vocabulary(model: Any) -> None:
    """phi3small masks the unused tokens of its own vocabulary, which lie far outside of a small one."""
    model._dummy_tokenizer_ids = mx.zeros((0,), mx.int32)


CONFIGS: dict[str, Config] = {
    "olmo": Config(
        sized(d_model=32, n_layers=2, mlp_hidden_size=64, n_heads=4, embedding_size=VOCABULARY),
        shim=_added_mask,
        probes=("hf_olmo",),
    ),
    "olmo2": Config(sized()),
    "olmo3": Config(
        sized(num_hidden_layers=4, layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL]),
        note="windows and full attention",
    ),
    "olmo_hybrid": Config(
        sized(
            num_hidden_layers=3,
            layer_types=[_LINEAR, _FULL, _LINEAR],
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
            linear_allow_neg_eigval=True,
        ),
        note="recurrent layers of four arrays, and full attention",
    ),
    "olmoe": Config(sized()),
    "openelm": Config(
        sized(
            num_transformer_layers=3,
            model_dim=32,
            ffn_dim_divisor=8,
            num_query_heads=[4, 4, 6],
            num_kv_heads=[1, 2, 3],
            ffn_multipliers=[1.0, 1.5, 2.0],
        ),
        note="another number of heads in every layer",
    ),
    "phi": Config(sized(partial_rotary_factor=0.5)),
    "phi3": Config(
        sized(
            original_max_position_embeddings=256,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 1.5, 2.0, 3.0],
            },
        )
    ),
    "phi3small": Config(
        sized(
            dense_attention_every_n_layers=2,
            ff_intermediate_size=64,
            gegelu_limit=20.0,
            layer_norm_epsilon=1e-5,
            blocksparse_block_size=32,
            blocksparse_num_local_blocks=2,
            blocksparse_vert_stride=2,
        ),
        shim=started(_small_vocabulary),
        note="one layer attends to some blocks of 32 rows only, and keeps all of them",
    ),
    "phimoe": Config(
        sized(
            original_max_position_embeddings=256,
            rope_scaling={
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 1.5, 2.0, 3.0],
                "short_mscale": 1.0,
                "long_mscale": 1.2,
            },
        )
    ),
    "phixtral": Config(sized(num_vocab=VOCABULARY, model_dim=32, num_heads=4, num_layers=2, rotary_dim=4)),
    "pixtral": Config({"model_type": "pixtral", "text_config": sized()}),
    "plamo": Config(sized(n_shared_head=2)),
    "plamo2": Config(
        sized(
            num_hidden_layers=4,
            hidden_size_per_head=8,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_num_heads=4,
            mamba_step=2,
        ),
        note="recurrent and full attention",
    ),
    "plamo3": Config(
        sized(num_hidden_layers=4, sliding_window_pattern=2),
        note="windows and full attention; the mask of a chunk looks one row beyond the window",
    ),
    "prism_hadamard_qwen35": Config(
        {
            "model_type": "prism_hadamard_qwen35",
            "schema_version": 1,
            "tensor_namespace": "mlx-lm-text",
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "modules": [
                {"path": "model.layers.0.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 512},
            ],
            "text_config": sized(
                intermediate_size=512,
                num_hidden_layers=3,
                num_experts=0,
                attention_bias=False,
                full_attention_interval=2,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                linear_conv_kernel_dim=4,
                rope_parameters={"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            ),
        },
        note="recurrent and full attention; one matrix packed in 2 bits",
    ),
}
