"""Everything at once for a while: threads, two caches on one directory, tight caps, evictions, clears."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from support import check_hit, filled, open_cache

from prefixcache import HIT_REASONS, PrefixCache

SECONDS = [4, pytest.param(180, marks=pytest.mark.long)]


def prompt(rng: random.Random) -> list[int]:
    """Prompts that share beginnings: a few roots, a few ways on."""
    tokens: list[int] = []
    for _ in range(rng.randrange(1, 5)):
        start = 100 * rng.randrange(4)
        tokens += range(start, start + rng.randrange(1, 30))
    return tokens


def work(cache: PrefixCache, seed: int, until: float, hits: list[int]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until:
        tokens = prompt(rng)
        hit = cache.fetch(tokens)
        assert hit.reason in HIT_REASONS
        check_hit(hit, tokens)
        hits.append(hit.cached_tokens)
        cache.store(tokens, filled(tokens))
        if rng.random() < 0.002:
            cache.clear()
        if rng.random() < 0.01:
            cache.flush()


@pytest.mark.parametrize("seconds", SECONDS)
def test_no_wrong_row_ever(tmp_path: Path, seconds: int) -> None:
    until = time.monotonic() + seconds
    hits: list[int] = []
    failures: list[BaseException] = []

    def guarded(cache: PrefixCache, seed: int) -> None:
        try:
            work(cache, seed, until, hits)
        except BaseException as error:
            failures.append(error)
            raise

    with (
        open_cache(tmp_path / "cache", ram="4MB", disk="1MB") as one,
        open_cache(tmp_path / "cache", ram="1MB", disk="1MB", verify="always") as two,
    ):
        threads = [threading.Thread(target=guarded, args=(cache, seed)) for seed, cache in enumerate((one, two, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert sum(1 for n in hits if n) > 20
        assert one.stats()["ram_peak_bytes"] <= 4 << 20
