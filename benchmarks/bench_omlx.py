"""Claim: through oMLX's names a lookup, a store and a restore cost what they cost through the front door.

Tables, reference counts and block ids are Python; hashing, presence and bytes are the core's. The first rows store no
tensors: what is measured is what a scheduler's own thread pays for a prompt.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import Numbers, Row, Settings, interleaved, main, timed
from mlx_lm.models.cache import KVCache
from workload import BLOCK, LAYERS, ROW_BYTES, check_hit, empty_caches, filled_caches, opened, prompt, ram_for

from prefixcache.hybrid_cache import create_default_kvcache_config
from prefixcache.paged_cache import PagedCacheManager
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache

TOKENS = 131_072
CHAINS = (1000, 2000, 4000, 8000)
# Tokens of a block where memory is measured: what a block costs does not depend on them.
SHORT = 16
EVICTABLE = 8000


class _Model:
    """What the cache asks a model for."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in range(self._layers)]


def _opened(
    blocks: int, layers: int = LAYERS, block_size: int = BLOCK, made: int | None = None, **ssd: Any
) -> tuple[BlockAwarePrefixCache, PagedCacheManager, PagedSSDCacheManager | None]:
    """``made``: blocks of the pool that are there from the start; None: all."""
    paged = PagedCacheManager(
        block_size=block_size, max_blocks=blocks + 1, model_name="bench", initial_blocks=made or blocks + 1
    )
    cache = BlockAwarePrefixCache(_Model(layers), paged)
    if not ssd:
        return cache, paged, None
    manager = PagedSSDCacheManager(
        max_size_bytes=1 << 40,
        expected_model_name="bench",
        expected_num_layers=layers,
        expected_block_size=block_size,
        **ssd,
    )
    paged.set_paged_ssd_cache_manager(manager)
    cache.set_paged_ssd_cache_manager(manager)
    return cache, paged, manager


def _layers_of(caches: list[Any], tokens: int) -> list[dict[str, Any]]:
    """What a scheduler hands over."""
    layers = []
    for cache in caches:
        state = (cache.keys[..., :tokens, :], cache.values[..., :tokens, :])
        layers.append({"state": state, "meta_state": (), "class_name": "KVCache", "cache_type": "KVCache"})
    mx.eval([layer["state"] for layer in layers])
    return layers


def _store(cache: BlockAwarePrefixCache, paged: PagedCacheManager, rid: str, tokens: list[int], layers: Any) -> float:
    """Seconds of a store; then the request ends."""
    config = create_default_kvcache_config(len(layers)) if layers else None
    tables: list[Any] = []
    seconds = timed(lambda: tables.append(cache.store_cache(rid, tokens, layers, model_cache_config=config)))
    if tables[0] is None or tables[0].num_tokens != len(tokens):
        raise RuntimeError(f"{tables[0]} is the table of {len(tokens)} tokens")
    _end(cache, paged, rid, tables[0])
    return seconds


def _end(cache: BlockAwarePrefixCache, paged: PagedCacheManager, rid: str, table: Any) -> None:
    paged.release_for_eviction(table.block_ids)
    cache.clear_request_entry(rid)


def _fetch(cache: BlockAwarePrefixCache, paged: PagedCacheManager, tokens: list[int], expected: int) -> float:
    found: list[Any] = []
    seconds = timed(lambda: found.extend(cache.fetch_cache("asked", tokens)))
    table = found[0]
    if table is None or table.num_tokens != expected:
        raise RuntimeError(f"{table} is the table of {expected} tokens")
    _end(cache, paged, "asked", table)
    return seconds


def lookup(rounds: int, scratch: str) -> Numbers:
    """Of a list of Python ints whose blocks are all known; with a store attached its files have tiny rows."""
    tokens, blocks = prompt(TOKENS), TOKENS // BLOCK
    asked = [*tokens, 1]
    plain, plain_pool, _ = _opened(blocks)
    _store(plain, plain_pool, "first", tokens, [])
    ssd, pool, manager = _opened(blocks, layers=1, cache_dir=Path(scratch))
    row = mx.zeros((1, 1, TOKENS, 8), dtype=mx.float16)
    one = KVCache()
    mx.eval(one.update_and_fetch(row, row))
    _store(ssd, pool, "first", tokens, _layers_of([one], TOKENS))

    def after_restart() -> float:
        """Nothing is known in memory: the store is asked for each block."""
        ssd.clear()
        return _fetch(ssd, pool, asked, TOKENS)

    seconds = interleaved(
        {
            "known": lambda: _fetch(plain, plain_pool, asked, TOKENS),
            "with_store": lambda: _fetch(ssd, pool, asked, TOKENS),
            "cold": after_restart,
        },
        3 * rounds,
    )
    if manager is not None:
        manager.close()
    return {name: value / TOKENS * 1e9 for name, value in seconds.items()}


def store_metadata(rounds: int, scratch: str) -> Numbers:
    """New prompts without tensors, and one that is known already."""
    prompts = [prompt(TOKENS, seed) for seed in range(rounds)]
    cache, paged, _ = _opened(rounds * TOKENS // BLOCK)
    fresh = interleaved({"new": lambda: _store(cache, paged, "r", prompts.pop(), [])}, rounds)
    known = prompt(TOKENS, 0)
    again = interleaved({"known": lambda: _store(cache, paged, "r", known, [])}, rounds)
    return {name: value / TOKENS * 1e9 for name, value in {**fresh, **again}.items()}


def index_memory(blocks: int, rounds: int, scratch: str) -> Numbers:
    """Bytes that Python allocates for one chain of blocks, records of the pool included."""
    tokens = prompt(blocks * SHORT)
    cache, paged, _ = _opened(blocks, block_size=SHORT, made=1)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    _store(cache, paged, "first", tokens, [])
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"bytes": used / blocks}


