"""mlx-lm's ``generate`` and ``stream_generate`` with a prefix cache: the same arguments, the same answers, less work.

The longest stored prefix of the prompt is restored, the rest is prefilled in chunks that end at block boundaries and
is recorded after each chunk, and the answer is recorded as it is decoded. A request that is cancelled half-way keeps
what it has computed. Importing this module does not import mlx_lm; the first call does.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import mlx.core as mx

from prefixcache._keys import KvFormat, Salt
from prefixcache._mlx_lm_recording import ExtraKeys, Recording, Rounds, Source
from prefixcache._results import Hit
from prefixcache.cache import PrefixCache

Progress: TypeAlias = Callable[[int, int], None]


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    *,
    prefix_cache: PrefixCache,
    salt: Salt = None,
    extra_keys: ExtraKeys = None,
    on_hit: Callable[[Hit], None] | None = None,
    prefill_step_size: int = 2048,
    prompt_progress_callback: Progress | None = None,
    **kwargs: Any,
) -> Generator[Any, None, None]:
    """Yields the ``GenerationResponse`` objects of mlx-lm's ``stream_generate``.

    ``prefix_cache`` must have been opened for ``model``. ``salt`` and ``extra_keys`` go into its keys; ``on_hit`` is
    called once, before the prefill, with the ``Hit`` that the request starts from. ``prompt_tokens`` counts the whole
    prompt, ``prompt_tps`` is the whole prompt over the time to the first token, and logits processors see the whole
    prompt, reused or not. ``prompt_progress_callback(done, total)`` first reports the reused tokens as done.
    Other arguments are mlx-lm's own.

    With ``max_kv_size`` or ``draft_model`` the caches live beside those of ``model``: see ``PrefixCache.beside``. A
    draft model's prefix is found, prefilled and recorded like the model's own, each as far as it goes; ``on_hit``,
    the progress and ``prompt_tokens`` speak of ``model``. Logits processors then see what mlx-lm shows them: the last
    token of the prompt and the answer.

    ValueError, at the call, for an empty prompt, and for options that would change the cache in a way that cannot be
    stored: ``input_embeddings``, ``prompt_cache``; when it starts, for a ``max_kv_size`` of no more than the 4 tokens
    that mlx-lm always keeps. Trouble while recording (a full disk, a cache class that cannot be stored) never stops
    the request: it is logged once. Errors of the model, of mlx-lm and of callbacks pass through; what is stored is not
    harmed, and a request that its reader or the progress callback ends keeps all that it has computed.
    Threads: run one generator on one thread; several generators may share ``prefix_cache``.
    """
    _refuse_options(kwargs)
    if max_tokens == 0:
        raise ValueError("max_tokens must not be 0 (-1 means no limit)")
    if prefill_step_size < 1:
        raise ValueError(f"prefill_step_size must be at least 1, not {prefill_step_size}")
    row = _encode(tokenizer, prompt)
    draft_model, max_kv_size = kwargs.pop("draft_model", None), kwargs.pop("max_kv_size", None)

    def sources() -> list[Source]:
        kv_format = _take_kv_format(kwargs)
        if draft_model is not None:
            # As mlx-lm, which has no sizes for a pair of models.
            caches = [prefix_cache, prefix_cache.beside(draft_model)]
        else:
            caches = [prefix_cache if max_kv_size is None else _rotating(prefix_cache, model, max_kv_size)]
        return [Source(cache, salt, extra_keys, kv_format) for cache in caches]

    request = _Request(model, draft_model, tokenizer, row, prefill_step_size, prompt_progress_callback, on_hit)
    return request.run(sources, max_tokens, kwargs)


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    *,
    prefix_cache: PrefixCache,
    **kwargs: Any,
) -> str:
    """The whole answer of ``stream_generate``; ``verbose`` prints it while it is made, and the timings."""
    reused = [0]
    on_hit = kwargs.pop("on_hit", None)

    def note(hit: Hit) -> None:
        reused[0] = hit.cached_tokens
        if on_hit is not None:
            on_hit(hit)

    pieces: list[str] = []
    response = None
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, prefix_cache=prefix_cache, on_hit=note, **kwargs):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print("\n" + "=" * 10)
        print(f"Prompt: {response.prompt_tokens} tokens, {reused[0]} reused, {response.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return "".join(pieces)


def _refuse_options(options: dict[str, Any]) -> None:
    reasons = {
        "input_embeddings": "the keys of stored blocks are made of token ids",
        "prompt_cache": "the cache comes from prefix_cache",
    }
    for name, reason in reasons.items():
        if options.pop(name, None) is not None:
            raise ValueError(f"{name} cannot be used with prefix_cache: {reason}")


def _take_kv_format(options: dict[str, Any]) -> KvFormat | None:
    """(bits, group size, start) of mlx-lm's KV quantisation, with mlx-lm's defaults, or None without it."""
    if options.get("kv_bits") is None:
        return None
    from mlx_lm.generate import generate_step

    # They differ between releases.
    defaults = inspect.signature(generate_step).parameters
    group_size = options.setdefault("kv_group_size", defaults["kv_group_size"].default)
    start = options.setdefault("quantized_kv_start", defaults["quantized_kv_start"].default)
    return (options["kv_bits"], group_size, start)


def _rotating(prefix_cache: PrefixCache, model: Any, max_kv_size: int) -> PrefixCache:
    """Where caches of this size live. A model that makes its own caches has them whatever the size is."""
    if hasattr(model, "make_cache"):
        return prefix_cache
    from mlx_lm.models.cache import make_prompt_cache

    return prefix_cache.beside(caches=make_prompt_cache(model, max_kv_size))


def _encode(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> mx.array:
    if isinstance(prompt, str):
        # As mlx-lm: a prompt that spells out its first special token needs no second one.
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos))
    row = prompt if isinstance(prompt, mx.array) else mx.array(cast("Any", prompt))
    if row.ndim != 1 or row.size == 0:
        raise ValueError(f"prompt must be one row of at least one token, not an array of shape {row.shape}")
    return row


@dataclass
class _Lane:
    """A model with its caches: the one that answers, or the one that drafts."""

    model: Any
    hit: Hit
    recording: Recording
    kv_format: KvFormat | None


class _TwoLists(list[Any]):
    """The caches of a model and its draft model for mlx-lm, which cuts them apart at the number of the model's layers
    and puts converted ones into the halves. It gets the lists themselves: some models have fewer caches than layers,
    and the converted ones are to be recorded."""

    def __init__(self, halves: Sequence[list[Any]]) -> None:
        super().__init__(halves[0] + halves[1])
        self._halves = halves

    def __getitem__(self, index: Any) -> Any:
        return self._halves[0 if index.start is None else 1] if isinstance(index, slice) else super().__getitem__(index)


@dataclass
class _Request:
    model: Any
    draft_model: Any
    tokenizer: Any
    prompt: mx.array
    step: int
    progress: Progress | None
    on_hit: Callable[[Hit], None] | None

    def __post_init__(self) -> None:
        self.tokens = cast("list[int]", self.prompt.tolist())

    def run(
        self, sources: Callable[[], list[Source]], max_tokens: int, options: dict[str, Any]
    ) -> Generator[Any, None, None]:
        from mlx_lm.generate import generation_stream, wired_limit

        started = time.perf_counter()
        stream = options.get("stream", generation_stream)
        lanes = self._lanes(sources())
        if self.on_hit is not None:
            self.on_hit(lanes[0].hit)
        answers, rounds = None, None
        try:
            with wired_limit(self.model, [stream]), mx.stream(stream):
                self._prefill_all(lanes)
            if self.draft_model is not None:
                rounds = self._rounds(lanes, max_tokens, options)
            answers = self._decode(lanes, max_tokens, options)
            rate = 0.0
            for response in _watched(answers, [lane.recording for lane in lanes]):
                _record(lanes, rounds, response)
                if not rate:
                    rate = len(self.tokens) / (time.perf_counter() - started)
                    self._report(len(self.tokens))
                yield replace(response, prompt_tokens=len(self.tokens), prompt_tps=rate)
        finally:
            if answers is not None:
                answers.close()
            _close(lanes, rounds)

    def _lanes(self, sources: list[Source]) -> list[_Lane]:
        lanes = []
        for model, source in zip((self.model, self.draft_model), sources, strict=False):
            hit = source.fetch(self.tokens)
            lanes.append(_Lane(model, hit, Recording(source, self.tokens, hit), source.kv_format))
        return lanes

    def _prefill_all(self, lanes: list[_Lane]) -> None:
        """Runs all but the last token of the prompt, which mlx-lm's own loop takes."""
        done = lanes[0].hit.cached_tokens
        self._report(done)
        for lane in lanes[1:]:
            self._prefill(lane, lambda _: self._report(done))
        self._prefill(lanes[0], self._report)

    def _prefill(self, lane: _Lane, report: Callable[[int], None]) -> None:
        from mlx_lm.generate import maybe_quantize_kv_cache

        convert: Callable[..., None] = maybe_quantize_kv_cache
        caches, recording = lane.hit.caches, lane.recording
        end, n = len(self.tokens) - 1, lane.hit.cached_tokens
        while n < end:
            cut = recording.cut(n, min(self.step, end - n))
            recording.leave()
            lane.model(self.prompt[n:cut][None], cache=caches)
            if lane.kv_format is not None:
                bits, group_size, start = lane.kv_format
                convert(caches, start, group_size, bits)
            mx.eval([cache.state for cache in caches])
            n = cut
            recording.prefilled(n)
            report(n)
            mx.clear_cache()

    def _rounds(self, lanes: list[_Lane], max_tokens: int, options: dict[str, Any]) -> Rounds:
        from mlx_lm.generate import speculative_generate_step

        default = inspect.signature(speculative_generate_step).parameters["num_draft_tokens"].default
        proposals = options.setdefault("num_draft_tokens", default)
        draft = lanes[1]
        if proposals < 1 or not all(cache.is_trimmable() for cache in draft.hit.caches):
            # mlx-lm goes on with them, but its rejected tokens would stay in them.
            draft.recording.close()
        return Rounds(len(self.tokens), max_tokens, proposals)

    def _decode(self, lanes: list[_Lane], max_tokens: int, options: dict[str, Any]) -> Generator[Any, None, None]:
        from mlx_lm.generate import stream_generate as decode

        options |= {"max_tokens": max_tokens, "prompt_cache": lanes[0].hit.caches}
        if self.draft_model is not None:
            both = _TwoLists([lane.hit.caches for lane in lanes])
            options |= {"draft_model": self.draft_model, "prompt_cache": both}
        elif processors := options.get("logits_processors"):
            options["logits_processors"] = [_seeing_all_of(self.prompt, processor) for processor in processors]
        answers: Generator[Any, None, None] = decode(self.model, self.tokenizer, self.prompt[-1:], **options)
        return answers

    def _report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, len(self.tokens))


