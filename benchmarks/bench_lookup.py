"""Claim: how much of a prompt is stored is known for a few nanoseconds a token, without reading a tensor.

What is stored has tiny rows and states: a lookup does not read them. The plain conversation has rows alone. The full
one has two windows and a state as well, and its last block is one of a few hundred that begin at the same place.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from harness import Numbers, Row, Settings, interleaved, main, timed
from mlx_lm.models.cache import ArraysCache, KVCache, LRUPromptCache, RotatingKVCache
from workload import BLOCK, prompt

from prefixcache._boundary import deepest_boundary
from prefixcache._core import BlockStore, KeyChain
from prefixcache._keys import key_chain
from prefixcache._parts import Needs, needs_of
from prefixcache._record import record
from prefixcache._registry import describe_layers, reaches_of

TOKENS = 131_072
WINDOWS = (1024, 4096)
CHILDREN = 300
# Tokens of a child behind what all share.
OWN = 100


def _caches(tokens: int, full: bool) -> list[Any]:
    """Caches as a prefill in one chunk leaves them: their windows hold every row."""
    row = mx.zeros((1, 1, tokens, 8), dtype=mx.float16)
    caches: list[Any] = [KVCache(), *(RotatingKVCache(window) for window in WINDOWS if full)]
    mx.eval([cache.update_and_fetch(row, row) for cache in caches])
    if full:
        states = ArraysCache(2)
        states[0], states[1] = mx.zeros((1, 3, 8)), mx.zeros((1, 2, 8, 8))
        caches.append(states)
    return caches


def _open(scratch: str) -> BlockStore:
    return BlockStore.open(
        directory=scratch, namespace="bench", ram_bytes=4 << 30, disk_bytes=1 << 40, queue_bytes=1 << 30
    )


def _store_all(store: BlockStore, chain: KeyChain, caches: list[Any], first_block: int = 0, state: bool = True) -> None:
    tokens = len(chain.tokens)
    report = record(store, chain, describe_layers(caches), tokens, tokens, first_block, state=state)
    if report.stored_tokens != tokens:
        raise RuntimeError(f"stored {report.stored_tokens} of {tokens} tokens: {report.reason} {report.detail}")


def _look_up(store: BlockStore, needs: Needs, tokens: object, expected: int) -> None:
    _find(store, needs, key_chain("bench", tokens, BLOCK), expected)


def _find(store: BlockStore, needs: Needs, chain: KeyChain, expected: int) -> None:
    found = deepest_boundary(store, chain, needs, len(chain.tokens) - 1)
    if found.n != expected:
        raise RuntimeError(f"{found.n} of {expected} tokens were found: {found.reason}")


def _per_token(seconds: dict[str, float]) -> Numbers:
    return {name: value / TOKENS * 1e9 for name, value in seconds.items()}


def plain(rounds: int, scratch: str) -> Numbers:
    """All blocks are there, and one token follows."""
    stored = prompt(TOKENS)
    asked = [*stored, 1]
    as_int32 = array("i", asked)
    store = _open(scratch)
    _store_all(store, key_chain("bench", stored, BLOCK), _caches(TOKENS, full=False))
    store.flush()
    needs = needs_of(reaches_of([KVCache()]))
    chain = key_chain("bench", asked, BLOCK)
    trie = LRUPromptCache()
    trie.insert_cache("model", stored, [KVCache()])
    seconds = interleaved(
        {
            "list": lambda: timed(lambda: _look_up(store, needs, asked, TOKENS)),
            "int32": lambda: timed(lambda: _look_up(store, needs, as_int32, TOKENS)),
            "presence": lambda: timed(lambda: _find(store, needs, chain, TOKENS)),
            "trie": lambda: timed(lambda: trie.fetch_nearest_cache("model", asked)),
        },
        3 * rounds,
    )
    store.close()
    return _per_token(seconds)


def among_children(full: bool, rounds: int, scratch: str) -> Numbers:
    """The last block asked for agrees with a tail, one of hundreds under the same parent; files are on disk too."""
    shared = TOKENS - BLOCK
    stored = prompt(TOKENS)
    store = _open(scratch)
    base = key_chain("bench", stored, BLOCK)
    _store_all(store, base, _caches(TOKENS, full), state=False)
    caches = _caches(shared + OWN, full)
    wanted: list[int] = []
    for number in range(CHILDREN):
        tail = prompt(OWN, seed=1 + number)
        _store_all(store, key_chain("bench", stored[:shared] + tail, BLOCK, previous=base), caches, shared // BLOCK)
        # One that is found neither first nor last.
        wanted = tail if number == CHILDREN - 30 else wanted
    store.flush()
    needs = needs_of(reaches_of(_caches(1, full)))
    asked = [*stored[:shared], *wanted, *prompt(BLOCK - OWN, seed=999)]
    # Leaves the tail that it agrees with before its end: rows reach into it, no state does.
    leaving = [*stored[:shared], *wanted[: OWN // 2], *prompt(BLOCK - OWN // 2, seed=998)]
    reached = shared + OWN // 2
    chain = key_chain("bench", asked, BLOCK)

    def first_after_open() -> float:
        with_files = _open(scratch)
        seconds = timed(lambda: _look_up(with_files, needs, asked, shared + OWN))
        with_files.close()
        return seconds

    parts = {
        "list": lambda: timed(lambda: _look_up(store, needs, asked, shared + OWN)),
        "leaving": lambda: timed(lambda: _look_up(store, needs, leaving, 0 if full else reached)),
        "presence": lambda: timed(lambda: _find(store, needs, chain, shared + OWN)),
    }
    seconds = interleaved(parts, 3 * rounds)
    seconds.update(interleaved({"opened": first_after_open}, rounds))
    store.close()
    return _per_token(seconds)


def rows(settings: Settings) -> Iterator[Row]:
    cost = settings.run(plain)
    yield Row("lookup of a Python list, all blocks present", TOKENS, cost["list"], "ns a token", "<= 12")
    yield Row("lookup of an int32 buffer", TOKENS, cost["int32"], "ns a token")
    yield Row("of it: presence, keys known", TOKENS, cost["presence"], "ns a token")
    yield Row("mlx-lm LRUPromptCache, empty caches", TOKENS, cost["trie"], "ns a token", note="a trie of tokens")
    kinds = ((False, "rows"), (True, f"rows, windows of {WINDOWS[0]} and {WINDOWS[1]}, a state"))
    for full, what in kinds:
        cost = settings.run(among_children, full=full)
        name = f"lookup of a Python list, {what}, a tail among {CHILDREN} children"
        yield Row(name, TOKENS, cost["list"], "ns a token", "<= 15")
        note = "no state within reach: every block is asked for one" if full else ""
        yield Row("the same, leaving the tail half way", TOKENS, cost["leaving"], "ns a token", "<= 15", note=note)
        yield Row("of the first: presence, keys known", TOKENS, cost["presence"], "ns a token")
        yield Row("the first one after opening the directory", TOKENS, cost["opened"], "ns a token")


if __name__ == "__main__":
    main(rows, [plain, among_children])
