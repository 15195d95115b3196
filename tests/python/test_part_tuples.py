"""Blocks that were stored as parts, as callers of the SSD manager load, forget and delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from handler_cases_vlm import CASES as VLM_CASES
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from ssd_blocks import MISSING, equal, hash_of, layers, open_manager, part_count, rows

from prefixcache._core import KeyChain, Part, Slots, TokenBuffer, group_key
from prefixcache._omlx.own_blocks import HashChain
from prefixcache._omlx.tuples import turboquant_module
from prefixcache._record import record
from prefixcache._registry import describe_layers
from prefixcache.paged_ssd_cache import PagedSSDCacheManager

SIZE = 8
SPACE = 0x1234_5678_9ABC_DEF0
TOKENS = list(range(500, 524))
HASHES = KeyChain("m", [], TOKENS, SIZE).keys


def store(
    manager: PagedSSDCacheManager, caches: Sequence[Any], feed: Callable[[int, int], None], blocks: int = 3
) -> None:
    """Runs block after block, and stores each as the prefix cache does."""
    keys = [group_key(key, SPACE) for key in HASHES]
    root = group_key(KeyChain("m", [], [], 1).root, SPACE)
    chain = HashChain(keys, root, SIZE, TokenBuffer(TOKENS))
    for block in range(blocks):
        feed(block * SIZE, (block + 1) * SIZE)
        end = (block + 1) * SIZE
        report = record(manager._store, chain, describe_layers(caches), end, end, block, tail=False)
        assert report.stored_tokens == end and report.reason == "complete"
    manager._attach_space("m", SPACE)


def kv(layer: int, start: int, stop: int, width: int = 32) -> tuple[mx.array, mx.array]:
    """Rows of the same tokens are the same, whenever they are asked for."""
    return tuple(mx.contiguous(rows(1, 2, 24, width, seed=50 * layer + i)[:, :, start:stop]) for i in range(2))


def feeding(caches: Sequence[Any]) -> Callable[[int, int], None]:
    def feed(start: int, stop: int) -> None:
        for layer, cache in enumerate(caches):
            for part in cache.caches if isinstance(cache, CacheList) else [cache]:
                if isinstance(part, ArraysCache):
                    part.cache = [rows(1, 3, seed=stop + i) for i in range(len(part.cache))]
                else:
                    part.update_and_fetch(*kv(layer, start, stop))

    return feed


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[PagedSSDCacheManager]:
    yield (opened := open_manager(tmp_path))
    opened.close()


def test_rows_of_each_block(manager: PagedSSDCacheManager, tmp_path: Path) -> None:
    caches = [KVCache(), KVCache()]
    store(manager, caches, feeding(caches))
    manager._store.flush()
    for one in (manager, open_manager(tmp_path, expected_block_size=SIZE)):
        one._attach_space("m", SPACE)
        for block, name in enumerate(HASHES):
            assert one.has_block(name)
            data, said = one.load_block_with_metadata(name)
            start, stop = block * SIZE, (block + 1) * SIZE
            assert equal(data, [kv(0, start, stop), kv(1, start, stop)])
            assert said is not None and (said["num_layers"], said["token_count"], said["block_size"]) == (2, SIZE, SIZE)
            assert (said["model_name"], said["layer_cache_types"]) == ("m", ["KVCache", "KVCache"])
            assert said["layer_meta_states"] == [(str(stop),), (str(stop),)]
        found = one.get_block_metadata(HASHES[1])
        assert found is not None and (found.token_count, found.model_name) == (SIZE, "m")
    assert manager.get_stats().loads == 3 and manager.size == 3


def test_windows_that_a_block_holds_whole(manager: PagedSSDCacheManager) -> None:
    caches = [
        RotatingKVCache(6),
        RotatingKVCache(8),
        RotatingKVCache(20),
        RotatingKVCache(6, keep=2),
        ChunkedKVCache(256),
    ]
    store(manager, caches, feeding(caches))
    first, second = (manager.load_block_with_metadata(name) for name in HASHES[:2])
    assert first[0] is not None and second[0] is not None and second[1] is not None
    assert equal(first[0][:3], [kv(0, 2, 8), kv(1, 0, 8), kv(2, 0, 8)])
    # The first block's window of 6 lacks its first 2 rows again: they are another part's.
    assert equal(first[0][3], MISSING) and equal(first[0][4], kv(4, 0, 8))
    assert equal(second[0], [kv(0, 10, 16), kv(1, 8, 16), MISSING, MISSING, MISSING])
    metas = [("0", "6", "16", "6"), ("0", "8", "16", "8"), ("0", "20", "16", "16"), ("2", "6", "16", "6"), ("256", "0")]
    assert second[1]["layer_meta_states"] == metas
    assert second[1]["layer_cache_types"] == ["RotatingKVCache"] * 4 + ["ChunkedKVCache"]


def test_states_where_they_stand(manager: PagedSSDCacheManager) -> None:
    caches = [ArraysCache(2), ArraysCache(3), KVCache(), CacheList(KVCache(), ArraysCache(2))]
    feed = feeding(caches)
    store(manager, caches, feed)
    keys = [group_key(name, SPACE) for name in HASHES]
    assert manager._store.erase(keys[:1], [Part.state])
    data, said = manager.load_block_with_metadata(HASHES[1])
    states = [rows(1, 3, seed=16 + i) for i in range(3)]
    assert said is not None and data is not None
    assert equal(data[0], tuple(states[:2])) and equal(data[1], ("__nstate__", "ArraysCache", states))
    assert equal(data[2], kv(2, 8, 16)) and equal(data[3], [kv(3, 8, 16), tuple(states[:2])])
    assert said["layer_meta_states"] == [(), (), ("16",), (["KVCache", "ArraysCache"], [("16",), ()])]
    without = manager.load_block(HASHES[0])
    assert without is not None and equal(without, [MISSING, MISSING, kv(2, 0, 8), [kv(3, 0, 8), MISSING]])


def test_quantised_rows(manager: PagedSSDCacheManager) -> None:
    caches = [QuantizedKVCache(group_size=32, bits=8)]
    store(manager, caches, feeding(caches))
    data, said = manager.load_block_with_metadata(HASHES[1])
    expected = [mx.quantize(part, group_size=32, bits=8) for part in kv(0, 8, 16)]
    assert (
        data is not None
        and said is not None
        and equal(data, [("__nstate__", "QuantizedKVCache", [*map(tuple, expected)])])
    )
    assert said["layer_meta_states"] == [("16", "32", "8")]


@pytest.mark.parametrize("name", sorted(name for name in VLM_CASES if "minimax" in name or name.startswith("turbo")))
def test_classes_of_mlx_vlm(manager: PagedSSDCacheManager, name: str) -> None:
    case = VLM_CASES[name]
    cache = case.make()
    store(manager, [cache], lambda start, stop: mx.eval([array for _, array in case.append(cache, start, stop)]))
    loaded = [manager.load_block(key) for key in HASHES]
    assert all(data is not None and len(data) == 1 for data in loaded)
    layers_found = [data[0] for data in loaded if data is not None]
    if "minimax" in name:
        live = [
            cache.kv_cache.keys,
            cache.kv_cache.values,
            *([cache.index_keys] if cache.index_keys is not None else []),
        ]
        parts = [layer[2] if isinstance(layer[0], str) else layer for layer in layers_found]
        assert {len(part) for part in parts} == {len(live)}
        for i, array in enumerate(live):
            joined = mx.concatenate([part[i] for part in parts], axis=2)
            assert equal(joined, mx.contiguous(array[:, :, : 3 * SIZE]))
        return
    module = turboquant_module()
    for layer in layers_found:
        assert layer[0] == "__turboquant_v2__" and {module._state_length(half) for half in layer[1]} == {SIZE}
    for i, live in enumerate((cache.keys, cache.values)):
        whole = module._slice_state(live, 3 * SIZE)
        joined = layers_found[0][1][i]
        for layer in layers_found[1:]:
            joined = module._concat_state(joined, layer[1][i])
        assert type(joined) is type(whole) and equal(joined, whole)


@pytest.mark.parametrize("name", sorted(VLM_CASES))
def test_every_class_can_be_loaded(manager: PagedSSDCacheManager, name: str) -> None:
    """In one shape or another: a block that is in order must not be taken for a damaged one."""
    case = VLM_CASES[name]
    cache = case.make()
    keys = [group_key(key, SPACE) for key in HASHES]
    chain = HashChain(keys, group_key(KeyChain("m", [], [], 1).root, SPACE), SIZE, TokenBuffer(TOKENS))
    for block in range(3):
        end = (block + 1) * SIZE
        mx.eval([found for _, found in case.append(cache, block * SIZE, end)])
        record(manager._store, chain, describe_layers([cache]), end, end, block, tail=False)
    manager._attach_space("m", SPACE)
    for key in HASHES:
        assert manager.load_block(key) is not None and manager.has_block(key)
    assert manager.get_stats().errors == 0


def test_a_former_space_is_not_seen(manager: PagedSSDCacheManager) -> None:
    caches = [KVCache()]
    store(manager, caches, feeding(caches))
    manager._attach_space("draft", 77)
    assert manager.has_block(HASHES[0])
    manager._attach_space("m", 78)
    assert not manager.has_block(HASHES[0]) and manager.load_block(HASHES[0]) is None
    manager._attach_space("m", SPACE)
    assert manager.load_block(HASHES[0]) is not None


def test_forgotten_until_stored_again(manager: PagedSSDCacheManager) -> None:
    caches = [KVCache()]
    store(manager, caches, feeding(caches))
    assert manager.forget_block(HASHES[0]) and not manager.has_block(HASHES[0])
    assert manager.load_block(HASHES[0]) is None and manager.has_block(HASHES[1])
    manager._note_parts_saved(HASHES[:1])
    assert manager.has_block(HASHES[0]) and manager.get_stats().saves == 1


def test_deleted_with_windows_and_states(manager: PagedSSDCacheManager, tmp_path: Path) -> None:
    caches = [KVCache(), RotatingKVCache(8), RotatingKVCache(6, keep=2), ArraysCache(2)]
    store(manager, caches, feeding(caches))
    assert manager.save_block(hash_of(1), layers(1), 4)
    manager._store.flush()
    before = part_count(tmp_path)
    for name in HASHES:
        assert manager.delete_block(name) is True and manager.delete_block(name) is False
    assert before > 7 and part_count(tmp_path) == 1 and manager.size == 1


def test_saved_as_parts_is_saved(manager: PagedSSDCacheManager) -> None:
    caches = [KVCache()]
    store(manager, caches, feeding(caches))
    assert manager.save_block(HASHES[0], layers(1), 8) is True
    data = manager.load_block(HASHES[0])
    assert data is not None and equal(data, [kv(0, 0, 8)]) and manager.get_stats().hits == 2


def test_structures_that_nobody_wrote_are_dropped(manager: PagedSSDCacheManager) -> None:
    key = group_key(HASHES[0], SPACE)
    slots = Slots([("0/keys", mx.zeros((1, 2, 8, 4)), 2, 0)])
    status, _ = manager._store.put(key, bytes(32), 8, TokenBuffer(TOKENS[:8]), slots, 0, 8, '[{"type":"x"}]')
    assert status
    manager._attach_space("m", SPACE)
    assert manager.has_block(HASHES[0]) and manager.load_block(HASHES[0]) is None
    assert not manager.has_block(HASHES[0]) and manager.get_stats().errors == 1


def test_models_attached_tell_whose_parts_count(manager: PagedSSDCacheManager) -> None:
    caches = [KVCache()]
    store(manager, caches, feeding(caches))
    manager.save_block(hash_of(1), layers(1), 4, "draft")
    manager._store.flush()
    assert manager.get_stats_for_model("m").num_files == 3 and manager.get_stats_for_model("draft").num_files == 1
    assert manager.get_stats_for_model("m").total_size_bytes > manager.get_stats_for_model("draft").total_size_bytes > 0
    # Nothing tells whose they are once there are two.
    manager._attach_space("draft", 77)
    assert manager.get_stats_for_model("m").num_files == 0
