"""`prefixcache.mlx_lm` with windows, recurrent states, `max_kv_size` and quantised caches: equal answers, less work."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import harness
from mlx_lm.models.cache import make_prompt_cache
from streams import SIZE, Setup, assert_same_answers, tokens_of
from streams import text as any_text

from prefixcache import PrefixCache

RECURRENT = ("mamba", "qwen3_next")
WINDOWS = ("gemma3_text", "gpt_oss")
Opened = Callable[..., AbstractContextManager[Setup]]


def text(length: int, seed: int = 0) -> list[int]:
    return any_text(length, seed, harness.VOCABULARY - 1)


@functools.cache
def built(name: str, **args: Any) -> Any:
    if not args:
        return harness.build(name)
    module = harness.import_model(name)
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict({**harness.configs()[name].args, **args}))
    harness.randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model


@pytest.fixture
def opened(tiny_tokenizer: Any, tmp_path: Path) -> Opened:
    """`with opened("mamba") as setup`: the tiny model of this name with an open cache."""

    @contextmanager
    def make(name: str, block_size: int = SIZE, **args: Any) -> Iterator[Setup]:
        model = built(name, **args)
        with PrefixCache.open(tmp_path / name, model, block_size=block_size) as cache:
            yield Setup(model, tiny_tokenizer, cache)

    return make


@pytest.mark.parametrize("name", [*WINDOWS, *RECURRENT])
def test_cold_then_warm_equals_mlx_lm(opened: Opened, name: str) -> None:
    prompt = text(55)
    with opened(name) as setup:
        theirs = setup.uncached(prompt, [48, 54], max_tokens=20)
        assert_same_answers(setup.run(prompt, max_tokens=20), theirs)
        assert_same_answers(setup.run(prompt, max_tokens=20), theirs)
        assert [hit.cached_tokens for hit in setup.hits] == [0, 54]


@pytest.mark.parametrize(("name", "reused"), [("gemma3_text", 70), ("gpt_oss", 70), ("mamba", 54), ("qwen3_next", 54)])
def test_a_turn_that_leaves_the_one_before_inside_a_block(opened: Opened, name: str, reused: int) -> None:
    """Rows of windows go to where it leaves. A state is there at the end of the prompt before, and from then on where
    it left too."""
    prompt = text(55)
    with opened(name) as setup:
        answer = tokens_of(setup.run(prompt, max_tokens=20))
        common = [*prompt, *answer][:70]
        ways = [[*common, *(((first + i) % 120) + 1 for i in range(20))] for first in (answer[15] + 1, answer[15] + 2)]
        ours = [setup.run(way) for way in ways]
        assert [hit.cached_tokens for hit in setup.hits] == [0, reused, 70]
        caches = make_prompt_cache(setup.model)
        donor = [48, 54, *range(55, reused + 1)] if reused > 54 else [48, 54]
        cuts = [80, 89] if reused == 70 else [70, 80, 89]
        assert_same_answers(ours[0], setup.uncached(ways[0], [*donor, *cuts], caches=caches))
        if name == "mamba":
            # Elsewhere its rows were computed one by one and its state in a chunk: no run has the same products.
            assert_same_answers(ours[1], setup.uncached(ways[1], [*donor, *cuts]))


@pytest.mark.parametrize("name", [*WINDOWS, *RECURRENT])
def test_the_next_turn_begins_where_the_answer_ended(opened: Opened, name: str) -> None:
    prompt = text(20)
    with opened(name) as setup:
        answer = tokens_of(setup.run(prompt, max_tokens=15))
        following = [*prompt, *answer, *text(9, seed=4)]
        ours = setup.run(following)
        assert setup.hits[1].cached_tokens == 35
        assert_same_answers(ours, setup.uncached(following, [16, 19, *range(20, 36), 43]))


@pytest.mark.parametrize("name", ["gemma3_text", *RECURRENT])
@pytest.mark.parametrize(("step", "stop", "ends"), [(16, 40, [16, 32, 48]), (7, 30, [7, 14, 16, 23, 30])])
def test_a_cancelled_prefill_keeps_its_progress(
    opened: Opened, name: str, step: int, stop: int, ends: list[int]
) -> None:
    prompt = text(55)

    def cancel(done: int, total: int) -> None:
        if done >= stop:
            raise InterruptedError

    with opened(name) as setup:
        with pytest.raises(InterruptedError):
            setup.run(prompt, prefill_step_size=step, prompt_progress_callback=cancel)
        ours = setup.run(prompt)
        assert setup.hits[1].cached_tokens == ends[-1]
        rest = [48, 54] if ends[-1] < 48 else [54]
        assert_same_answers(ours, setup.uncached(prompt, [*ends, *rest]))


@pytest.mark.parametrize("name", ["gpt_oss", *RECURRENT])
@pytest.mark.parametrize("taken", [1, 9])
def test_a_closed_generator_keeps_its_progress(opened: Opened, name: str, taken: int) -> None:
    prompt = text(20)
    with opened(name) as setup:
        stream = setup.stream(prompt, max_tokens=30)
        seen = [next(stream).token for _ in range(taken)]
        stream.close()
        following = [*prompt, *seen, *text(5, seed=2)]
        ours = setup.run(following)
        assert setup.hits[1].cached_tokens == 20 + taken
        rest = [e for e in (32,) if 20 + taken < e < len(following) - 1]
        ends = [16, 19, *range(20, 21 + taken), *rest, len(following) - 1]
        assert_same_answers(ours, setup.uncached(following, ends))


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "qwen2"])
def test_an_error_between_two_tokens_stores_no_state_of_neither(opened: Opened, name: str) -> None:
    """The model has run a token that nobody was told of when a logits processor raises."""
    prompt, calls = text(23), []

    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(len(tokens))
        if len(calls) == 4:
            raise ArithmeticError("no more")
        return logits

    with opened(name) as setup:
        seen = []
        with pytest.raises(ArithmeticError, match="no more"):
            for response in setup.stream(prompt, logits_processors=[fail]):
                seen.append(response.token)
        assert len(seen) == 2
        following = [*prompt, *seen, *text(9, seed=3)]
        ours = setup.run(following)
        # What the prefill left; the rows of the rest are not worth a doubt.
        reused = {"qwen2": 16}.get(name, 22)
        assert setup.hits[1].cached_tokens == reused
        assert_same_answers(ours, setup.uncached(following, [16, 22, 32, 33] if reused == 22 else [16, 32, 33]))


def test_a_window_smaller_than_a_block_while_three_blocks_are_decoded(opened: Opened) -> None:
    """A ring of 24 rows and blocks of 32 tokens: every row is kept before the ring drops it."""
    prompt = text(20)
    with opened("gpt_oss", block_size=32) as setup:
        first = setup.run(prompt, max_tokens=110)
        assert_same_answers(first, setup.uncached(prompt, [19], max_tokens=110))
        whole = [*prompt, *tokens_of(first)]
        assert len(whole) == 130
        for n in (130, 97, 80, 64, 41):
            assert setup.reach(whole[:n]) == n
        turn = [*whole[:80], *text(9, seed=7)]
        ours = setup.run(turn)
        assert_same_answers(ours, setup.uncached(turn, [*range(19, 81), 88]))


def test_states_are_kept_every_so_many_decoded_tokens(opened: Opened, tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = built("mamba")
    with PrefixCache.open(tmp_path, model, block_size=4, state_interval=32) as cache:
        setup = Setup(model, tiny_tokenizer, cache)
        whole = [*text(20), *tokens_of(setup.run(text(20), max_tokens=90))]
        for n in (70, 100):
            assert setup.reach(whole[:n]) == n // 32 * 32
        assert setup.reach(whole) == 110


class TestMaxKvSize:
    LIMIT = 24

    def uncached(self, setup: Setup, prompt: list[int], ends: list[int], **options: Any) -> Any:
        return setup.uncached(prompt, ends, caches=make_prompt_cache(setup.model, self.LIMIT), **options)

    @pytest.mark.parametrize("length", [10, 24, 25, 55])
    def test_shorter_and_longer_prompts(self, opened: Opened, length: int) -> None:
        prompt = text(length)
        last = (length - 1) // SIZE * SIZE
        with opened("qwen2") as setup:
            theirs = self.uncached(setup, prompt, sorted({last, length - 1} - {0}), max_tokens=30)
            for _ in range(2):
                assert_same_answers(setup.run(prompt, max_kv_size=self.LIMIT, max_tokens=30), theirs)
            assert [hit.cached_tokens for hit in setup.hits] == [0, length - 1]

    def test_every_size_is_apart(self, opened: Opened) -> None:
        """Rows behind a window were computed without those that had left it."""
        prompt = text(55)
        with opened("qwen2") as setup:
            for limit in (None, 24, 32, None, 24, 32):
                setup.run(prompt, max_kv_size=limit)
            assert [hit.cached_tokens for hit in setup.hits] == [0, 0, 0, 54, 54, 54]
            assert_same_answers(setup.run(prompt), setup.uncached(prompt, [48, 54]))

    def test_a_second_turn_and_one_that_leaves_the_first_inside_a_block(self, opened: Opened) -> None:
        prompt = text(40)
        with opened("qwen2") as setup:
            whole = [*prompt, *tokens_of(setup.run(prompt, max_kv_size=self.LIMIT, max_tokens=30))]
            for n in (70, 53):
                turn = [*whole[:n], 126, *text(12, seed=5)]
                ours = setup.run(turn, max_kv_size=self.LIMIT)
                assert setup.hits[-1].cached_tokens == n
                rest = [b for b in (64, 80) if n < b < len(turn) - 1]
                ends = [32, 39, *range(40, n + 1), *rest, len(turn) - 1]
                assert_same_answers(ours, self.uncached(setup, turn, ends))

    def test_a_window_of_kept_tokens_only_is_refused(self, opened: Opened) -> None:
        with opened("qwen2") as setup, pytest.raises(ValueError, match="keep must be below max_size, got 4 and 4"):
            setup.run(text(20), max_kv_size=4)

    def test_a_model_that_makes_its_own_caches_ignores_it(self, opened: Opened) -> None:
        with opened("gemma3_text") as setup:
            answers = [setup.run(text(40), max_kv_size=limit) for limit in (None, 8)]
            assert_same_answers(*answers)
            assert [hit.cached_tokens for hit in setup.hits] == [0, 39]


class TestKvBits:
    OPTIONS = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 40}
    FORM = (8, 32, 40)

    def test_a_hybrid_converts_while_it_decodes(self, opened: Opened) -> None:
        prompt = text(20)
        with opened("qwen3_next", head_dim=32) as setup:
            first = setup.run(prompt, max_tokens=40, **self.OPTIONS)
            assert_same_answers(first, setup.uncached(prompt, [16, 19], kv=self.FORM, max_tokens=40))
            following = [*prompt, *tokens_of(first), *text(9, seed=1)]
            ours = setup.run(following, **self.OPTIONS)
            assert setup.hits[1].cached_tokens == 60
            assert [hasattr(cache, "bits") for cache in setup.hits[1].caches].count(True) > 0
            ends = [16, 19, *range(20, 61), 64, 68]
            assert_same_answers(ours, setup.uncached(following, ends, kv=self.FORM))

    def test_a_recurrent_model_has_nothing_to_convert(self, opened: Opened) -> None:
        prompt = text(55)
        with opened("mamba") as setup:
            # Plain rows end at 40, and a prefill of them one token before.
            theirs = setup.uncached(prompt, [39, 48, 54])
            for _ in range(2):
                assert_same_answers(setup.run(prompt, **self.OPTIONS), theirs)
            assert [hit.cached_tokens for hit in setup.hits] == [0, 54]

    @pytest.mark.parametrize(("name", "limit"), [("gemma3_text", None), ("qwen2", 24)])
    @pytest.mark.parametrize("length", [38, 70])
    def test_rings_cannot_be_converted(self, opened: Opened, name: str, limit: int | None, length: int) -> None:
        """mlx-lm says so itself, in the prefill or while decoding; what was stored by then serves on."""
        prompt = text(length)
        with opened(name, head_dim=32) as setup:
            with pytest.raises(NotImplementedError, match="NYI"):
                setup.run(prompt, prefill_step_size=SIZE, max_kv_size=limit, **self.OPTIONS)
            ours = setup.run(prompt, max_kv_size=limit)
            assert setup.hits[1].cached_tokens == 32
            caches = make_prompt_cache(setup.model, limit)
            ends = [16, 32, 37] if length == 38 else [16, 32, 64, 69]
            assert_same_answers(ours, setup.uncached(prompt, ends, caches=caches))
            # Below the start it is as good as any other request.
            short = setup.run(prompt[:30], max_kv_size=limit, max_tokens=5, **self.OPTIONS)
            assert setup.hits[2].cached_tokens == 29
            assert len(short) == 5


def test_trouble_is_logged_once_and_the_request_goes_on(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = text(55)

    def trouble(*_: Any, **__: Any) -> None:
        raise OSError("disk on fire")

    with opened("qwen3_next") as setup:
        theirs = setup.uncached(prompt, [48, 54])
        monkeypatch.setattr("prefixcache._recorder.Recorder.advance", trouble)
        with caplog.at_level(logging.WARNING, "prefixcache.mlx_lm"):
            assert_same_answers(setup.run(prompt), theirs)
    assert [record.getMessage() for record in caplog.records] == [
        "the rest of this request is not recorded: disk on fire"
    ]
