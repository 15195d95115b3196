"""The machine's own speeds: copies and plain file access. Ratios elsewhere have their own reference, taken in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from harness import THREADS, Numbers, Row, Settings, interleaved, main
from reference import (
    CAN_DROP_CACHE,
    GIB,
    Memory,
    copy_seconds,
    drop_from_page_cache,
    read_seconds,
    untouched_copy_seconds,
    write_seconds,
)
from workload import ROW_BYTES


def copies(tokens: int, rounds: int, scratch: str) -> Numbers:
    size = min(tokens * ROW_BYTES, GIB)
    source, to = Memory(size), Memory(size)
    parts: dict[str, Callable[[], float]] = {}
    for threads in sorted({1, THREADS}):
        parts[f"copy into touched memory, {threads} thread(s)"] = lambda t=threads: copy_seconds(to, source, t)  # type: ignore[misc]
        for huge in (False, True):
            name = f"copy into untouched memory, {'huge' if huge else 'plain'} pages, {threads} thread(s)"
            parts[name] = lambda t=threads, h=huge: untouched_copy_seconds(size, source, t, huge=h)  # type: ignore[misc]
    return _speeds(size, interleaved(parts, rounds))


def files(tokens: int, rounds: int, scratch: str) -> Numbers:
    size = min(tokens * ROW_BYTES, GIB)
    source, to = Memory(size), Memory(size)
    pieces = 8
    piece = Memory(size // pieces)
    paths = [Path(scratch) / f"piece{i}" for i in range(pieces)]
    for path in paths:
        write_seconds(path, piece.view(0, piece.size), sync=True)
    one = Path(scratch) / "one"

    def cold(threads: int) -> float:
        drop_from_page_cache(paths)
        return read_seconds(paths, to, threads)

    parts: dict[str, Callable[[], float]] = {
        "write one file, 1 thread": lambda: write_seconds(one, source.view(0, size), sync=False),
        "write one file and fsync, 1 thread": lambda: write_seconds(one, source.view(0, size), sync=True),
    }
    for threads in sorted({1, THREADS}):
        parts[f"read files, page cache warm, {threads} thread(s)"] = lambda t=threads: read_seconds(paths, to, t)  # type: ignore[misc]
        if CAN_DROP_CACHE:
            parts[f"read files, cold, {threads} thread(s)"] = lambda t=threads: cold(t)  # type: ignore[misc]
    return _speeds(size, interleaved(parts, rounds))


def _speeds(size: int, seconds: dict[str, float]) -> Numbers:
    return {name: size / value / 1e9 for name, value in seconds.items()}


def rows(settings: Settings) -> Iterator[Row]:
    # Speeds hardly depend on the size beyond the processor's cache.
    tokens = max(n for n in settings.tokens if n <= 8192) if min(settings.tokens) <= 8192 else min(settings.tokens)
    for scenario in (copies, files):
        for name, speed in settings.run(scenario, tokens=tokens).items():
            yield Row(name, tokens, speed, "GB/s")


if __name__ == "__main__":
    main(rows, [copies, files])
