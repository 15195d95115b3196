"""A run of a model without a prefix cache, against which everything restored is compared."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from architectures import caches as looks
from architectures import harness

BLOCK = 16
# Two turns of a conversation: each is a prompt, and tokens decoded after it. The first ends inside a block, the second
# at the end of one.
PROMPT, TURN = 86, 90
PROMPT2, TURN2 = 107, 112
PROMPT3, TURN3 = 120, 121
TOKENS = [int(token) for token in np.random.default_rng(11).integers(1, harness.VOCABULARY, 130)]


def forked(n: int, length: int, way: int = 1) -> list[int]:
    """A prompt of ``length`` tokens that leaves TOKENS after n of them; other ways differ from the first token on."""
    return TOKENS[:n] + [(token + way) % harness.VOCABULARY for token in TOKENS[n:length]]


def chunks(start: int, prompt: int, end: int, next_cut: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """How mlx-lm runs a prompt that is cached up to ``start``: in chunks, then its last token alone, then decoding."""
    while start < prompt - 1:
        stop = min(next_cut(start), prompt - 1)
        yield start, stop
        start = stop
    for n in range(start, end):
        yield n, n + 1


def next_block(n: int) -> int:
    return (n // BLOCK + 1) * BLOCK


CHUNKS = [
    *chunks(0, PROMPT, TURN, next_block),
    *chunks(TURN, PROMPT2, TURN2, next_block),
    *chunks(TURN2, PROMPT3, TURN3, next_block),
]


def feed(model: Any, caches: Sequence[Any], tokens: Sequence[int], start: int, stop: int) -> mx.array:
    """Runs tokens [start, stop) and gives their logits."""
    logits = model(mx.array([tokens[start:stop]]), cache=caches)
    mx.eval(logits)
    return logits


class Architecture:
    """One module's model, and what it gives for TOKENS without a prefix cache: the logits of every chunk, and a deep
    copy of its caches at the end of each. The run goes as far as was asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = harness.build(name)
        self.logits: dict[tuple[int, int], mx.array] = {}
        self.copies: dict[int, list[Any]] = {}
        self._expected: dict[Any, list[mx.array]] = {}
        self._caches = self.make_caches()
        self.state = looks.has_state(self._caches)

    def _run(self, upto: int) -> None:
        for start, stop in CHUNKS[len(self.copies) :]:
            if start >= upto:
                break
            self.logits[start, stop] = feed(self.model, self._caches, TOKENS, start, stop)
            looks.evaluate(self._caches)
            self.copies[stop] = copy.deepcopy(self._caches)

    def make_caches(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def copy_at(self, n: int) -> list[Any]:
        """A deep copy of the caches of the run that stands at n: made there, or made at the end of the chunk around n
        and cut."""
        if n == 0:
            return self.make_caches()
        self._run(n)
        if n in self.copies:
            return copy.deepcopy(self.copies[n])
        return looks.cut(self.copies[min(m for m in self.copies if m > n)], n)

    def go_on(self, caches: Sequence[Any], tokens: Sequence[int], sizes: Sequence[int]) -> list[mx.array]:
        """The logits of chunks of these sizes of ``tokens``. Changes the caches."""
        stops = list(itertools.accumulate(sizes))
        return [feed(self.model, caches, tokens, start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def check_copy(self, caches: Sequence[Any], n: int, tokens: Sequence[int], sizes: Sequence[int]) -> None:
        """``caches``, restored at n, give the logits of a deep copy of the donor's for chunks of ``tokens[n:]``.

        Where the first chunk is one token, the rings of the copy are put in temporal order. Uses the caches up.
        """
        rest = tuple(tokens[n : n + sum(sizes)])
        key = (n, rest, tuple(sizes))
        if key not in self._expected:
            donor = self.copy_at(n)
            self._expected[key] = self.go_on(looks.in_temporal_order(donor) if sizes[0] == 1 else donor, rest, sizes)
        self._check_standing(caches, n)
        for step, pair in enumerate(zip(self.go_on(caches, rest, sizes), self._expected[key], strict=True)):
            assert same(*pair), f"{self.name}: restored at {n}, chunk {step} of {list(sizes)}: {difference(*pair)}"

    def check_run(self, caches: Sequence[Any], n: int, upto: int) -> None:
        """``caches``, restored at n, go on to ``upto`` with the logits of the run that had no prefix cache. Uses the
        caches up."""
        self._check_standing(caches, n)
        rest = [(start, stop) for start, stop in CHUNKS if n <= start and stop <= upto]
        assert rest[0][0] == n, f"{self.name}: no chunk of the run begins at {n}"
        for start, stop in rest:
            self.check_chunk(feed(self.model, caches, TOKENS, start, stop), start, stop)

    def _check_standing(self, caches: Sequence[Any], n: int) -> None:
        found, expected = looks.standing(caches), looks.standing(self.copy_at(n))
        assert found == expected, f"{self.name}: caches that should stand at {n}"

    def check_chunk(self, logits: mx.array, start: int, stop: int) -> None:
        """These are the logits of the run that had no prefix cache. KeyError if it had no such chunk."""
        self._run(stop)
        expected = self.logits[start, stop]
        assert same(logits, expected), f"{self.name}: tokens [{start}, {stop}): {difference(logits, expected)}"


def same(left: mx.array, right: mx.array) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and mx.array_equal(left, right).item()


def difference(left: mx.array, right: mx.array) -> str:
    return f"logits differ by {mx.max(mx.abs(left - right)).item()}"