def _watched(answers: Generator[Any, None, None], recordings: list[Recording]) -> Generator[Any, None, None]:
    """``answers``; while the next one is made, mlx-lm works on the caches."""
    for recording in recordings:
        recording.leave()
    for answer in answers:
        yield answer
        for recording in recordings:
            recording.leave()
    for recording in recordings:
        recording.back()


def _record(lanes: list[_Lane], rounds: Rounds | None, response: Any) -> None:
    if rounds is None:
        # mlx-lm has given the token to the model before it yields it.
        lanes[0].recording.decoded(response.token)
        return
    begins = rounds.yielded(response.from_draft)
    for lane, standing, kept in zip(lanes, rounds.standing(), rounds.kept(), strict=True):
        if begins:
            lane.recording.check(standing)
        lane.recording.decoded(response.token, kept)


def _close(lanes: list[_Lane], rounds: Rounds | None) -> None:
    """Stores the rest. By now mlx-lm has cut back what a draft model was wrong about."""
    standing = (None,) * len(lanes) if rounds is None else rounds.kept()
    for lane, kept in zip(lanes, standing, strict=True):
        lane.recording.close(kept)


def _seeing_all_of(prompt: mx.array, processor: Callable[[mx.array, mx.array], mx.array]) -> Any:
    """``processor`` behind a prompt whose first tokens mlx-lm does not see because they are in the cache."""
    hidden = prompt[:-1]
    return lambda tokens, logits: processor(mx.concatenate([hidden, tokens]), logits)
