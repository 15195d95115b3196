"""Claim: a store of any size serves at once; it lists its files in proportion to their number, and reads none."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from harness import Numbers, Row, Settings, main

from prefixcache._core import BlockStore

COUNTS = (1_000, 10_000, 100_000)
CHAIN = 64  # blocks
BLOCK = 256


def make_file(folder: Path, key: bytes, parent: bytes, depth: int) -> None:
    """A file with the name of a block's rows, and nothing in it."""
    where = folder / key.hex()[:2]
    if not where.is_dir():
        where.mkdir(mode=0o700)
    name = f"{key.hex()}-{parent.hex()[:16]}-{depth}.kv.safetensors"
    os.close(os.open(where / name, os.O_CREAT | os.O_WRONLY, 0o600))


def _make_files(folder: Path, count: int) -> list[tuple[bytes, bytes]]:
    """The files of chains of blocks. Key and parent of each block."""
    blocks = []
    parent = bytes(32)
    for i in range(count):
        if i % CHAIN == 0:
            parent = hashlib.sha256(b"root").digest()
        key = hashlib.sha256(b"%d" % i).digest()
        make_file(folder, key, parent, (i % CHAIN + 1) * BLOCK)
        blocks.append((key, parent))
        parent = key
    return blocks


def _open(scratch: Path) -> BlockStore:
    return BlockStore.open(
        directory=str(scratch), namespace="bench", ram_bytes=0, disk_bytes=1 << 40, queue_bytes=1 << 20
    )


def opened(count: int, rounds: int, scratch: str) -> Numbers:
    root = Path(scratch) / "store"
    _open(root).close()
    blocks = _make_files(root / "v1" / "bench", count)
    last = (count - 1) // CHAIN * CHAIN
    chain = blocks[last:]
    keys = [key for key, _ in chain]
    returned, known, served = [], [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        store = _open(root)
        returned.append(time.perf_counter() - start)
        served.append(_seconds_to_find(store, keys, chain[0][1]))
        while store.stats()["parts"] != count:
            time.sleep(0.001)
        known.append(time.perf_counter() - start)
        store.close()
    # The first round has read the folders into the page cache.
    return {
        "open_ms": median(returned[1:]) * 1e3,
        "listed_ms": median(known[1:]) * 1e3,
        "first_lookup_us": median(served[1:]) * 1e6,
    }


def _seconds_to_find(store: BlockStore, keys: list[bytes], root: bytes) -> float:
    start = time.perf_counter()
    found = store.longest_prefix(keys, root, BLOCK)
    seconds = time.perf_counter() - start
    if found != len(keys):
        raise RuntimeError(f"{found} of {len(keys)} blocks were found")
    return seconds


def rows(settings: Settings) -> Iterator[Row]:
    for count in COUNTS:
        numbers = settings.run(opened, count=count)
        yield Row(f"open with {count:,} parts returns", count, numbers["open_ms"], "ms", "<= 2000")
        yield Row("the same until all are listed", count, numbers["listed_ms"], "ms", "<= 2000")
        yield Row("the first lookup of 64 blocks", count, numbers["first_lookup_us"], "us")


if __name__ == "__main__":
    main(rows, [opened])
