"""Claim: a store holds its caller for about one copy of the new bytes, and writes nothing twice."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from harness import THREADS, Numbers, Row, Settings, interleaved, main, timed
from reference import (
    GIB,
    Memory,
    back_by_host,
    copy_seconds,
    part_files,
    untouched_copy_seconds,
    write_files_seconds,
)
from workload import BLOCK, ROW_BYTES, filled_caches, opened, prompt, ram_for

from prefixcache import PrefixCache


def _store(cache: PrefixCache, stored: list[int], caches: list[object]) -> float:
    """Seconds that the caller is held."""
    reports = []
    seconds = timed(lambda: reports.append(cache.store(stored, caches)))
    if reports[0].stored_tokens != len(stored) or not reports[0].bytes:
        raise RuntimeError(f"the store kept less than asked for: {reports[0]}")
    return seconds


def steady(tokens: int, to_disk: bool, rounds: int, scratch: str) -> Numbers:
    """The RAM tier is full: each store recycles the memory of the one before."""
    caches = filled_caches(tokens)
    size = min(tokens * ROW_BYTES, GIB)
    source, to = Memory(size), Memory(size)
    bytes_stored = tokens * ROW_BYTES
    written: list[float] = []
    flushes: list[float] = []
    rates: list[float] = []
    # The queue takes all of a prompt: what is measured is the copy, not the disk.
    with opened(Path(scratch) if to_disk else None, ram_for(tokens), queue=3 * bytes_stored) as cache:
        prompts = iter([prompt(tokens, seed) for seed in range(rounds + 1)])

        def store() -> float:
            seconds = _store(cache, next(prompts), caches)
            if to_disk:
                before = cache.stats()["written_bytes"]
                flushes.append(timed(cache.flush))
                written.append(cache.stats()["written_bytes"])
                rates.append((written[-1] - before) / flushes[-1])
                _drop(Path(scratch), cache)
            return seconds

        parts = {"copy": lambda: copy_seconds(to, source, THREADS), "store": store}
        if to_disk:
            block = BLOCK * ROW_BYTES
            parts["write"] = lambda: write_files_seconds(Path(scratch), block, bytes_stored // block, source)
        for part in parts.values():
            part()
        flushes.clear()
        rates.clear()
        seconds = interleaved(parts, rounds)
    seconds["copy"] *= bytes_stored / size
    return {
        **seconds,
        "flush": statistics.median(flushes) if flushes else 0.0,
        "rate": statistics.median(rates) if rates else 0.0,
        "written": written[-1] / (len(written) * bytes_stored) if written else 0.0,
    }


def _drop(directory: Path, cache: PrefixCache) -> None:
    """Removes what the last round stored, so that neither the disk nor the page cache fills up."""
    cache.clear()
    for path in part_files(directory):
        os.unlink(path)


def first_fill(tokens: int, rounds: int, scratch: str) -> Numbers:
    """A RAM tier that was never touched."""
    caches = filled_caches(tokens)
    source = Memory(min(tokens * ROW_BYTES, GIB))
    stored = prompt(tokens)

    def store() -> float:
        back_by_host(ram_for(tokens))
        with opened(None, ram_for(tokens)) as cache:
            return _store(cache, stored, caches)

    return interleaved(
        {"copy": lambda: untouched_copy_seconds(tokens * ROW_BYTES, source, THREADS), "store": store}, rounds
    )


def rows(settings: Settings) -> Iterator[Row]:
    for tokens in settings.tokens:
        size = tokens * ROW_BYTES / 1e9
        for to_disk in (False, True):
            got = settings.run(steady, tokens=tokens, to_disk=to_disk, recycled=True)
            where = "RAM and disk" if to_disk else "RAM only"
            yield Row(
                f"store, caller held, {where}, memory touched before",
                tokens,
                got["store"] / got["copy"],
                "x",
                "<= 1.3",
                f"{THREADS}-thread copy, {size / got['copy']:.1f} GB/s",
                f"{got['store'] * 1e3:.0f} ms, {size / got['store']:.1f} GB/s",
            )
        yield Row("bytes written / new KV bytes", tokens, got["written"], "x", "<= 1.05")
        plain = f"plain write of as many files, {size / got['write']:.1f} GB/s"
        until_written = got["store"] + got["flush"]
        yield Row(
            "store and flush, from the call until all is in files",
            tokens,
            got["write"] / until_written,
            "x",
            None,
            plain,
            f"{until_written * 1e3:.0f} ms, {size / until_written:.1f} GB/s",
        )
        rate = got["rate"] / 1e9
        yield Row(
            "from the queue to the page cache",
            tokens,
            rate * got["write"] / size,
            "x",
            ">= 0.8",
            plain,
            f"{rate:.1f} GB/s",
        )
        got = settings.run(first_fill, tokens=tokens)
        yield Row(
            "store, caller held, RAM tier fills for the first time",
            tokens,
            got["store"] / got["copy"],
            "x",
            "<= 1.3",
            f"{THREADS}-thread copy into untouched huge pages, {size / got['copy']:.1f} GB/s",
            f"{got['store'] * 1e3:.0f} ms, {size / got['store']:.1f} GB/s",
        )


if __name__ == "__main__":
    main(rows, [steady, first_fill])