def evictable(rounds: int, scratch: str) -> Numbers:
    """Half of the blocks are retained with what they hold, half are free."""
    cache, paged, _ = _opened(EVICTABLE, block_size=SHORT)
    _store(cache, paged, "first", prompt(EVICTABLE // 2 * SHORT), [])

    def asked(count: int) -> float:
        found: list[Any] = []
        seconds = timed(lambda: found.extend(paged.get_evictable_blocks(count)))
        if len({block.block_id for block in found}) != count:
            raise RuntimeError(f"{len(found)} blocks of {count} can be evicted")
        return seconds

    seconds = interleaved({"all": lambda: asked(EVICTABLE), "few": lambda: asked(64)}, 3 * rounds)
    return {name: value * 1e3 for name, value in seconds.items()}


def restore(tokens: int, tier: str, rounds: int, scratch: str) -> Numbers:
    """The same rows through both doors, in turns; destinations were touched before."""
    stored = prompt(tokens)
    asked = [*stored, 1]
    folder = Path(scratch)
    options: dict[str, Any] = {"cache_dir": folder / "omlx"}
    if tier == "ram":
        options = {"cache_dir": None, "hot_cache_max_bytes": ram_for(tokens), "hot_cache_only": True}
    cache, paged, manager = _opened(tokens // BLOCK, **options)
    caches = filled_caches(tokens)
    ram = ram_for(tokens) if tier == "ram" else 0
    with opened(None if tier == "ram" else folder / "front", ram) as front:
        front.store(stored, caches)
        front.flush()
        _store(cache, paged, "first", stored, _layers_of(caches, tokens))
        del caches

        def through_front() -> float:
            hits: list[Any] = []
            seconds = timed(lambda: hits.append(front.fetch(asked)))
            check_hit(hits[0], tokens)
            return seconds

        def through_omlx(whole: bool) -> float:
            found: list[Any] = []
            seconds = timed(lambda: found.extend(cache.fetch_cache("asked", asked)))
            table = found[0]
            again = timed(lambda: found.append(cache.reconstruct_cache(table)))
            if found[-1] is None or found[-1][0].offset != tokens or len(found[-1]) != len(empty_caches()):
                raise RuntimeError(f"{table} was not restored")
            _end(cache, paged, "asked", table)
            return again + (seconds if whole else 0)

        parts = {
            "front": through_front,
            "omlx": lambda: through_omlx(False),
            "whole": lambda: through_omlx(True),
        }
        for part in parts.values():
            part()
        seconds = interleaved(parts, 2 * rounds)
    if manager is not None:
        manager.close()
    return seconds


def rows(settings: Settings) -> Iterator[Row]:
    cost = settings.run(lookup)
    yield Row("fetch_cache, all blocks known", TOKENS, cost["known"], "ns a token", "<= 20", note="no store attached")
    yield Row("the same, a store attached", TOKENS, cost["with_store"], "ns a token", "<= 20")
    yield Row("the same after clear(): each block is asked for", TOKENS, cost["cold"], "ns a token")
    cost = settings.run(store_metadata)
    yield Row("store_cache without tensors, a new prompt", TOKENS, cost["new"], "ns a token", "<= 100")
    yield Row("store_cache without tensors, a known prompt", TOKENS, cost["known"], "ns a token", "<= 100")
    memory = {blocks: settings.run(index_memory, blocks=blocks)["bytes"] for blocks in CHAINS}
    for blocks, used in memory.items():
        yield Row(f"memory of a chain of {blocks:,} blocks", blocks * SHORT, used, "bytes a block")
    growth = memory[CHAINS[-1]] / memory[CHAINS[0]]
    said = f"{CHAINS[-1]:,} blocks against {CHAINS[0]:,}"
    yield Row("memory of a block, long chain against short", CHAINS[-1] * SHORT, growth, "x", "<= 1.1", said)
    cost = settings.run(evictable)
    name = f"get_evictable_blocks over {EVICTABLE:,} blocks"
    yield Row(f"{name}, all", EVICTABLE * SHORT, cost["all"], "ms", "<= 10")
    yield Row(f"{name}, 64", EVICTABLE * SHORT, cost["few"], "ms", "<= 10")
    tokens = min(settings.tokens, key=lambda n: abs(n - 8192))
    for tier, where in (("ram", "RAM tier"), ("ssd", "page cache")):
        got = settings.run(restore, tokens=tokens, tier=tier, recycled=True)
        speed = tokens * ROW_BYTES / got["front"] / 1e9
        against = f"PrefixCache.fetch, {got['front'] * 1e3:.0f} ms, {speed:.1f} GB/s"
        yield Row(f"reconstruct_cache, {where}", tokens, got["omlx"] / got["front"], "x", "<= 1.05", against)
        yield Row(
            f"fetch_cache and reconstruct_cache, {where}", tokens, got["whole"] / got["front"], "x", None, against
        )


if __name__ == "__main__":
    main(rows, [lookup, store_metadata, index_memory, evictable, restore])
