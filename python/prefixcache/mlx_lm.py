"""mlx-lm's ``generate`` and ``stream_generate`` with a prefix cache: the same arguments, the same answers, less work.

The longest stored prefix of the prompt is restored, the rest is prefilled in chunks that end at block boundaries and
is recorded after each chunk, and the answer is recorded as it is decoded. A request that is cancelled half-way keeps
what it has computed. Importing this module does not import mlx_lm; the first call does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import mlx.core as mx

from prefixcache._keys import KvFormat, Salt
from prefixcache._results import Hit
from prefixcache.cache import PrefixCache

ExtraKeys: TypeAlias = "Sequence[tuple[int, int, Salt]] | None"
Progress: TypeAlias = Callable[[int, int], None]

_log = logging.getLogger(__name__)
# What recording may raise for reasons that the request did not cause: the request goes on without it.
_RECORDING_TROUBLE = (ValueError, TypeError, OSError, RuntimeError, MemoryError)

_NO_CUT = 1 << 40


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

    ValueError, at the call, for an empty prompt, and for options that would change the cache in a way that cannot be
    stored: ``draft_model``, ``max_kv_size``, ``input_embeddings``, ``prompt_cache``. Trouble while recording (a full
    disk, a cache class that cannot be stored) never stops the request: it is logged once.
    Threads: run one generator on one thread; several generators may share ``prefix_cache``.
    """
    _refuse_options(kwargs)
    if max_tokens == 0:
        raise ValueError("max_tokens must not be 0 (-1 means no limit)")
    if prefill_step_size < 1:
        raise ValueError(f"prefill_step_size must be at least 1, not {prefill_step_size}")
    row = _encode(tokenizer, prompt)
    source = _Source(prefix_cache, salt, extra_keys, _take_kv_format(kwargs))
    request = _Request(model, tokenizer, row, source, prefill_step_size, prompt_progress_callback, on_hit)
    return request.run(max_tokens, kwargs)


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
        "draft_model": "speculative decoding keeps a second cache, which cannot be stored yet",
        "max_kv_size": "a rotating cache cannot be stored yet",
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
    from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START

    group_size = options.setdefault("kv_group_size", 64)
    start = options.setdefault("quantized_kv_start", DEFAULT_QUANTIZED_KV_START)
    return (options["kv_bits"], group_size, start)


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
class _Source:
    """Where a request's prefix comes from and goes to, in the form that its caches have at the time.

    With KV quantisation mlx-lm holds plain rows below ``start`` tokens and converts them all once it has passed it.
    Plain rows are those of a run without quantisation and share its keys; converted ones have keys of their own.
    """

    cache: PrefixCache
    salt: Salt
    extra_keys: ExtraKeys
    kv_format: KvFormat | None

    def is_plain(self, n: int) -> bool:
        return self.kv_format is None or n < self.kv_format[2]

    def fetch(self, tokens: list[int]) -> Hit:
        start = 0 if self.kv_format is None else self.kv_format[2]
        if self.kv_format is not None and len(tokens) > start:
            hit = self._fetch(tokens, self.kv_format)
            if hit.cached_tokens >= max(start, 1):
                return hit
        plain = tokens if self.kv_format is None else tokens[:start]
        return self._fetch(plain, None)

    def _fetch(self, tokens: list[int], kv_format: KvFormat | None) -> Hit:
        return self.cache.fetch(tokens, salt=self.salt, extra_keys=self.extra_keys, kv_format=kv_format)

    def record(self, tokens: list[int], start: Any, plain: bool) -> Any:
        if self.kv_format is None:
            return self.cache.record(tokens, start, salt=self.salt, extra_keys=self.extra_keys)
        known, form = (tokens[: self.kv_format[2]], None) if plain else (tokens, self.kv_format)
        return self.cache.record(known, start, salt=self.salt, extra_keys=self.extra_keys, kv_format=form)


