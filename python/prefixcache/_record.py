"""The store line: from live caches to blocks."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache._core import BlockStore, Part, Status, StatusCode, group_key
from prefixcache._keys import Chain
from prefixcache._layer_state import LayerState, encode_structure
from prefixcache._parts import PartSlots, part_slots
from prefixcache._results import StoreReport

_REASONS = {StatusCode.FULL: "queue_full", StatusCode.CLOSED: "closed"}


def record(
    store: BlockStore,
    chain: Chain,
    states: Sequence[LayerState],
    upto: int,
    stands_at: int,
    first_block: int = 0,
    tail: bool = True,
    state: bool = True,
) -> StoreReport:
    """Stores the rows of tokens [first_block * block_size, upto) that are not stored yet, as far as they are there.

    Whole blocks, then with ``tail`` the rest as a short one. With ``state``, what is exact only where the layers stand
    is stored too, if that is at ``upto``. Blocks before ``first_block`` are taken as stored. Stops at the first part
    that finds no room, so that what is stored stays a prefix. ``upto`` must not exceed ``stands_at``, the tokens that
    the layers stand at, nor the tokens of the chain.
    """
    size = chain.block_size
    whole, rest = divmod(upto, size)
    writer = _Writer(store, chain, states, part_slots(states, stands_at), min(first_block, whole) * size)
    done = all(
        writer.put_rows(i, min((i + 1) * size, upto)) for i in range(first_block, whole + 1 if tail and rest else whole)
    )
    writer.touch()
    if done and state and upto == stands_at:
        writer.put_state((upto - 1) // size, upto)
    writer.note_gone()
    return writer.report


def record_snapshot(store: BlockStore, chain: Chain, states: Sequence[LayerState], n: int) -> StoreReport:
    """Stores what layers that stood at ``n`` need to stand there again, but for rows that every n needs: those of their
    windows, in all blocks that these reach back to, and the state."""
    size, last = chain.block_size, (n - 1) // chain.block_size
    parts = part_slots(states, n)
    writer = _Writer(store, chain, states, parts, last * size)
    windows = [part for part in parts if part.part == Part.win]
    for block in range(min((part.first_row for part in windows), default=n) // size, last + 1):
        if not writer.put_rows(block, min((block + 1) * size, n), kv=False):
            return writer.report
    writer.put_state(last, n)
    return writer.report


class _Writer:
    """Puts the parts of one block after the other and counts. ``report`` says how far it came."""

    def __init__(
        self,
        store: BlockStore,
        chain: Chain,
        states: Sequence[LayerState],
        parts: Sequence[PartSlots],
        stored_tokens: int,
    ) -> None:
        self._store = store
        self._chain = chain
        self._parts = parts
        self._meta = encode_structure(states)
        self._last: bytes | None = None
        self._gone: list[tuple[bytes, int]] = []
        self.report = StoreReport(stored_tokens=stored_tokens)

    def put_rows(self, block: int, depth: int, kv: bool = True) -> bool:
        """Rows of tokens [block * block_size, depth). False where there was no room."""
        start = block * self._chain.block_size
        added = 0
        for part in self._parts:
            lo, hi = max(start, part.first_row), min(depth, part.end)
            if part.part == Part.win and part.first_row > start:
                self._gone.append((group_key(self._key(block, depth), part.group), start))
            if part.part == Part.state or (part.part == Part.kv and not kv) or (lo >= hi and part.part == Part.win):
                continue
            status, count = self._put(part, block, depth, lo, hi)
            if not status:
                return False
            added += count
        if kv:
            self._last = self._key(block, depth)
        self.report.stored_tokens = depth
        self.report.new_blocks += added > 0
        return True

    def note_gone(self) -> None:
        """Says so in the report if rows of a window are neither in their layers any more nor stored."""
        stored = self._store.presence([key for key, _ in self._gone])
        gone = [
            start
            for (_, start), found in zip(self._gone, stored, strict=True)
            if "win" not in found or found["win"][2] > start
        ]
        if gone and self.report.reason == "complete":
            self.report.reason = "rows_gone"
            self.report.detail = f"{len(gone)} blocks, the first at token {gone[0]}, have not all rows of their windows"

    def touch(self) -> None:
        """Makes the rows of the sequence newer than those that its windows have left behind: these are to go first."""
        if self._last is not None:
            self._store.touch(self._last)

    def put_state(self, block: int, depth: int) -> bool:
        """The state, for tokens [0, depth). False where there was no room; true as well if there is none."""
        for part in self._parts:
            if part.part == Part.state:
                status, added = self._put(part, block, depth, depth, depth)
                if not status:
                    return False
                self.report.state_at = depth
                self.report.state_bytes = added
        return True

    def _put(self, part: PartSlots, block: int, depth: int, lo: int, hi: int) -> tuple[Status, int]:
        chain = self._chain
        start = block * chain.block_size
        key = self._key(block, depth)
        parent = chain.key(block - 1) if block else chain.root
        content = [item for item in chain.content_of_block(block) if item[0] < depth]
        tokens = chain.tokens.slice(start, depth)
        status, added = self._store.put(
            key, parent, depth, tokens, part.slots, lo, hi, self._meta, part.part, content, part.group
        )
        if status:
            self.report.bytes += added
        else:
            self.report.reason, self.report.detail = _REASONS[status.code], status.message
        return status, added

    def _key(self, block: int, depth: int) -> bytes:
        whole = depth == (block + 1) * self._chain.block_size
        return self._chain.key(block) if whole else self._chain.cut_key(block, depth)
