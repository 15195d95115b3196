"""Requests through `prefixcache.mlx_lm` and through mlx-lm alone, to be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_lm import stream_generate as plain_stream_generate
from mlx_lm.generate import GenerationResponse
from runs import KvFormat, prefill, same_bits

from prefixcache import Hit, PrefixCache
from prefixcache.mlx_lm import stream_generate

SIZE = 16


def text(length: int, seed: int = 0, vocabulary: int = 499) -> list[int]:
    return [(7919 * (i + 1) * (i + 3 + seed) + 31 * seed) % vocabulary for i in range(length)]


class Setup:
    """A tiny model with an open cache, and runs with it (their hits are kept) and without."""

    def __init__(self, model: Any, tokenizer: Any, cache: PrefixCache) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.hits: list[Hit] = []

    def stream(self, prompt: Any, **options: Any) -> Iterator[GenerationResponse]:
        options = {"max_tokens": 6, "prefix_cache": self.cache, "on_hit": self.hits.append} | options
        return stream_generate(self.model, self.tokenizer, prompt, **options)

    def run(self, prompt: Any, **options: Any) -> list[GenerationResponse]:
        return list(self.stream(prompt, **options))

    def uncached(
        self,
        prompt: Sequence[int],
        ends: Iterable[int],
        kv: KvFormat | None = None,
        caches: list[Any] | None = None,
        start: int = 0,
        **options: Any,
    ) -> list[GenerationResponse]:
        """mlx-lm's own run after a prefill in chunks that end at `ends`; `caches` stand at `start` and move on."""
        ends = list(ends)
        caches = prefill(self.model, prompt, ends, caches, start, kv)
        if kv is not None:
            options |= dict(zip(("kv_bits", "kv_group_size", "quantized_kv_start"), kv, strict=True))
        options = {"max_tokens": 6, "prompt_cache": caches} | options
        return list(plain_stream_generate(self.model, self.tokenizer, prompt[ends[-1] :], **options))

    def reach(self, tokens: Sequence[int], cache: PrefixCache | None = None) -> int:
        """How many of `tokens` can be restored, if one more follows."""
        return (self.cache if cache is None else cache).fetch([*tokens, 1]).cached_tokens


def assert_same_answers(ours: Sequence[GenerationResponse], theirs: Sequence[GenerationResponse]) -> None:
    assert [response.token for response in ours] == [response.token for response in theirs]
    assert [response.text for response in ours] == [response.text for response in theirs]
    assert [response.from_draft for response in ours] == [response.from_draft for response in theirs]
    assert [response.finish_reason for response in ours] == [response.finish_reason for response in theirs]
    assert [response.generation_tokens for response in ours] == [response.generation_tokens for response in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert same_bits(a.logprobs, b.logprobs)


def tokens_of(responses: Sequence[GenerationResponse]) -> list[int]:
    return [response.token for response in responses]
