"""Cache directories for tests of the command: real ones, and ones of named files without content."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import filled, open_cache, part_files

CHAIN = list(range(300, 341))  # five blocks of 8 and a tail of 1


def real_cache(directory: Path, *sequences: Sequence[int], **options: Any) -> list[Path]:
    """Stores the sequences, by default CHAIN, and closes the cache. Its part files."""
    with open_cache(directory, **options) as cache:
        for tokens in sequences or (CHAIN,):
            cache.store(tokens, filled(tokens))
    return part_files(directory)


def set_age(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(path, (moment, moment), follow_symlinks=False)


@dataclass(frozen=True)
class Node:
    """A block of a made-up tree: a file of its size and age, of which only the name means something."""

    key: bytes
    parent: bytes
    depth: int
    bytes: int
    age: float
    part: str = "kv"

    @property
    def name(self) -> str:
        return f"{self.key.hex()}-{self.parent[:8].hex()}-{self.depth}.{self.part}.safetensors"

    def make(self, directory: Path, namespace: str = "test") -> Path:
        folder = directory / "v1" / namespace / self.key.hex()[:2]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / self.name
        path.write_bytes(bytes(self.bytes))
        path.chmod(0o600)
        set_age(path, self.age)
        return path


def chain_of(ages: Sequence[float], number: int = 1, size: int = 1000, part: str = "kv") -> list[Node]:
    """One block after the other, with these ages."""
    parent = bytes([255, number]) * 16
    nodes = []
    for i, age in enumerate(ages):
        key = bytes([number, i, 7]) + bytes(29)
        nodes.append(Node(key, parent, 8 * (i + 1), size, age, part))
        parent = key
    return nodes


def tree(seed: int, count: int) -> list[Node]:
    """A random forest of blocks of random sizes and ages, any child after its parent."""
    chance = random.Random(seed)
    nodes: list[Node] = []
    for _ in range(count):
        above = chance.choice(nodes) if nodes and chance.random() < 0.8 else None
        parent = above.key if above else chance.randbytes(32)
        depth = (above.depth if above else 0) + 8
        key = bytes([chance.randrange(4)]) + chance.randbytes(31)  # few folders: making them takes the time
        nodes.append(Node(key, parent, depth, chance.randrange(1, 50), chance.randrange(1, 10**6)))
    return nodes


def left(directory: Path) -> set[str]:
    """Names of the files that are there."""
    return {path.name for path in directory.rglob("*") if path.is_file() or path.is_symlink()}
