"""Fixtures that several test files share: a real model, and small random ones that are fast on any machine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path[:0] = [str(EXAMPLES), str(ROOT / "scripts")]

# What takes longest goes first, so that all workers of a run end together; the rest follows by name.
SLOWEST = (
    "test_kills",
    "test_demo",
    "test_architectures",
    "test_exactness",
    "test_handlers_vlm",
    "test_faults",
    "test_omlx_scheduler",
    "test_omlx_scheduler_sharing",
    "test_mlx_lm_draft",
    "test_windows",
    "test_handler_contract",
    "test_mlx_lm",
    "test_restore",
    "test_stub",
    "test_lines",
    "test_damage",
    "test_hostile_files",
    "test_shared_directory",
    "test_embed",
)


# Cases with arrays without items. MLX's CUDA build ends the process where mlx-lm's caches have appended such.
WITHOUT_ITEMS = (
    "kv-no-values",
    "list-kv-kv",
    "rotating-5-keep-4",
    "turbo-prod-1",
    "minimax_m3_vl",
    "test_every_array_of_a_stored_cache_is_used",
)


def on_cuda() -> bool:
    import mlx.core as mx

    return mx.default_device() != mx.Device(mx.cpu) and not mx.metal.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if on_cuda():
        skip = pytest.mark.skip(reason="MLX's CUDA build segfaults on a cache's arrays without items")
        for item in items:
            if any(name in item.name for name in WITHOUT_ITEMS):
                item.add_marker(skip)
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))


def pytest_configure(config: pytest.Config) -> None:
    """Where long tests are left out, half of all random examples are."""
    if config.option.markexpr == "not long":
        from hypothesis import settings

        settings.register_profile("short", max_examples=settings.default.max_examples // 2)
        settings.load_profile("short")


def examples(number: int) -> int:
    """As many random examples of each hundred as this run has."""
    from hypothesis import settings

    return number * settings.default.max_examples // 100


def long(*values: Any) -> Any:
    """A point of a grid that the short form leaves out."""
    return pytest.param(*values, marks=pytest.mark.long)


def child_environment(*folders: Path) -> dict[str, str]:
    """For a Python program that is to find the prefixcache under test, and what lies in `folders`."""
    import prefixcache

    site = Path(prefixcache.__file__).resolve().parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, *folders)))}


# How MLX says that its GPU backend has no such operation: nothing that runs on that device can be tested with it.
LACKING = (
    "has no CUDA implementation",
    "not yet supported on the GPU",
    "No Metal back-end",
    "[quantized_matmul] No implementation for problem shape",
)


def lacking_is_a_skip() -> Generator[None, Any, Any]:
    import mlx.core as mx

    try:
        return (yield)
    except (RuntimeError, ValueError) as error:
        if mx.default_device() == mx.Device(mx.cpu) or not any(text in str(error) for text in LACKING):
            raise
        pytest.skip(f"this MLX on {mx.default_device()}: {error}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    return (yield from lacking_is_a_skip())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    return (yield from lacking_is_a_skip())


class RealModel(NamedTuple):
    """SmolLM2-135M-Instruct: the model, its tokenizer, the folder, and whether matrix products are fast here."""

    model: Any
    tokenizer: Any
    folder: Path
    fast: bool


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The prepared model folder; the first run on a machine downloads it."""
    import smollm2 as preparation

    return preparation.prepare()


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> RealModel:
    import smollm2 as preparation

    model, tokenizer = preparation.load(smollm2_folder)
    return RealModel(model, tokenizer, smollm2_folder, preparation.has_fast_blas())


@functools.cache
def make_tiny_llama(dtype: str = "float32", layers: int = 3, kv_heads: int = 2, seed: int = 7) -> Any:
    """An mlx-lm llama of random weights: 4 query heads of size 32, vocabulary 512. Equal arguments, equal weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 512}
    arguments = llama.ModelArgs(
        model_type="llama",
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        head_dim=32,
        rms_norm_eps=1e-5,
        **sizes,
    )
    model = llama.Model(arguments)
    key = mx.random.key(seed)
    # Explicit keys: the weights depend on `seed` alone, and the global random state stays as it is.
    weights = tree_flatten(model.parameters())
    for (name, weight), own_key in zip(weights, mx.random.split(key, len(weights)), strict=True):
        if weight.ndim == 2:
            model.load_weights([(name, mx.random.normal(weight.shape, scale=0.1, key=own_key))], strict=False)
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Any]:
    """`tiny_llama(dtype="float16", layers=2)` gives a model; the same arguments give the same object."""
    return make_tiny_llama


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A byte-level tokenizer for `tiny_llama`: ids 0..255 are bytes, the rest spare words; 512 ends a text, which
    the model cannot say.
    """
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"word{i}" for i in range(len(letters), 512)), "<end>"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>"))
