"""The RAM tier of the SSD manager: alone, beside the disk, and shared by several managers."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
from ssd_blocks import equal, hash_of, layers, open_manager, part_count
from support import all_files

from prefixcache.paged_ssd_cache import PagedSSDCacheManager, SharedHotCacheBudget

MB = 1 << 20
BLOCK = 4 * 2 * 64 * 8 * 2  # bytes of layers(n, tokens=64)


def save(manager: PagedSSDCacheManager, *numbers: int, tokens: int = 64, flush: bool = True) -> None:
    for number in numbers:
        assert manager.save_block(hash_of(number), layers(number, tokens=tokens), tokens)
    if flush:
        manager._store.flush()


def in_ram(manager: PagedSSDCacheManager, *numbers: int) -> list[int]:
    held = manager._blobs.in_ram([hash_of(number) for number in numbers])
    return [number for number, is_held in zip(numbers, held, strict=True) if is_held]


def test_a_ram_tier_is_read_from_ram(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=8 * MB)
    save(manager, 1, 2)
    assert equal(manager.load_block(hash_of(1)), layers(1, tokens=64))
    stats = manager.get_stats()
    assert (stats.hot_cache_hits, stats.hot_cache_entries, stats.num_files) == (1, 2, 2)
    assert 2 * BLOCK <= stats.hot_cache_size_bytes <= stats.hot_cache_max_bytes
    cold = open_manager(tmp_path)
    assert equal(cold.load_block(hash_of(1)), layers(1, tokens=64))
    assert (cold.get_stats().hot_cache_hits, cold.get_stats().hot_cache_entries) == (0, 0)


@pytest.mark.parametrize("write_back", [True, False])
def test_everything_is_written_at_once_with_a_ram_tier(tmp_path: Path, write_back: bool) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=8 * MB)
    assert manager.save_block(hash_of(1), layers(1), 4, hot_cache_write_back=write_back)
    until = time.monotonic() + 10
    while part_count(tmp_path) == 0 and time.monotonic() < until:
        time.sleep(0.01)
    # Neither closed, nor evicted, nor flushed.
    assert part_count(tmp_path) == 1 and manager.get_stats().saves_persisted == 1


def test_the_ram_tier_keeps_within_its_bound_and_nothing_is_lost(tmp_path: Path) -> None:
    bound = 10 * 64 << 10
    manager = open_manager(tmp_path, hot_cache_max_bytes=bound)
    for number in range(30):
        save(manager, number, flush=False)
        assert manager.get_stats().hot_cache_size_bytes <= bound
    manager._store.flush()
    stats = manager.get_stats()
    assert stats.hot_cache_evictions > 0 and 0 < stats.hot_cache_entries < 30
    for number in range(30):
        assert equal(manager.load_block(hash_of(number)), layers(number, tokens=64))


def test_a_block_above_the_bound_goes_to_disk_and_evicts_nothing(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=256 << 10)
    save(manager, 1)
    save(manager, 2, tokens=4096)
    assert in_ram(manager, 1, 2) == [1] and equal(manager.load_block(hash_of(2)), layers(2, tokens=4096))


def test_clearing_the_ram_tier_harms_nothing(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=8 * MB)
    save(manager, 1, 2, 3)
    assert manager.clear_hot_cache() == 3 and in_ram(manager, 1, 2, 3) == []
    assert manager.get_stats().hot_cache_size_bytes == 0 and manager.clear_hot_cache() == 0
    for number in (1, 2, 3):
        assert equal(manager.load_block(hash_of(number)), layers(number, tokens=64))
    assert manager.size == 3


@pytest.mark.parametrize("hot", [0, 8 * MB])
def test_clearing_does_not_harm_blocks_that_wait(tmp_path: Path, hot: int) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=hot)
    for number in range(40):
        save(manager, number, flush=False)
        manager.clear_hot_cache()
        assert manager.has_block(hash_of(number))
    for number in range(40):
        assert equal(manager.load_block(hash_of(number)), layers(number, tokens=64))
    manager.close()
    assert part_count(tmp_path) == 40 and open_manager(tmp_path).size == 40


@pytest.mark.parametrize("act", ["forget_block", "delete_block"])
def test_a_block_that_waits_leaves_no_trace_in_the_sizes(tmp_path: Path, act: str) -> None:
    manager = open_manager(tmp_path)
    for number in range(20):
        save(manager, number, flush=False)
        assert getattr(manager, act)(hash_of(number)) is True
    manager._store.flush()
    on_disk = sum(path.stat().st_size for path in all_files(tmp_path))
    stats = manager.get_stats()
    assert manager.size == 0 and stats.total_size_bytes == on_disk and stats.num_files == part_count(tmp_path)
    assert part_count(tmp_path) == (20 if act == "forget_block" else 0)


def test_shrinking_frees_the_least_recently_used_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU's arena gives memory back by whole slabs.
    monkeypatch.setenv("PREFIXCACHE_GATHER", "cpu")
    manager = open_manager(tmp_path, hot_cache_max_bytes=8 * MB)
    save(manager, *range(8))
    manager.load_block(hash_of(0))
    before = manager.hot_bytes()
    freed = manager.shrink_hot_cache_to(before // 2, [hash_of(1), hash_of(2)])
    assert freed == before - manager.hot_bytes() >= before - before // 2
    left = in_ram(manager, *range(8))
    assert {0, 1, 2} <= set(left) and 3 not in left and len(left) < 8
    assert manager.shrink_hot_cache_to(before) == 0
    assert manager.shrink_hot_cache_to(0, None) > 0 and in_ram(manager, *range(8)) == []
    assert all(manager.load_block(hash_of(number)) is not None for number in range(8))


def test_preloading_says_what_is_in_ram(tmp_path: Path) -> None:
    hashes = [hash_of(number) for number in range(6)]
    manager = open_manager(tmp_path, hot_cache_max_bytes=8 * MB)
    save(manager, *range(5))
    assert manager.preload_matched_blocks(hashes) == 5 and manager.preload_matched_blocks([]) == 0
    found = manager.get_stats_dict()
    assert (found["preload_calls"], found["preload_blocks_loaded"]) == (2, 5)
    manager.clear_hot_cache()
    assert manager.preload_matched_blocks(hashes) == 0
    assert open_manager(tmp_path).preload_matched_blocks(hashes) == 0


def test_ram_alone(tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        manager = open_manager(directory, hot_cache_only=True, hot_cache_max_bytes=8 * MB)
        save(manager, 1, 2)
        assert equal(manager.load_block(hash_of(1)), layers(1, tokens=64)) and manager.size == 2
        assert manager.get_stats().hot_cache_hits == 1 and manager.get_stats().num_files == 0
        found = manager.get_block_metadata(hash_of(1))
        assert found is not None and found.token_count == 64
        assert manager.forget_block(hash_of(2)) and not manager.has_block(hash_of(2)) and manager.size == 1
        assert manager.delete_block(hash_of(1)) and not manager.has_block(hash_of(1))
        save(manager, 2)
        assert equal(manager.load_block(hash_of(2)), layers(2, tokens=64))
        assert manager.clear() == 1 and manager.size == 0
        save(manager, 3)
        manager.close()
    assert list(tmp_path.iterdir()) == []


def test_ram_alone_is_a_bound_and_what_is_evicted_is_gone() -> None:
    manager = open_manager(None, hot_cache_only=True, hot_cache_max_bytes=10 * 64 << 10)
    save(manager, *range(30))
    there = [number for number in range(30) if manager.has_block(hash_of(number))]
    assert 0 < len(there) < 30 and 29 in there and manager.size == len(there)
    assert [n for n in range(30) if manager.load_block(hash_of(n)) is not None] == there
    assert manager.clear_hot_cache() == len(there) and manager.size == 0


def test_neither_ram_nor_disk_keeps_nothing() -> None:
    manager = open_manager(None, hot_cache_only=True)
    assert manager.save_block(hash_of(1), layers(1), 4) is False and not manager.has_block(hash_of(1))


def test_managers_share_a_bound(tmp_path: Path) -> None:
    budget = SharedHotCacheBudget(12 * 64 << 10)
    one, two = (
        open_manager(tmp_path, hot_cache_max_bytes=1, hot_cache_budget=budget, expected_model_name=name)
        for name in ("m", "n")
    )
    assert one.get_stats().hot_cache_max_bytes == two.get_stats().hot_cache_max_bytes == budget.max_bytes
    save(one, *range(10))
    assert budget.total_bytes == one.hot_bytes() > 0
    save(two, *range(100, 110))
    assert 0 < budget.total_bytes == one.hot_bytes() + two.hot_bytes() <= budget.max_bytes
    # The one that stored last holds most.
    assert len(in_ram(two, *range(100, 110))) == 10 > len(in_ram(one, *range(10)))
    for number in range(10):
        assert one.load_block(hash_of(number)) is not None and two.load_block(hash_of(100 + number)) is not None


def test_shrinking_and_clearing_reach_all_managers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU's arena gives memory back by whole slabs.
    monkeypatch.setenv("PREFIXCACHE_GATHER", "cpu")
    budget = SharedHotCacheBudget(8 * MB)
    one, two = (open_manager(tmp_path, hot_cache_budget=budget) for _ in range(2))
    save(one, 0, 1, 2)
    save(two, 3, 4, 5)
    held = budget.total_bytes
    assert one.shrink_hot_cache_to(0, [hash_of(1), hash_of(4)]) == held - budget.total_bytes > 0
    assert in_ram(one, 0, 1, 2) == [1] and in_ram(two, 3, 4, 5) == [4]
    assert budget.clear_all_owners() == 2 and budget.total_bytes == 0
    save(two, 6)
    two.close()
    assert budget.total_bytes == 0
    reference = weakref.ref(one)
    one.close()
    del one
    gc.collect()
    assert reference() is None, "a closed manager is kept alive"


def test_many_saves_of_two_managers_stay_within_the_bound(tmp_path: Path) -> None:
    budget = SharedHotCacheBudget(12 * 64 << 10)
    managers = [open_manager(tmp_path, hot_cache_budget=budget) for _ in range(2)]

    def work(index: int) -> None:
        for number in range(index * 100, index * 100 + 40):
            save(managers[index], number, flush=False)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for manager in managers:
        manager._store.flush()
        manager._settle()
    assert budget.total_bytes <= budget.max_bytes
    for index, manager in enumerate(managers):
        for number in range(index * 100, index * 100 + 40):
            assert equal(manager.load_block(hash_of(number)), layers(number, tokens=64))
