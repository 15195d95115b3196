"""`prefixcache.mlx_lm` with a draft model: two lists of caches, which mlx-lm cuts back where the draft was wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import harness
from conftest import long
from mlx_lm import stream_generate as plain_stream_generate
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from runs import prefill
from streams import SIZE, Setup, assert_same_answers, text, tokens_of

from prefixcache import PrefixCache


class Pair(Setup):
    """A model, a draft model, and runs of both with the cache and without."""

    def __init__(self, model: Any, draft: Any, tokenizer: Any, cache: PrefixCache) -> None:
        super().__init__(model, tokenizer, cache)
        self.draft = draft
        self.beside = cache.beside(draft)

    def stream(self, prompt: Any, **options: Any) -> Iterator[GenerationResponse]:
        return super().stream(prompt, **({"draft_model": self.draft} | options))

    def plain(self, prompt: list[int], ends: list[int], both: Both | None = None, **options: Any) -> Any:
        """mlx-lm's own speculative decoding behind a prefill of both models in chunks that end at `ends`."""
        both = Both(self) if both is None else both
        both.prefill(prompt, ends)
        options = {"max_tokens": 6, "draft_model": self.draft, "prompt_cache": both.caches} | options
        return plain_stream_generate(self.model, self.tokenizer, prompt[-1:], **options)

    def reaches(self, tokens: list[int]) -> tuple[int, int]:
        return self.reach(tokens), self.reach(tokens, self.beside)


class Both:
    """Two lists of live caches without a prefix cache."""

    def __init__(self, pair: Pair) -> None:
        self.models = (pair.model, pair.draft)
        self.layers = len(pair.model.layers)
        self.caches = [*make_prompt_cache(pair.model), *make_prompt_cache(pair.draft)]

    @property
    def halves(self) -> tuple[list[Any], list[Any]]:
        return self.caches[: self.layers], self.caches[self.layers :]

    @property
    def standing(self) -> tuple[int, int]:
        target, draft = self.halves
        return target[0].offset, draft[0].offset

    def prefill(self, prompt: list[int], ends: list[int]) -> None:
        for model, half, start in zip(self.models, self.halves, self.standing, strict=True):
            prefill(model, prompt, ends, half, start)


@pytest.fixture(params=["often right", "never right"])
def pair(request: pytest.FixtureRequest, tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path) -> Any:
    """A draft of the model's own weights, rounded, is wrong now and then; one of other weights nearly always."""
    rounded = request.param == "often right"
    draft = tiny_llama("bfloat16") if rounded else tiny_llama("float32", layers=2, seed=8)
    with PrefixCache.open(tmp_path, tiny_llama("float32"), block_size=SIZE) as cache:
        yield Pair(tiny_llama("float32"), draft, tiny_tokenizer, cache)


NEVER_RIGHT = pytest.mark.parametrize("pair", ["never right"], indirect=True)


