"""mlx-vlm's caches through a real store: rows at any token, whole states where they were captured."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from handler_cases_vlm import CASES, rows
from mlx.utils import tree_flatten
from mlx_vlm.turboquant import TurboQuantKVCache

from prefixcache import PrefixCache

ROWS = ["kv", "turbo-3.5", "turbo-split", "buffered-16-0-7", "rotating-16-4", "minimax", "qsa", "hybrid", "hy-v4"]
STATES = ["kv", "list", "arrays-3", "buffered-16-0-7", "z1t", "deepseek-v41"]
BLOCK = 8


def make(names: list[str]) -> list[Any]:
    return [CASES[name].make() for name in names]


def run(names: list[str], caches: list[Any], start: int, stop: int) -> Iterator[tuple[str, mx.array]]:
    """Everything that each layer shows while tokens [start, stop) are appended."""
    for name, cache in zip(names, caches, strict=True):
        for what, seen in CASES[name].append(cache, start, stop):
            for _, leaf in tree_flatten(seen):
                if isinstance(leaf, mx.array):
                    mx.eval(leaf)
                    yield f"{name}: {what}", leaf


def tokens_to(n: int) -> list[int]:
    return [7 * i + 1 for i in range(n)]


@pytest.fixture(params=["ram", "ssd"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"namespace": "test", "block_size": BLOCK, "disk": "1GB", "ram": "64MB" if request.param == "ram" else 0}


def check_as_donor(names: list[str], caches: list[Any], n: int, donors: dict[int, list[Any]]) -> None:
    reference = copy.deepcopy(donors[n])
    for name, cache in zip(names, reference, strict=True):
        CASES[name].settle(cache)
    for start, stop in ((n, n + 1), (n + 1, n + 6), (n + 6, n + 7)):
        for (what, found), (_, expected) in zip(
            run(names, caches, start, stop), run(names, reference, start, stop), strict=True
        ):
            assert found.dtype == expected.dtype, what
            assert mx.array_equal(found, expected).item(), f"{what} at {start} after a restore at {n}"


@pytest.mark.parametrize("names", [ROWS, STATES], ids=["rows", "states"])
def test_recorded_and_restored(names: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    caches, donors = make(names), {}
    with PrefixCache.open(tmp_path / "cache", caches=make(names), **options) as cache:
        recorder = cache.record(tokens_to(64), caches)
        for n in range(16, 65, 16):
            list(run(names, caches, n - 16, n))
            donors[n] = copy.deepcopy(caches)
            assert recorder.advance(n).stored_tokens == n
    with PrefixCache.open(tmp_path / "cache", caches=make(names), **options) as cache:
        for stored, asked in ((64, tokens_to(70)), (48, [*tokens_to(48), 5, 6])):
            hit = cache.fetch(asked)
            assert hit.cached_tokens == stored
            check_as_donor(names, hit.caches, stored, donors)


def test_rows_stand_at_any_token(options: dict[str, Any], tmp_path: Path) -> None:
    """Where no state is needed, a prompt that leaves a stored one inside a block keeps the rows before it leaves."""
    caches, donors = make(ROWS), {}
    for n in (16, 32, 40, 48):
        list(run(ROWS, caches, 0 if n == 16 else max(donors), n))
        donors[n] = copy.deepcopy(caches)
    donors[41] = make(ROWS)
    for start, stop in ((0, 16), (16, 32), (32, 41)):
        list(run(ROWS, donors[41], start, stop))
    with PrefixCache.open(tmp_path / "cache", caches=make(ROWS), **options) as cache:
        for n in (16, 32, 40, 48):
            assert cache.store(tokens_to(n), donors[n]).stored_tokens == n
        hit = cache.fetch([*tokens_to(41), 5, 6])
        assert hit.cached_tokens == 41
        check_as_donor(ROWS, hit.caches, 41, donors)


def test_rows_of_two_codecs_never_meet(options: dict[str, Any], tmp_path: Path) -> None:
    """TurboQuant sets channels apart by the first tokens it sees, so equal tokens in other chunks have other codes."""

    def donor(*ends: int) -> Any:
        cache = TurboQuantKVCache(3.5, key_bits=3.5, value_bits=3.5)
        for start, stop in zip((0, *ends), ends, strict=False):
            cache.update_and_fetch(*(rows(i, 64, start, stop, dtype=mx.float16) for i in (1, 2)))
        return cache

    first, second = donor(16, 32), donor(32, 64)
    assert not mx.array_equal(first.key_codec.low_idx, second.key_codec.low_idx).item()
    with PrefixCache.open(tmp_path / "cache", caches=[donor()], **options) as cache:
        assert cache.store(tokens_to(32), [first]).stored_tokens == 32
        cache.store(tokens_to(64), [second])
        hit = cache.fetch(tokens_to(70))
        assert hit.cached_tokens == 32
        for found, expected in zip(hit.caches[0].dequantize(), first.dequantize(), strict=True):
            assert mx.array_equal(found, expected).item()
