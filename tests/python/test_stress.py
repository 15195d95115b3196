"""Eight threads over one directory: store, fetch, record, flush, clear, close, on rows that tell where they belong."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from sessions import MODELS, open_for, prompt, serve

from prefixcache import PrefixCache

THREADS = 8
SECONDS = [4, pytest.param(120, marks=pytest.mark.long)]


class Door:
    """The cache that all threads use, until one of them closes it and opens the next."""

    def __init__(self, directory: Path, model: str) -> None:
        self._directory, self._model = directory, model
        self._lock = threading.Lock()
        self.cache = self._open()

    def _open(self) -> PrefixCache:
        return open_for(self._model, self._directory, ram="2MB", disk="400KB")

    def reopen(self) -> None:
        with self._lock:
            self.cache.close()
            self.cache = self._open()


def work(door: Door, seed: int, until: float, seen: Counter[str]) -> None:
    chance = random.Random(seed)
    while time.monotonic() < until:
        cache = door.cache
        kind = chance.random()
        if kind < 0.9:
            # It checks every row of the hit.
            hit = serve(cache, prompt(chance), range(chance.randrange(4)), record=chance.random() < 0.5)
            seen[hit.reason] += 1
            seen["tokens"] += hit.cached_tokens
        elif kind < 0.95:
            try:
                cache.flush()
            except ValueError:
                seen["closed"] += 1
        elif kind < 0.97:
            assert cache.stats()["corrupt_parts"] == 0
        elif kind < 0.98:
            try:
                cache.clear()
            except ValueError:
                seen["closed"] += 1
        elif kind < 0.985:
            door.reopen()


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("model", ["everything", pytest.param("rows", marks=pytest.mark.long)])
def test_nobody_gets_anothers_rows(tmp_path: Path, model: str, seconds: int) -> None:
    assert model in MODELS
    door = Door(tmp_path / "cache", model)
    until = time.monotonic() + seconds
    seen: Counter[str] = Counter()
    failures: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            work(door, seed, until, seen)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    door.cache.close()
    assert not failures
    assert seen["tokens"] > 0
    with open_for(model, tmp_path / "cache", ram=0) as cache:
        for seed in range(20):
            serve(cache, prompt(random.Random(seed)), record=False)
        assert cache.stats()["corrupt_parts"] == 0
