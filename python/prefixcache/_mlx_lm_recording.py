"""Where the prefix of an mlx-lm request comes from, and how the request is recorded while mlx-lm runs it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from prefixcache._keys import KvFormat, Salt
from prefixcache._recorder import Recorder
from prefixcache._results import Hit, StoreReport
from prefixcache.cache import PrefixCache

Answer = TypeVar("Answer")
ExtraKeys: TypeAlias = "Sequence[tuple[int, int, Salt]] | None"

_log = logging.getLogger("prefixcache.mlx_lm")
# What recording may raise for reasons that the request did not cause: the request goes on without it.
_TROUBLE = (ValueError, TypeError, AttributeError, LookupError, OSError, RuntimeError, MemoryError)


@dataclass
class Source:
    """Where a request's prefix comes from and goes to, in the form that its caches have at the time.

    With KV quantisation mlx-lm holds plain rows below ``start`` tokens and converts them all once it has passed it.
    Plain rows are those of a run without quantisation and share its keys; converted ones have keys of their own.
    """

    cache: PrefixCache
    salt: Salt
    extra_keys: ExtraKeys
    kv_format: KvFormat | None

    def is_plain(self, n: int) -> bool:
        """Whether caches that stand at ``n`` are not converted yet."""
        return self.kv_format is None or n < self.kv_format[2]

    def fetch(self, tokens: list[int]) -> Hit:
        """The longest stored prefix that a request of this form could have computed."""
        if self.kv_format is None:
            return self._fetch(tokens, None)
        start = self.kv_format[2]
        if len(tokens) > start:
            hit = self._fetch(tokens, self.kv_format)
            if hit.cached_tokens >= max(start, 1):
                return hit
        return self._fetch(tokens[:start], None)

    def record(self, tokens: list[int], start: Hit | list[Any], plain: bool) -> Recorder:
        """A recorder for caches that are converted or not. ``start``: a hit, or the caches."""
        form = None if plain else self.kv_format
        # Rows from ``start`` on are never plain ones.
        known = tokens[: self.kv_format[2]] if plain and self.kv_format is not None else tokens
        return self.cache.record(known, start, salt=self.salt, extra_keys=self.extra_keys, kv_format=form)

    def _fetch(self, tokens: list[int], kv_format: KvFormat | None) -> Hit:
        return self.cache.fetch(tokens, salt=self.salt, extra_keys=self.extra_keys, kv_format=kv_format)


class Recording:
    """Records one list of caches of one request. After the first trouble it does nothing more, and the request goes on.

    It is told where the caches stand, since those of a recurrent model do not know. While others work on them nobody
    does: from ``leave`` until it is told again, and if they raise, for good.
    """

    def __init__(self, source: Source, tokens: list[int], hit: Hit) -> None:
        self._source = source
        self._tokens = list(tokens)
        self._caches = hit.caches
        self._classes = [type(cache) for cache in hit.caches]
        self._start = self._n = hit.cached_tokens
        self._plain = source.is_plain(self._n)
        self._settled = True
        self._thread = threading.get_ident()
        self._recorder: Recorder | None = None
        self._open(hit)

    def cut(self, n: int, most: int) -> int:
        """Where a prefill chunk of at most ``most`` tokens that starts at ``n`` should end."""
        cut = self._try(lambda recorder: recorder.next_cut(n, most))
        return n + most if cut is None else cut

    def leave(self) -> None:
        """Others work on the caches now. If they raise, the caches are half-way between two tokens."""
        self._settled = False

    def back(self) -> None:
        """They are done, and have run no token."""
        self._settled = True

    def prefilled(self, n: int) -> None:
        """The caches stand at ``n`` and are evaluated."""
        self._advance(n, [])

    def decoded(self, token: int, n: int | None = None) -> None:
        """``token`` was sampled, and the caches have taken in ``n`` of the tokens known now; default: all of them."""
        self._tokens.append(token)
        self._advance(len(self._tokens) if n is None else n, [token])

    def check(self, standing: int) -> None:
        """Stops unless the caches count ``standing`` tokens, rejected ones included."""
        counted = None if self._recorder is None else _counted(self._caches)
        if self._recorder is not None and counted != standing:
            self._stop(f"its caches count {counted} tokens, not {standing}: rejected ones may be among them")

    def close(self, standing: int | None = None) -> None:
        """Stores what is not stored yet, if the caches count ``standing`` tokens, where that is given.

        A generator that another thread collects stops at what it has recorded.
        """
        if self._settled and self._n > self._start and threading.get_ident() == self._thread:
            if standing is not None:
                self.check(standing)
            self._try(lambda recorder: recorder.finish(self._n))
        self._recorder = None

    def _advance(self, n: int, new: list[int]) -> StoreReport | None:
        self._settled = True
        self._n = n
        if self._recorder is not None and self._plain and (not self._source.is_plain(n) or self._converted()):
            self._plain = False
            self._open(self._caches)
            new = []
        return self._try(lambda recorder: recorder.advance(n, tokens=new))

    def _converted(self) -> bool:
        """mlx-lm puts converted layers into the list. Rejected tokens count for it, so this may be before the start."""
        if self._source.kv_format is None:
            return False
        return [type(cache) for cache in self._caches] != self._classes

    def _open(self, start: Hit | list[Any]) -> None:
        try:
            self._recorder = self._source.record(self._tokens, start, self._plain)
        except _TROUBLE as error:
            self._stop(error)

    def _try(self, action: Callable[[Recorder], Answer]) -> Answer | None:
        if self._recorder is None:
            return None
        try:
            return action(self._recorder)
        except _TROUBLE as error:
            self._stop(error)
            return None

    def _stop(self, why: object) -> None:
        self._recorder = None
        _log.warning("the rest of this request is not recorded: %s", why)


class Rounds:
    """Where a model's caches and its draft model's stand between two tokens of mlx-lm's speculative decoding.

    A round: the draft model, which does not run the last token that it proposes, proposes some tokens behind the last
    one known; the model runs that one and all proposals; those that it agrees with are yielded, then one of its own,
    which neither has run. Then both lists are cut back to what was yielded and run.
    """

    def __init__(self, known: int, max_tokens: int, proposals: int) -> None:
        """The prompt has ``known`` tokens, and both lists stand before the last of them."""
        self._known = self._base = known
        self._last = known + max_tokens
        self._proposals = proposals
        self._drafted = 0
        self._over = True

    def yielded(self, from_draft: bool) -> bool:
        """Counts a token. True if it is the first of a round."""
        first = self._over
        if first:
            self._base = self._known
            self._drafted = min(self._last - self._base, self._proposals)
        self._known += 1
        self._over = not from_draft
        return first

    def standing(self) -> tuple[int, int]:
        """Tokens in the caches of the model and of the draft model now, before they are cut back."""
        return self._base + self._drafted, self._base + self._drafted - 1

    def kept(self) -> tuple[int, int]:
        """How many of them are tokens that were yielded: where the caches stand after they are cut back."""
        run = self._known - self._over
        return run, min(run, self._base + self._drafted - 1)


def _counted(caches: Sequence[Any]) -> int | None:
    """The tokens in the first layer that holds some and counts them. Cheap: one layer speaks for all."""
    for cache in caches:
        for layer in getattr(cache, "caches", (cache,)):
            offset = getattr(layer, "offset", None)
            if isinstance(offset, int) and offset > 0:
                return offset
    return None
