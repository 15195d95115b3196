"""A scheduler of oMLX over this package's managers: real models of every family, from arrival to store and restart.

Whatever a request is served from, each of its logits has the bits of a run without a cache whose chunks had the same
shapes; hits are as long as whole blocks allow; and when all is done no reference and no snapshot is left.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import harness
from conftest import EXAMPLES, child_environment, make_tiny_llama
from omlx_families import BLOCK, FAMILIES, Family, Shadow, text
from omlx_scheduler import TEXT, Salts, Scheduler
from runs import assert_same_logits

from prefixcache.paged_ssd_cache import SharedHotCacheBudget

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module", autouse=True)
def no_compiler() -> Iterator[None]:
    """On a CPU, MLX calls the system's compiler for each function that a model wants to be compiled: seconds each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


# The others run too, where there is more time.
LONG = {"lists of rows", "lists of a state and rows", "lists of a state and a window", "windows as long as a block"}


def most_families() -> Any:
    """Of each kind of layer one model; the rest are long tests."""
    marks = {name: [pytest.mark.long] if name in LONG else [] for name in sorted(FAMILIES)}
    values = [pytest.param(FAMILIES[name], marks=marks[name], id=name) for name in marks]
    return pytest.mark.parametrize("family", values)


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


class TestConversations:
    def test_turns_and_a_fork(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            first, answer = text(5 * size + 3), text(2 * size, seed=3)
            assert shadow.serve(engine, first, answer) == 0
            # The prompt's five blocks and two of the answer; three tokens are of no whole block.
            second = [*first, *answer, *text(size + 4, seed=5)]
            assert shadow.serve(engine, second, text(5, seed=7)) == 7 * size
            # Leaves the first inside its third block.
            assert shadow.serve(engine, [*first[: 2 * size + size // 2], *text(2 * size, seed=9)]) == 2 * size
            # The second turn is eight blocks and twelve tokens.
            assert shadow.serve(engine, [*second, *text(7, seed=7)], text(3, seed=1)) == 8 * size
            assert shadow.serve(engine, text(4 * size, seed=11)) == 0
            assert_at_rest(engine)

    def test_a_prompt_that_is_stored_whole(self, family: Family, tmp_path: Path) -> None:
        """One token must be run at least. What only stands where it was captured is computed anew."""
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt = text(6 * size + 1)
            assert shadow.serve(engine, prompt) == 0
            same = engine.serve(prompt[: 4 * size], text(size, seed=2))
            shadow.check(same)
            assert same.full_hit
            assert same.cached_tokens == (4 * size - 1 if family.sliceable else 0)
            assert_at_rest(engine)
            # Its blocks are retained still.
            assert shadow.serve(engine, [*prompt[: 4 * size], 1, 2, 3]) == 4 * size
            assert shadow.serve(engine, prompt) == 6 * size
            assert_at_rest(engine)

    @pytest.mark.parametrize("answered", [3, pytest.param(40, marks=pytest.mark.long)])
    def test_a_prompt_of_whole_blocks(self, family: Family, tmp_path: Path, answered: int) -> None:
        """Between prefill and decoding no snapshot is taken: a state is not known there, rows are."""
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt, answer = text(4 * size), text(answered, seed=3)
            shadow.serve(engine, prompt, answer)
            found = shadow.serve(engine, [*prompt, *text(5, seed=4)])
            assert found == (4 * size if family.sliceable else 3 * size)
            assert_at_rest(engine)

    def test_a_first_prompt_of_one_block(self, family: Family, tmp_path: Path) -> None:
        """No snapshot at all: the state that the request ends with is not that of the block's end."""
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt = text(size)
            shadow.serve(engine, prompt, text(3, seed=3))
            found = shadow.serve(engine, [*prompt, *text(5, seed=4)])
            assert found == (size if family.sliceable else 0)
            assert_at_rest(engine)

    def test_a_stop_token_that_was_not_fed(self, family: Family, tmp_path: Path) -> None:
        """The last block lacks its last row: it is no whole block."""
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt, answer = text(3 * size + 5), text(size - 5, seed=3)
            shadow.serve(engine, prompt, answer, feed_last=False)
            assert shadow.serve(engine, [*prompt, *answer, *text(5, seed=4)]) == 3 * size
            assert_at_rest(engine)

    def test_thinking_models_keep_the_prompt(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt, answer = text(3 * size + 5), text(size, seed=3)
            shadow.serve(engine, prompt, answer, thinking=True)
            assert shadow.serve(engine, [*prompt, *answer, 1, 2]) == 3 * size
            assert_at_rest(engine)

    @most_families()
    def test_short_prompts(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            for length in (1, 2, size - 1):
                assert shadow.serve(engine, text(length), [5]) == 0
            assert shadow.serve(engine, text(size + 1)) == 0
            assert shadow.serve(engine, text(size + 2)) == size
            assert_at_rest(engine)

    def test_larger_chunks(self, family: Family, tmp_path: Path) -> None:
        """Chunks of several blocks, for models that need no snapshots."""
        engine, shadow, size = opened(family, tmp_path, step=2 * 16 + 8)
        with engine:
            prompt = text(6 * size + 9)
            assert shadow.serve(engine, prompt, text(4, seed=2)) == 0
            assert shadow.serve(engine, [*prompt[: 3 * size + 1], *text(30, seed=6)]) == 3 * size
            assert shadow.serve(engine, [*prompt, 7]) == 6 * size
            assert_at_rest(engine)


class TestEnds:
    """Requests that end otherwise than they should leave nothing behind, and harm no other."""

    @most_families()
    def test_aborted_anywhere(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt = text(4 * size + 5)
            shadow.serve(engine, prompt)
            longer = [*prompt, *text(2 * size, seed=3)]
            for stage in range(4):
                request = engine.admit(longer)
                if stage > 0:
                    engine.prefill(request, upto=None if stage > 1 else 5 * size)
                if stage > 2:
                    engine.decode(request, text(size, seed=5))
                shadow.check(request)
                assert request.cached_tokens == 4 * size
                engine.abort(request)
                assert_at_rest(engine)
            assert shadow.serve(engine, longer) == 4 * size

    def test_rejected_after_the_fetch(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt = text(4 * size + 5)
            shadow.serve(engine, prompt)
            for _ in range(5):
                request = engine.admit([*prompt, 1])
                assert request.cached_tokens == 4 * size
                engine.reject(request)
                assert_at_rest(engine)
            assert shadow.serve(engine, [*prompt, 2, 3]) == 4 * size

    def test_recovery_forgets_memory_and_keeps_files(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt = text(4 * size + 5)
            shadow.serve(engine, prompt)
            lost = engine.admit([*prompt, 1])
            engine.prefill(lost)
            engine.recover()
            assert engine.paged.stats.allocated_blocks == 1
            assert_at_rest(engine)
            assert shadow.serve(engine, [*prompt, 2, 3]) == 4 * size
            assert_at_rest(engine)

    @most_families()
    def test_many_requests_in_flight(self, family: Family, tmp_path: Path) -> None:
        """Several requests on the same prefix, stored while others run, ended in another order than they began."""
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt = text(3 * size + 5)
            shadow.serve(engine, prompt)
            others = [[*prompt[: (1 + i % 3) * size + 2], *text(size + i, seed=20 + i)] for i in range(6)]
            running = [engine.admit(other) for other in others]
            assert [request.cached_tokens for request in running] == [(1 + i % 3) * size for i in range(6)]
            for request in running:
                engine.prefill(request)
            for number, request in enumerate(reversed(running)):
                if number % 3 == 2:
                    engine.abort(request)
                else:
                    engine.decode(request, text(4, seed=number))
                    engine.finish(request)
            for request in running:
                shadow.check(request)
            assert_at_rest(engine)
            assert shadow.serve(engine, prompt) == 3 * size


@most_families()
def test_pool_of_few_blocks(family: Family, tmp_path: Path) -> None:
    """A pool that is full of retained blocks has room: new prompts are stored, and nothing wrong is ever found."""
    engine, shadow, size = opened(family, tmp_path, max_blocks=9, initial_blocks=4)
    with engine:
        for number in range(8):
            prompt = text(3 * size + 2, seed=30 + number)
            assert shadow.serve(engine, prompt) == 0
            assert shadow.serve(engine, [*prompt, 1]) == 3 * size
            assert_at_rest(engine)
        # All of them are on the SSD.
        for number in range(8):
            assert shadow.serve(engine, text(3 * size + 2, seed=30 + number)) == 3 * size
        assert engine.paged.stats.total_blocks <= 9
        assert_at_rest(engine)


def test_fork(tmp_path: Path) -> None:
    """A second request on the blocks of one that runs: each holds them for itself."""
    engine, shadow, size = opened(FAMILIES["rows"], tmp_path)
    with engine:
        prompt = text(3 * size + 5)
        shadow.serve(engine, prompt)
        request = engine.admit([*prompt, 1])
        child = engine.prefix.fork_cache(request.rid, "child")
        assert child.num_tokens == 3 * size
        blocks = [engine.paged.allocated_blocks[i] for i in child.block_ids]
        assert [block.ref_count for block in blocks] == [2, 2, 2]
        engine.abort(request)
        assert [block.ref_count for block in blocks] == [1, 1, 1]
        assert [cache.offset for cache in engine.prefix.reconstruct_cache(child)] == [3 * size] * 3
        engine.prefix.release_cache("child")
        assert_at_rest(engine)
        assert shadow.serve(engine, [*prompt, 1]) == 3 * size


class TestSalts:
    """An image's tokens say nothing about what it shows: rows at and behind it differ with its hash."""

    SIZE = 16

    def ask(self, images: dict[int, int], length: int = 100) -> tuple[list[int], list[int], Salts]:
        """A prompt with images of ten tokens each, by start, and what the model is fed."""
        tokens, inputs = text(length), text(length)
        ranges, seen = [], ""
        for start, image in sorted(images.items()):
            tokens[start : start + 10] = [126] * 10
            inputs[start : start + 10] = text(10, seed=100 + image)
            seen += f"{image};"
            ranges.append((start, (seen,)))
        return tokens, inputs, Salts(extra_key_ranges=ranges) if ranges else TEXT

    def serve(self, engine: Scheduler, shadow: Shadow, images: dict[int, int], salts: Salts | None = None) -> int:
        tokens, inputs, own = self.ask(images)
        return shadow.serve(engine, tokens, text(4, seed=1), salts or own, inputs=inputs)

    def test_segments(self, tmp_path: Path) -> None:
        engine, shadow, _ = opened(FAMILIES["rows"], tmp_path)
        with engine:
            assert self.serve(engine, shadow, {20: 1, 60: 2}) == 0
            assert self.serve(engine, shadow, {20: 1, 60: 2}) == 96
            # Another second image: the blocks that end at or before token 60 are kept.
            assert self.serve(engine, shadow, {20: 1, 60: 3}) == 48
            # Another first image, and none at all.
            assert self.serve(engine, shadow, {20: 4, 60: 2}) == 16
            assert self.serve(engine, shadow, {}) == 16
            assert_at_rest(engine)

    def test_one_image(self, tmp_path: Path) -> None:
        engine, shadow, _ = opened(FAMILIES["rows"], tmp_path)
        with engine:
            one, two = (Salts((image,), 32) for image in ("a", "b"))
            assert self.serve(engine, shadow, {32: 1}, one) == 0
            assert self.serve(engine, shadow, {32: 2}, two) == 32
            assert self.serve(engine, shadow, {32: 1}, one) == 96
            assert self.serve(engine, shadow, {32: 2}, two) == 96
            whole = Salts(("a",))
            assert self.serve(engine, shadow, {32: 1}, whole) == 0
            assert_at_rest(engine)


class TestManyModels:
    def test_a_second_model_in_the_directory(self, tmp_path: Path) -> None:
        """Of other layers, and of the same layers with other weights; both at once, and after a restart."""
        models = {
            "one": make_tiny_llama(),
            "two": make_tiny_llama(seed=8),
            "three": FAMILIES["states and rows"].model,
        }
        shadows = {name: Shadow(model, 16) for name, model in models.items()}
        prompt = text(5 * 16 + 3)
        for found in (0, 80):
            engines = {name: Scheduler(model, tmp_path, model_name=name) for name, model in models.items()}
            for name, engine in engines.items():
                assert shadows[name].serve(engine, prompt, text(4, seed=1)) == found
            for name, engine in engines.items():
                assert shadows[name].serve(engine, [*prompt, 1]) == 80
                assert_at_rest(engine)
            for engine in engines.values():
                engine.close()

    @pytest.mark.parametrize("draft", ["rows", "states and rows", "windows as long as a block"])
    def test_a_draft_model_shares_the_ssd_manager(self, tmp_path: Path, draft: str) -> None:
        target, shadow, _ = opened(FAMILIES["rows"], tmp_path, model_name="target")
        small = make_tiny_llama(layers=1, seed=9) if draft == "rows" else FAMILIES[draft].model
        with target, Scheduler(small, tmp_path, model_name="draft", ssd=target.ssd) as second:
            behind = Shadow(small, second.block_size)
            prompt = text(5 * BLOCK + 3)
            assert shadow.serve(target, prompt) == 0
            assert behind.serve(second, prompt) == 0
            for engine, its in ((target, shadow), (second, behind)) * 2:
                assert its.serve(engine, [*prompt, 1]) == 5 * BLOCK
            target.recover()
            assert behind.serve(second, [*prompt, 2]) == 5 * BLOCK
            second.recover()
            assert shadow.serve(target, [*prompt, 3]) == 5 * BLOCK
            # The target's form changes: its blocks are gone, the draft's are not.
            target.refresh_layer_signature(["QuantizedKVCache"] * 3)
            assert behind.serve(second, [*prompt, 4]) == 5 * BLOCK
            assert_at_rest(target)
            assert_at_rest(second)

    def test_another_structure_under_the_same_name(self, tmp_path: Path) -> None:
        """Layers, their types, or the size of blocks changed between two starts: nothing stale is served."""
        prompt = text(5 * 16 + 3)
        engines = [
            (make_tiny_llama(), 16),
            (make_tiny_llama(layers=2), 16),
            (FAMILIES["states and rows"].model, 16),
            (make_tiny_llama(), 8),
        ]
        for model, size in engines:
            with Scheduler(model, tmp_path, block_size=size) as engine:
                shadow = Shadow(model, size)
                assert shadow.serve(engine, prompt) == 0
                assert shadow.serve(engine, [*prompt, 1]) == 80
                assert_at_rest(engine)


class TestForms:
    @most_families()
    def test_states_as_this_mlx_lm_has_them(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path, raw=True)
        with engine:
            first, answer = text(4 * size + 3), text(2 * size, seed=3)
            assert shadow.serve(engine, first, answer) == 0
            assert shadow.serve(engine, [*first, *answer, *text(size + 4, seed=5)], text(size, seed=7)) == 6 * size
            assert shadow.serve(engine, [*first[: 2 * size + 5], *text(9, seed=9)]) == 2 * size
            assert_at_rest(engine)

    def test_quantised_rows(self, tmp_path: Path) -> None:
        """Rows in another form are another configuration's, in the same directory and under the same name."""
        model, form, prompt = make_tiny_llama(), (8, 32, 0), text(5 * 16 + 3)
        plain = Shadow(model, 16)
        for found in (0, 80):
            with Scheduler(model, tmp_path) as engine:
                assert plain.serve(engine, prompt, [1, 2]) == found
                assert_at_rest(engine)
        quantised = Shadow(model, 16, form)
        for found in (0, 80, 80):
            with Scheduler(model, tmp_path, kv_format=form, layer_types=["QuantizedKVCache"] * 3) as engine:
                assert quantised.serve(engine, prompt, [1, 2]) == found
                assert_at_rest(engine)
        with Scheduler(model, tmp_path) as engine:
            assert plain.serve(engine, prompt, [1, 2]) == 80

    @pytest.mark.skipif(harness.MLX_LM < (0, 32), reason="mlx-lm before 0.32 loses rows of short chunks")
    @pytest.mark.parametrize("raw", [True, False])
    def test_chunks_of_attention(self, tmp_path: Path, raw: bool) -> None:
        """Schedulers take these layers for sliceable and keep no snapshots: they stand only where a request ended. In
        mlx-lm's older form a state does not tell where that is."""
        engine, shadow, size = opened(Family(lambda: harness.build("llama4")), tmp_path, raw=raw)
        assert not engine.stateful
        with engine:
            prompt = text(5 * size - 4)
            assert shadow.serve(engine, prompt, [1, 2, 3, 4]) == 0
            assert shadow.serve(engine, [*prompt, 1, 2, 3, 4, *text(9, seed=2)]) == (5 * size if raw else 0)
            assert shadow.serve(engine, [*prompt, 7, 8]) == 0
            assert_at_rest(engine)

    def test_restored_caches_join_a_batch(self, family: Family, tmp_path: Path) -> None:
        """Merged with others they give the bits that caches of a run without a prefix cache give there."""
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt = text(4 * size + 3)
            shadow.serve(engine, prompt)
            requests = [engine.admit([*prompt[: k * size + 2], *text(9, seed=k)]) for k in (2, 4)]
            assert [request.cached_tokens for request in requests] == [2 * size, 4 * size]
            for request in requests:
                engine.prefill(request)
            plain = [shadow.check(request) for request in requests]
            ours, theirs = (
                batch_logits(family.model, caches) for caches in ([request.caches for request in requests], plain)
            )
            assert_same_logits(ours, theirs, "a batch")
            for request in requests:
                engine.abort(request)
            assert_at_rest(engine)


def batch_logits(model: Any, sequences: list[list[Any]], steps: int = 5) -> list[mx.array]:
    batch = [layer[0].merge(list(layer)) for layer in zip(*sequences, strict=True)]
    logits = [model(mx.array([[7 + step], [9 + step]]), cache=batch) for step in range(steps)]
    mx.eval(logits)
    return logits


class TestMemory:
    MODES = {
        "through": {},
        "back": {"hot_cache_max_bytes": 64 << 20},
        "little": {"hot_cache_max_bytes": 200 << 10},
        "ram only": {"hot_cache_max_bytes": 64 << 20, "hot_cache_only": True},
    }

    @most_families()
    @pytest.mark.parametrize("mode", ["back", "little", "ram only", pytest.param("through", marks=pytest.mark.long)])
    def test_modes(self, family: Family, tmp_path: Path, mode: str) -> None:
        engine, shadow, size = opened(family, None if mode == "ram only" else tmp_path, **self.MODES[mode])
        with engine:
            prompt, answer = text(5 * size + 3), text(size, seed=3)
            assert shadow.serve(engine, prompt, answer) == 0
            for pressure in (False, True, False):
                request = engine.admit([*prompt, 1], pressure=pressure)
                engine.prefill(request)
                shadow.check(request)
                assert request.cached_tokens == 5 * size
                engine.abort(request)
            found = shadow.serve(engine, [*prompt, *answer, *text(size, seed=4)], pressure=True)
            # Snapshots in memory do not say how many tokens they are of. Where nothing else does, the newest is lost.
            unknown = mode == "ram only" and family in (FAMILIES["states alone"], FAMILIES["states and rows"])
            assert found == (5 if unknown else 6) * size
            assert_at_rest(engine)
        if mode == "ram only":
            return
        engine, _, _ = opened(family, tmp_path, **self.MODES[mode])
        with engine:
            assert shadow.serve(engine, [*prompt, 2]) == 5 * size

    @most_families()
    def test_pressure_while_requests_run(self, family: Family, tmp_path: Path) -> None:
        """A third thread shrinks and clears the hot tier and reads statistics all the time."""
        engine, shadow, size = opened(family, tmp_path, hot_cache_max_bytes=4 << 20)
        done, errors = threading.Event(), []

        def administer() -> None:
            dice = random.Random(5)
            try:
                while not done.wait(0.001):
                    blocks = list(engine.paged.allocated_blocks.values())
                    protected = {block.block_hash for block in blocks if block.ref_count and block.block_hash}
                    engine.ssd.shrink_hot_cache_to(dice.choice([0, 1 << 16, 1 << 20]), protected_hashes=protected)
                    if dice.random() < 0.1:
                        engine.ssd.clear_hot_cache()
                    engine.ssd.get_stats(), engine.ssd.get_stats_dict()
                    engine.prefix.get_stats_dict(), engine.paged.get_stats()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        admin = threading.Thread(target=administer)
        with engine:
            admin.start()
            try:
                prompt = text(3 * size + 5)
                for number in range(8):
                    asked = [*prompt[: (number % 3 + 1) * size + 3], *text(size, seed=40 + number)]
                    request = engine.admit(asked, pressure=number % 2 == 1)
                    engine.prefill(request)
                    engine.decode(request, text(3, seed=number))
                    shadow.check(request)
                    assert request.cached_tokens % size == 0
                    engine.finish(request, pressure=number % 4 == 3)
                    engine.settle()
                    shadow.note(request)
            finally:
                done.set()
                admin.join()
            assert errors == []
            assert_at_rest(engine)

    def test_a_budget_for_two_engines(self, tmp_path: Path) -> None:
        budget = SharedHotCacheBudget(300 << 10)
        families = [FAMILIES["rows"], FAMILIES["states and rows"]]
        engines = [
            opened(family, tmp_path, model_name=str(number), hot_cache_budget=budget)
            for number, family in enumerate(families)
        ]
        for number in range(6):
            for engine, shadow, size in engines:
                prompt = text(3 * size + 2, seed=60 + number)
                assert shadow.serve(engine, prompt, [1]) == 0
                assert budget.total_bytes <= 300 << 10
        budget.shrink_to(0)
        assert budget.total_bytes == 0
        for number in range(6):
            for engine, shadow, size in engines:
                assert shadow.serve(engine, text(3 * size + 2, seed=60 + number)) == 3 * size
                assert_at_rest(engine)
        for engine, _, _ in engines:
            engine.close()


class Visitors:
    """Requests in random order over prompts that share beginnings: served, dropped, several at once, over restarts,
    in a pool, a RAM tier and a disk that are too small for all of them."""

    def __init__(self, family: Family, directory: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.family, self.directory = family, directory
        self.shadow = Shadow(family.model, BLOCK, canonical=True)
        self.prompts: list[list[int]] = [[]]
        self.running: list[Any] = []
        self.hits = 0
        self.engine = self.opened()

    def opened(self) -> Scheduler:
        sizes = {"max_size_bytes": 3 << 20, "hot_cache_max_bytes": self.dice.choice([0, 1 << 18, 1 << 22])}
        return Scheduler(self.family.model, self.directory, max_blocks=24, initial_blocks=4, **sizes)

    def visit(self) -> None:
        what = self.dice.choices(["new", "go on", "leave", "recover", "restart"], [10, 12, 3, 1, 1])[0]
        if what == "new" and len(self.running) < 4:
            self.admit()
        elif what in ("go on", "leave") and self.running:
            self.end(self.running.pop(self.dice.randrange(len(self.running))), what == "leave")
        elif what in ("recover", "restart"):
            while self.running:
                self.end(self.running.pop(), leave=True)
            self.engine.recover() if what == "recover" else self.engine.close()
            self.engine = self.engine if what == "recover" else self.opened()

    def admit(self) -> None:
        before = self.dice.choice(self.prompts[-8:])
        shared = before[: self.dice.randint(0, len(before))]
        fresh = [self.dice.randint(1, 125) for _ in range(self.dice.randint(2, 3 * BLOCK))]
        prompt = [*shared, *fresh][: 5 * BLOCK + 7]
        # Never whole blocks, so that no block holds rows of a prompt that were run one by one.
        prompt = prompt if len(prompt) % BLOCK else prompt[:-1]
        self.prompts.append(prompt)
        request = self.engine.admit(prompt, pressure=self.dice.random() < 0.2)
        assert request.cached_tokens % BLOCK == 0
        self.hits += request.cached_tokens > 0
        self.running.append(request)

    def end(self, request: Any, leave: bool) -> None:
        if leave and self.dice.random() < 0.5:
            return self.engine.abort(request)
        self.engine.prefill(request)
        self.engine.decode(request, [self.dice.randint(1, 125) for _ in range(self.dice.randint(0, 9))])
        self.shadow.check(request)
        if leave:
            return self.engine.abort(request)
        return self.engine.finish(request, pressure=self.dice.random() < 0.2)

    def close(self) -> None:
        while self.running:
            self.end(self.running.pop(), leave=False)
        assert_at_rest(self.engine)
        self.engine.close()


@most_families()
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_any_order(family: Family, tmp_path: Path, seed: int) -> None:
    visitors = Visitors(family, tmp_path, seed)
    for _ in range(300 if seed else 60):
        visitors.visit()
    visitors.close()
    assert visitors.hits >= 5


CHILD = """
import hashlib, json, sys, time
import mlx.core as mx
from pathlib import Path
from omlx_families import FAMILIES
from omlx_scheduler import Scheduler

mx.disable_compile()
order = json.load(sys.stdin)
family = FAMILIES[order["family"]]
engine = Scheduler(family.model, Path(sys.argv[1]), **order["options"])
for prompt, answer in order["requests"]:
    request = engine.serve(prompt, answer)
    bits = b"".join(bytes(memoryview(mx.contiguous(x).view(mx.uint8))) for x in request.logits)
    print(json.dumps([request.cached_tokens, hashlib.sha256(bits).hexdigest()]), flush=True)
if order["wait"]:
    time.sleep(60)
engine.close()
"""


def digest(logits: list[mx.array]) -> str:
    return hashlib.sha256(b"".join(bytes(memoryview(mx.contiguous(x).view(mx.uint8))) for x in logits)).hexdigest()


def child(directory: Path, family: str, requests: list[Any], wait: bool = False, **options: Any) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)],
        env=child_environment(HERE, EXAMPLES),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    json.dump({"family": family, "requests": requests, "wait": wait, "options": options}, process.stdin)
    process.stdin.close()
    return process


RESTARTED = ["rows", "states and rows", "windows of half a block", pytest.param("states alone", marks=pytest.mark.long)]
KILLED = [pytest.param(0), pytest.param(64 << 20, marks=pytest.mark.long)]


class TestProcesses:
    @pytest.mark.parametrize("name", RESTARTED)
    def test_restart(self, tmp_path: Path, name: str) -> None:
        engine, shadow, size = opened(FAMILIES[name], tmp_path)
        prompt, answer = text(4 * size + 3), text(5, seed=3)
        with engine:
            shadow.serve(engine, prompt, answer)
            here = engine.serve([*prompt, 1, 2], [3, 4])
            shadow.check(here)
        process = child(tmp_path, name, [[[*prompt, 1, 2], [3, 4]]])
        answered = [json.loads(line) for line in process.stdout]
        assert process.wait() == 0
        assert answered == [[4 * size, digest(here.logits)]]

    @pytest.mark.parametrize("name", ["rows", "states and rows"])
    @pytest.mark.parametrize("hot", KILLED)
    def test_killed(self, tmp_path: Path, name: str, hot: int) -> None:
        """After the answer, at once: whole blocks or none, from the first on, and nothing wrong among them."""
        prompts = [text(4 * BLOCK + 3, seed=seed) for seed in (50, 51)]
        process = child(tmp_path, name, [[prompt, [5]] for prompt in prompts], wait=True, hot_cache_max_bytes=hot)
        for _ in prompts:
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        # What the dead process computed is computed again, and stored elsewhere.
        twin, shadow, size = opened(FAMILIES[name], tmp_path / "twin", model_name="twin")
        with twin:
            for prompt in prompts:
                shadow.serve(twin, prompt, [5])
        with Scheduler(FAMILIES[name].model, tmp_path) as engine:
            for prompt in prompts:
                found = shadow.serve(engine, [*prompt, 1, 2])
                assert found % size == 0
                assert found <= 4 * size
                assert shadow.serve(engine, [*prompt, 1, 3]) == 4 * size
            assert_at_rest(engine)
