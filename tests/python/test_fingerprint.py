"""model_fingerprint: what must change it, and what must not."""

from __future__ import annotations

import copy
import enum
import importlib
import math
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import llama, rope_utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from prefixcache._fingerprint import model_fingerprint

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.5] * 8,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def _model(**changes: Any) -> Any:
    mx.random.seed(7)
    return llama.Model(llama.ModelArgs(**{**SIZES, **changes}))


def _adapted(scale: float) -> Any:
    model = _model()
    attention = model.layers[1].self_attn
    attention.q_proj = LoRALinear.from_base(attention.q_proj, r=4, scale=scale)
    attention.q_proj.lora_b = mx.ones_like(attention.q_proj.lora_b)
    return model


class Holder(nn.Module):
    """A module with one attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Settings:
    """An object that is no module, with attributes and slots."""

    __slots__ = ("__dict__", "hidden")

    def __init__(self, hidden: Any, **values: Any) -> None:
        self.hidden = hidden
        vars(self).update(values)


def _hold(value: Any) -> str:
    return model_fingerprint(Holder(value))


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def test_equal_models_are_equal() -> None:
    assert model_fingerprint(_model()) == model_fingerprint(_model())
    digest = model_fingerprint(_model())
    assert len(digest) == 64
    assert set(digest) <= set("0123456789abcdef")


def test_copies_and_uses_are_equal() -> None:
    model = _model()
    before = model_fingerprint(model)
    assert model_fingerprint(copy.deepcopy(model)) == before
    mx.eval(model.parameters())
    model(mx.array([[1, 2, 3]]), make_prompt_cache(model))
    assert model_fingerprint(model) == before


KINDS = {"abc": {3, "x", (1, None), 2.5}, Colour.RED: frozenset("hello"), 4: {"b": 1, "a": 2}}


def some_digests() -> list[str]:
    return [
        model_fingerprint(_adapted(2.0)),
        _hold(KINDS),
        _hold(_times(3.0)),
        _hold(nn.gelu_approx),
        _hold(Settings(1)),
    ]


def test_equal_in_every_process(tmp_path: Path) -> None:
    """Neither the hash seed, nor the folder, nor what else is imported may matter."""
    code = f"import mlx_lm.models.qwen3, {__name__} as t; print(*t.some_digests())"
    environment = {**os.environ, "PYTHONHASHSEED": "99", "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert done.stdout.split() == some_digests()


@pytest.mark.parametrize("name", [None, *ROPES])
def test_rope_base_and_scale(name: str | None) -> None:
    """B21's kind: equal weights, another position encoding."""
    scaling = ROPES.get(name or "")
    if name == "dynamic" and not hasattr(rope_utils, "DynamicNTKScalingRoPE"):
        pytest.skip("this mlx-lm has no RoPE of type dynamic")
    common = {"rope_scaling": scaling, "max_position_embeddings": 256}
    before = _model(**common)
    other_base = _model(**common, rope_theta=10001.0)
    assert model_fingerprint(before) == model_fingerprint(_model(**common))
    assert model_fingerprint(before) != model_fingerprint(other_base)
    # The base must be seen in the layers themselves, not only in the configuration.
    other_base.args.rope_theta = before.args.rope_theta
    assert model_fingerprint(before) != model_fingerprint(other_base)
    if scaling:
        assert model_fingerprint(before) != model_fingerprint(_model(max_position_embeddings=256))


def test_lora_scale_and_presence() -> None:
    digests = [model_fingerprint(model) for model in (_model(), _adapted(2.0), _adapted(2.5), _adapted(2.0))]
    assert digests[1] == digests[3]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("position", ["first", "last"])
def test_one_weight_bit(dtype: mx.Dtype, position: str) -> None:
    model = _model()
    model.set_dtype(dtype)
    before = model_fingerprint(model)
    module = model.layers[1].mlp.down_proj
    weight = module.weight
    raw = weight.view(mx.uint16 if dtype.size == 2 else mx.uint32).flatten()
    index = 0 if position == "first" else raw.size - 1
    raw[index] = raw[index] ^ 1
    module.weight = raw.reshape(weight.shape[0], -1).view(dtype)
    assert module.weight.dtype == dtype
    assert model_fingerprint(model) != before
    module.weight = weight
    assert model_fingerprint(model) == before


