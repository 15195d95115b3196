"""Claim: a lookup takes less than a millisecond, also while another thread stores and many parts are known.

Every lookup is that of a chain of 64 blocks; there is a pause between them, as there is between requests. What is
stored meanwhile has little in it, so that parts come as fast as they can: the more often they meet a lookup.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles

import mlx.core as mx
import numpy as np
from bench_open import BLOCK, CHAIN, make_file
from harness import Numbers, Row, Settings, main
from mlx_lm.models.cache import KVCache
from workload import VOCABULARY

from prefixcache._boundary import deepest_boundary
from prefixcache._core import BlockStore, KeyChain, Slots
from prefixcache._keys import key_chain
from prefixcache._parts import needs_of
from prefixcache._registry import reaches_of

KNOWN = 100_000
STORED = 10_000
# Seconds between two lookups.
PAUSE = 0.0005
# Lookups without the other thread.
ALONE = 4000
TARGET = "<= 1"

Look = Callable[[], object]


def _chains(count: int, seed: int) -> list[KeyChain]:
    """So many blocks in chains; whole blocks and nothing behind them."""
    choose = np.random.default_rng(seed)
    return [
        key_chain("bench", choose.integers(0, VOCABULARY, CHAIN * BLOCK, dtype=np.int32), BLOCK)
        for _ in range(-(-count // CHAIN))
    ]


def _open(scratch: Path) -> BlockStore:
    # The queue is short, so that storing takes as long as writing does; the RAM tier holds less than half of the parts.
    return BlockStore.open(
        directory=str(scratch), namespace="bench", ram_bytes=256 << 20, disk_bytes=1 << 40, queue_bytes=32 << 20
    )


def _prepared(root: Path) -> tuple[BlockStore, list[KeyChain]]:
    _open(root).close()
    chains = _chains(KNOWN, seed=0)
    for chain in chains:
        parent = chain.root
        for i, key in enumerate(chain.keys):
            make_file(root / "v1" / "bench", key, parent, (i + 1) * BLOCK)
            parent = key
    store = _open(root)
    while store.stats()["parts"] < KNOWN:
        time.sleep(0.01)
    return store, chains


def _store_all(store: BlockStore, chains: list[KeyChain], slots: Slots, failed: list[str]) -> None:
    for chain in chains:
        parent = chain.root
        for i, key in enumerate(chain.keys):
            lo, hi = i * BLOCK, (i + 1) * BLOCK
            status, _ = store.put(key, parent, hi, chain.block_tokens(i), slots, lo, hi)
            if not status:
                failed.append(status.message)
            parent = key
    if not store.flush():
        failed.append("flush")


def _milliseconds(look: Look, go_on: Callable[[int], bool]) -> list[float]:
    seconds = []
    while go_on(len(seconds)):
        started = time.perf_counter()
        look()
        seconds.append((time.perf_counter() - started) * 1e3)
        time.sleep(PAUSE)
    return seconds


def _look(what: str, store: BlockStore, chains: list[KeyChain]) -> Look:
    """One lookup of a chain taken at random. RuntimeError unless all that is known is found."""
    needs = needs_of(reaches_of([KVCache()]))
    choose = random.Random(what)
    prompts = [chain.tokens.tolist() for chain in chains[:64]]
    keys = [(chain.keys, chain.root) for chain in chains]

    def check(found: int, expected: int) -> None:
        if found != expected:
            raise RuntimeError(f"{found} of {expected} were found")

    def of_keys() -> None:
        chain, root = choose.choice(keys)
        check(store.longest_prefix(chain, root, BLOCK), CHAIN)

    def hashed() -> None:
        chain = key_chain("bench", choose.choice(prompts), BLOCK)
        check(deepest_boundary(store, chain, needs, CHAIN * BLOCK).n, CHAIN * BLOCK)

    def missing() -> None:
        chain, root = choose.choice(keys)
        check(store.longest_prefix([*chain, choose.randbytes(32)], root, BLOCK), CHAIN)

    return {"keys": of_keys, "hashed": hashed, "missing": missing}[what]


def _summary(times: list[float]) -> Numbers:
    return {"p50": median(times), "p99": quantiles(times, n=100)[98], "max": max(times), "lookups": len(times)}


def looked_up(what: str, rounds: int, scratch: str) -> Numbers:
    del rounds  # one pass has thousands of lookups
    store, chains = _prepared(Path(scratch) / "store")
    look = _look(what, store, chains)
    _milliseconds(look, lambda count: count < 200)
    alone = _milliseconds(look, lambda count: count < ALONE)
    failed: list[str] = []
    others = _chains(STORED, seed=1)
    # Evaluated on this thread, as arrays are on that of the model.
    slots = Slots([("keys", mx.zeros((CHAIN * BLOCK, 64), mx.uint8), 0, 0)])
    thread = threading.Thread(target=_store_all, args=(store, others, slots, failed))
    started = time.perf_counter()
    thread.start()
    beside = _milliseconds(look, lambda _: thread.is_alive())
    seconds = time.perf_counter() - started
    thread.join()
    stats = store.stats()
    store.close()
    if failed or stats["written_parts"] < STORED:
        raise RuntimeError(f"{stats['written_parts']} parts were written; {failed[:3]}")
    return {"alone": _summary(alone), "beside": _summary(beside), "parts_a_second": stats["written_parts"] / seconds}


def rows(settings: Settings) -> Iterator[Row]:
    kinds = {
        "keys": ("lookup of 64 blocks, keys known", TARGET),
        "hashed": ("the same with hashing of 16,384 tokens", None),
        "missing": ("and with a block that is not there, looked for on disk", None),
    }
    for what, (claim, target) in kinds.items():
        numbers = settings.run(looked_up, what=what)
        beside, alone = numbers["beside"], numbers["alone"]
        note = f"{beside['lookups']:,} lookups beside {numbers['parts_a_second']:,.0f} parts a second"
        against = f"{alone['p99']:.3g} ms alone: {beside['p99'] / alone['p99']:.1f} times"
        yield Row(f"{claim}: 99 of 100 within", KNOWN, beside["p99"], "ms", target, against, note)
        yield Row("of these the median", KNOWN, beside["p50"], "ms", against=f"{alone['p50']:.3g} ms alone")
        yield Row("and the slowest", KNOWN, beside["max"], "ms", against=f"{alone['max']:.3g} ms alone")


if __name__ == "__main__":
    main(rows, [looked_up])