class _Recording:
    """Records one request. After the first trouble it does nothing more, so that the request goes on."""

    def __init__(self, source: _Source, tokens: list[int], hit: Hit) -> None:
        self._source = source
        self._tokens = list(tokens)
        self._caches = hit.caches
        self._recorder: Any = None
        self._broken = False
        self._thread = threading.get_ident()
        self._n = hit.cached_tokens
        self._told = len(tokens)
        self._plain = source.is_plain(self._n)
        self._open(hit)

    def last_cut(self, n: int, limit: int) -> int:
        """Where a prefill chunk that starts at ``n`` should end: the last block boundary up to ``limit``, if any."""
        cut = self._next_cut(n)
        while cut < limit and (further := self._next_cut(cut)) <= limit:
            cut = further
        return min(cut, limit)

    def prefilled(self, n: int) -> None:
        """The caches stand at ``n`` and are evaluated."""
        self._advance(n)

    def decoded(self, token: int) -> None:
        """``token`` was sampled. By then mlx-lm has given it to the model already: the caches count it."""
        self._tokens.append(token)
        n = self._standing()
        if n >= self._cut:
            self._advance(n)

    def close(self) -> None:
        """Stores what is not stored yet. A generator that another thread collects stops at what it has recorded."""
        if threading.get_ident() != self._thread or self._broken:
            return
        n = self._standing()
        if n > self._n:
            self._advance(n)
        self._try(lambda recorder: recorder.finish(n))

    def _standing(self) -> int:
        """How many tokens the caches have taken in, by their own count where they keep one."""
        offsets = (getattr(cache, "offset", None) for cache in self._caches)
        known = len(self._tokens)
        return min(next((offset for offset in offsets if isinstance(offset, int)), known), known)

    def _advance(self, n: int) -> None:
        if self._plain and not self._source.is_plain(n):
            # mlx-lm has just converted every row: from here on the converted form is what can be recorded.
            self._plain = False
            self._open(self._caches)
        new, self._told = self._tokens[self._told :], len(self._tokens)
        self._try(lambda recorder: recorder.advance(n, tokens=new) if new else recorder.advance(n))
        self._n = n
        self._cut = self._next_cut(n)

    def _open(self, start: Any) -> None:
        self._told = len(self._tokens)
        try:
            self._recorder = self._source.record(self._tokens, start, self._plain)
        except _RECORDING_TROUBLE as error:
            self._stop(error)
        self._cut = self._next_cut(self._n)

    def _next_cut(self, n: int) -> int:
        cut = self._try(lambda recorder: recorder.next_cut(n))
        return n + _NO_CUT if cut is None else cut

    def _try(self, action: Callable[[Any], Any]) -> Any:
        if self._broken:
            return None
        try:
            return action(self._recorder)
        except _RECORDING_TROUBLE as error:
            self._stop(error)
            return None

    def _stop(self, error: Exception) -> None:
        self._broken = True
        self._recorder = None
        _log.warning("the rest of this request is not recorded: %s", error)


@dataclass
class _Request:
    model: Any
    tokenizer: Any
    prompt: mx.array
    source: _Source
    step: int
    progress: Progress | None
    on_hit: Callable[[Hit], None] | None

    def __post_init__(self) -> None:
        self.tokens = cast("list[int]", self.prompt.tolist())

    def run(self, max_tokens: int, options: dict[str, Any]) -> Generator[Any, None, None]:
        from mlx_lm.generate import generation_stream, wired_limit

        started = time.perf_counter()
        stream = options.setdefault("stream", generation_stream)
        hit = self.source.fetch(self.tokens)
        if self.on_hit is not None:
            self.on_hit(hit)
        recording = _Recording(self.source, self.tokens, hit)
        with wired_limit(self.model, [stream]), mx.stream(stream):
            self._prefill(hit, recording)
        answers = self._decode(hit.caches, max_tokens, options)
        try:
            rate = 0.0
            for response in answers:
                rate = rate or len(self.tokens) / (time.perf_counter() - started)
                recording.decoded(response.token)
                yield replace(response, prompt_tokens=len(self.tokens), prompt_tps=rate)
        finally:
            answers.close()
            recording.close()

    def _prefill(self, hit: Hit, recording: _Recording) -> None:
        """Runs all but the last token of the prompt, which mlx-lm's own loop takes."""
        from mlx_lm.generate import maybe_quantize_kv_cache

        convert: Callable[..., None] = maybe_quantize_kv_cache
        end, n = len(self.tokens) - 1, hit.cached_tokens
        self._report(n)
        while n < end:
            cut = recording.last_cut(n, min(n + self.step, end))
            self.model(self.prompt[n:cut][None], cache=hit.caches)
            if self.source.kv_format is not None:
                bits, group_size, start = self.source.kv_format
                convert(hit.caches, start, group_size, bits)
            mx.eval([cache.state for cache in hit.caches])
            n = cut
            recording.prefilled(n)
            self._report(n)
            mx.clear_cache()

    def _decode(self, caches: list[Any], max_tokens: int, options: dict[str, Any]) -> Generator[Any, None, None]:
        from mlx_lm.generate import stream_generate as decode

        if processors := options.get("logits_processors"):
            options["logits_processors"] = [_seeing_all_of(self.prompt, processor) for processor in processors]

        def progress(done: int, _: int) -> None:
            if done:
                self._report(len(self.tokens))

        last = self.prompt[-1:]
        options |= {"max_tokens": max_tokens, "prompt_cache": caches, "prompt_progress_callback": progress}
        answers: Generator[Any, None, None] = decode(self.model, self.tokenizer, last, **options)
        return answers

    def _report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, len(self.tokens))


def _seeing_all_of(prompt: mx.array, processor: Callable[[mx.array, mx.array], mx.array]) -> Any:
    """``processor`` behind a prompt whose first tokens mlx-lm does not see because they are in the cache."""
    hidden = prompt[:-1]
    return lambda tokens, logits: processor(mx.concatenate([hidden, tokens]), logits)
