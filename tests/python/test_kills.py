"""Processes killed at random instants: what the next one finds is sound, and the disk holds no more than it may."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import child_environment
from kill_child import MODELS, prompt
from sessions import open_for, serve
from support import all_files, part_files

from prefixcache import PrefixCache
from prefixcache.maintenance import verify

HERE = Path(__file__).parent
CAP = 300_000
GRACE = 600.0  # seconds that temporary files of other processes are left alone


class Workers:
    """The workers of a `kill_child.py`, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "kill_child.py", directory, str(CAP)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment(HERE),
        )  # fmt: skip
        self._worker = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, seed: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        self._worker = self._number()

    def kill(self) -> None:
        """The worker must have been alive: nothing came out of fetch or store, and no row was wrong."""
        os.kill(self._worker, signal.SIGKILL)
        status = self._number()
        assert os.WIFSIGNALED(status), self._trouble()
        assert os.WTERMSIG(status) == signal.SIGKILL, self._trouble()

    def _number(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._trouble()
        return int(line)

    def _trouble(self) -> str:
        self._process.kill()
        return self._process.communicate()[1][-3000:]


def temporary(directory: Path) -> list[Path]:
    return [path for path in all_files(directory) if path.name.startswith(".tmp-")]


def wait_until_counted(cache: PrefixCache, directory: Path) -> None:
    """A cache lists its directory while it serves. Then it knows what is there, to the byte."""
    there = sum(path.stat().st_size for path in all_files(directory))
    until = time.monotonic() + 30
    while cache.stats()["disk_bytes"] != there:
        assert time.monotonic() < until, f"{cache.stats()['disk_bytes']} bytes are counted, {there} are there"
        time.sleep(0.01)
        there = sum(path.stat().st_size for path in all_files(directory))


def check_what_is_left(directory: Path, writers: int, chance: random.Random) -> int:
    """After a kill. Returns tokens that were served, all of them right."""
    sizes = [path.stat().st_size for path in all_files(directory)]
    assert sum(sizes) <= CAP + writers * max(sizes, default=0)
    if part_files(directory):
        # Files get their names whole: no kill leaves half a part.
        assert verify(directory).damage == []
    old = chance.random() < 0.5
    for path in temporary(directory) if old else ():
        moment = time.time() - GRACE - 10
        os.utime(path, (moment, moment))
    served = 0
    for model in MODELS:
        with open_for(model, directory, ram=0, disk=CAP) as cache:
            wait_until_counted(cache, directory)
            assert not old or not temporary(directory)
            for _ in range(4):
                served += serve(cache, prompt(chance), record=False).cached_tokens
            cache.flush()
            stats = cache.stats()
            assert (stats["corrupt_parts"], stats["lost_parts"], stats["write_errors"]) == (0, 0, 0), stats[
                "last_error"
            ]
            assert not stats["degraded"]
    return served


AT_LENGTH = [pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((1, 200), (2, 100))]


@pytest.mark.parametrize(("writers", "kills"), [(1, 10), (2, 5), *AT_LENGTH])
def test_a_kill_at_any_instant_costs_a_miss(tmp_path: Path, writers: int, kills: int) -> None:
    directory = tmp_path / "cache"
    chance = random.Random(kills)
    served = 0
    with ExitStack() as stack:
        all_workers = [stack.enter_context(Workers(directory)) for _ in range(writers)]
        for number in range(kills):
            for place, workers in enumerate(all_workers):
                workers.start(writers * number + place)
            for workers in all_workers:
                time.sleep(chance.uniform(0, 0.5))
                workers.kill()
            served += check_what_is_left(directory, writers, chance)
    assert served > 0
