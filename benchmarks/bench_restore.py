"""Claim: a restore is one pass over the bytes, and needs no memory but its result's."""

from __future__ import annotations

import resource
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import THREADS, Numbers, Row, Settings, interleaved, main, timed
from reference import (
    CAN_DROP_CACHE,
    GIB,
    Memory,
    back_by_host,
    copy_seconds,
    drop_from_page_cache,
    part_files,
    read_seconds,
    untouched_copy_seconds,
)
from workload import ROW_BYTES, check_hit, fill_directory, filled_caches, opened, prompt, ram_for, result_bytes

from prefixcache import PrefixCache


def _fetch(cache: PrefixCache, stored: list[int]) -> float:
    """Seconds of a restore of all of ``stored``, as the prefix of a prompt with one more token."""
    hits: list[Any] = []
    request = [*stored, 1]
    seconds = timed(lambda: hits.append(cache.fetch(request)))
    check_hit(hits[0], len(stored))
    return seconds


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def touched(tokens: int, tier: str, rounds: int, scratch: str) -> Numbers:
    """Destinations touched before; blocks in the RAM tier or in the page cache."""
    directory = Path(scratch)
    if tier == "ssd":
        stored = fill_directory(directory, tokens)
    else:
        stored = prompt(tokens)
    size = min(tokens * ROW_BYTES, GIB)
    with opened(directory if tier == "ssd" else None, 0 if tier == "ssd" else ram_for(tokens)) as cache:
        if tier == "ram":
            cache.store(stored, filled_caches(tokens))
        source, to = Memory(size), Memory(size)
        for _ in range(2):
            _fetch(cache, stored)
        before = _faults()
        _fetch(cache, stored)
        faults = _faults() - before

        def first_read() -> float:
            with opened(directory, 0) as fresh:
                return _fetch(fresh, stored)

        parts: dict[str, Callable[[], float]] = {
            "copy": lambda: copy_seconds(to, source, THREADS) * tokens * ROW_BYTES / size,
            "fetch": lambda: _fetch(cache, stored),
        }
        if tier == "ssd":
            files = part_files(directory)
            parts["first_read"] = first_read
            parts["read"] = lambda: read_seconds(files, to, THREADS)
        return {**interleaved(parts, rounds), "faults": faults}


def untouched(tokens: int, tier: str, stored_in: str, rounds: int, scratch: str) -> Numbers:
    """The first restore of a process; the copy beside it has fresh memory too."""
    size = tokens * ROW_BYTES
    source = Memory(min(size, GIB))
    stored = prompt(tokens)
    with opened(Path(stored_in) if tier == "ssd" else None, 0 if tier == "ssd" else ram_for(tokens)) as cache:
        if tier == "ram":
            cache.store(stored, filled_caches(tokens))
        copies = [untouched_copy_seconds(size, source, THREADS)]
        back_by_host(size)
        fetches = [_fetch(cache, stored) for _ in range(2)]
        copies.append(untouched_copy_seconds(size, source, THREADS))
    return {"first": fetches[0], "second": fetches[1], "copy": statistics.mean(copies)}


