"""Several managers in one directory: which blocks each shows, forgets and removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssd_blocks import BIG, equal, hash_of, layers, open_manager, part_count
from support import all_files

KV = ["KVCache", "KVCache"]
TURBO = ["TurboQuantKVCache", "KVCache"]


def save(manager: Any, number: int, model: str = "m", types: list[str] | None = None, tokens: int = 4) -> None:
    assert manager.save_block(hash_of(number), layers(number), tokens, model, types)


def shown(manager: Any, *numbers: int) -> list[int]:
    """Of these blocks the ones that the manager has, which are those it loads."""
    has = [number for number in numbers if manager.has_block(hash_of(number))]
    loaded = [number for number in numbers if manager.load_block(hash_of(number)) is not None]
    assert has == loaded
    return has


def test_blocks_of_others_are_not_shown_and_not_removed(tmp_path: Path) -> None:
    writer = open_manager(tmp_path, expected_block_size=4)
    save(writer, 1, "m", KV)
    save(writer, 2, "other", KV)
    save(writer, 3, "", KV)
    save(writer, 4, "m", None)
    assert writer.save_block(hash_of(5), layers(5, count=3), 4, "m", [*KV, "KVCache"])
    writer.close()
    everything = (1, 2, 3, 4, 5)
    for options, expected in [
        ({}, [1, 2, 3, 4, 5]),
        ({"expected_model_name": "m"}, [1, 3, 4, 5]),
        ({"expected_num_layers": 2}, [1, 2, 3, 4]),
        ({"expected_block_size": 4}, [1, 2, 3, 4, 5]),
        ({"expected_block_size": 8}, []),
        ({"expected_layer_cache_types": KV}, [1, 2, 3]),
        ({"expected_model_name": "m", "expected_num_layers": 2, "expected_layer_cache_types": KV}, [1, 3]),
        ({"expected_layer_cache_types": TURBO}, []),
    ]:
        manager = open_manager(tmp_path, **options)
        assert shown(manager, *everything) == expected, options
        assert manager.size == len(expected) and manager.get_stats().num_files == 5
        hidden = [number for number in everything if number not in expected]
        assert [manager.get_block_metadata(hash_of(number)) for number in hidden] == [None] * len(hidden)
        manager.close()
    assert part_count(tmp_path) == 5


def test_size_and_use_do_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    save(writer, 1, "m")
    save(writer, 2, "other")
    writer.close()
    assert open_manager(tmp_path, expected_model_name="m").size == 1


def test_wrapped_classes_are_the_same(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    save(writer, 1, "m", ["SizedArraysCache", "PrefillReadyRotatingKVCache"])
    writer.close()
    reader = open_manager(tmp_path, expected_layer_cache_types=["ArraysCache", "RotatingKVCache"])
    assert shown(reader, 1) == [1]
    # Its own words come back.
    found = reader.load_block_with_metadata(hash_of(1))[1]
    assert found is not None and found["layer_cache_types"][0] == "SizedArraysCache"


def test_a_block_that_is_not_shown_is_replaced_when_saved(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    save(writer, 1, "m", KV)
    writer.close()
    manager = open_manager(tmp_path, expected_model_name="n")
    assert manager.save_block(hash_of(1), layers(7), 4, "n", KV)
    assert equal(manager.load_block(hash_of(1)), layers(7)) and manager.get_stats().saves == 1
    manager.close()
    assert equal(open_manager(tmp_path).load_block(hash_of(1)), layers(7)) and part_count(tmp_path) == 1


def test_one_manager_sees_what_another_one_writes(tmp_path: Path) -> None:
    one, other = open_manager(tmp_path), open_manager(tmp_path)
    assert shown(other, 1) == []
    save(one, 1)
    one._store.flush()
    assert shown(other, 1) == [1]
    # What it put in the place of another block is judged again when it is read.
    strict = open_manager(tmp_path, expected_model_name="m")
    assert strict.has_block(hash_of(1))
    assert one.delete_block(hash_of(1)) and one.save_block(hash_of(1), layers(1), 4, "other")
    one._store.flush()
    assert strict.load_block(hash_of(1)) is None and not strict.has_block(hash_of(1))


def test_what_another_one_deletes_is_a_miss(tmp_path: Path) -> None:
    one, other = open_manager(tmp_path), open_manager(tmp_path)
    save(one, 1)
    one._store.flush()
    assert other.has_block(hash_of(1)) and one.delete_block(hash_of(1))
    assert other.load_block(hash_of(1)) is None and not other.has_block(hash_of(1))
    assert other.get_stats().errors == 0


def test_forgotten_blocks_stay_on_disk(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    save(manager, 1)
    save(manager, 2)
    assert manager.forget_block(hash_of(1)) is True and manager.forget_block(hash_of(1)) is False
    assert manager.forget_block(hash_of(9)) is False
    assert shown(manager, 1, 2) == [2] and manager.size == 1
    manager._store.flush()
    assert part_count(tmp_path) == 2 and shown(open_manager(tmp_path), 1, 2) == [1, 2]
    # Saved again it is back, with what was saved now: the old data were no good.
    assert manager.save_block(hash_of(1), layers(8), 4, "m")
    assert equal(manager.load_block(hash_of(1)), layers(8)) and manager.size == 2


def test_deleted_blocks_are_gone(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    for number in (1, 2, 3):
        save(manager, number)
    manager._store.flush()
    assert manager.delete_block(hash_of(1)) is True and manager.delete_block(hash_of(1)) is False
    assert part_count(tmp_path) == 2 and shown(manager, 1, 2, 3) == [2, 3]
    # One that is not shown can be removed too.
    other = open_manager(tmp_path, expected_model_name="n")
    assert shown(other, 2) == [] and other.delete_block(hash_of(2)) is True
    assert part_count(tmp_path) == 1 and shown(open_manager(tmp_path), 1, 2, 3) == [3]


def test_clear_removes_everything_of_the_directory(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    save(writer, 1, "m")
    save(writer, 2, "n")
    writer.close()
    manager = open_manager(tmp_path, expected_model_name="m")
    save(manager, 3)
    assert manager.clear() == 3
    assert part_count(tmp_path) == 0 and manager.size == 0 and manager.get_stats().total_size_bytes == 0
    save(manager, 3)
    assert shown(manager, 1, 2, 3) == [3]


def test_the_first_save_sets_the_signature(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, expected_model_name="m")
    save(manager, 1, "m", None)
    assert manager._expected_layer_cache_types is None
    save(manager, 2, "m", KV)
    assert manager._expected_layer_cache_types == KV and manager._signature_sweep_completed
    save(manager, 3, "m", TURBO)
    assert manager._expected_layer_cache_types == KV
    assert manager.adopt_layer_signature_if_unset(TURBO) is False
    assert open_manager(None, hot_cache_only=True).adopt_layer_signature_if_unset([]) is False


def test_the_sweep_hides_blocks_of_another_signature(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    save(writer, 1, "m", KV)
    save(writer, 2, "m", TURBO)
    save(writer, 3, "m", None)
    save(writer, 4, "other", KV)
    writer.close()
    manager = open_manager(tmp_path, expected_model_name="m")
    assert manager.invalidate_stale_layer_signature() == 0  # nothing is expected
    assert shown(manager, 1, 2) == [1, 2]
    assert manager.set_expected_layer_signature(TURBO) is True
    assert manager._signature_sweep_completed is False
    assert manager.invalidate_stale_layer_signature() == 1
    assert manager._signature_sweep_completed is True
    assert manager.invalidate_stale_layer_signature() == 0  # once
    assert shown(manager, 1, 2) == [2]
    assert part_count(tmp_path) == 4


def test_the_sweep_finds_what_was_not_asked_for_yet(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    for number in range(3):
        save(writer, number, "m", KV)
    save(writer, 3, "other", KV)
    writer.close()
    manager = open_manager(tmp_path, expected_model_name="m")
    assert manager.set_expected_layer_signature(TURBO) and manager.invalidate_stale_layer_signature() == 3
    assert shown(manager, 0, 1, 2, 3) == []
    # Back again: what fits is shown.
    assert manager.set_expected_layer_signature(KV) and shown(manager, 0, 1, 2, 3) == [0, 1, 2]


def test_blocks_saved_here_without_types_survive_the_sweep(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, expected_model_name="m")
    save(manager, 1, "m", None)
    save(manager, 2, "", KV)  # sets the signature
    save(manager, 3, "m", KV)
    assert manager.set_expected_layer_signature(TURBO) and manager.invalidate_stale_layer_signature() == 1
    assert shown(manager, 1, 2, 3) == [1, 2]


def test_a_manager_without_a_model_never_sweeps(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    save(manager, 1, "m", KV)
    assert manager.set_expected_layer_signature(TURBO) is True
    assert manager.invalidate_stale_layer_signature() == 0 and shown(manager, 1) == [1]


def test_only_a_changed_form_is_a_change(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, expected_layer_cache_types=["ArraysCache"])
    assert manager.set_expected_layer_signature(["SizedArraysCache"]) is False
    assert manager._expected_layer_cache_types == ["SizedArraysCache"]
    assert manager.set_expected_layer_signature(["KVCache"]) is True
    assert manager.set_expected_layer_signature(None) is True and manager._expected_layer_cache_types is None
    assert manager.set_expected_layer_signature(None) is False


def test_a_draft_model_neither_sets_the_signature_nor_is_judged_by_it(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, expected_model_name="target")
    save(manager, 1, "draft", ["KVCache"])
    assert manager._expected_layer_cache_types is None
    save(manager, 2, "target", TURBO)
    assert manager._expected_layer_cache_types == TURBO
    save(manager, 3, "draft", ["KVCache"])
    assert shown(manager, 1, 2, 3) == [1, 2, 3]
    assert manager.set_expected_layer_signature(KV) and manager.invalidate_stale_layer_signature() == 1
    assert shown(manager, 1, 2, 3) == [1, 3]


def test_the_limit_counts_what_others_wrote_before(tmp_path: Path) -> None:
    for number in range(30):
        manager = open_manager(tmp_path, max_size_bytes=60_000, expected_model_name=("m", "n")[number % 2])
        assert manager.save_block(hash_of(number), layers(number, tokens=64), 64, manager._expected_model_name)
        manager.close()
        used = sum(path.stat().st_size for path in all_files(tmp_path))
        assert 0 < used <= 60_000
    assert part_count(tmp_path) > 3


def test_the_limit_holds_at_once_and_oldest_blocks_go_first(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, max_size_bytes=60_000)
    for number in range(20):
        assert manager.save_block(hash_of(number), layers(number, tokens=64), 64)
        manager._store.flush()
        assert manager.get_stats().total_size_bytes <= 60_000
        manager.load_block(hash_of(0))  # in use
    stats = manager.get_stats()
    assert stats.evictions > 0 and stats.num_files == manager.size == part_count(tmp_path)
    left = shown(manager, *range(20))
    assert left == [0, *range(20 - len(left) + 1, 20)]


def test_enforcing_the_limit_makes_room(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, max_size_bytes=60_000)
    while manager.get_stats().evictions == 0:
        number = manager.get_stats().saves
        assert manager.save_block(hash_of(number), layers(number, tokens=64), 64)
        manager._store.flush()
    before = manager.get_stats().total_size_bytes
    assert before > 54_000
    freed = manager.enforce_size_limit()
    assert freed > 0 and manager.get_stats().total_size_bytes == before - freed <= 54_000
    assert manager.enforce_size_limit() == 0
    used = sum(path.stat().st_size for path in all_files(tmp_path))
    assert used == manager.get_stats().total_size_bytes
    assert open_manager(None, hot_cache_only=True, hot_cache_max_bytes=BIG).enforce_size_limit() == 0
