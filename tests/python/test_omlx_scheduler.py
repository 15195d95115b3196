"""A scheduler of oMLX over this package's managers: real models of every family, from arrival to store.

Whatever a request is served from, each of its logits has the bits of a run without a cache whose chunks had the same
shapes; hits are as long as whole blocks allow; and when all is done no reference and no snapshot is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import harness
from conftest import make_tiny_llama
from omlx_families import (
    FAMILIES,
    Family,
    Shadow,
    architecture,
    assert_at_rest,
    most_families,
    opened,
    text,
    two_families,
)
from omlx_scheduler import TEXT, Salts, Scheduler
from runs import assert_same_logits


@pytest.fixture(scope="module", autouse=True)
def no_compiler() -> Iterator[None]:
    """On a CPU, MLX calls the system's compiler for each function that a model wants to be compiled: seconds each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


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

    @most_families()
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

    @most_families()
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

    @most_families()
    def test_a_first_prompt_of_one_block(self, family: Family, tmp_path: Path) -> None:
        """No snapshot at all: the state that the request ends with is not that of the block's end."""
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt = text(size)
            shadow.serve(engine, prompt, text(3, seed=3))
            found = shadow.serve(engine, [*prompt, *text(5, seed=4)])
            assert found == (size if family.sliceable else 0)
            assert_at_rest(engine)

    @most_families()
    def test_a_stop_token_that_was_not_fed(self, family: Family, tmp_path: Path) -> None:
        """The last block lacks its last row: it is no whole block."""
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt, answer = text(3 * size + 5), text(size - 5, seed=3)
            shadow.serve(engine, prompt, answer, feed_last=False)
            assert shadow.serve(engine, [*prompt, *answer, *text(5, seed=4)]) == 3 * size
            assert_at_rest(engine)

    @most_families()
    def test_thinking_models_keep_the_prompt(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            prompt, answer = text(3 * size + 5), text(size, seed=3)
            shadow.serve(engine, prompt, answer, thinking=True)
            assert shadow.serve(engine, [*prompt, *answer, 1, 2]) == 3 * size
            assert_at_rest(engine)

    @two_families()
    def test_short_prompts(self, family: Family, tmp_path: Path) -> None:
        engine, shadow, size = opened(family, tmp_path)
        with engine:
            for length in (1, 2, size - 1):
                assert shadow.serve(engine, text(length), [5]) == 0
            assert shadow.serve(engine, text(size + 1)) == 0
            assert shadow.serve(engine, text(size + 2)) == size
            assert_at_rest(engine)

    @most_families()
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

    @two_families()
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

    @two_families()
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

    @most_families()
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

    @two_families()
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


@two_families()
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

    @pytest.mark.parametrize(
        ("window", "found"), [(5, [3, 3]), pytest.param(24, [3, 3], marks=pytest.mark.long), (40, [3, 4])]
    )
    def test_windows_that_blocks_do_not_fit(self, tmp_path: Path, window: int, found: list[int]) -> None:
        """Rows of a window are found in as many blocks as it reaches over. One of 40 tokens that stood at block 5 has
        all but the first rows that it needs to stand at block 4; the snapshot of block 3 has these."""
        family = Family(architecture("gpt_oss", sliding_window=window))
        engine, shadow, size = opened(family, tmp_path, align=False)
        assert size == 16
        with engine:
            prompt, answer = text(5 * size + 3), text(2 * size, seed=3)
            assert shadow.serve(engine, prompt, answer) == 0
            assert shadow.serve(engine, [*prompt, *answer, 1, 2, 3]) == 7 * size
            for blocks in (1, 2, 5):
                assert shadow.serve(engine, [*prompt[: blocks * size + 3], 1, 2, 3]) == blocks * size
            for answered, expected in zip((3, 20), found, strict=True):
                prompt = text(4 * size, seed=20 + answered)
                shadow.serve(engine, prompt, text(answered, seed=4))
                assert shadow.serve(engine, [*prompt, *text(5, seed=44)]) == expected * size
            assert_at_rest(engine)

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
