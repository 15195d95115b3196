"""Blocks on SSD and in RAM, by hash: what is saved comes back, in this process and in the next one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import pytest
from ssd_blocks import BIG, MISSING, equal, hash_of, layers, open_manager, part_count, state, two_layers
from support import all_files

from prefixcache.paged_ssd_cache import (
    PagedSSDBlockMetadata,
    PagedSSDCacheManager,
    _cache_compat_signature,
    _canonicalize_layer_cache_types,
    parse_size,
)

TYPES = ["KVCache", "KVCache"]


def test_a_block_comes_back_bit_for_bit(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    data = two_layers(1)
    assert not manager.has_block(hash_of(1)) and manager.load_block(hash_of(1)) is None
    assert manager.save_block(hash_of(1), data, 16) is True
    # At once, before anything is written, and in arrays of its own.
    assert manager.has_block(hash_of(1)) and equal(manager.load_block(hash_of(1)), data)
    manager.close()
    assert not manager.has_block(hash_of(1)) and manager.load_block(hash_of(1)) is None
    again = open_manager(tmp_path)
    assert again.has_block(hash_of(1)) and equal(again.load_block(hash_of(1)), data)


def test_what_is_said_of_a_block_comes_back(tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "token_count": 16,
        "model_name": "org/m",
        "layer_cache_types": ["KVCache", "RotatingKVCache"],
        "layer_meta_states": [("16",), ["4", ("8", 1)]],
    }
    for manager in (open_manager(tmp_path, expected_block_size=16), open_manager(tmp_path)):
        manager.save_block(hash_of(1), two_layers(1), **said)
        data, found = manager.load_block_with_metadata(hash_of(1), promote_to_hot_cache=False)
        assert equal(data, two_layers(1))
        assert found == {
            "num_layers": 2,
            "token_count": 16,
            "model_name": "org/m",
            "block_size": 16,
            "cache_signature": _cache_compat_signature(
                model_name="org/m", num_layers=2, block_size=16, layer_cache_types=said["layer_cache_types"]
            ),
            "layer_cache_types": said["layer_cache_types"],
            "layer_meta_states": [("16",), ("4", ("8", 1))],
        }
        manager.close()
    assert open_manager(tmp_path).load_block_with_metadata(b"none") == (None, None)


@pytest.mark.parametrize(
    ("meta", "shown"), [("", ()), ("text", "text"), (None, ()), (["1"], ("1",)), ((1, "2"), (1, "2"))]
)
def test_texts_stay_texts_and_the_rest_is_tuples(tmp_path: Path, meta: Any, shown: Any) -> None:
    manager = open_manager(tmp_path)
    manager.save_block(hash_of(1), layers(1, count=1), 4, layer_meta_states=[meta])
    found = manager.load_block_with_metadata(hash_of(1))[1]
    assert (
        found is not None
        and found["layer_meta_states"] == [shown]
        and type(found["layer_meta_states"][0]) is type(shown)
    )


def test_without_a_word_about_layers_there_is_none(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    manager.save_block(hash_of(1), layers(1), 4)
    found = manager.load_block_with_metadata(hash_of(1))[1]
    assert found is not None and found["layer_cache_types"] is None and found["layer_meta_states"] is None
    assert (found["block_size"], found["model_name"]) == (4, "")


@pytest.mark.parametrize("name", [b"", b"hash1", b"x" * 31, b"x" * 33, bytes(range(200))])
def test_hashes_of_any_length(tmp_path: Path, name: bytes) -> None:
    manager = open_manager(tmp_path)
    assert manager.save_block(name, layers(5), 4)
    assert manager.has_block(name) and not manager.has_block(name + b"1")
    manager.close()
    again = open_manager(tmp_path)
    assert equal(again.load_block(name), layers(5)) and again.size == 1
    found = again.get_block_metadata(name)
    assert found is not None and found.block_hash == name


def test_lazy_arrays_are_evaluated_by_the_caller(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    base = mx.arange(64, dtype=mx.float32).reshape(1, 1, 8, 8)
    assert manager.save_block(hash_of(1), [(base * 2, base[:, :, ::2].swapaxes(2, 3))], 8)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(manager.load_block(hash_of(1))))
    thread.start()
    thread.join()
    assert equal(found[0], [(base * 2, mx.contiguous(base[:, :, ::2].swapaxes(2, 3)))])


def test_the_first_one_stays(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    assert manager.save_block(hash_of(1), layers(1), 4)
    assert manager.save_block(hash_of(1), layers(2), 4) is True
    # Not even looked at.
    assert manager.save_block(hash_of(1), [(object(), "nothing")], 4) is True
    assert equal(manager.load_block(hash_of(1)), layers(1))
    stats = manager.get_stats()
    assert (stats.saves, stats.hits, stats.loads, stats.errors) == (1, 3, 1, 0)
    manager.close()
    # Nor in the next process.
    again = open_manager(tmp_path)
    assert again.save_block(hash_of(1), layers(3), 4) and equal(again.load_block(hash_of(1)), layers(1))
    assert again.get_stats().saves == 0


@pytest.mark.parametrize("restart", [False, True])
def test_a_state_takes_the_place_of_a_placeholder(tmp_path: Path, restart: bool) -> None:
    manager = open_manager(tmp_path)
    kv = layers(1, count=1)
    assert manager.save_block(hash_of(1), [*kv, MISSING, MISSING], 4)
    if restart:
        manager.close()
        manager = open_manager(tmp_path)
    # As little as before, and less than before: what is there stays.
    assert manager.save_block(hash_of(1), [*layers(2, count=1), MISSING, MISSING], 4)
    assert equal(manager.load_block(hash_of(1)), [*kv, MISSING, MISSING])
    assert manager.save_block(hash_of(1), [*kv, state(3), MISSING], 4)
    assert equal(manager.load_block(hash_of(1)), [*kv, state(3), MISSING])
    assert manager.save_block(hash_of(1), [*kv, MISSING, state(4)], 4)
    assert equal(manager.load_block(hash_of(1)), [*kv, state(3), MISSING])
    assert manager.save_block(hash_of(1), [*kv, state(5), state(4)], 4)
    assert manager.save_block(hash_of(1), [*kv, state(6), state(6)], 4)
    manager.close()
    again = open_manager(tmp_path)
    assert equal(again.load_block(hash_of(1)), [*kv, state(5), state(4)]) and part_count(tmp_path) == 1


def test_what_cannot_be_stored_is_refused_and_counted(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    good = layers(1, count=1)
    refused: list[Any] = [
        [*good, (mx.zeros(3), 7)],
        [*good, (mx.zeros(3), "text")],
        [*good, mx.zeros(3)],
        [*good, None],
        [(MagicMock(), MagicMock())],
        None,
        5,
    ]
    for number, data in enumerate(refused):
        assert manager.save_block(hash_of(number), data, 4) is False
        assert not manager.has_block(hash_of(number))
    assert manager.save_block(hash_of(50), good, 4, layer_meta_states=[(mx.zeros(1),)]) is False
    assert manager.save_block(hash_of(51), good, 4, layer_meta_states=["x" * (2 << 20)]) is False
    assert manager.get_stats().errors == len(refused) + 2 and manager.size == 0
    assert manager.save_block(hash_of(1), good, 4)


def test_many_shapes_through_files(tmp_path: Path) -> None:
    data = [
        (mx.zeros((1, 0, 4, 8), mx.bfloat16), mx.array(2.5, mx.float16)),
        ("__nstate__", "ArraysCache", [mx.ones((2, 2), mx.uint8), None, (mx.array([True]), [None, mx.array(3)])]),
        ("__nstate__", "ArraysCache", [None]),
        (mx.array([1 + 2j], mx.complex64), None),
    ]
    manager = open_manager(tmp_path)
    assert manager.save_block(hash_of(1), data, 4)
    assert manager.save_block(hash_of(2), [("__nstate__", "ArraysCache", [None, None])], 4)
    assert manager.save_block(hash_of(3), [], 4)
    manager.close()
    again = open_manager(tmp_path)
    assert equal(again.load_block(hash_of(1)), data)
    (pair,) = again.load_block(hash_of(2)) or [None]
    assert tuple(pair) == (None, None) and pair.class_name == "ArraysCache"
    assert again.load_block(hash_of(3)) == []


def test_as_a_cache_manager(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    assert manager.fetch(hash_of(1)) == (None, False)
    assert manager.store(hash_of(1), (layers(1), 16, "m")) and manager.store(hash_of(2), (layers(2), 8))
    assert manager.store(hash_of(3), layers(3))
    value, hit = manager.fetch(hash_of(1))
    assert hit is True and equal(value, layers(1))
    found = [manager.load_block_with_metadata(hash_of(number))[1] for number in (1, 2, 3)]
    assert [one and (one["token_count"], one["model_name"]) for one in found] == [(16, "m"), (8, ""), (0, "")]
    assert manager.size == 3 and manager.max_size <= BIG == manager.configured_max_size
    assert manager.evict(hash_of(2)) is True and manager.evict(hash_of(2)) is False
    assert manager.clear() == 2 and manager.size == 0 and not manager.has_block(hash_of(1))


def test_metadata_of_a_block(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    assert manager.get_block_metadata(hash_of(1)) is None
    manager.save_block(hash_of(1), layers(1), 16, "m", TYPES)
    manager._store.flush()
    found = manager.get_block_metadata(hash_of(1))
    assert isinstance(found, PagedSSDBlockMetadata)
    assert (found.block_hash, found.token_count, found.model_name, found.num_layers) == (hash_of(1), 16, "m", 2)
    assert found.layer_cache_types == TYPES
    assert found.file_path.is_file() and found.file_size == found.file_path.stat().st_size
    assert PagedSSDBlockMetadata.from_dict(found.to_dict()).file_path == found.file_path


def test_statistics(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=8 << 20)
    manager.save_block(hash_of(1), layers(1), 4)
    manager.save_block(hash_of(2), [(1, 2)], 4)
    manager.load_block(hash_of(1))
    manager.load_block(hash_of(2))
    manager._store.flush()
    stats = manager.get_stats()
    assert (stats.saves, stats.saves_persisted, stats.errors, stats.save_rate) == (1, 1, 1, 0.5)
    assert (stats.loads, stats.hits, stats.misses, stats.hit_rate) == (1, 1, 1, 0.5)
    assert (stats.hot_cache_hits, stats.hot_cache_entries, stats.num_files) == (1, 1, 1)
    assert (stats.ssd_write_drops, stats.ssd_inline_write_fallbacks, stats.evict_unlink_failures) == (0, 0, 0)
    assert 0 < stats.hot_cache_size_bytes <= stats.hot_cache_max_bytes == 8 << 20
    on_disk = sum(path.stat().st_size for path in all_files(tmp_path))
    assert stats.total_size_bytes == on_disk and stats.configured_max_size_bytes == BIG
    found = manager.get_stats_dict()
    assert found["cache_dir"] == str(tmp_path) and found["total_size"] == on_disk
    assert found["utilization"] == on_disk / found["max_size"] and found["max_size_formatted"].endswith("GB")
    assert {"configured_max_size", "configured_max_size_formatted", "total_size_formatted", "num_files"} <= found.keys()
    assert {"hot_cache_size_formatted", "hot_cache_max_formatted", "hot_cache_max_bytes"} <= found.keys()
    assert (found["saves"], found["errors"], found["preload_calls"], found["preload_time_ms"]) == (1, 1, 0, 0)
    assert repr(manager).startswith(f"PagedSSDCacheManager(cache_dir={str(tmp_path)!r}, parts=1, size=")


def test_statistics_of_one_model(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    for number, model in enumerate(["org/m", "org/m", "draft"]):
        manager.save_block(hash_of(number), layers(number), 4, model)
    manager._store.flush()
    for name, count in (("org/m", 2), ("m", 2), ("draft", 1), ("org", 0), ("other", 0)):
        stats = manager.get_stats_for_model(name)
        assert stats.num_files == count and (stats.total_size_bytes > 0) == (count > 0)
        assert stats.saves == 3
    manager.close()
    # A manager that expects one of them shows the other's to nobody.
    again = open_manager(tmp_path, expected_model_name="org/m")
    assert again.get_stats_for_model("m").num_files == 2 and again.get_stats_for_model("draft").num_files == 0
    assert again.get_stats().num_files == 3 and again.size == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1024", 1024), ("17B", 17), ("1KB", 1024), ("1.5GB", 3 << 29), (" 2 tb ", 2 << 40), ("10mb", 10 << 20)],
)
def test_sizes_as_text(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "1.5", "1e3", "ten", "1XB", "-1", "-1GB", "1 2GB", "nan GB", "inf", None, 1.5]
)
def test_other_sizes_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_size(text)


def test_helpers_by_their_old_names() -> None:
    assert _canonicalize_layer_cache_types(["SizedArraysCache"]) == ["ArraysCache"]
    assert '"model_name":"m"' in _cache_compat_signature(
        model_name="m", num_layers=1, block_size=2, layer_cache_types=None
    )


def test_a_spec_of_the_class_has_no_expected_types(tmp_path: Path) -> None:
    """Stand-ins that are made of the class must not seem to expect something."""
    stand_in = MagicMock(spec=PagedSSDCacheManager)
    assert not hasattr(stand_in, "_expected_layer_cache_types")
    for name in ("save_block", "load_block_with_metadata", "forget_block", "invalidate_stale_layer_signature"):
        assert hasattr(stand_in, name)
    manager = open_manager(tmp_path)
    assert manager._expected_layer_cache_types is None and manager._signature_sweep_completed is False


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directory"):
        PagedSSDCacheManager(None, BIG)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="directory"):
        PagedSSDCacheManager(tmp_path / "file", BIG)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ValueError, match="only this user"):
        PagedSSDCacheManager(open_to_all, BIG)


def test_a_closed_manager_misses(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    manager.save_block(hash_of(1), layers(1), 4)
    manager.close()
    manager.close()
    assert manager.save_block(hash_of(2), layers(2), 4) is False
    assert manager.load_block(hash_of(1)) is None and not manager.has_block(hash_of(1))
    assert manager.delete_block(hash_of(1)) is False and manager.forget_block(hash_of(1)) is False
    assert manager.clear() == 0 and manager.size == 0
    assert manager.preload_matched_blocks([hash_of(1)]) == 0
    assert part_count(tmp_path) == 1 and open_manager(tmp_path).has_block(hash_of(1))
