"""Builds a tiny model of random weights for any module of ``mlx_lm.models``.

Every module ``configs_*.py`` beside this one has a table ``CONFIGS: dict[str, Config]`` and may have another,
``LEFT_OUT: dict[str, str]``: modules that cannot be tested, and why.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import math
import pkgutil
import sys
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.models
from mlx.utils import tree_flatten

MLX_LM = tuple(int(part) for part in mlx_lm.__version__.split(".")[:3])
VOCABULARY = 128
WINDOW = 24  # a window that is no multiple of the tests' blocks of 16 tokens, and that short prompts fill

# Sizes under the names that most modules use; ModelArgs.from_dict ignores those that a module does not know.
SIZES: dict[str, Any] = {
    "model_type": "tiny",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    # multi-head latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "sliding_window": WINDOW,
}


@dataclass(frozen=True)
class Config:
    """``args`` go to the module's ``ModelArgs.from_dict``; ``shim`` makes the module run on a CPU first; ``note`` says
    what is special about it; ``probes`` are packages that the module asks for at import and never uses."""

    args: dict[str, Any]
    shim: Callable[[ModuleType], None] | None = None
    note: str = ""
    probes: tuple[str, ...] = ()


def sized(**args: Any) -> dict[str, Any]:
    """SIZES with some of them replaced and others added."""
    return {**SIZES, **args}


@functools.cache
def discovered() -> tuple[str, ...]:
    """The modules of ``mlx_lm.models`` that have a ``Model``, their own or an imported one. None is imported."""
    folders = [Path(folder) for folder in mlx_lm.models.__path__]
    return tuple(sorted(file.stem for folder in folders for file in folder.glob("*.py") if _has_model(file)))


def _has_model(file: Path) -> bool:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            return True
        if isinstance(node, ast.ImportFrom) and any((name.asname or name.name) == "Model" for name in node.names):
            return True
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == "Model" for target in node.targets):
            return True
    return False


@functools.cache
def import_model(name: str) -> ModuleType:
    config = configs()[name]
    missing = [package for package in config.probes if importlib.util.find_spec(package) is None]
    sys.modules.update({package: ModuleType(package) for package in missing})
    # Some modules of older releases make their Metal kernels when they are imported.
    kernels = mx.fast if mx.metal.is_available() else unittest.mock.MagicMock()
    try:
        with unittest.mock.patch.object(mx.fast, "metal_kernel", kernels.metal_kernel):
            module = importlib.import_module(f"mlx_lm.models.{name}")
    finally:
        for package in missing:
            del sys.modules[package]
    if config.shim is not None:
        config.shim(module)
    return module


def _tables(kind: str) -> dict[str, Any]:
    package = importlib.import_module(__package__)
    merged: dict[str, Any] = {}
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.name.startswith("configs_"):
            table = getattr(importlib.import_module(f"{__package__}.{entry.name}"), kind, {})
            assert not merged.keys() & table.keys(), f"{kind} twice: {sorted(merged.keys() & table.keys())}"
            merged.update(table)
    return merged


@functools.cache
def configs() -> dict[str, Config]:
    """All configurations by module name."""
    return _tables("CONFIGS")


@functools.cache
def left_out() -> dict[str, str]:
    """Modules that are not tested, and why."""
    return _tables("LEFT_OUT")


def build(name: str) -> Any:
    """The model of module ``name``: float32, equal random weights each time, none of them left as it started."""
    module = import_model(name)
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(configs()[name].args))
    model.set_dtype(mx.float32)
    randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def randomize(model: Any) -> None:
    """Gives every floating-point parameter random values: vectors near where they start, matrices of unit gain."""
    weights = tree_flatten(model.parameters())
    changed = []
    for (name, weight), key in zip(weights, mx.random.split(mx.random.key(5), len(weights)), strict=True):
        if not mx.issubdtype(weight.dtype, mx.floating):
            continue
        noise = mx.random.normal(weight.shape, key=key)
        if weight.ndim < 2:
            changed.append((name, weight + 0.2 * noise))
        else:
            changed.append((name, noise / math.sqrt(math.prod(weight.shape[1:]))))
    model.load_weights(changed, strict=False)