def test_the_drafts_of_these_tests_are_accepted_and_rejected(
    tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """What follows is only worth something if rounds end in every way."""
    with PrefixCache.open(tmp_path, tiny_llama("float32"), block_size=SIZE) as cache:
        right = Pair(tiny_llama("float32"), tiny_llama("bfloat16"), tiny_tokenizer, cache)
        flags = [response.from_draft for response in right.run(text(40), num_draft_tokens=3, max_tokens=60)]
        rounds = "".join(str(int(flag)) for flag in flags).split("0")
        # Some rounds end with all three proposals accepted, some before.
        assert "111" in rounds, rounds
        assert {"", "1", "11"} & set(rounds), rounds


@pytest.mark.parametrize("proposals", [1, long(2), 4])
@pytest.mark.parametrize("length", [1, 40])
def test_cold_then_warm_equals_mlx_lm(pair: Pair, proposals: int, length: int) -> None:
    prompt = text(length)
    ends = sorted({(length - 1) // SIZE * SIZE, length - 1})
    options = {"num_draft_tokens": proposals, "max_tokens": 23}
    theirs = list(pair.plain(prompt, ends, **options))
    assert_same_answers(pair.run(prompt, **options), theirs)
    assert_same_answers(pair.run(prompt, **options), theirs)
    assert [hit.cached_tokens for hit in pair.hits] == [0, length - 1]
    assert pair.beside.stats()["cached_tokens"] == length - 1


@NEVER_RIGHT
def test_a_prefix_of_the_model_alone_serves_it(pair: Pair) -> None:
    """Each goes on from where its own stored prefix ends."""
    prompt = text(40)
    pair.run(prompt, draft_model=None)
    reports: list[tuple[int, int]] = []
    ours = pair.run(prompt, prompt_progress_callback=lambda *report: reports.append(report))
    assert pair.hits[1].cached_tokens == 39
    assert pair.beside.stats()["hits"] == 0
    assert reports == [(39, 40)] * 3 + [(40, 40)]
    assert_same_answers(ours, list(pair.plain(prompt, [32, 39])))
    pair.run(prompt)
    assert pair.beside.stats()["cached_tokens"] == 39


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 5, *map(long, (6, 7)), 8])
def test_what_is_stored_is_what_both_stand_at(pair: Pair, taken: int) -> None:
    """After a request that its reader ends, in the middle of a round or at its end."""
    prompt = text(27)
    both = Both(pair)
    theirs = pair.plain(prompt, [16, 26], both, num_draft_tokens=3, max_tokens=15)
    ours = pair.stream(prompt, num_draft_tokens=3, max_tokens=15)
    seen = [(next(theirs).token, next(ours).token) for _ in range(taken)]
    theirs.close()
    ours.close()
    whole = [*prompt, *(token for token, _ in seen)]
    assert [a for a, _ in seen] == [b for _, b in seen]
    reached = pair.reaches(whole)
    assert reached == both.standing
    # What is there is right: the next turn gives the bits of mlx-lm's own caches.
    turn = [*whole, *text(9, seed=5)]
    ends = [end for end in (32,) if end > max(both.standing)] + [len(turn) - 1]
    assert_same_answers(pair.run(turn, max_tokens=3), list(pair.plain(turn, ends, both, max_tokens=3)))
    assert pair.hits[1].cached_tokens == reached[0]


@pytest.mark.parametrize("tokens", [1, long(2), 3, long(8), 50])
def test_the_second_turn_of_a_conversation(pair: Pair, tokens: int) -> None:
    prompt, both = text(27), Both(pair)
    theirs = list(pair.plain(prompt, [16, 26], both, num_draft_tokens=2, max_tokens=tokens))
    ours = pair.run(prompt, num_draft_tokens=2, max_tokens=tokens)
    assert_same_answers(ours, theirs)
    whole = [*prompt, *tokens_of(ours)]
    assert pair.reaches(whole) == both.standing
    turn = [*whole, *text(9, seed=5)]
    ends = [end for end in (32, 80) if end > max(both.standing) and end < len(turn) - 1] + [len(turn) - 1]
    assert_same_answers(pair.run(turn), list(pair.plain(turn, ends, both)))


def test_blocks_are_there_while_the_answer_is_decoded(pair: Pair) -> None:
    prompt, seen = text(20), []
    for response in pair.stream(prompt, max_tokens=40, num_draft_tokens=3):
        seen.append(response.token)
        known = [*prompt, *seen]
        run = len(known) - (not response.from_draft)
        assert pair.reach(known[: run // SIZE * SIZE]) == run // SIZE * SIZE
        # The draft model lags by up to two tokens.
        assert pair.reach(known, pair.beside) >= (len(known) - 2) // SIZE * SIZE


def test_an_answer_that_ends_by_itself(pair: Pair) -> None:
    prompt, both = text(20), Both(pair)
    fifth = tokens_of(pair.run(prompt))[4]
    pair.cache.clear()
    pair.tokenizer.add_eos_token(str(fifth))
    try:
        theirs = list(pair.plain(prompt, [16, 19], both))
        ours = pair.run(prompt)
        assert ours[-1].finish_reason == "stop"
        assert_same_answers(ours, theirs)
        assert pair.reaches([*prompt, *tokens_of(ours)]) == both.standing
    finally:
        pair.tokenizer.eos_token_ids.discard(fifth)


@NEVER_RIGHT
def test_a_cancelled_prefill_keeps_the_progress_of_both(pair: Pair) -> None:
    prompt = text(100)

    def cancel(done: int, total: int) -> None:
        if done >= 40:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pair.run(prompt, prefill_step_size=7, prompt_progress_callback=cancel)
    assert pair.reaches(prompt) == (46, 99)
    ours = pair.run(prompt)
    assert [hit.cached_tokens for hit in pair.hits] == [0, 46]
    assert len(ours) == 6


@pytest.mark.parametrize("start", [0, 34, 60])
def test_quantised_requests(pair: Pair, start: int) -> None:
    """mlx-lm converts while it drafts, by tokens that it takes back later."""
    prompt = text(27)
    form = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    options = {"num_draft_tokens": 3, "max_tokens": 20} | form
    first = pair.run(prompt, **options)
    whole = [*prompt, *tokens_of(first)]
    caches = [prefill(model, prompt, [16, 26], kv_format=(8, 32, start)) for model in (pair.model, pair.draft)]
    joined = [*caches[0], *caches[1]]
    plain = {"draft_model": pair.draft, "prompt_cache": joined, **options}
    assert_same_answers(first, list(plain_stream_generate(pair.model, pair.tokenizer, prompt[-1:], **plain)))
    ours = pair.run([*whole, 7, 8], **options)
    if start == 34:
        assert [hasattr(cache, "bits") for cache in pair.hits[1].caches] == [True] * 3
    assert pair.hits[1].cached_tokens in (len(whole) - 1, len(whole))
    again = pair.run([*whole, 7, 8], **options)
    assert_same_answers(again, ours)
    assert pair.hits[2].cached_tokens == len(whole) + 1


class TestModelsThatCannotBeCutBack:
    @pytest.fixture
    def opened(self, tiny_tokenizer: Any, tmp_path: Path) -> Iterator[Callable[[str, str], Pair]]:
        caches: list[PrefixCache] = []

        def make(name: str, draft: str) -> Pair:
            model = harness.build(name)
            caches.append(PrefixCache.open(tmp_path, model, block_size=SIZE))
            return Pair(model, harness.build(draft), tiny_tokenizer, caches[-1])

        yield make
        for cache in caches:
            cache.close()

    def test_a_recurrent_model_is_an_error_of_mlx_lm(self, opened: Callable[[str, str], Pair]) -> None:
        pair = opened("mamba", "qwen2")
        prompt = text(40, vocabulary=120)
        with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
            pair.run(prompt)
        # The prefill is as good as any.
        assert_same_answers(pair.run(prompt, draft_model=None), pair.uncached(prompt, [32, 39]))
        assert pair.hits[1].cached_tokens == 39

    def test_a_recurrent_draft_is_stored_up_to_the_answer(
        self, opened: Callable[[str, str], Pair], caplog: pytest.LogCaptureFixture
    ) -> None:
        """mlx-lm goes on with it, its rejected tokens left in the states."""
        pair = opened("qwen2", "mamba")
        prompt = text(40, vocabulary=120)
        ours = [pair.run(prompt, max_tokens=30) for _ in range(2)]
        assert_same_answers(*ours)
        assert_same_answers(ours[0], list(pair.plain(prompt, [32, 39], FewerCounted(pair), max_tokens=30)))
        whole = [*prompt, *tokens_of(ours[0])]
        assert pair.reaches(whole)[0] in (69, 70)
        assert pair.reaches(whole)[1] == 39
        assert caplog.records == []

    def test_a_model_with_fewer_caches_than_layers(self, opened: Callable[[str, str], Pair]) -> None:
        """mlx-lm would cut a list of both at the number of layers."""
        pair = opened("afm7", "qwen2")
        prompt = text(16, vocabulary=120)
        assert len(make_prompt_cache(pair.model)) < len(pair.model.layers)
        alone = plain_stream_generate(pair.model, pair.tokenizer, prompt, max_tokens=9, draft_model=pair.draft)
        theirs = list(alone)
        for _ in range(2):
            assert_same_answers(pair.run(prompt, max_tokens=9), theirs)
        assert [hit.cached_tokens for hit in pair.hits] == [0, 15]

    def test_a_ring_that_fills_while_tokens_are_drafted(
        self, opened: Callable[[str, str], Pair], caplog: pytest.LogCaptureFixture
    ) -> None:
        """From then on mlx-lm leaves rejected tokens in it. Nothing of that is stored, and the log says why."""
        pair = opened("gemma3_text", "qwen2")
        prompt = text(13, vocabulary=120)
        with caplog.at_level(logging.WARNING, "prefixcache.mlx_lm"):
            ours = pair.run(prompt, max_tokens=40)
        assert len(ours) == 40
        messages = [record.getMessage() for record in caplog.records]
        assert (
            len([message for message in messages if "rejected ones may be among them" in message]) == len(messages) > 0
        )
        whole = [*prompt, *tokens_of(ours)]
        reached = pair.reach(whole)
        assert 12 <= reached <= harness.WINDOW
        turn = [*whole[:16], 3, 4, 5]
        n = min(reached, 16)
        alone = pair.run(turn, draft_model=None)
        assert pair.hits[1].cached_tokens == n
        assert tokens_of(alone) == tokens_of(pair.uncached(turn, [16, 18]))

    def test_a_prompt_longer_than_the_window_is_an_error_of_mlx_lm(self, opened: Callable[[str, str], Pair]) -> None:
        pair = opened("gemma3_text", "qwen2")
        prompt = text(60, vocabulary=120)
        with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
            pair.run(prompt)
        assert pair.reaches(prompt) == (48, 48)


class FewerCounted(Both):
    """A draft model that counts no tokens is run from the start."""

    @property
    def standing(self) -> tuple[int, int]:
        return self.halves[0][0].offset, 0


@NEVER_RIGHT
def test_max_kv_size_is_ignored_as_by_mlx_lm(pair: Pair) -> None:
    prompt = text(40)
    assert_same_answers(pair.run(prompt, max_kv_size=8), list(pair.plain(prompt, [32, 39])))
    pair.run(prompt)
    assert [hit.cached_tokens for hit in pair.hits] == [0, 39]


def test_logits_processors_see_what_mlx_lm_shows_them(pair: Pair) -> None:
    prompt = text(40)
    seen: list[list[int]] = []

    def favour_new(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        logits[:, tokens] -= 2.0
        return logits

    runs = [pair.run(prompt, logits_processors=[favour_new], max_tokens=12) for _ in range(2)]
    theirs = list(pair.plain(prompt, [32, 39], logits_processors=[favour_new], max_tokens=12))
    for ours in runs:
        assert_same_answers(ours, theirs)
    third = len(seen) // 3
    assert seen[:third] == seen[third : 2 * third] == seen[2 * third :]


@NEVER_RIGHT
class TestBeside:
    def test_one_store_with_several_doors(self, pair: Pair) -> None:
        assert pair.cache.beside(pair.draft) is pair.beside
        assert pair.beside.beside(pair.model) is pair.cache
        assert pair.cache.beside(caches=make_prompt_cache(pair.model)) is pair.cache
        assert pair.cache.beside(namespace="other", caches=make_prompt_cache(pair.model)) is not pair.cache
        assert pair.beside.namespace != pair.cache.namespace
        assert pair.beside.block_size == pair.cache.block_size

    def test_blocks_are_each_ones_own_and_go_together(self, pair: Pair) -> None:
        prompt = text(40)
        pair.run(prompt)
        assert pair.reaches(prompt) == (40, 40)
        other = pair.cache.beside(namespace="other", caches=make_prompt_cache(pair.model))
        assert pair.reach(prompt, other) == 0
        pair.beside.clear()
        assert pair.reaches(prompt) == (0, 0)

    def test_they_are_closed_together(self, pair: Pair) -> None:
        pair.run(text(40))
        pair.cache.close()
        assert pair.beside.fetch(text(40)).reason == "closed"
        with pytest.raises(ValueError, match="closed"):
            pair.beside.flush()

    def test_they_survive_a_restart_together(self, pair: Pair, tmp_path: Path) -> None:
        prompt = text(40)
        first = pair.run(prompt)
        pair.cache.close()
        with PrefixCache.open(tmp_path, pair.model, block_size=SIZE) as cache:
            again = Pair(pair.model, pair.draft, pair.tokenizer, cache)
            assert_same_answers(again.run(prompt), first)
            assert again.hits[0].cached_tokens == again.beside.stats()["cached_tokens"] == 39

    def test_misuse(self, pair: Pair) -> None:
        with pytest.raises(ValueError, match="a model or prototype caches"):
            pair.cache.beside()
        with pytest.raises(ValueError, match="a model or prototype caches"):
            pair.cache.beside(namespace="other")
        with pytest.raises(ValueError, match="namespace is 'a/b'"):
            pair.cache.beside(pair.draft, namespace="a/b")
        with pytest.raises(ValueError, match="must be empty"):
            pair.cache.beside(caches=prefill(pair.model, text(5), [5]))
        with pytest.raises(TypeError, match="expected a cache object"):
            pair.cache.beside(caches=[object()])

    def test_equal_weights_are_the_same_model(self, pair: Pair) -> None:
        doors = [pair.cache.beside(harness.build("qwen2")) for _ in range(2)]
        assert doors[0] is doors[1]
        assert doors[0] is not pair.cache
