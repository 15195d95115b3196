"""Claim: how much of a prompt is stored is known for a few nanoseconds a token, without reading a tensor."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import mlx.core as mx
from harness import Numbers, Row, Settings, interleaved, main, timed
from mlx_lm.models.cache import KVCache, LRUPromptCache
from workload import BLOCK, prompt

from prefixcache._boundary import deepest_boundary
from prefixcache._core import BlockStore
from prefixcache._keys import key_chain
from prefixcache._record import record
from prefixcache.type_registry import describe_layers

TOKENS = 131_072


def present(rounds: int, scratch: str) -> Numbers:
    """All blocks are there. Their rows are tiny: a lookup does not read them."""
    stored = prompt(TOKENS)
    as_int32 = array("i", stored)
    small = KVCache()
    small.keys = small.values = mx.zeros((1, 1, TOKENS, 8), dtype=mx.float16)
    small.offset = TOKENS
    store = BlockStore.open(
        directory=scratch, namespace="bench", ram_bytes=1 << 30, disk_bytes=1 << 40, queue_bytes=1 << 30
    )
    chain = key_chain("bench", stored, BLOCK)
    record(store, chain, describe_layers([small]), TOKENS)
    store.flush()

    def look_up(tokens: object) -> None:
        found = deepest_boundary(store, key_chain("bench", tokens, BLOCK), TOKENS)
        if found.n != TOKENS:
            raise RuntimeError(f"{found.n} of {TOKENS} tokens were found")

    trie = LRUPromptCache()
    trie.insert_cache("model", stored, [KVCache()])
    longer = [*stored, 1]
    seconds = interleaved(
        {
            "list": lambda: timed(lambda: look_up(stored)),
            "int32": lambda: timed(lambda: look_up(as_int32)),
            "presence": lambda: timed(lambda: deepest_boundary(store, chain, TOKENS)),
            "trie": lambda: timed(lambda: trie.fetch_nearest_cache("model", longer)),
        },
        3 * rounds,
    )
    store.close()
    return {name: value / TOKENS * 1e9 for name, value in seconds.items()}


def rows(settings: Settings) -> Iterator[Row]:
    cost = settings.run(present)
    yield Row("lookup of a Python list, all blocks present", TOKENS, cost["list"], "ns a token", "<= 12")
    yield Row("lookup of an int32 buffer", TOKENS, cost["int32"], "ns a token")
    yield Row("of it: presence, keys known", TOKENS, cost["presence"], "ns a token")
    yield Row("mlx-lm LRUPromptCache, empty caches", TOKENS, cost["trie"], "ns a token", note="a trie of tokens")


if __name__ == "__main__":
    main(rows, [present])