def test_where_a_weight_lies() -> None:
    model = _model()
    before = model_fingerprint(model)
    first, second = model.layers[0].mlp, model.layers[1].mlp
    first.up_proj.weight, second.up_proj.weight = second.up_proj.weight, first.up_proj.weight
    assert model_fingerprint(model) != before


@pytest.mark.parametrize(
    "changes", [{"rms_norm_eps": 2e-5}, {"rope_traditional": True}, {"num_attention_heads": 2, "head_dim": 16}]
)
def test_configuration(changes: dict[str, Any]) -> None:
    assert model_fingerprint(_model(**changes)) != model_fingerprint(_model())


def test_quantisation() -> None:
    digests = []
    for options in ({"bits": 4}, {"bits": 8}, {"bits": 4, "group_size": 32}, {"mode": "mxfp4"}, {"mode": "mxfp8"}):
        model = _model()
        nn.quantize(model, **options)
        digests.append(model_fingerprint(model))
    assert len(set(digests)) == len(digests)
    before = model_fingerprint(model)
    model.layers[0].mlp.up_proj.bits = 5
    assert model_fingerprint(model) != before


def test_training_mode() -> None:
    model = _model()
    model.train()
    trained = model_fingerprint(model)
    model.eval()
    assert model_fingerprint(model) != trained


DIFFERENT: list[Any] = [
    *(None, False, True, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, math.nan, math.inf, 1j, "", "1", "None", b"", b"1", "é"),
    *([], (), {}, set(), [1], (1,), {1}, frozenset({1}), {1: 2}, {2: 1}, {1: 1, 2: 2}, [[]], [[], []], [1, 2], [2, 1]),
    *(["ab", "c"], ["a", "bc"], ["abc"], {"a": None}, {"a": {}}, Colour.RED, Colour.BLUE, Path("/a"), Path("/b")),
    *(mx.float16, mx.float32, mx.array(1), mx.array(1.0), mx.array([1]), mx.array([[1]]), mx.zeros((0, 2))),
    *(mx.zeros((2, 0)), mx.array([1, 2]), mx.array([2, 1]), mx.tanh, mx.sigmoid, nn.silu, nn.gelu, nn.gelu_approx),
    *(np.array([1, 2]), np.array([2, 1]), np.array([1, 2], dtype=np.int16), np.float32(1), np.float64(1), np.int64(1)),
    *(deque([1]), deque([2]), deque([1], maxlen=4), range(3), range(4), partial(pow, 2), partial(pow, 3)),
    *(_times(2.0), _times(3.0), mx.compile(_times(2.0)), mx.compile(_times(3.0)), mx.compile(partial(_times, 2.0))),
    *(Settings(1), Settings(2), Settings(1, a=1), Settings(1, b=1), Settings(Settings(1)), [Settings(1).__init__]),
    *([Settings(2).__init__], Holder(1), Holder(2), Holder, Settings, int, len, max, "abc".upper, "abd".upper),
    *(lambda x=1: x, lambda x=2: x, lambda *, x=1: x, lambda *, x=2: x, lambda: 1, lambda: 2, lambda: (1, (2, 3))),
]


def test_every_different_value_counts() -> None:
    digests = {_hold(value) for value in DIFFERENT}
    assert len(digests) == len(DIFFERENT)


def test_attribute_names_and_private_values_count() -> None:
    digests = set()
    for name, value in (("a", 1.0), ("b", 1.0), ("_a", 1.0), ("_a", 2.0), ("_a", mx.array(1.0)), ("_a", mx.array(2.0))):
        holder = Holder(None)
        setattr(holder, name, value)
        digests.add(model_fingerprint(holder))
    assert len(digests) == 6


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)


@settings(max_examples=examples(40), deadline=None)
@given(_VALUES, _VALUES)
def test_digest_is_equal_exactly_for_equal_values(left: Any, right: Any) -> None:
    def canonical(value: Any) -> str:
        if isinstance(value, dict):
            return f"dict{sorted((key, canonical(item)) for key, item in value.items())}"
        return f"list{[*map(canonical, value)]}" if isinstance(value, list) else repr(value)

    assert (_hold(left) == _hold(right)) == (canonical(left) == canonical(right))
    assert _hold(copy.deepcopy(left)) == _hold(left)


