"""What a manager knows of its blocks: the index, and which blocks are its own."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefixcache._omlx.cache_types import canonical_types
from prefixcache._omlx.ssd_index import (
    Expected,
    PagedSSDBlockMetadata,
    PagedSSDCacheIndex,
    compat_signature,
)


def block(number: int, size: int = 100, **fields: Any) -> PagedSSDBlockMetadata:
    return PagedSSDBlockMetadata(
        block_hash=bytes([number]) * 32,
        file_path=Path(f"/cache/{number}.safetensors"),
        file_size=size,
        token_count=16,
        created_at=float(number),
        last_access=float(number),
        num_layers=2,
        **fields,
    )


def hashes(blocks: list[PagedSSDBlockMetadata]) -> list[int]:
    return [one.block_hash[0] for one in blocks]


def test_metadata_as_a_dict() -> None:
    plain = block(7)
    said = plain.to_dict()
    assert said["block_hash"] == "07" * 32 and said["file_path"] == "/cache/7.safetensors"
    assert "layer_cache_types" not in said and "layer_meta_states" not in said
    assert PagedSSDBlockMetadata.from_dict(said) == plain
    full = block(
        8,
        model_name="m",
        block_size=16,
        cache_signature="{}",
        layer_cache_types=["A", "B"],
        layer_meta_states=[("1", "2"), ()],
    )
    said = full.to_dict()
    assert said["layer_meta_states"] == [["1", "2"], []]
    assert PagedSSDBlockMetadata.from_dict(json.loads(json.dumps(said))) == full


def test_metadata_of_an_older_dict() -> None:
    said = block(1).to_dict()
    for name in ("model_name", "block_size", "cache_signature"):
        del said[name]
    found = PagedSSDBlockMetadata.from_dict(said)
    assert (found.model_name, found.block_size, found.cache_signature) == ("", 0, "")
    assert found.layer_cache_types is None and found.layer_meta_states is None
    del said["token_count"]
    with pytest.raises(KeyError, match="token_count"):
        PagedSSDBlockMetadata.from_dict(said)


def test_touch_sets_the_time() -> None:
    found = block(1)
    before = time.time()
    found.touch()
    assert before <= found.last_access <= time.time()


def test_add_get_remove() -> None:
    index = PagedSSDCacheIndex(1000)
    assert (index.count, index.total_size, index.max_size) == (0, 0, 1000)
    one = block(1, 100)
    index.add(one)
    index.add(block(2, 50))
    assert index.get(one.block_hash) is one and index.contains(one.block_hash)
    assert (index.count, index.total_size) == (2, 150)
    # The same block again replaces it, size and all.
    index.add(block(1, 30))
    assert (index.count, index.total_size) == (2, 80)
    assert index.remove(one.block_hash) == block(1, 30)
    assert index.remove(one.block_hash) is None and index.get(one.block_hash) is None
    assert (index.count, index.total_size) == (1, 50)
    assert hashes(index.get_all_metadata()) == [2] and index.get_all_hashes() == [bytes([2]) * 32]


def test_the_order_of_use() -> None:
    index = PagedSSDCacheIndex(1000)
    for number in (3, 1, 2):
        index.add(block(number))
    assert hashes(index.get_lru_entries(2)) == [3, 1]
    index.touch(bytes([3]) * 32)
    assert hashes(index.get_lru_entries(10)) == [1, 2, 3]
    index.touch(b"nobody")
    index.get(bytes([1]) * 32)
    assert hashes(index.get_lru_entries(1)) == [1]
    index.sort_lru_by_last_access()  # 3 was touched: it has today's time
    assert hashes(index.get_lru_entries(10)) == [1, 2, 3]
    index.add(block(2, 5))
    assert hashes(index.get_all_metadata()) == [1, 3, 2]


def test_eviction_takes_the_oldest_until_the_rest_fits() -> None:
    index = PagedSSDCacheIndex(1000)
    for number in range(1, 6):
        index.add(block(number, 100))
    assert index.evict_until_size(500) == []
    assert hashes(index.evict_until_size(450)) == [1]
    assert hashes(index.evict_until_size(100, max_count=2)) == [2, 3]
    assert hashes(index.evict_until_size(0)) == [4, 5]
    assert (index.count, index.total_size) == (0, 0) and index.evict_until_size(0) == []


def test_sizes_are_corrected() -> None:
    index = PagedSSDCacheIndex(1000)
    index.add(block(1, 100))
    index.update_file_size(bytes([1]) * 32, 130)
    index.update_file_size(b"nobody", 5)
    found = index.get(bytes([1]) * 32)
    assert found is not None and found.file_size == 130 and index.total_size == 130


def test_threads_do_not_lose_bytes() -> None:
    index = PagedSSDCacheIndex(1000)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(2000):
            number = chance.randrange(20)
            chance.choice([lambda n: index.add(block(n, n)), lambda n: index.remove(bytes([n]) * 32)])(number)
            index.evict_until_size(150, max_count=1)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.total_size == sum(one.file_size for one in index.get_all_metadata())


def test_wrappers_are_named_as_what_they_wrap() -> None:
    assert canonical_types(None) is None and canonical_types([]) == []
    given = ["SizedArraysCache", "PrefillReadyRotatingKVCache", "TurboQuantKVCache", "KVCache", "Unheard"]
    assert canonical_types(given) == ["ArraysCache", "RotatingKVCache", "TurboQuantKVCache", "KVCache", "Unheard"]


def test_the_signature_is_compact_and_does_not_see_wrappers() -> None:
    said = compat_signature(model_name="m", num_layers=1, block_size=16, layer_cache_types=["SizedArraysCache"])
    assert said == '{"block_size":16,"layer_cache_types":["ArraysCache"],"model_name":"m","num_layers":1}'
    assert compat_signature(model_name="", num_layers=0, block_size=0, layer_cache_types=None) == (
        '{"block_size":0,"layer_cache_types":null,"model_name":"","num_layers":0}'
    )


TYPES = ["KVCache", "ArraysCache"]
MINE = block(1, model_name="m", block_size=16, layer_cache_types=TYPES)
EXPECTED = Expected("m", 2, 16, ("KVCache", "SizedArraysCache"))


def test_what_is_as_expected_is_accepted() -> None:
    assert EXPECTED.accepts(MINE)
    assert Expected().accepts(block(1))
    assert Expected("", 0, 0, tuple(TYPES)).accepts(MINE)
    # What a block does not say of its model and layers is not held against it.
    assert EXPECTED.accepts(replace(MINE, model_name="", num_layers=0))


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "n"},
        {"num_layers": 3},
        {"block_size": 32},
        {"block_size": 0},
        {"layer_cache_types": None},
        {"layer_cache_types": ["KVCache", "KVCache"]},
        {"layer_cache_types": ["TurboQuantKVCache", "ArraysCache"]},
        {"cache_signature": "not JSON"},
        {"cache_signature": "[" * 100_000},
        {"cache_signature": compat_signature(model_name="m", num_layers=2, block_size=32, layer_cache_types=TYPES)},
    ],
    ids=lambda other: f"{next(iter(other))}={str(next(iter(other.values())))[:20]}",
)
def test_what_is_not_is_not(other: dict[str, Any]) -> None:
    assert not EXPECTED.accepts(replace(MINE, **other))


def test_a_signature_that_says_the_same_in_other_words_is_accepted() -> None:
    said = json.dumps({"num_layers": 2, "model_name": "m", "layer_cache_types": TYPES, "block_size": 16}, indent=2)
    assert EXPECTED.accepts(replace(MINE, cache_signature=said))


def test_stale_is_only_what_says_so() -> None:
    assert EXPECTED.is_stale(replace(MINE, layer_cache_types=["KVCache", "KVCache"]))
    assert not EXPECTED.is_stale(MINE) and not EXPECTED.is_stale(replace(MINE, layer_cache_types=None))
    assert not Expected("m").is_stale(MINE)


def test_another_model_is_one_that_has_another_name() -> None:
    assert EXPECTED.is_other_model("draft")
    assert not EXPECTED.is_other_model("m") and not EXPECTED.is_other_model("") and not Expected().is_other_model("m")
