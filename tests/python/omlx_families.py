"""One tiny model of each family of caches, as the scheduler's tests run them, and what their requests must answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import caches as looks
from architectures import harness
from conftest import make_tiny_llama
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from omlx_scheduler import Request, Scheduler
from runs import KvFormat, assert_same_logits
from support import ON_CPU

VOCABULARY = harness.VOCABULARY
BLOCK = 16


@dataclass(frozen=True)
class Family:
    """``sliceable``: rows alone, of which any block can be cut."""

    build: Callable[[], Any]
    sliceable: bool = False

    @functools.cached_property
    def model(self) -> Any:
        return self.build()


def architecture(name: str, **sizes: Any) -> Callable[[], Any]:
    """A tiny model of mlx-lm's module ``name``, with some of its sizes replaced."""

    def build() -> Any:
        module = harness.import_model(name)
        mx.random.seed(3)
        model = module.Model(module.ModelArgs.from_dict({**harness.configs()[name].args, **sizes}))
        model.set_dtype(mx.float32)
        harness.randomize(model)
        model.eval()
        mx.eval(model.parameters())
        return model

    return build


FAMILIES: dict[str, Family] = {
    "rows": Family(make_tiny_llama, sliceable=True),
    "lists of rows": Family(architecture("deepseek_v32"), sliceable=True),
    "windows as long as a block": Family(architecture("gpt_oss", sliding_window=BLOCK)),
    "windows of half a block": Family(architecture("gemma3_text", sliding_window=8, num_hidden_layers=3)),
    "states and rows": Family(architecture("qwen3_next")),
    "lists of a state and rows": Family(architecture("falcon_h1")),
    "lists of a state and a window": Family(architecture("baichuan_m1", sliding_window=BLOCK)),
    "states alone": Family(architecture("mamba")),
}


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens that do not repeat with a short period."""
    return [(7919 * (i + 1) * (i + 3 + seed) + 31 * seed) % (VOCABULARY - 1) for i in range(length)]


class Shadow:
    """What requests must have answered: runs without a prefix cache, in chunks of the same shapes.

    ``note`` says how the rows of a request came to be, ``check`` runs them again. Rows that are stored already stay
    those of the first request that had them. ``canonical``: nothing needs to be noted, since all that can be hit was
    run in chunks of one block each.
    """

    def __init__(self, model: Any, block_size: int, kv_format: KvFormat | None = None, canonical: bool = False) -> None:
        self._canonical = canonical
        self._model = model
        self._kv_format = kv_format
        self._size = block_size
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def check(self, request: Request) -> list[Any]:
        """Every logit since the hit has the bits of a run that had none. Returns the caches of that run."""
        caches, start, expected = self._standing(request), request.cached_tokens, []
        for end in request.ends:
            expected.append(self._run(caches, request.inputs[start:end]))
            start = end
        assert_same_logits(request.logits, expected, f"{request.rid}, restored at {request.cached_tokens}")
        return caches

    def _standing(self, request: Request) -> list[Any]:
        """Caches that stand where the request's hit does, without a prefix cache."""
        n, caches, start = request.cached_tokens, make_prompt_cache(self._model), 0
        for end in self._base(request):
            # A chunk as long as that in which the rows were made, whatever came behind them: a GPU rounds by length.
            inputs = list(request.inputs[start:end])
            self._run(caches, inputs + [0] * (end - start - len(inputs)))
            start = end
        caches = looks.in_temporal_order(looks.cut(caches, n) if start > n else caches)
        # oMLX's callers get rows without room behind them.
        return caches if ON_CPU else looks.without_room(caches)

    def _run(self, caches: list[Any], inputs: Sequence[int]) -> mx.array:
        logits = self._model(mx.array([inputs]), cache=caches)
        if self._kv_format is not None:
            maybe_quantize_kv_cache(caches, self._kv_format[2], *self._kv_format[1::-1])
        mx.eval(logits)
        looks.evaluate(caches)
        return logits

    def note(self, request: Request) -> None:
        """To be called when the request has been stored."""
        if request.full_hit and request.cached_tokens:
            return  # its first new row was computed a second time: no run without a cache does that
        ends = [*self._base(request), *request.ends]
        for boundary in range(self._size, request.n + 1, self._size):
            cover = next(end for end in ends if end >= boundary)
            prefix = tuple(request.inputs[:boundary])
            self._ends.setdefault(prefix, [end for end in ends if end <= cover])

    def _base(self, request: Request) -> list[int]:
        n = request.cached_tokens
        n += n > 0 and request.full_hit
        if self._canonical:
            return list(range(self._size, n + 1, self._size))
        return self._ends[tuple(request.inputs[:n])] if n else []

    def serve(
        self, engine: Scheduler, prompt: Sequence[int], answer: Sequence[int] = (), *args: Any, **how: Any
    ) -> int:
        """A whole request, checked. Returns how many of its tokens were restored."""
        request = engine.serve(prompt, answer, *args, **how)
        self.check(request)
        self.note(request)
        return request.cached_tokens


# Of each kind of layer one model; the rest are long tests.
MOST = ("rows", "states alone", "states and rows", "windows of half a block")


def most_families(short: Collection[str] = MOST) -> Any:
    """Every family, those in ``short`` also in the short form."""
    values = [
        pytest.param(FAMILIES[name], marks=[] if name in short else pytest.mark.long, id=name)
        for name in sorted(FAMILIES)
    ]
    return pytest.mark.parametrize("family", values)


def two_families() -> Any:
    """For what depends little on the layers: without states and with them."""
    return most_families(("rows", "states and rows"))


def opened(family: Family, directory: Path | None, **options: Any) -> tuple[Scheduler, Shadow, int]:
    engine = Scheduler(family.model, directory, **options)
    return engine, Shadow(family.model, engine.block_size), engine.block_size


def assert_at_rest(engine: Scheduler) -> None:
    """No request holds anything: every block is free or retained, every count of the pool agrees with its blocks."""
    engine.settle()
    paged = engine.paged
    held = {block.block_id: block.ref_count for block in paged.allocated_blocks.values() if not block.is_null}
    assert set(held.values()) <= {0}, paged.get_ref_count_summary()
    assert len(engine.prefix) == 0
    stats = paged.get_stats()
    assert stats.allocated_blocks == len(held) + 1
    assert stats.free_blocks == paged.free_blocks == len(paged.free_block_queue.get_all_free_blocks())
    assert stats.total_blocks == stats.allocated_blocks + stats.free_blocks
    assert stats.shared_blocks == 0
    if engine.boundaries is not None:
        assert list((engine.directory / "_boundary_snapshots").rglob("*.safetensors")) == []
        assert not any(engine.boundaries.has(rid, count) for rid, count in engine.captured)
