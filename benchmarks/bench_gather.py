"""Claim: on a GPU a restore from RAM runs at the speed of its memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from device import device_copy, has_gpu
from harness import THREADS, Numbers, Row, Settings, interleaved, main, timed
from reference import GIB, Memory, copy_seconds
from workload import (
    BLOCK,
    ROW_BYTES,
    append_one,
    check_hit,
    fill_directory,
    filled_caches,
    opened,
    prompt,
    ram_for,
)

from prefixcache import PrefixCache

# Slabs are whole numbers of pages, and the last block needs room beside the others.
ROOM = 1.25


def _fetch(cache: PrefixCache, request: list[int]) -> Any:
    """A restore of all of ``request`` but its last token; ends with an idle device."""
    hit = cache.fetch(request)
    check_hit(hit, len(request) - 1)
    mx.synchronize()
    return hit


def from_arena(tokens: int, rounds: int, scratch: str) -> Numbers:
    """Blocks in the RAM tier; results in memory that MLX has recycled, then in fresh memory."""
    stored = prompt(tokens)
    request = [*stored, 1]
    with opened(None, int(ram_for(tokens) * ROOM)) as cache:
        caches = filled_caches(tokens)
        cache.store(stored, caches)
        blocks = [
            [part[:, :, at : at + BLOCK] for at in range(0, tokens, BLOCK)]
            for layer in caches
            for part in (layer.keys, layer.values)
        ]
        blocks = [[mx.contiguous(block) for block in slot] for slot in blocks]
        mx.eval(blocks)
        del caches
        before = cache.stats()["gathered_device_bytes"]
        first = timed(lambda: _fetch(cache, request))
        by_device = cache.stats()["gathered_device_bytes"] - before
        # What a fetch asks the store for: all layers, table and launches included, without hashing and cache objects.
        keys = cache._chain(request, None, None, None).keys[: tokens // BLOCK]
        room = cache.fetch(request).caches[0].keys.shape[2]

        def gather() -> None:
            found = cache._store.gather(keys, 0, tokens, room)
            if not found.status:
                raise RuntimeError(found.status.message)
            mx.synchronize()

        for _ in range(3):
            _fetch(cache, request)
            gather()
        copy = device_copy(tokens * ROW_BYTES)
        copy()

        def concatenate() -> None:
            mx.eval([mx.concatenate(slot, axis=2) for slot in blocks])
            mx.synchronize()

        def fresh() -> float:
            mx.clear_cache()
            seconds = timed(gather)
            gather()
            return seconds

        seconds = interleaved(
            {
                "copy": lambda: timed(copy),
                "gather": lambda: timed(gather),
                "fetch": lambda: timed(lambda: _fetch(cache, request)),
                "concatenate": lambda: timed(concatenate),
                "fresh": fresh,
            },
            rounds,
        )
        return {**seconds, "first": first, "by_device": by_device / (tokens * ROW_BYTES)}


def from_files(tokens: int, rounds: int, scratch: str) -> Numbers:
    """Blocks in the page cache, filled in by CPU threads; then the first use of the arrays by the GPU."""
    request = [*fill_directory(Path(scratch), tokens), 1]
    size = min(tokens * ROW_BYTES, GIB)
    source, to = Memory(size), Memory(size)
    with opened(Path(scratch), 0) as cache:
        for _ in range(2):
            _fetch(cache, request)
        seconds = interleaved(
            {
                "copy": lambda: copy_seconds(to, source, THREADS) * tokens * ROW_BYTES / size,
                "fetch": lambda: timed(lambda: _fetch(cache, request)),
            },
            rounds,
        )
        # Last: what the GPU has used lies in its own memory, where a card has one.
        used = []
        for _ in range(min(3, rounds)):
            hit = _fetch(cache, request)
            arrays = [part for layer in hit.caches for part in (layer.keys, layer.values)]
            used.append((timed(lambda a=arrays: _use(a)), timed(lambda a=arrays: _use(a))))  # type: ignore[misc]
    first, second = (statistics.median(values) for values in zip(*used, strict=True))
    return {**seconds, "first": first, "second": second}


def _use(arrays: list[mx.array]) -> None:
    mx.eval([mx.max(array) for array in arrays])
    mx.synchronize()


def append(tokens: int, rounds: int, scratch: str) -> Numbers:
    """The first token after a restore from the arena against the second."""
    stored = prompt(tokens)
    request = [*stored, 1]
    first, second = [], []
    with opened(None, int(ram_for(tokens) * ROOM)) as cache:
        cache.store(stored, filled_caches(tokens))
        for _ in range(rounds + 1):
            hit = _fetch(cache, request)
            first.append(timed(lambda h=hit: (append_one(h.caches), mx.synchronize())))  # type: ignore[misc]
            second.append(timed(lambda h=hit: (append_one(h.caches), mx.synchronize())))  # type: ignore[misc]
    # The very first one compiles.
    return {"first": statistics.median(first[1:]), "second": statistics.median(second[1:])}


def rows(settings: Settings) -> Iterator[Row]:
    if not has_gpu():
        yield Row("restore on a GPU", 0, 0, "", None, "", "not measured: MLX's default device here is the CPU")
        return
    for tokens in settings.tokens:
        yield from _arena_rows(settings, tokens)
        got = settings.run(from_files, tokens=tokens, recycled=True)
        against = f"{THREADS}-thread copy, {_said(tokens, got['copy'])}"
        name = "restore from the page cache, arrays filled"
        yield Row(name, tokens, got["copy"] / got["fetch"], "x", ">= 0.8", against, _said(tokens, got["fetch"]))
        yield Row(
            "their first use by the GPU", tokens, got["first"] * 1e3, "ms", None, f"second {got['second'] * 1e3:.2f} ms"
        )
        got = settings.run(append, tokens=tokens)
        yield Row(
            "first 1-token append after a restore from the arena",
            tokens,
            got["first"] / got["second"],
            "x",
            "<= 2",
            f"second append, {got['second'] * 1e3:.2f} ms",
        )


def _arena_rows(settings: Settings, tokens: int) -> Iterator[Row]:
    got = settings.run(from_arena, tokens=tokens)
    copy = f"device copy, {_said(tokens, got['copy'], 2)} read and written"
    gate = ">= 0.6" if tokens >= 32_768 else None
    said = f"{_said(tokens, got['gather'], 2)}, {got['by_device']:.0%} by the kernel"
    yield Row("gather of all layers from the arena", tokens, got["copy"] / got["gather"], "x", gate, copy, said)
    said = _said(tokens, got["concatenate"], 2)
    name = "gather of all layers, against mx.concatenate"
    yield Row(name, tokens, got["concatenate"] / got["gather"], "x", ">= 8", "mx.concatenate of the blocks", said)
    said = _said(tokens, got["fresh"], 2)
    yield Row("gather into fresh memory", tokens, got["copy"] / got["fresh"], "x", None, copy, said)
    said = _said(tokens, got["fetch"], 2)
    name = "fetch: hashing, lookup and cache objects too"
    yield Row(name, tokens, got["copy"] / got["fetch"], "x", None, copy, said)
    said = "what the CPU filled moves to the card" if mx.cuda.is_available() else ""
    yield Row("the first fetch", tokens, got["first"] * 1e3, "ms", None, "", said)


def _said(tokens: int, seconds: float, times: int = 1) -> str:
    return f"{seconds * 1e3:.2f} ms, {times * tokens * ROW_BYTES / seconds / 1e9:.1f} GB/s"


if __name__ == "__main__":
    main(rows, [from_arena, from_files, append])
