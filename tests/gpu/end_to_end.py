"""A real model from the prompt to the first token: cold, restored from RAM, restored from the SSD.

Usage: end_to_end.py [--tokens N ...] [--rounds N]     runs on any device; SmolLM2-135M comes from examples/smollm2.py

What is restored must equal a deep copy of the donor's caches, bit for bit, and so must the logits of the tokens that
follow, as far as deep copies agree among themselves: not everything that a GPU computes comes out the same twice, so
each place is restored several times, and as many deep copies stand beside it. Then come times: medians, from an idle
device to the token's number on the CPU. Cold is mlx-lm alone; each request asks something new behind a prompt that is
stored. Ends with status 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "python")]

import smollm2  # noqa: E402
from mlx_lm import stream_generate as plain_generate  # noqa: E402
from runs import following_logits, prefill, rows_of, same_bits, trimmed_copy  # noqa: E402
from support import ON_CPU  # noqa: E402

from prefixcache import Hit, PrefixCache  # noqa: E402
from prefixcache.mlx_lm import stream_generate  # noqa: E402

BLOCK = 256
QUESTION = 16
STEPS, CHUNK = 6, 5
TRIES = 8  # restores, and deep copies, of each place


@dataclass
class Row:
    """One line of the table. Milliseconds; medians of the rounds."""

    place: str
    first_token: float
    restore: float | None = None
    megabytes: float = 0.0
    first_step: float | None = None
    second_step: float | None = None


class Bench:
    """One prompt: its donor, and a cache that holds it."""

    def __init__(self, model: Any, tokenizer: Any, tokens: Sequence[int], rounds: int) -> None:
        self.model, self.tokenizer, self.tokens, self.rounds = model, tokenizer, list(tokens), rounds
        ends = [*range(BLOCK, len(tokens), BLOCK), len(tokens)]
        self.donor = prefill(model, self.tokens, ends)
        # Steps of which copies of the donor gave the same logits, and of which they did not.
        self.compared = self.undecided = 0
        self._questions = itertools.count(1)

    def request(self) -> list[int]:
        """The prompt and a question that nobody asked before."""
        number = next(self._questions)
        return [*self.tokens, *((7919 * (i + 1) * (number + i) + number) % 40_000 + 100 for i in range(QUESTION))]

    def differences(self, cache: PrefixCache, place: str) -> Iterator[str]:
        """Where restored caches, or what a model says behind them, are not the donor's."""
        following = self.tokens[5 : 5 + STEPS + CHUNK]
        for n in (len(self.tokens), len(self.tokens) - BLOCK // 2 - 1):
            where = f"{place}, {n} tokens"
            restored = []
            for _ in range(TRIES):
                # With as much room as the donor: how a GPU's attention rounds depends on how far apart heads lie.
                hit = cache.fetch([*self.tokens[:n], 17, 18], spare=self.donor[0].keys.shape[2] - n)
                if hit.cached_tokens != n or {tier for tier, count in hit.tiers.items() if count} != {place}:
                    yield f"{where}: {hit.cached_tokens} were restored from {hit.tiers} ({hit.reason})"
                    break
                yield from self._other_rows(hit.caches, n, where)
                restored.append(self._logits(hit.caches, following))
            copies = [self._logits(trimmed_copy(self.donor, n), following) for _ in range(TRIES)]
            yield from self._other_logits(restored, copies, where)

    def _other_rows(self, caches: list[Any], n: int, where: str) -> Iterator[str]:
        pairs = zip(rows_of(caches, n), rows_of(self.donor, n), strict=True)
        for number, (mine, other) in enumerate(pairs):
            if not same_bits(mine, other):
                yield f"{where}: layer {number // 2} has other {('keys', 'values')[number % 2]}"

    def _other_logits(self, restored: list[Any], copies: list[Any], where: str) -> Iterator[str]:
        """Steps of which all copies say one thing, and every restore another."""
        for step, theirs in enumerate(zip(*copies, strict=True)):
            if not all(same_bits(theirs[0], other) for other in theirs[1:]):
                self.undecided += 1
                continue
            self.compared += 1
            # On a GPU copies can agree by chance; a wrong restore does not say what they say.
            agree = all if ON_CPU else any
            if restored and not agree(same_bits(logits[step], theirs[0]) for logits in restored):
                yield f"{where}: logits of step {step} differ by {mx.abs(restored[0][step] - theirs[0]).max().item()}"

    def _logits(self, caches: list[Any], following: Sequence[int]) -> list[mx.array]:
        return following_logits(self.model, caches, following, STEPS, CHUNK)

    def cold(self) -> Row:
        return Row("nothing", self._median(lambda: self._first(plain_generate, self.request())))

    def missed(self, cache: PrefixCache) -> Row:
        """With a prefix cache that has nothing for it: the prompt is recorded, block by block."""
        salts = itertools.count(1)

        def run() -> float:
            options = {"prefix_cache": cache, "salt": next(salts)}
            return self._first(stream_generate, self.request(), **options)

        return Row("a miss", self._median(run))

    def warm(self, cache: PrefixCache, place: str) -> Row:
        hits: list[Hit] = []

        def run() -> float:
            return self._first(stream_generate, self.request(), prefix_cache=cache, on_hit=hits.append)

        first_token = self._median(run)
        if {hit.cached_tokens for hit in hits} != {len(self.tokens)}:
            raise SystemExit(f"{place}: hits of {sorted({hit.cached_tokens for hit in hits})} tokens")
        restores, firsts, seconds = zip(*(self._steps(cache) for _ in range(self.rounds + 1)), strict=True)
        middle = [statistics.median(times[1:]) for times in (restores, firsts, seconds)]
        return Row(place, first_token, middle[0], hits[-1].bytes / 1e6, middle[1], middle[2])

    def _steps(self, cache: PrefixCache) -> tuple[float, float, float]:
        """A restore alone, and two decoded tokens behind it."""
        prompt = [*self.tokens, 17]
        found: list[Hit] = []
        restore = idle_ms(lambda: found.append(cache.fetch(prompt)))
        caches = found[0].caches

        def step() -> None:
            mx.eval(self.model(mx.array([[17]]), cache=caches))

        return restore, idle_ms(step), idle_ms(step)

    def _first(self, generate: Callable[..., Any], prompt: list[int], **options: Any) -> float:
        answer = generate(self.model, self.tokenizer, prompt, max_tokens=1, **options)
        spent = idle_ms(lambda: next(answer))
        answer.close()
        return spent

    def _median(self, run: Callable[[], float]) -> float:
        # The first compiles kernels.
        return statistics.median([run() for _ in range(self.rounds + 1)][1:])


def idle_ms(body: Callable[[], object]) -> float:
    """Milliseconds of `body`, from an idle device to an idle device."""
    mx.synchronize()
    start = time.perf_counter()
    body()
    mx.synchronize()
    return (time.perf_counter() - start) * 1e3


@contextmanager
def opened(directory: Path, model: Any, ram: str | int) -> Iterator[PrefixCache]:
    with PrefixCache.open(directory, model, block_size=BLOCK, ram=ram) as cache:
        yield cache


def story(tokenizer: Any, length: int) -> list[int]:
    sentence = "The {}th ship of the fleet left harbour {} in the spring, and its crew of {} saw {} whales. "
    text = "".join(sentence.format(i, i * 7 % 11, i * 5 + 3, i * i % 23) for i in range(2, 4 + length // 20))
    tokens: list[int] = tokenizer.encode(text)[:length]
    if len(tokens) != length:
        raise SystemExit(f"the story has {len(tokens)} tokens, {length} are wanted")
    return tokens


def measure(model: Any, tokenizer: Any, length: int, rounds: int) -> int:
    """Prints what was found for a prompt of this length; the number of differences."""
    bench = Bench(model, tokenizer, story(tokenizer, length), rounds)
    with tempfile.TemporaryDirectory(prefix="prefixcache-e2e-") as folder:
        with opened(Path(folder), model, "4GB") as cache:
            stored = cache.store(bench.tokens, bench.donor)
            if stored.stored_tokens != length:
                raise SystemExit(f"not stored: {stored}")
            cache.flush()
            wrong = list(bench.differences(cache, "ram"))
            stats = cache.stats()
            if not ON_CPU and not stats["gathered_device_bytes"]:
                wrong.append(f"the kernel copied nothing: {stats['last_error']}")
            rows = [bench.cold(), bench.missed(cache), bench.warm(cache, "ram")]
        with opened(Path(folder), model, 0) as cache:
            wrong += bench.differences(cache, "ssd")
            rows.append(bench.warm(cache, "ssd"))
    show(length, rows)
    print(f"  restored against a deep copy of the donor: {'equal, bit for bit' if not wrong else 'DIFFERENT'}")
    steps = f"{bench.compared} steps, {bench.undecided} more in which copies of the donor differ among themselves"
    print(f"  logits compared in {steps}", flush=True)
    for line in wrong[:12]:
        print(f"    {line}")
    return len(wrong)


def show(length: int, rows: list[Row]) -> None:
    print(f"{length} tokens of prompt, {QUESTION} of question")
    headings = (
        ("restored from", -14),
        ("first token", 13),
        ("gain", 9),
        ("restore", 12),
        ("MB", 7),
        ("next two steps", 20),
    )
    print("  " + "".join(f"{text:<{-width}}" if width < 0 else f"{text:>{width}}" for text, width in headings))
    for row in rows:
        gain = f"{rows[0].first_token / row.first_token:.2f} x"
        line = f"  {row.place:14}{row.first_token:10.2f} ms{gain:>9}"
        if row.restore is not None:
            line += f"{row.restore:9.2f} ms{row.megabytes:7.1f}{row.first_step:9.2f}, {row.second_step:.2f} ms"
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 7680])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if min(options.tokens) <= BLOCK or options.rounds < 1:
        parser.error(f"--tokens must be more than {BLOCK}, --rounds at least 1")
    model, tokenizer = smollm2.load(smollm2.prepare())
    print(f"SmolLM2-135M, MLX {mx.__version__} on {mx.default_device()}; medians of {options.rounds}")
    return int(sum(measure(model, tokenizer, length, options.rounds) for length in options.tokens) > 0)


if __name__ == "__main__":
    sys.exit(main())