def memory(tokens: int, stored_in: str, rounds: int, scratch: str) -> Numbers:
    """Peak of the process's own memory while it restores, sampled; mapped files belong to the page cache."""
    stored = prompt(tokens)
    with opened(Path(stored_in), 0) as cache:
        cache.fetch(prompt(2, seed=1))
        before = _own_memory()
        peak = before
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.0005):
                peak = max(peak, _own_memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        hit = cache.fetch([*stored, 1])
        peak = max(peak, _own_memory())
        done.set()
        watcher.join()
        check_hit(hit, tokens)
        return {"peak": peak - before, "result": result_bytes(hit.caches), "rows": tokens * ROW_BYTES}


def _own_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def cold(tokens: int, rounds: int, scratch: str) -> Numbers:
    """Nothing of the blocks is in the page cache."""
    directory = Path(scratch)
    stored = fill_directory(directory, tokens)
    files = part_files(directory)
    to = Memory(min(tokens * ROW_BYTES, GIB))

    def fetch() -> float:
        drop_from_page_cache(files)
        with opened(directory, 0) as fresh:
            return _fetch(fresh, stored)

    def read() -> float:
        drop_from_page_cache(files)
        return read_seconds(files, to, THREADS)

    return interleaved({"read": read, "fetch": fetch}, rounds)


def rows(settings: Settings) -> Iterator[Row]:
    for tokens in settings.tokens:
        yield from _touched_rows(settings, tokens)
        yield from _fresh_process_rows(settings, tokens)
        if CAN_DROP_CACHE:
            got = settings.run(cold, tokens=tokens, recycled=True, rounds=min(3, settings.rounds))
            plain = f"{THREADS}-thread cold read, {_speed(tokens, got['read']):.1f} GB/s"
            said = _said(tokens, got["fetch"])
            yield Row("restore, page cache cold", tokens, got["read"] / got["fetch"], "x", ">= 0.85", plain, said)


def _touched_rows(settings: Settings, tokens: int) -> Iterator[Row]:
    for tier, where in (("ram", "RAM tier"), ("ssd", "page cache, checksums compared before")):
        got = settings.run(touched, tokens=tokens, tier=tier, recycled=True)
        copy = f"{THREADS}-thread copy, {_speed(tokens, got['copy']):.1f} GB/s"
        faults = f", {got['faults']:.0f} page faults" if got["faults"] > 100 else ""
        said = _said(tokens, got["fetch"]) + faults
        yield Row(f"restore, {where}", tokens, got["copy"] / got["fetch"], "x", ">= 0.8", copy, said)
    said = _said(tokens, got["first_read"])
    yield Row("restore, page cache, first read", tokens, got["copy"] / got["first_read"], "x", ">= 0.5", copy, said)
    plain = f"{THREADS}-thread plain read, {_speed(tokens, got['read']):.1f} GB/s"
    yield Row("restore, page cache, first read", tokens, got["read"] / got["first_read"], "x", None, plain)


def _fresh_process_rows(settings: Settings, tokens: int) -> Iterator[Row]:
    stored_in = settings.scratch / f"stored-{tokens}"
    fill_directory(stored_in, tokens)
    gate = ">= 0.75" if tokens >= 32_768 else None
    for tier, where in (("ram", "RAM tier"), ("ssd", "page cache, first read")):
        runs = [
            settings.run(untouched, tokens=tokens, tier=tier, stored_in=str(stored_in))
            for _ in range(min(3, settings.rounds))
        ]
        got = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        copy = f"{THREADS}-thread copy into untouched huge pages, {_speed(tokens, got['copy']):.1f} GB/s"
        name = f"restore into untouched memory, fresh process, {where}"
        yield Row(name, tokens, got["copy"] / got["first"], "x", gate, copy, _said(tokens, got["first"]))
        said = _said(tokens, got["second"])
        yield Row(
            f"the same once more in that process, {tier}", tokens, got["copy"] / got["second"], "x", None, copy, said
        )
    if Path("/proc/self/status").exists():
        got = settings.run(memory, tokens=tokens, stored_in=str(stored_in))
        extra = max(0.0, got["peak"] / got["result"] - 1) * 100
        said = f"{got['result'] / got['rows']:.2f} x the rows, room to grow included"
        yield Row("extra memory while restoring", tokens, extra, "% of the result", "<= 5", "", said)
    for path in part_files(stored_in):
        path.unlink()


def _speed(tokens: int, seconds: float) -> float:
    return tokens * ROW_BYTES / seconds / 1e9


def _said(tokens: int, seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms, {_speed(tokens, seconds):.1f} GB/s"


if __name__ == "__main__":
    main(rows, [touched, untouched, memory, cold])
