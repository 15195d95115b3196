"""Whole blocks in our own store: rows, windows and states, and where layers can be made to stand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from parts import same

from prefixcache._core import BlockStore
from prefixcache._layer_state import encode_structure
from prefixcache._omlx.block_hash import block_hashes
from prefixcache._omlx.layer_dicts import bare, layer_dict
from prefixcache._omlx.own_blocks import OwnBlocks
from prefixcache._registry import describe_layers

SIZE = 8
MODEL = "a-model"
Make = Callable[[], list[Any]]

FAMILIES: dict[str, Make] = {
    "plain": lambda: [KVCache(), KVCache()],
    "windows": lambda: [RotatingKVCache(max_size=12), KVCache(), RotatingKVCache(max_size=20)],
    "kept": lambda: [RotatingKVCache(max_size=12, keep=4), KVCache()],
    "states": lambda: [ArraysCache(2), KVCache()],
    "three states": lambda: [ArraysCache(3)],
    "lists": lambda: [CacheList(KVCache(), KVCache()), CacheList(KVCache(), RotatingKVCache(max_size=12))],
    "states in lists": lambda: [CacheList(ArraysCache(1), KVCache()), RotatingKVCache(max_size=12)],
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    store = BlockStore.open(
        directory=str(tmp_path), namespace="omlx", ram_bytes=0, disk_bytes=1 << 30, queue_bytes=1 << 26
    )
    yield store
    store.close()


def feed(caches: Sequence[Any], start: int, end: int) -> None:
    """Lets all caches go from ``start`` to ``end`` tokens in one chunk; every value depends on layer and position."""
    for layer, cache in enumerate(caches):
        _feed(cache, layer, start, end)


def _feed(cache: Any, seed: int, start: int, end: int) -> None:
    if isinstance(cache, CacheList):
        for child, inner in enumerate(cache.caches):
            _feed(inner, seed * 10 + child, start, end)
    elif isinstance(cache, ArraysCache):
        cache.cache = [mx.full((1, 2, 3 + i), 1000 * seed + 10 * end + i, mx.float32) for i in range(len(cache.cache))]
    else:
        rows = mx.arange(start, end, dtype=mx.float32).reshape(1, 1, -1, 1) + mx.zeros((1, 2, 1, 4)) + 1000 * seed
        cache.update_and_fetch(rows, rows + 0.5)


def run(make: Make, ends: Sequence[int]) -> tuple[list[Any], dict[int, list[dict[str, Any]]], dict[int, list[Any]]]:
    """Caches at the last of ``ends``, layer dicts at each, and deep copies at each."""
    caches, dicts, copies, at = make(), {}, {}, 0
    for end in ends:
        feed(caches, at, end)
        at = end
        dicts[end] = [layer_dict(cache) for cache in caches]
        copies[end] = copy.deepcopy(caches)
    return caches, dicts, copies


def own(store: BlockStore, make: Make, form: object = None) -> OwnBlocks:
    return OwnBlocks(store, make(), MODEL, form, SIZE)


def hashes_of(tokens: Sequence[int], **salts: Any) -> list[bytes]:
    return block_hashes(list(tokens), SIZE, MODEL, **salts)


def assert_equal_layers(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """What a model can read of the caches is the same, bit for bit."""
    left, right = (describe_layers([bare(cache) for cache in caches]) for caches in (found, expected))
    assert encode_structure(left) == encode_structure(right)
    for one, other in zip(left, right, strict=True):
        assert one.offset == other.offset
    for one, other in zip(found, expected, strict=True):
        assert_same_cache(one, other)


def assert_same_cache(one: Any, other: Any) -> None:
    one = bare(one)
    if isinstance(other, CacheList):
        for left, right in zip(one.caches, other.caches, strict=True):
            assert_same_cache(left, right)
    elif isinstance(other, ArraysCache):
        assert len(one.cache) == len(other.cache)
        assert all(same(a, b) for a, b in zip(one.cache, other.cache, strict=True))
    elif isinstance(other, RotatingKVCache):
        assert one.offset == other.offset
        # The rows that the next chunk attends to.
        behind = slice(one.keep - min(other.offset, other.max_size), None)
        for a, b in ((one.keys, other.keys), (one.values, other.values)):
            assert same(temporal(one, a)[..., behind, :], temporal(other, b)[..., behind, :])
            assert same(a[..., : one.keep, :], b[..., : one.keep, :])
    else:
        n = other.offset
        assert one.offset == n
        assert one.keys.shape[2] == n
        assert same(one.keys, other.keys[..., :n, :])
        assert same(one.values, other.values[..., :n, :])


def temporal(cache: Any, array: mx.array) -> mx.array:
    return cache._temporal_order(array) if cache._idx != cache.offset else array[..., : cache.offset, :]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_with_a_snapshot_is_served(store: BlockStore, family: str) -> None:
    make, tokens = FAMILIES[family], list(range(100, 148))
    _, dicts, copies = run(make, range(SIZE, 49, SIZE))
    blocks = own(store, make)
    hashes = hashes_of(tokens)
    assert blocks.store(hashes, tokens, dicts[48], {n: dicts[n] for n in dicts if n < 48}) == 6
    for count in range(1, 7):
        found = blocks.restore(hashes[:count])
        # The state at the very end is known only where rows end with the tokens.
        last = 6 if family != "three states" else 5
        assert found.n == min(count, last) * SIZE
        assert_equal_layers(found.caches, copies[found.n])


@pytest.mark.parametrize("family", FAMILIES)
def test_without_snapshots_only_the_end_is_served(store: BlockStore, family: str) -> None:
    make, tokens = FAMILIES[family], list(range(48))
    _, dicts, copies = run(make, [5, 30, 48])
    blocks = own(store, make)
    hashes = hashes_of(tokens)
    kept = blocks.store(hashes, tokens, dicts[48], None)
    assert kept == 6
    found = blocks.restore(hashes)
    if family == "three states":
        assert found.n == 0
        return
    assert found.n == 48
    assert_equal_layers(found.caches, copies[48])


@pytest.mark.parametrize("family", ["states", "three states", "states in lists"])
def test_a_state_of_another_count_is_never_served(store: BlockStore, family: str) -> None:
    """Seven tokens ran, one block of them is whole: the state after seven is not the block's."""
    make, tokens = FAMILIES[family], list(range(SIZE + 3))
    _, dicts, _ = run(make, [SIZE + 3])
    blocks = own(store, make)
    blocks.store(hashes_of(tokens), tokens, dicts[SIZE + 3], None)
    assert blocks.restore(hashes_of(tokens)).caches is None


def test_a_longer_cache_says_nothing_of_the_state_at_its_tokens_end(store: BlockStore) -> None:
    make, tokens = FAMILIES["states"], list(range(2 * SIZE))
    _, dicts, _ = run(make, [2 * SIZE + 4])
    blocks = own(store, make)
    assert blocks.store(hashes_of(tokens), tokens, dicts[2 * SIZE + 4], None) == 2
    assert blocks.restore(hashes_of(tokens)).caches is None


def test_a_state_that_says_its_count_is_kept_beside_longer_rows(store: BlockStore) -> None:
    make, tokens = FAMILIES["states"], list(range(2 * SIZE))
    _, dicts, copies = run(make, [2 * SIZE, 2 * SIZE + 4])
    merged = [{**dicts[2 * SIZE][0], "token_count": 2 * SIZE}, dicts[2 * SIZE + 4][1]]
    blocks = own(store, make)
    assert blocks.store(hashes_of(tokens), tokens, merged, None) == 2
    found = blocks.restore(hashes_of(tokens))
    assert found.n == 2 * SIZE
    assert_equal_layers(found.caches, copies[2 * SIZE])
