"""`prefixcache.mlx_lm` against mlx-lm's own functions: equal answers, and nothing computed twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import child_environment
from mlx_lm import generate as plain_generate
from mlx_lm import stream_generate as plain_stream_generate
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import KVCache
from runs import prefill
from streams import SIZE, Setup, assert_same_answers, text, tokens_of

from prefixcache import Hit, PrefixCache, Recorder
from prefixcache.mlx_lm import generate


@pytest.fixture
def tiny(tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path) -> Iterator[Setup]:
    model = tiny_llama("float32")
    with PrefixCache.open(tmp_path, model, block_size=SIZE) as cache:
        yield Setup(model, tiny_tokenizer, cache)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 50])
def test_cold_then_warm_equals_mlx_lm(tiny: Setup, length: int) -> None:
    prompt = text(length)
    ends = sorted({(length - 1) // SIZE * SIZE, length - 1})
    theirs = tiny.uncached(prompt, ends)
    assert_same_answers(tiny.run(prompt), theirs)
    assert not tiny.hits[0]
    assert_same_answers(tiny.run(prompt), theirs)
    assert tiny.hits[1].cached_tokens == length - 1


def test_prompts_of_every_kind_are_the_same_prompt(tiny: Setup) -> None:
    words = "The quick brown fox jumps over the lazy dog."
    tokens = tiny.tokenizer.encode(words)
    answers = [tokens_of(tiny.run(p)) for p in (words, tokens, mx.array(tokens), np.array(tokens, np.int32))]
    assert answers == [answers[0]] * 4
    assert [hit.cached_tokens for hit in tiny.hits] == [0, *[len(tokens) - 1] * 3]


def test_the_answer_is_reused_by_the_next_turn(tiny: Setup) -> None:
    """All that the caches have taken in is stored, also the token that was sampled last."""
    prompt = text(20)
    answer = tokens_of(tiny.run(prompt, max_tokens=30))
    following = [*prompt, *answer, *text(9, seed=4)]
    ours = tiny.run(following)
    assert tiny.hits[1].cached_tokens == 50
    ends = [SIZE, 19, *range(20, 51), 58]
    assert_same_answers(ours, tiny.uncached(following, ends))


def test_an_answer_that_ends_by_itself(tiny: Setup) -> None:
    prompt = text(20)
    third = tokens_of(tiny.run(prompt))[2]
    tiny.cache.clear()
    tiny.tokenizer.add_eos_token(str(third))
    try:
        ours = tiny.run(prompt)
        assert ours[-1].finish_reason == "stop"
        assert_same_answers(ours, tiny.uncached(prompt, [SIZE, 19]))
        assert tiny.cache.fetch([*prompt, *tokens_of(ours), 1]).cached_tokens == 20 + len(ours)
    finally:
        tiny.tokenizer.eos_token_ids.discard(third)


def test_blocks_are_there_while_the_answer_is_decoded(tiny: Setup) -> None:
    prompt, seen = text(20), []
    for response in tiny.stream(prompt, max_tokens=40):
        seen.append(response.token)
        known = [*prompt, *seen]
        whole = len(known) // SIZE * SIZE
        assert tiny.cache.fetch([*known[:whole], 1]).cached_tokens == whole


@pytest.mark.parametrize("taken", [1, 5, 13])
def test_a_closed_generator_keeps_its_progress(tiny: Setup, taken: int) -> None:
    prompt = text(20)
    stream = tiny.stream(prompt, max_tokens=100)
    seen = [next(stream).token for _ in range(taken)]
    stream.close()
    assert tiny.cache.fetch([*prompt, *seen, 1]).cached_tokens == 20 + taken


def test_a_cancelled_prefill_keeps_its_progress(tiny: Setup) -> None:
    prompt = text(100)

    def cancel(done: int, total: int) -> None:
        if done >= 50:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        tiny.run(prompt, prefill_step_size=SIZE, prompt_progress_callback=cancel)
    ours = tiny.run(prompt, prefill_step_size=SIZE)
    assert tiny.hits[1].cached_tokens == 64
    assert_same_answers(ours, tiny.uncached(prompt, [16, 32, 48, 64, 80, 96, 99]))


@pytest.mark.parametrize(("step", "ends"), [(7, range(7, 50, 7)), (16, [16, 32, 48]), (40, [32, 48]), (2048, [48])])
def test_chunks_end_at_blocks_and_are_reported(tiny: Setup, step: int, ends: Any) -> None:
    reports: list[tuple[int, int]] = []
    cut = {7: [7, 14, 16, 23, 30, 32, 39, 46, 48]}.get(step, list(ends))
    tiny.run(text(50), prefill_step_size=step, prompt_progress_callback=lambda *report: reports.append(report))
    assert reports == [(n, 50) for n in (0, *cut, 49, 50)]
    reports.clear()
    tiny.run(text(50), prompt_progress_callback=lambda *report: reports.append(report))
    assert reports == [(49, 50), (50, 50)]


def test_logits_processors_see_the_whole_prompt(tiny: Setup) -> None:
    prompt = text(40)
    seen: list[list[int]] = []

    def favour_new(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        logits[:, tokens] -= 2.0
        return logits

    first = tiny.run(prompt, logits_processors=[favour_new])
    second = tiny.run(prompt, logits_processors=[favour_new])
    assert tiny.hits[1].cached_tokens == 39
    assert_same_answers(first, second)
    half = len(seen) // 2
    assert seen[:half] == seen[half:]
    assert [row[:40] for row in seen] == [prompt] * len(seen)
    assert seen[1][40:] == tokens_of(first)[:1]


def test_responses_count_the_whole_prompt(tiny: Setup) -> None:
    prompt = text(40)
    for responses in (tiny.run(prompt), tiny.run(prompt)):
        assert {response.prompt_tokens for response in responses} == {40}
        assert len({response.prompt_tps for response in responses}) == 1
        assert responses[0].prompt_tps > 0
        assert isinstance(responses[0], GenerationResponse)


def test_salts_and_content_keys_keep_requests_apart(tiny: Setup) -> None:
    prompt = text(40)
    for options in ({}, {"salt": "a"}, {"salt": "b"}, {"extra_keys": [(18, 30, b"image 1")]}):
        tiny.run(prompt, **options)
        tiny.run(prompt, **options)
    assert [hit.cached_tokens for hit in tiny.hits] == [0, 39, 0, 39, 0, 39, 18, 39]


def test_generate_is_the_text_of_the_stream(tiny: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = text(40)
    hits: list[Hit] = []
    expected = "".join(response.text for response in tiny.run(prompt))
    options = {"max_tokens": 6, "prefix_cache": tiny.cache}
    answer = generate(tiny.model, tiny.tokenizer, prompt, verbose=True, on_hit=hits.append, **options)
    assert answer == expected == plain_generate(tiny.model, tiny.tokenizer, prompt, max_tokens=6)
    assert [hit.cached_tokens for hit in hits] == [39]
    printed = capsys.readouterr().out
    assert expected in printed
    assert "40 tokens, 39 reused" in printed
    assert generate(tiny.model, tiny.tokenizer, prompt, **options) == expected
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_embeddings": mx.zeros((4, 8))}, "input_embeddings cannot be used"),
        ({"prompt_cache": []}, "prompt_cache cannot be used"),
        ({"max_tokens": 0}, "max_tokens must not be 0"),
        ({"prefill_step_size": 0}, "prefill_step_size must be at least 1, not 0"),
    ],
)
def test_options_that_cannot_be_kept_are_refused_at_the_call(tiny: Setup, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.stream(text(20), **options)


@pytest.mark.parametrize("name", ["draft_model", "max_kv_size", "input_embeddings", "prompt_cache", "kv_bits"])
def test_options_that_are_none_are_none(tiny: Setup, name: str) -> None:
    assert len(tiny.run(text(20), **{name: None})) == 6


@pytest.mark.parametrize("prompt", [[], "", mx.array([], mx.int32), mx.zeros((1, 4), mx.int32)])
def test_a_prompt_must_be_one_row_of_tokens(tiny: Setup, prompt: Any) -> None:
    with pytest.raises(ValueError, match="one row of at least one token"):
        tiny.stream(prompt)


def test_misuse_of_the_keys_is_an_error(tiny: Setup) -> None:
    with pytest.raises(TypeError, match="salt"):
        tiny.run(text(20), salt=object())
    with pytest.raises(ValueError, match="-1"):
        tiny.run([3, -1, 5])


@pytest.mark.parametrize("start", [0, 16, 40])
def test_quantised_requests_equal_mlx_lm(tiny: Setup, start: int) -> None:
    """mlx-lm converts the cache once it has passed `start`; before that, rows are those of a plain run."""
    form = (8, 32, start)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start, "prefill_step_size": SIZE}
    prompt = text(70)
    ends = [16, 32, 48, 64, 69]
    theirs = tiny.uncached(prompt, ends, kv=form)
    assert_same_answers(tiny.run(prompt, **options), theirs)
    assert_same_answers(tiny.run(prompt, **options), theirs)
    assert [hit.cached_tokens for hit in tiny.hits] == [0, 69]
    assert all(hasattr(cache, "bits") for cache in tiny.hits[1].caches)
    # A prompt that leaves the stored one before `start` takes plain rows, one that leaves later converted ones.
    shorter = [*prompt[:30], *text(40, seed=8)]
    ours = tiny.run(shorter, **options)
    assert tiny.hits[2].cached_tokens == 30
    caches = prefill(tiny.model, prompt, [16, 32], kv_format=form)
    for cache in caches:
        cache.trim(2)
    prefill(tiny.model, shorter, [32, 48, 64, 69], caches, 30, form)
    kv = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    again = plain_stream_generate(tiny.model, tiny.tokenizer, shorter[69:], max_tokens=6, prompt_cache=caches, **kv)
    assert_same_answers(ours, list(again))


def test_a_request_converts_while_it_decodes(tiny: Setup) -> None:
    form = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 40}
    prompt = text(20)
    first = tiny.run(prompt, max_tokens=50, **form)
    assert_same_answers(first, tiny.uncached(prompt, [16, 19], kv=(8, 32, 40), max_tokens=50))
    whole = [*prompt, *tokens_of(first)]
    # Below the start, whole blocks of plain rows serve every form; past it, rows serve their own form alone.
    tiny.run([*whole[:36], 7])
    tiny.run([*whole[:66], 7], **form)
    tiny.run([*whole[:66], 7], **(form | {"kv_bits": 4}))
    assert [hit.cached_tokens for hit in tiny.hits[1:]] == [32, 66, 36]


def test_plain_rows_past_the_start_are_not_used(tiny: Setup) -> None:
    """A quantised run would have computed them with converted rows."""
    prompt = text(70)
    tiny.run(prompt)
    tiny.run(prompt, kv_bits=8, kv_group_size=32, quantized_kv_start=40)
    assert tiny.hits[1].cached_tokens == 39


def test_a_cache_class_that_cannot_be_stored_does_not_stop_a_request(
    tiny: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unheard(KVCache):
        pass

    monkeypatch.setattr(tiny.model, "make_cache", lambda: [Unheard() for _ in tiny.model.layers], raising=False)
    with PrefixCache.open(tmp_path / "other", tiny.model, block_size=SIZE) as cache:
        ours = [tiny.run(text(40), prefix_cache=cache) for _ in range(2)]
        assert cache.stats()["store_reasons"].keys() == {"unsupported_type"}
    assert [(hit.cached_tokens, hit.reason) for hit in tiny.hits] == [(0, "unsupported_type")] * 2
    assert_same_answers(ours[0], tiny.uncached(text(40), [32, 39]))
    assert_same_answers(ours[0], ours[1])


def test_a_cache_that_is_closed_meanwhile_does_not_stop_a_request(tiny: Setup) -> None:
    theirs = tiny.uncached(text(40), [32, 39])
    assert_same_answers(tiny.run(text(40), on_hit=lambda _: tiny.cache.close()), theirs)
    assert_same_answers(tiny.run(text(40)), theirs)
    assert not tiny.hits[0]


@pytest.mark.parametrize("method", ["advance", "finish", "next_cut"])
def test_trouble_while_recording_is_logged_once(
    tiny: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is on fire")

    theirs = tiny.uncached(text(40), [39] if method == "next_cut" else [32, 39], max_tokens=30)
    monkeypatch.setattr(Recorder, method, fail)
    assert_same_answers(tiny.run(text(40), max_tokens=30), theirs)
    assert [record.getMessage() for record in caplog.records] == [
        "the rest of this request is not recorded: the disk is on fire"
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # mlx-lm's own stream objects to it
def test_a_generator_that_another_thread_closes(tiny: Setup) -> None:
    prompt, streams = text(40), []

    def begin() -> None:
        streams.append(tiny.stream(prompt, max_tokens=50))
        next(streams[0])

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    streams[0].close()
    assert tiny.cache.fetch(prompt).cached_tokens == 32


def test_requests_of_several_threads_share_a_cache(tiny: Setup) -> None:
    prompt = text(40)
    theirs = tiny.uncached(prompt, [32, 39])
    answers: dict[int, list[GenerationResponse]] = {}

    def work(number: int) -> None:
        for _ in range(3):
            answers[number] = tiny.run(prompt)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    for ours in answers.values():
        assert_same_answers(ours, theirs)


def test_two_interleaved_streams(tiny: Setup) -> None:
    prompts = [text(40), [*text(36), *text(8, seed=6)]]
    theirs = [tiny.uncached(prompt, [32, len(prompt) - 1], max_tokens=20) for prompt in prompts]
    streams = [tiny.stream(prompt, max_tokens=20) for prompt in prompts]
    ours: list[list[GenerationResponse]] = [[], []]
    for _ in range(20):
        for answers, stream in zip(ours, streams, strict=True):
            answers.append(next(stream))
    assert_same_answers(ours[0], theirs[0])
    assert tokens_of(ours[1]) == tokens_of(theirs[1])


def test_the_import_does_not_pull_in_mlx_lm() -> None:
    code = "import sys, prefixcache.mlx_lm; print(sorted({'mlx_lm', 'transformers'} & sys.modules.keys()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_real_conversation(smollm2: Any, tmp_path: Path) -> None:
    """Two turns with chat template: the second reuses the first and its answer."""
    size = 256 if smollm2.fast else 16
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    hits: list[Hit] = []
    with PrefixCache.open(tmp_path, smollm2.model, block_size=size) as cache:
        options = {"prefix_cache": cache, "on_hit": hits.append, "max_tokens": 10}
        answer = generate(smollm2.model, smollm2.tokenizer, prompt, **options)
        assert answer == "The capital of France is Paris."
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And of Italy?"}]
        following = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert "Rome" in generate(smollm2.model, smollm2.tokenizer, following, **options)
    assert hits[1].cached_tokens == len(prompt) + 8
