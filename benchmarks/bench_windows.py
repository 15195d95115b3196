"""Claim: a sliding window costs its new rows and no more, can be had at any token, and needs little memory.

The geometry is that of Gemma 3, scaled: of six layers five have a window of 1,024 tokens; 4 KV heads, head size 256,
float16, blocks of 256 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conversation import Model, converse, serve
from harness import Numbers, Row, Settings, interleaved, main, timed
from mlx_lm.models.cache import KVCache, RotatingKVCache
from workload import BLOCK, check_hit, prompt

from prefixcache import PrefixCache

WINDOW = 1024
LAYERS = 12
HEADS, HEAD_SIZE = 4, 256
TURNS = 40
GEMMA = Model(lambda: [KVCache() if i % 6 == 5 else RotatingKVCache(WINDOW) for i in range(LAYERS)], HEADS, HEAD_SIZE)
WINDOWS_ONLY = Model(lambda: [RotatingKVCache(WINDOW) for _ in range(LAYERS)], HEADS, HEAD_SIZE)
ROWS_ONLY = Model(lambda: [KVCache() for _ in range(LAYERS)], HEADS, HEAD_SIZE)
MODELS = {"Gemma-like": GEMMA, "windows only": WINDOWS_ONLY}


def _open(model: Model, directory: Path | None, ram: int, name: str = "bench", **options: Any) -> PrefixCache:
    write = "ram_only" if directory is None else "through"
    return PrefixCache.open(
        directory, namespace=name, caches=model.make(), block_size=BLOCK, ram=ram, write=write, **options
    )


def _turns(seed: int, fewest: int, most: int) -> list[tuple[int, int]]:
    """Lengths of turns: about two thirds are the user's, one third is decoded."""
    lengths = [random.Random(seed + i).randint(fewest, most) for i in range(TURNS)]
    return [(n - n // 3, n // 3) for n in lengths]


def stored(rounds: int, scratch: str) -> Numbers:
    """Bytes that each turn puts, and writes, against those of its new rows.

    A turn that begins inside a block stores the rows before it in that block again, in a longer tail or as a whole
    block: those rows are counted apart.
    """
    row = GEMMA.row_bytes()
    ratios, written, again, new_rows, put = [], [], 0, 0, 0
    with _open(GEMMA, Path(scratch), 1 << 30) as cache:
        before = cache.stats()
        for number, turn in enumerate(converse(cache, GEMMA, 3000, _turns(1, 96, 160))):
            if turn.hit != turn.before:
                raise RuntimeError(f"turn {number} restored {turn.hit} of {turn.before} tokens")
            cache.flush()
            after = cache.stats()
            added, files = (after[name] - before[name] for name in ("put_bytes", "written_bytes"))
            before = after
            if number == 0:
                continue
            repeated = turn.before % BLOCK * row
            new = (turn.end - turn.before) * row
            ratios.append((added - repeated) / new)
            written.append((files - repeated) / new)
            again, new_rows, put = again + repeated, new_rows + new, put + added
    return {
        "put": max(ratios),
        "least": min(ratios),
        "written": max(written),
        "all": put / new_rows,
        "tokens": turn.end,
    }


def restore(tokens: int, tier: str, rounds: int, scratch: str) -> Numbers:
    """Seconds of a restore to ``tokens``, and of as many bytes by a model whose layers all keep every row."""
    windowed = LAYERS * 5 // 6
    same, rest = divmod(tokens * (LAYERS - windowed) + min(tokens, WINDOW) * windowed, LAYERS)
    if rest:
        raise ValueError(f"no whole number of rows has the bytes of {tokens} tokens")
    size = 2 * (tokens + BLOCK) * GEMMA.row_bytes()
    with ExitStack() as stack:
        parts = {}
        for name, model, n in (("windows", GEMMA, tokens), ("rows", ROWS_ONLY, same)):
            # Stored from a longer prompt, so that n is wherever it is, and one chunk would not hold it.
            asked = prompt(n + BLOCK, seed=n)
            directory = None if tier == "ram" else Path(scratch) / name
            if directory is not None:
                with _open(model, directory, 0, name) as cache:
                    serve(cache, model, asked, [])
            cache = stack.enter_context(_open(model, directory, size if tier == "ram" else 0, name))
            if directory is None:
                serve(cache, model, asked, [])
            request = [*asked[:n], 1]
            parts[name] = lambda cache=cache, request=request, n=n: _fetch(cache, request, n)
        for _ in range(3):
            for part in parts.values():
                part()
        seconds = interleaved(parts, 5 * rounds)
    return {**seconds, "same": same, "bytes": same * ROWS_ONLY.row_bytes()}


def _fetch(cache: PrefixCache, request: list[int], n: int) -> float:
    hits: list[Any] = []
    seconds = timed(lambda: hits.append(cache.fetch(request, spare=0)))
    check_hit(hits[0], n)
    return seconds


def small_ram(kind: str, conversations: int, windows: int, rounds: int, scratch: str) -> Numbers:
    """RAM for ``windows`` times the rows of all windows. The conversations take turns; together they hold far more."""
    model = MODELS[kind]
    windowed = sum(isinstance(layer, RotatingKVCache) for layer in model.make())
    ram = windows * WINDOW * windowed * model.layer_row_bytes()
    gains, shares = [], []
    with _open(model, None, ram) as cache:
        running = [converse(cache, model, 3000, _turns(100 * seed, 480, 640), seed) for seed in range(conversations)]
        last: dict[int, int] = {}
        for turns in zip(*running, strict=True):
            for who, turn in enumerate(turns):
                if turn.before:
                    gains.append(turn.hit - last.get(who, 1))
                    shares.append(turn.hit / turn.before)
                    last[who] = turn.hit
        peak, end = cache.stats()["ram_peak_bytes"], turns[0].end
    if peak > ram or last[0] == 0:
        raise RuntimeError(f"the RAM tier held {peak} bytes, allowed are {ram}; the last hit has {last[0]} tokens")
    return {"gain": min(gains), "share": min(shares), "windows": end * conversations / WINDOW, "tokens": end}


def rows(settings: Settings) -> Iterator[Row]:
    got = settings.run(stored)
    note = f"rows of a begun block that are stored again counted apart; with them {got['all']:.2f} x over all turns"
    name = f"bytes stored in a turn / its new rows, most of {TURNS} turns"
    yield Row(name, got["tokens"], got["put"], "x", "<= 1.05", f"least {got['least']:.3f}", note)
    yield Row("bytes written in a turn / its new rows, files whole", got["tokens"], got["written"], "x", "<= 1.05")
    for tier, where in (("ram", "RAM tier"), ("ssd", "page cache")):
        for n in (512, 700, WINDOW, WINDOW + 6 * 100, WINDOW + 6 * 1280, WINDOW + 6 * 1280 - 6 * 17):
            got = settings.run(restore, recycled=True, tokens=n, tier=tier)
            place = f"{n % BLOCK} into a block" if n % BLOCK else "a block's end"
            against = f"{got['same']:,} tokens of {LAYERS} layers without windows, {got['rows'] * 1e3:.1f} ms"
            note = f"{place}; {got['windows'] * 1e3:.1f} ms, {got['bytes'] / 1e6:.0f} MB"
            yield Row(f"restore, {where}", n, got["windows"] / got["rows"], "x", "<= 1.2", against, note)
    # Four windows are too few for the rows of the layers that keep all: hits may stop growing, no more.
    for kind, count, size in (
        ("Gemma-like", 1, 12),
        ("windows only", 1, 12),
        ("windows only", 2, 12),
        ("Gemma-like", 1, 4),
    ):
        got = settings.run(small_ram, kind=kind, conversations=count, windows=size)
        name = f"smallest growth of a hit, RAM for {size} windows, {kind}, {count} conversation{'s' * (count > 1)}"
        said = f"{got['windows']:.0f} windows in all; at least {got['share']:.1%} of the earlier tokens reused"
        note = f"{TURNS} turns of 480 to 640 tokens, {said}"
        yield Row(name, got["tokens"], got["gain"], "tokens", ">= 0", "the hit of the turn before", note)


if __name__ == "__main__":
    main(rows, [stored, restore, small_ram])
