"""Several processes on one directory: the cap is theirs together, whoever is killed; what one wrote, others find."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import check_hit, filled, open_cache, part_files

from prefixcache import PrefixCache

CAP = 1 << 20
ROUNDS = [6, pytest.param(60, marks=pytest.mark.long)]

WORKER = """
import random, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support import check_hit, filled, open_cache
rng = random.Random(int(sys.argv[3]))
with open_cache(Path(sys.argv[2]), namespace=sys.argv[4], ram=0, disk=int(sys.argv[5]), verify="always") as cache:
    print("open", flush=True)
    while True:
        tokens = [rng.randrange(6), *range(rng.randrange(20, 90))]
        hit = cache.fetch([*tokens, 1])
        check_hit(hit, [*tokens, 1])
        cache.store(tokens, filled(tokens))
        if rng.random() < 0.1:
            cache.flush()
"""


def sizes_below(directory: Path) -> list[int]:
    sizes = [0]
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:
                continue
    return sizes


def worker(directory: Path, seed: int, namespace: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(directory), str(seed), namespace, str(CAP)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip


@pytest.mark.parametrize("rounds", ROUNDS)
def test_the_cap_holds_whoever_is_killed(tmp_path: Path, rounds: int) -> None:
    directory = tmp_path / "c"
    rng = random.Random(rounds)
    processes = [worker(directory, seed, "ab"[seed % 2]) for seed in range(3)]
    largest = seen = 0
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "open\n"
        for number in range(rounds):
            until = time.monotonic() + rng.uniform(0.2, 0.8)
            while time.monotonic() < until:
                # A walk is no instant: without the stop, a file may be seen that goes for one that is seen later.
                for process in processes:
                    process.send_signal(signal.SIGSTOP)
                sizes = sizes_below(directory)
                seen, largest = max(seen, sum(sizes)), max(largest, *sizes)
                for process in processes:
                    process.send_signal(signal.SIGCONT)
                time.sleep(0.02)
            victim = rng.randrange(3)
            assert processes[victim].poll() is None, processes[victim].communicate()[1][-3000:]
            processes[victim].send_signal(signal.SIGKILL)
            processes[victim].communicate()
            processes[victim] = worker(directory, 100 + number, "ab"[victim % 2])
        for process in processes:
            assert process.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert seen > CAP // 2, "the processes wrote little"
    # One for each that writes, and what the one killed last has left and nobody has counted yet.
    assert seen <= CAP + (len(processes) + 1) * largest
    assert sum(sizes_below(directory)) <= CAP + len(processes) * largest
    for namespace in "ab":
        with open_cache(directory, namespace=namespace, ram=0, disk=CAP) as cache:
            assert sum(sizes_below(directory)) <= CAP
            for first in range(6):
                tokens = [first, *range(90)]
                check_hit(cache.fetch(tokens), tokens)
            assert cache.stats()["corrupt_parts"] == 0


def both(tmp_path: Path, **options: object) -> tuple[PrefixCache, PrefixCache]:
    return open_cache(tmp_path / "c", **options), open_cache(tmp_path / "c", **options)


def test_what_one_writes_the_other_finds(tmp_path: Path) -> None:
    one, two = both(tmp_path, ram=0)
    with one, two:
        tokens = list(range(64))
        one.store(tokens, filled(tokens))
        one.flush()
        hit = two.fetch([*tokens, 1])
        check_hit(hit, [*tokens, 1])
        assert hit.cached_tokens == 64
        one.clear()
        check_hit(two.fetch([*tokens, 1]), [*tokens, 1])
        assert two.fetch([*tokens, 1]).cached_tokens == 0
        two.store(tokens, filled(tokens))
        two.flush()
        assert one.fetch([*tokens, 1]).cached_tokens == 64


def test_the_policy_back_writes_at_flush_and_close(tmp_path: Path) -> None:
    tokens, more = list(range(64)), [7, *range(64)]
    with open_cache(tmp_path / "c", write="back", ram="8MB") as cache:
        cache.store(tokens, filled(tokens))
        assert part_files(tmp_path / "c") == []
        assert cache.fetch([*tokens, 1]).cached_tokens == 64
        cache.flush()
        written = len(part_files(tmp_path / "c"))
        assert written > 0
        cache.store(more, filled(more))
        assert len(part_files(tmp_path / "c")) == written
    with open_cache(tmp_path / "c", ram=0) as cache:
        for prompt in (tokens, more):
            hit = cache.fetch([*prompt, 1])
            check_hit(hit, [*prompt, 1])
            assert hit.cached_tokens == len(prompt)
