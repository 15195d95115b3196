"""The store line: from live caches to blocks."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache._core import BlockStore, KeyChain, Slots, StatusCode
from prefixcache._layer_state import LayerState, encode_structure, flatten
from prefixcache._results import StoreReport

_REASONS = {StatusCode.FULL: "queue_full", StatusCode.CLOSED: "closed"}


def record(
    store: BlockStore, chain: KeyChain, states: Sequence[LayerState], upto: int, first_block: int = 0, tail: bool = True
) -> StoreReport:
    """Stores the rows of tokens [first_block * block_size, upto) that are not stored yet.

    Whole blocks, then with ``tail`` the rest as a short one. Blocks before ``first_block`` are taken as stored. Stops
    at the first block that finds no room, so that what is stored stays a prefix. ``upto`` must not exceed the tokens
    of the chain nor the rows of the states.
    """
    size = chain.block_size
    whole, rest = divmod(upto, size)
    report = StoreReport(stored_tokens=min(first_block, whole) * size)
    if upto <= first_block * size:
        return report
    if any(slot.reach.kind != "all" for _, slot in flatten(states)):
        raise ValueError("only slots whose every row is needed can be stored")
    slots = Slots([(name, slot.data, slot.seq_axis, slot.first_row) for name, slot in flatten(states)])
    meta = encode_structure(states)
    for i in range(first_block, whole + 1 if tail and rest else whole):
        depth = min((i + 1) * size, upto)
        key = chain.key(i) if i < whole else chain.cut_key(i, depth)
        parent = chain.key(i - 1) if i else chain.root
        content = [item for item in chain.content_of_block(i) if item[0] < depth]
        tokens = chain.tokens.slice(i * size, depth)
        status, added = store.put(key, parent, depth, tokens, slots, i * size, depth, meta, content=content)
        if not status:
            report.reason, report.detail = _REASONS[status.code], status.message
            return report
        report.stored_tokens = depth
        report.bytes += added
        report.new_blocks += added > 0
    return report
