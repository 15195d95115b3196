"""A growing conversation on caches of any class: each turn restores, prefills in chunks and decodes token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache
from workload import prompt

from prefixcache import PrefixCache

# As mlx-lm's server prefills.
CHUNK = 2048


@dataclass(frozen=True)
class Model:
    """Empty caches, one a layer, and what a step appends to them: rows of one shape, states of some shapes."""

    make: Callable[[], list[Any]]
    heads: int
    head_size: int
    states: tuple[tuple[tuple[int, ...], mx.Dtype], ...] = ()

    def layer_row_bytes(self) -> int:
        """Bytes of one token in one layer that keeps rows, float16."""
        return 2 * self.heads * self.head_size * 2

    def row_bytes(self) -> int:
        """Bytes of one token in all layers that keep rows."""
        return self.layer_row_bytes() * sum(not isinstance(layer, ArraysCache) for layer in self.make())

    def state_bytes(self) -> int:
        """Bytes of what the other layers hold."""
        return sum(array.nbytes for array in _states(self)) * sum(isinstance(c, ArraysCache) for c in self.make())

    def append(self, caches: Sequence[Any], count: int) -> None:
        """What ``count`` tokens do to every layer, as one chunk."""
        keys, values = (rows[..., :count, :] for rows in _rows(self))
        pending = []
        for layer in caches:
            if isinstance(layer, ArraysCache):
                for slot, array in enumerate(_states(self)):
                    layer[slot] = array
            else:
                pending += layer.update_and_fetch(keys, values)
        mx.eval(pending)


@cache
def _rows(model: Model) -> list[mx.array]:
    shape = (1, model.heads, CHUNK, model.head_size)
    rows = [mx.random.randint(0, 30_000, shape).astype(mx.uint16).view(mx.float16) for _ in range(2)]
    mx.eval(rows)
    return rows


@cache
def _states(model: Model) -> list[mx.array]:
    states = [mx.random.normal(shape).astype(dtype) for shape, dtype in model.states]
    mx.eval(states)
    return states


@dataclass(frozen=True)
class Turn:
    """``hit``: tokens restored, of which ``before`` were those of earlier turns; ``end``: tokens afterwards."""

    before: int
    hit: int
    end: int


def serve(cache: PrefixCache, model: Model, asked: list[int], answer: Sequence[int]) -> int:
    """One request, recorded: all but the last token of the prompt in chunks, the rest one by one. The tokens restored.

    The caches end at all of ``asked`` and ``answer``.
    """
    hit = cache.fetch(asked)
    recorder = cache.record(asked, hit)
    n, end = hit.cached_tokens, len(asked) - 1
    while n < end:
        cut = min(recorder.next_cut(n, CHUNK), end)
        model.append(hit.caches, cut - n)
        n = cut
        recorder.advance(n)
    for token in [*answer, None]:
        model.append(hit.caches, 1)
        n += 1
        recorder.advance(n, [] if token is None else [token])
    recorder.finish(n)
    return hit.cached_tokens


def converse(
    cache: PrefixCache, model: Model, first: int, turns: Sequence[tuple[int, int]], seed: int = 0
) -> Iterator[Turn]:
    """Serves a first prompt of ``first`` tokens, then turns of (new tokens of the user, decoded tokens)."""
    said: list[int] = []
    for number, (new, decoded) in enumerate([(first, 32), *turns]):
        before = len(said)
        asked = [*said, *prompt(new, seed=1000 * seed + 2 * number)]
        answer = prompt(decoded, seed=1000 * seed + 2 * number + 1)
        hit = serve(cache, model, asked, answer)
        said = [*asked, *answer]
        yield Turn(before, hit, len(said))
