"""Recorder: stores one request's blocks as they become complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixcache._core import KeyChain
from prefixcache._keys import KvFormat
from prefixcache._layer_state import LayerState
from prefixcache._results import StoreReport
from prefixcache._sizes import is_count
from prefixcache._storing import Storing
from prefixcache._window_rows import WindowRows
from prefixcache.errors import Unsupported


class Recorder:
    """Stores one request's blocks as they become complete. For one thread at a time.

    It keeps the list of caches it was given, and reads their arrays only inside ``advance`` and ``finish``.
    """

    def __init__(
        self,
        storing: Storing,
        chain: KeyChain,
        caches: Sequence[Any],
        start: int,
        stored: int,
        checkpoint: int | None,
        kv_format: KvFormat | None,
    ) -> None:
        """The caches stand at ``start`` tokens, of which the first ``stored`` need not be stored again. ``checkpoint``:
        where a state is wanted."""
        self._storing = storing
        self._chain = chain
        self._caches = caches
        self._kv_format = kv_format
        self._size = chain.block_size
        self._n = start
        self._stored_blocks = stored // self._size
        # Whole blocks when something was stored last: where there was no room, the next block is soon enough.
        self._tried_blocks = self._stored_blocks
        self._checkpoint = checkpoint if storing.needs.state else None
        self._prompt_end = len(chain.tokens) - 1
        # Where a state was stored only so that a request that ends here loses nothing.
        self._provisional: int | None = None
        self._window_rows = WindowRows(storing.needs, self._size, start)

    def next_cut(self, n: int, most: int | None = None) -> int:
        """Where a prefill chunk that starts at token ``n`` should end.

        Without ``most`` the first good place: a block boundary or where a state is to be kept. With it, the largest
        chunk: the last block boundary within it, but never behind a place where a state is to be kept; n + most if
        there is no such place in it.
        """
        if not is_count(n):
            raise ValueError(f"n is {n!r}, expected a number of tokens")
        if most is not None and (not is_count(most) or most < 1):
            raise ValueError(f"most is {most!r}, expected a number of tokens, 1 or more")
        cut = (n // self._size + 1) * self._size
        if most is not None:
            cut = max(cut, (n + most) // self._size * self._size)
        if self._storing.needs.state:
            cut = min(cut, (n // self._storing.interval + 1) * self._storing.interval)
            # One token must be run: an identical prompt is taken up before its last one.
            for wanted in (self._checkpoint, self._prompt_end):
                if wanted is not None and n < wanted:
                    cut = min(cut, wanted)
        return cut if most is None else min(cut, n + most)

    def advance(self, n: int, tokens: Any = None) -> StoreReport:
        """Says that the caches now stand at ``n`` tokens, the last ``len(tokens)`` of them decoded behind the prompt.

        Call it after each prefill chunk and for each decoded token, or at least every min(block size, smallest window
        without the rows it keeps) tokens; more than half of that at a time only if regularly. Stores the blocks that
        became complete, and a recurrent state at the end of a chunk of several tokens, before the last token of the
        prompt, at a wanted checkpoint and every ``state_interval`` tokens; where nothing is due it returns at once and
        looks at nothing. ValueError if the caches stand at fewer tokens, or if ``n`` is beyond the tokens known.
        """
        new = 0 if tokens is None else len(tokens)
        self._check(n, new)
        if new:
            self._chain.extend(tokens)
        step, self._n = n - self._n, n
        lasting = self._storing.needs.state and self._is_checkpoint(n)
        state = lasting or (self._storing.needs.state and step > 1)
        if not state and n // self._size <= self._tried_blocks:
            return self._keep_rows(n)
        # A state inside a block is of no use without the rows before it.
        return self._store(n, tail=lasting, state=state, lasting=lasting)

    def finish(self, n: int | None = None) -> StoreReport:
        """Stores what is left, the short block behind the last whole one included. ``n``: tokens the caches stand at;
        default: all tokens known."""
        upto = len(self._chain.tokens) if n is None else n
        self._check(upto)
        self._n = upto
        return self._store(upto, tail=True, state=True, lasting=True)

    def _store(self, n: int, tail: bool, state: bool, lasting: bool) -> StoreReport:
        rows = self._window_rows

        def amend(states: Sequence[LayerState]) -> Sequence[LayerState]:
            joined = rows.joined(states, n)
            rows.keep(states, n)
            return joined

        report = self._storing.store(
            self._chain,
            self._caches,
            n,
            self._kv_format,
            uncounted=n,
            first_block=self._stored_blocks,
            tail=tail,
            state=state,
            prune=lasting,
            superseded=self._superseded_at(n),
            prompt_end=self._prompt_end,
            amend=amend,
        )
        if report.state_at is not None:
            self._provisional = None if lasting or not report.state_bytes else n
        self._tried_blocks = n // self._size
        self._stored_blocks = max(self._stored_blocks, report.stored_tokens // self._size)
        return report

    def _keep_rows(self, n: int) -> StoreReport:
        """Rows of small windows are copied before they leave their rings."""
        report = StoreReport(stored_tokens=self._stored_blocks * self._size)
        if self._window_rows.due(n):
            try:
                states, _ = self._storing.describe(self._caches, self._kv_format)
                self._window_rows.keep(states, n)
            except Unsupported as refusal:
                report.reason, report.detail = refusal.reason, str(refusal)
                return self._storing.count(report)
        return report

    def _superseded_at(self, n: int) -> int | None:
        """A state behind the prompt does not serve an identical prompt: the last one within it stays."""
        last = self._provisional
        return last if last is not None and (n <= self._prompt_end or last > self._prompt_end) else None

    def _is_checkpoint(self, n: int) -> bool:
        return n > 0 and (n in (self._checkpoint, self._prompt_end) or n % self._storing.interval == 0)

    def _check(self, n: int, new: int = 0) -> None:
        known = len(self._chain.tokens) + new
        if not is_count(n):
            raise ValueError(f"n is {n!r}, expected a number of tokens")
        if n > known:
            raise ValueError(f"n is {n!r}, but only {known} tokens are known")
