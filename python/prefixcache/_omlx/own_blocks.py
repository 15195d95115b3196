"""Blocks of oMLX's tables in our own store: parts of whole blocks, found by their hashes.

The key of a part is the hash of its block, moved into a space of its own for each form of a model's caches, so that
rows of another form are never even looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from prefixcache._boundary import Boundary
from prefixcache._core import BlockStore, KeyChain, TokenBuffer, group_key, sha256
from prefixcache._keys import ContentRange, encode_salt
from prefixcache._layer_state import ALL, BOUNDARY, LayerState, encode_structure, walk
from prefixcache._omlx.foreign_calls import answer_of
from prefixcache._omlx.layer_dicts import live_caches, wrap_restored
from prefixcache._parts import head_group, needs_of, window_group
from prefixcache._record import record, record_snapshot
from prefixcache._registry import describe_layers, reaches_of
from prefixcache._restore import Restored, restore
from prefixcache.errors import Unsupported

Layers = Sequence[Mapping[str, Any]]
_NO_TOKENS = TokenBuffer([])


class Snapshots(Protocol):
    """What a scheduler hands over: no more than this may be asked of it."""

    def __contains__(self, n: int, /) -> bool: ...
    def __getitem__(self, n: int, /) -> Layers | None: ...


@dataclass(frozen=True)
class HashChain:
    """Whole blocks by their keys. ``digests``: of what salts each block, None where nothing does."""

    keys: list[bytes]
    root: bytes
    block_size: int
    tokens: TokenBuffer = _NO_TOKENS
    digests: Sequence[bytes | None] = ()

    def key(self, i: int, /) -> bytes:
        return self.keys[i]

    def cut_key(self, i: int, depth: int, /) -> bytes:
        raise ValueError(f"block {i} cannot be cut at token {depth}: there are whole blocks only")

    def content_of_block(self, i: int, /) -> list[ContentRange]:
        # Two blocks with the same tokens and other salts must not pass for one another.
        digest = self.digests[i] if self.digests else None
        return [] if digest is None else [(i * self.block_size, i * self.block_size + 1, digest)]


class OwnBlocks:
    """The blocks of one model in one store. Any thread.

    ``prototypes``: the model's own fresh caches, one a layer. KV is shared between equal ``form``, prototypes and block
    size (tokens). ``Unsupported`` for a cache class that no handler knows.
    """

    def __init__(self, store: BlockStore, prototypes: Sequence[Any], model_name: str, form: object, size: int) -> None:
        self._store = store
        self._prototypes = list(prototypes)
        self._size = size
        self._needs = needs_of(reaches_of(prototypes))
        own = encode_structure(describe_layers(prototypes))
        self.space = int.from_bytes(sha256(encode_salt((model_name, repr(form), own, size)))[:8], "little")
        self._root = group_key(KeyChain(model_name, [], [], 1).root, self.space)

    def store(
        self,
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        layers: Layers,
        snapshots: Snapshots | None,
        digests: Sequence[bytes | None] = (),
    ) -> int:
        """Stores the whole blocks of ``tokens``; how many of them, from the first on, are stored now.

        Rows that the layers do not hold any more, and states that are not known to stand at a block's end, are left
        out. ``Unsupported`` or ValueError for layers that cannot be understood or contradict one another.
        """
        states = describe_layers(live_caches(layers, self._prototypes))
        _check_complete(states)
        upto, stands_at = _standing(states, len(tokens), self._size)
        if upto == 0:
            return 0
        chain = HashChain(self._keys(hashes), self._root, self._size, TokenBuffer(tokens), digests)
        known = _state_stands_at(layers, states, len(tokens)) == upto
        report = record(self._store, chain, states, upto, stands_at, tail=False, state=known)
        kept = report.stored_tokens // self._size
        if snapshots is not None and (self._needs.state or self._needs.windows):
            self._store_snapshots(chain, states, snapshots, kept)
        return kept

    def restore(self, hashes: Sequence[bytes]) -> Restored:
        """Caches that stand at the end of a block: the deepest one of these that everything is there for."""
        chain = HashChain(self._keys(hashes), self._root, self._size)
        find = partial(self._deepest, chain)
        # No room behind the rows: callers take their number for the number of tokens.
        found = restore(self._store, chain, find, self._prototypes, None, self._needs, len(hashes) * self._size, 0)
        if found.caches is not None:
            found.caches = wrap_restored(found.caches, found.n)
        return found

    def stored(self, hashes: Sequence[bytes]) -> int:
        """How many blocks, from the first on, have their rows stored."""
        return self._store.longest_prefix(self._keys(hashes), self._root, self._size)

    def _keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        return [group_key(value, self.space) for value in hashes]

    def _store_snapshots(self, chain: HashChain, full: Sequence[LayerState], snapshots: Snapshots, blocks: int) -> None:
        for block in range(blocks):
            n = (block + 1) * self._size
            if n not in snapshots or self._stands(chain, block):
                continue
            layers = answer_of(snapshots.__getitem__, n)
            states = None if layers is None else self._snapshot_states(layers, full, n)
            try:
                if states is not None:
                    record_snapshot(self._store, chain, states, n)
            except (ValueError, TypeError, RuntimeError):
                # Arrays that no part can hold: the rows are stored all the same.
                continue

    def _snapshot_states(self, layers: Layers, full: Sequence[LayerState], n: int) -> list[LayerState] | None:
        """The layers of a snapshot, those that it leaves out from the whole cache; None unless they stand at ``n``."""
        try:
            states = describe_layers(live_caches(layers, self._prototypes))
        except (Unsupported, ValueError, TypeError):
            return None
        if len(states) != len(full) or any(layer.get("token_count", n) != n for layer in layers):
            return None
        merged = []
        for state, whole in zip(states, full, strict=True):
            held = [state] if any(part.slots for _, part in walk([state])) else []
            # What is left out comes from the whole cache, where only rows can be those of an earlier end.
            if not held and any(_has(part, BOUNDARY.kind) for _, part in walk([whole])):
                return None
            if not _offsets(held, ALL.kind) | _offsets(held, "window") <= {n}:
                return None
            merged.append(state if held else _at(whole, n))
        return merged

    def _deepest(self, chain: HashChain, limit: int) -> Boundary:
        rows = self._store.longest_prefix(chain.keys, chain.root, self._size)
        blocks = min(rows, limit // self._size)
        for block in reversed(range(blocks)):
            if self._stands(chain, block):
                key = chain.key(block)
                n = (block + 1) * self._size
                kept = [reach for reach in self._needs.windows if reach.keep and reach.first_row(n)]
                heads = {reach: chain.key((reach.keep - 1) // self._size) for reach in kept}
                windows = dict.fromkeys(self._needs.windows, key)
                return Boundary(n, chain.keys[: block + 1], "complete", None, n, key, windows, heads)
        return Boundary(0, [], "no_checkpoint" if blocks else "no_match", None)

    def _stands(self, chain: HashChain, block: int) -> bool:
        """Whether what layers need besides rows is stored for the end of this block."""
        key = chain.key(block)
        if self._needs.state and "state" not in self._store.presence([key])[0]:
            return False
        n = (block + 1) * self._size
        for reach in self._needs.windows:
            first = reach.first_row(n)
            if not self._has_rows(chain, window_group(reach), first, n):
                return False
            if reach.keep and first and not self._has_rows(chain, head_group(reach), 0, reach.keep):
                return False
        return True

    def _has_rows(self, chain: HashChain, group: int, lo: int, hi: int) -> bool:
        blocks = range(lo // self._size, (hi - 1) // self._size + 1)
        found = self._store.presence([group_key(chain.key(i), group) for i in blocks])
        for block, parts in zip(blocks, found, strict=True):
            if "win" not in parts:
                return False
            first, end = parts["win"][2:]
            start = block * self._size
            # Rows of a file that was not read yet are unknown: reading will tell.
            if first >= 0 and (first > max(lo, start) or end < min(hi, start + self._size)):
                return False
        return True


def _has(state: LayerState, kind: str) -> bool:
    return any(slot.reach.kind == kind for slot in state.slots)


def _offsets(states: Sequence[LayerState], kind: str) -> set[int]:
    """The numbers of tokens that layers with rows of this reach stand at."""
    found = {state.offset for _, state in walk(states) if _has(state, kind)}
    return {offset for offset in found if offset is not None}


def _at(state: LayerState, n: int) -> LayerState:
    """The state with the token count ``n``; it holds the rows up to there."""
    children = tuple(_at(child, n) for child in state.children)
    return replace(state, children=children, offset=None if state.offset is None or not state.slots else n)


def _check_complete(states: Sequence[LayerState]) -> None:
    """ValueError for a layer that counts tokens and holds none beside others that hold some: blocks without its rows
    would stand in the way of those that have them."""
    leaves = [(path, state) for path, state in walk(states) if not state.children]
    empty = [path for path, state in leaves if state.offset == 0 and not state.slots]
    if empty and any(state.slots for _, state in leaves):
        raise ValueError(f"layer {empty[0]} holds nothing beside others that hold tokens")


def _standing(states: Sequence[LayerState], tokens: int, size: int) -> tuple[int, int]:
    """How many tokens, in whole blocks, these layers hold rows of; and the tokens that their windows stand at.

    Layers whose every row is kept may stand further than the others. ValueError for windows that disagree.
    """
    windows = _offsets(states, "window")
    if len(windows) > 1:
        raise ValueError(f"layers with windows stand at different numbers of tokens: {sorted(windows)}")
    upto = min([tokens, *_offsets(states, ALL.kind), *windows]) // size * size
    return upto, max([upto, *windows])


def _state_stands_at(layers: Layers, states: Sequence[LayerState], tokens: int) -> int | None:
    """The tokens that the recurrent states are known to be those of; None if that cannot be known.

    They count no tokens themselves. The caller may have put layers of a snapshot beside longer ones, so that rows tell
    something only where they end with the tokens.
    """
    given = {layer["token_count"] for layer, state in zip(layers, states, strict=True) if "token_count" in layer}
    stateful = [i for i, state in enumerate(states) if any(_has(part, BOUNDARY.kind) for _, part in walk([state]))]
    if given:
        return given.pop() if len(given) == 1 and all("token_count" in layers[i] for i in stateful) else None
    windows = _offsets(states, "window")
    if windows:
        return windows.pop() if len(windows) == 1 else None
    return tokens if _offsets(states, ALL.kind) == {tokens} else None
