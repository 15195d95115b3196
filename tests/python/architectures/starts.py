"""Start values for models whose random weights would not do."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def started(change: Callable[[Any], None]) -> Callable[[ModuleType], None]:
    """A shim: every new ``Model`` of the module goes through ``change`` first, and vectors stay near what that sets."""

    def shim(module: ModuleType) -> None:
        class Model(module.Model):
            def __init__(self, args: Any) -> None:
                super().__init__(args)
                change(self)

        module.Model = Model

    return shim


# States that keep early tokens, as trained ones do: with random weights they would forget them within 20 tokens.
def slow_mamba(model: Any) -> None:
    for layer in model.layers:
        layer.mixer.dt_proj.bias = layer.mixer.dt_proj.bias - 5.0


def slow_recurrent_gemma(model: Any) -> None:
    for layer in model.layers:
        if layer.temporal_block_type == "recurrent":
            unit = layer.temporal_block.rg_lru
            unit.recurrent_param = unit.recurrent_param - 6.0


def slow_rwkv7(model: Any) -> None:
    for layer in model.layers:
        last = layer.attn.w_lora.lora[2]
        last.bias = last.bias - 5.0
