"""Claim: a recurrent state costs its own bytes once, however long the conversation is.

The geometry is that of Qwen3-Next, scaled: of four layers three have a convolution's last inputs and a recurrent state,
one keeps rows; 2 KV heads, head size 256, float16, blocks of 256 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from conversation import Model, converse
from harness import THREADS, Numbers, Row, Settings, interleaved, main, timed
from mlx_lm.models.cache import ArraysCache, KVCache
from reference import Memory, copy_seconds, part_files
from workload import BLOCK, check_hit, prompt

from prefixcache import PrefixCache

LAYERS = 12
HEADS, HEAD_SIZE = 2, 256
# 16 key heads and 32 value heads of 128; a convolution over 4 tokens.
STATES = (((1, 3, 8192), mx.float16), ((1, 32, 128, 128), mx.float32))
TURNS = 40
QWEN = Model(lambda: [KVCache() if i % 4 == 3 else ArraysCache(2) for i in range(LAYERS)], HEADS, HEAD_SIZE, STATES)
STATES_ONLY = Model(lambda: [ArraysCache(2) for _ in range(LAYERS * 3 // 4)], HEADS, HEAD_SIZE, STATES)


def _open(model: Model, directory: Path | None, ram: int, **options: Any) -> PrefixCache:
    write = "ram_only" if directory is None else "through"
    return PrefixCache.open(
        directory, namespace="bench", caches=model.make(), block_size=BLOCK, ram=ram, write=write, **options
    )


def checkpoint(rounds: int, scratch: str) -> Numbers:
    """Bytes that a recorded chunk adds beyond its rows, against those of the state's arrays: in memory, in files."""
    put, written, held = [], [], []
    size = QWEN.state_bytes()
    with _open(QWEN, Path(scratch), 4 << 30) as cache:
        tokens = prompt(16 * BLOCK)
        hit = cache.fetch(tokens)
        recorder = cache.record(tokens, hit)
        # Each state is dropped again with the next one; what it took to store it is counted before.
        for end in range(BLOCK, len(tokens), BLOCK):
            cache.flush()
            before = cache.stats()
            QWEN.append(hit.caches, BLOCK)
            report = recorder.advance(end)
            cache.flush()
            after = cache.stats()
            if report.state_at != end:
                raise RuntimeError(f"no state was stored for {end} tokens: {report}")
            added, files = (after[name] - before[name] for name in ("put_bytes", "written_bytes"))
            rows = BLOCK * QWEN.row_bytes()
            put.append((added - rows) / size)
            written.append((files - rows) / size)
        held = [path.stat().st_size for path in part_files(Path(scratch)) if path.name.endswith(".state.safetensors")]
    return {"put": max(put), "written": max(written), "files": len(held), "file": held[0] / size, "size": size}


def growing(interval: int, rounds: int, scratch: str) -> Numbers:
    """Bytes stored in each turn of a conversation, and the states that are left of it."""
    lengths = [random.Random(i).randint(96, 160) for i in range(TURNS)]
    turns = [(n - n // 3, n // 3) for n in lengths]
    per_turn: list[int] = []
    with _open(QWEN, Path(scratch), 1 << 30, state_interval=interval) as cache:
        before = 0
        for number, turn in enumerate(converse(cache, QWEN, 2048, turns)):
            if turn.hit != turn.before:
                raise RuntimeError(f"turn {number} restored {turn.hit} of {turn.before} tokens")
            total = cache.stats()["put_bytes"]
            per_turn.append(total - before)
            before = total
        cache.flush()
    kept = sum(path.name.endswith(".state.safetensors") for path in part_files(Path(scratch)))
    # The first entry is the first prompt; turn 1 begins behind it.
    early, late = per_turn[2:12], per_turn[-10:]
    return {
        "early": max(early),
        "late": max(late),
        "mean": sum(per_turn[1:]) / TURNS,
        "kept": kept,
        "wanted": 2 + turn.end // interval,
        "tokens": turn.end,
    }


def restore(rounds: int, scratch: str) -> Numbers:
    """Seconds of a restore of states alone, from RAM and from the page cache, and of a copy of as many bytes."""
    size = STATES_ONLY.state_bytes()
    tokens = prompt(2 * BLOCK + 9)
    caches = STATES_ONLY.make()
    STATES_ONLY.append(caches, len(tokens))
    source, to = Memory(size), Memory(size)
    directory = Path(scratch)
    with _open(STATES_ONLY, directory, 0) as on_disk, _open(STATES_ONLY, None, 8 * size) as in_ram:
        for cache in (on_disk, in_ram):
            cache.store(tokens, caches, covers=len(tokens))
            cache.flush()

        def fetch(cache: PrefixCache) -> float:
            hits: list[Any] = []
            seconds = timed(lambda: hits.append(cache.fetch([*tokens, 1])))
            check_hit(hits[0], len(tokens))
            return seconds

        parts = {
            "copy": lambda: copy_seconds(to, source, THREADS),
            "ram": lambda: fetch(in_ram),
            "ssd": lambda: fetch(on_disk),
        }
        for part in parts.values():
            part()
        return {**interleaved(parts, 5 * rounds), "size": size}


def rows(settings: Settings) -> Iterator[Row]:
    got = settings.run(checkpoint)
    size = f"{got['size'] / 1e6:.1f} MB of arrays"
    name = "bytes that a checkpoint adds / bytes of the state"
    yield Row(f"{name}, stored", BLOCK, got["put"], "x", "<= 1.01", size, "of 15 in a row the most")
    yield Row(f"{name}, written", BLOCK, got["written"], "x", "<= 1.01", size, "whole files")
    for interval in (8192, 512):
        got = settings.run(growing, interval=interval)
        said = f"a state every {interval:,} tokens is kept"
        against = f"most of turns 2 to 11, {got['early'] / 1e6:.1f} MB"
        note = f"mean {got['mean'] / 1e6:.1f} MB, {TURNS} turns of 96 to 160 tokens"
        late = got["late"] / got["early"]
        yield Row(
            f"bytes stored in a turn, most of the last 10, {said}", got["tokens"], late, "x", "<= 1.05", against, note
        )
        yield Row(f"states left, {said}", got["tokens"], got["kept"], "states", f"<= {got['wanted']}")
    got = settings.run(restore, recycled=True)
    for tier, where in (("ram", "RAM tier"), ("ssd", "page cache")):
        copy = f"{THREADS}-thread copy, {got['size'] / got['copy'] / 1e9:.1f} GB/s"
        note = f"{got[tier] * 1e3:.2f} ms, {got['size'] / 1e6:.0f} MB"
        yield Row(f"restore of a state, {where}", 2 * BLOCK + 9, got["copy"] / got[tier], "x", None, copy, note)


if __name__ == "__main__":
    main(rows, [checkpoint, growing, restore])