def test_order_and_sharing_do_not_count() -> None:
    shared = Settings(1, a=[1, 2])
    assert _hold([shared, shared]) == _hold([Settings(1, a=[1, 2]), Settings(1, a=[1, 2])])
    assert _hold({"a": 1, "b": 2}) == _hold({"b": 2, "a": 1})
    assert _hold(Settings(1, a=1, b=2)) == _hold(Settings(1, b=2, a=1))
    assert _hold(mx.arange(6).reshape(2, 3).T) == _hold(mx.array([[0, 3], [1, 4], [2, 5]]))


def test_cycles() -> None:
    def ring(length: int, mark: int) -> Any:
        first = Settings(mark)
        last = first
        for _ in range(length - 1):
            last.next = Settings(0)
            last = last.next
        last.next = first
        return first

    assert _hold(ring(3, 1)) == _hold(ring(3, 1))
    assert len({_hold(ring(1, 1)), _hold(ring(2, 1)), _hold(ring(3, 1)), _hold(ring(3, 2))}) == 4
    child = Holder(1)
    parent = Holder([child])
    child.parent = [parent]
    assert len(model_fingerprint(parent)) == 64


def test_objects_that_cannot_be_taken_apart() -> None:
    """A lock, a file or a generator says nothing about the KV, and must not stop anyone."""
    with open(os.devnull) as handle:
        for thing in (threading.Lock(), handle, (i for i in range(3)), memoryview(b"abc")):
            assert _hold(thing) == _hold(thing)


def test_object_arrays_are_known_by_their_values() -> None:
    assert _hold(np.array(["ab", 1], dtype=object)) == _hold(np.array(["a" + "b", 1], dtype=object))
    assert _hold(np.array(["ab", 1], dtype=object)) != _hold(np.array(["ab", 2], dtype=object))


def test_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    before = model_fingerprint(model)
    original = llama.Attention.__call__
    monkeypatch.setattr(llama.Attention, "__call__", lambda self, *args: original(self, *args) * 2)
    assert model_fingerprint(model) != before
    monkeypatch.undo()
    assert model_fingerprint(model) == before


def test_classes_without_a_source_file() -> None:
    def typed_in(factor: int) -> Any:
        scope: dict[str, Any] = {"nn": nn, "__name__": "typed_in"}
        exec(f"class M(nn.Module):\n    def __call__(self, x):\n        return x * {factor}", scope)
        return scope["M"]()

    assert model_fingerprint(typed_in(2)) == model_fingerprint(typed_in(2))
    assert model_fingerprint(typed_in(2)) != model_fingerprint(typed_in(3))


def test_source_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own file counts, and what it uses of its package; a file that it does not use does not."""
    package = tmp_path / "own_models"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "helper": "def twice(x):\n    return x * 2\n",
        "model": "import mlx.nn as nn\nfrom .helper import twice\nclass M(nn.Module):\n"
        "    def __call__(self, x):\n        return twice(x)\n",
        "other": "x = 1\n",
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("own_models.model").M()
    before = model_fingerprint(model)
    importlib.import_module("own_models.other")
    assert model_fingerprint(model) == before
    for name, counts in {"other": False, "helper": True, "model": True}.items():
        path = package / f"{name}.py"
        text = path.read_text()
        path.write_text(text + "# changed\n")
        assert (model_fingerprint(model) != before) == counts, name
        path.write_text(text)
    for name in [name for name in sys.modules if name.startswith("own_models")]:
        monkeypatch.delitem(sys.modules, name)


def test_mlx_version(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Holder(1)
    before = model_fingerprint(model)
    monkeypatch.setattr(mx, "__version__", "0.0.1")
    assert model_fingerprint(model) != before


@pytest.mark.parametrize("thing", [None, 1, "model", {}, [nn.Linear(2, 2)], nn.Linear, mx.ones(3)], ids=repr)
def test_things_that_are_no_model(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"must be an mlx.nn.Module, not {type(thing).__name__}"):
        model_fingerprint(thing)
