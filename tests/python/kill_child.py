"""Processes that work on a cache until they are killed: `kill_child.py DIRECTORY CAP`.

This process loads what they need, once. For each line with a number on its standard input it forks one, which stores,
fetches, evicts, clears and reopens for ever, writes its process number, and once it has ended its status. A worker ends
by itself only if something went wrong, or with this process. A GPU's driver does not survive a fork: there a worker is
a program of its own, `kill_child.py DIRECTORY CAP SEED`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

import mlx.core as mx
from sessions import open_for, prompt, serve

MODELS = ("rows", "everything", "kept rows")
BLOCK = 8


def work(directory: Path, chance: random.Random, cap: int) -> None:
    """One cache from open to close. `serve` checks every row that it is handed."""
    options = {"ram": chance.choice([0, "1MB"]), "verify": chance.choice(["first", "always"]), "disk": cap}
    with open_for(chance.choice(MODELS), directory, **options) as cache:
        for _ in range(chance.randrange(1, 12)):
            serve(cache, prompt(chance), range(chance.randrange(4)), record=chance.random() < 0.7)
            if chance.random() < 0.05:
                cache.clear()
            if chance.random() < 0.2:
                cache.flush()


def work_for_ever(directory: Path, seed: int, cap: int) -> None:
    parent = os.getppid()
    chance = random.Random(seed)
    try:
        while os.getppid() == parent:
            work(directory, chance, cap)
    finally:
        traceback.print_exc()
        os._exit(1)


def forked(directory: str, cap: str, seed: str) -> int:
    worker = os.fork()
    if worker == 0:
        work_for_ever(Path(directory), int(seed), int(cap))
    return worker


def started(directory: str, cap: str, seed: str) -> int:
    """Returns when the new program is at work."""
    reads, writes = os.pipe()
    command = [sys.executable, __file__, directory, cap, seed]
    worker = os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writes, 1)])
    os.close(writes)
    with open(reads) as ready:
        ready.readline()
    return worker


def be_ready() -> None:
    """Until here a kill would hit a program that still loads and compiles."""
    with tempfile.TemporaryDirectory() as scratch:
        work(Path(scratch), random.Random(1), 1 << 20)
    print("ready", flush=True)


def main() -> None:
    directory, cap, *seed = sys.argv[1:]
    if seed:
        be_ready()
        work_for_ever(Path(directory), int(seed[0]), int(cap))
    start = forked if mx.default_device() == mx.Device(mx.cpu) else started
    for line in sys.stdin:
        worker = start(directory, cap, line.strip())
        print(worker, flush=True)
        print(os.waitpid(worker, 0)[1], flush=True)


if __name__ == "__main__":
    main()
