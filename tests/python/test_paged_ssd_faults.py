"""The SSD manager in trouble: kills, damage, files of others, hostile text, many threads. Trouble is a miss."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import child_environment
from ssd_blocks import MISSING, equal, hash_of, layers, open_manager, part_count, state
from support import all_files, part_files

from prefixcache._core import Part, Slots, TokenBuffer
from prefixcache._omlx.blobs import _parent_of, blob_key

HERE = Path(__file__).parent

CHILD = """
import sys
from ssd_blocks import hash_of, layers, open_manager
manager = open_manager(sys.argv[1], hot_cache_max_bytes=1 << 26)
for number in range(1000):
    assert manager.save_block(hash_of(number), layers(number, tokens=64), 64)
    if number == 20:
        manager._store.flush()
        print("flushed", flush=True)
"""


def kill_while_saving(directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)], env=child_environment(HERE), stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"flushed\n"
        time.sleep(0.02)
        child.send_signal(signal.SIGKILL)


def test_a_kill_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    kill_while_saving(tmp_path)
    manager = open_manager(tmp_path)
    there = [number for number in range(1000) if manager.has_block(hash_of(number))]
    assert there[:21] == list(range(21))
    for number in [*range(21), *there[-20:]]:
        assert equal(manager.load_block(hash_of(number)), layers(number, tokens=64))
    assert manager.size == len(there) and manager.get_stats().errors == 0


@pytest.mark.parametrize("where", ["header", "data", "end", "empty"])
def test_damage_is_a_miss_and_goes(tmp_path: Path, where: str) -> None:
    writer = open_manager(tmp_path)
    assert writer.save_block(hash_of(1), layers(1, tokens=64), 64, "m")
    writer.close()
    (path,) = part_files(tmp_path)
    content = bytearray(path.read_bytes())
    if where == "end":
        content = content[:-7]
    elif where == "empty":
        content = bytearray()
    else:
        content[300 if where == "header" else -100] ^= 4
    path.write_bytes(content)
    manager = open_manager(tmp_path)
    assert part_count(tmp_path) == 1  # opening reads names, not files
    assert manager.load_block(hash_of(1)) is None and manager.load_block_with_metadata(hash_of(1)) == (None, None)
    assert not manager.has_block(hash_of(1)) and manager.size == 0 and part_count(tmp_path) == 0
    assert (manager.get_stats().errors, manager.get_stats().misses) == (1, 2)
    # It can be stored anew.
    assert manager.save_block(hash_of(1), layers(2, tokens=64), 64, "m")
    assert equal(manager.load_block(hash_of(1)), layers(2, tokens=64))


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    assert writer.save_block(hash_of(1), layers(1), 4, "m")
    writer.close()
    (path,) = part_files(tmp_path)
    good = path.read_bytes()
    chance = random.Random(5)
    for position in chance.sample(range(len(good)), 60):
        bad = bytearray(good)
        bad[position] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        manager = open_manager(tmp_path)
        assert manager.load_block(hash_of(1)) is None, position
        manager.close()
        path.write_bytes(good)
    assert equal(open_manager(tmp_path).load_block(hash_of(1)), layers(1))


def test_a_file_may_not_claim_to_be_another_block(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    for number in (1, 2):
        assert writer.save_block(hash_of(number), layers(number), 4)
    paths = [writer._blobs.path_of(hash_of(number)) for number in (1, 2)]
    writer.close()
    paths[1].write_bytes(paths[0].read_bytes())
    manager = open_manager(tmp_path)
    assert manager.load_block(hash_of(2)) is None and not manager.has_block(hash_of(2))
    assert equal(manager.load_block(hash_of(1)), layers(1)) and manager.size == 1


def test_what_killed_writes_left_behind_is_no_block(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    assert writer.save_block(hash_of(1), layers(1), 4)
    path = writer._blobs.path_of(hash_of(1))
    writer.close()
    content = path.read_bytes()
    fresh, old = path.with_name(".tmp-1-2-3"), path.with_name(".tmp-4-5-6")
    for leftover in (fresh, old):
        leftover.write_bytes(content)
    os.utime(old, (1, 1))
    path.unlink()
    manager = open_manager(tmp_path)
    assert manager.size == 0 and not manager.has_block(hash_of(1)) and manager.load_block(hash_of(1)) is None
    # What may still be in use is counted, what cannot be is gone.
    assert fresh.exists() and not old.exists()
    assert manager.get_stats().total_size_bytes == len(content)


def test_files_of_others_are_counted_and_go_first(tmp_path: Path) -> None:
    writer = open_manager(tmp_path)
    assert writer.save_block(hash_of(1), layers(1, tokens=64), 64)
    path = writer._blobs.path_of(hash_of(1))
    writer.close()
    strange = [path.with_name("something_tmp.safetensors"), path.with_name(f"{'0' * 64}.safetensors")]
    for one in strange:
        one.write_bytes(bytes(30_000))
    manager = open_manager(tmp_path, max_size_bytes=70_000)
    assert manager.size == 1 and manager.get_stats().total_size_bytes == sum(
        p.stat().st_size for p in all_files(tmp_path)
    )
    for number in (2, 3):
        assert manager.save_block(hash_of(number), layers(number, tokens=64), 64)
        manager._store.flush()
        assert sum(p.stat().st_size for p in all_files(tmp_path)) <= 70_000
    assert not all(one.exists() for one in strange)
    assert [number for number in (1, 2, 3) if manager.has_block(hash_of(number))] == [1, 2, 3]


GOOD = {
    "version": 1,
    "block_hash": hash_of(1).hex(),
    "token_count": 4,
    "model_name": "",
    "block_size": 4,
    "cache_signature": "",
    "created_at": 1.0,
    "num_layers": 1,
    "layer_cache_types": None,
    "layer_meta_states": None,
    "placeholders": [],
    "layers": [["p", None, [["a", "0"], ["a", "1"]]]],
}
HOSTILE: list[Any] = [
    "",
    "[]",
    "not json",
    "[" * 200_000,
    {**GOOD, "version": 2},
    {**GOOD, "block_hash": "zz"},
    {**GOOD, "block_hash": hash_of(2).hex()},
    {**GOOD, "token_count": "4"},
    {**GOOD, "num_layers": 1 << 60},
    {**GOOD, "num_layers": True},
    {**GOOD, "layer_cache_types": "KVCache"},
    {**GOOD, "layer_meta_states": [["t", 5]]},
    {**GOOD, "layer_meta_states": [{"a": 1}]},
    {**GOOD, "placeholders": 3},
    {**GOOD, "layers": [["p", None, [["a", "0"], ["a", "2"]]]]},
    {**GOOD, "layers": [["p", None, [["a", "0"], ["n"]]]]},
    {**GOOD, "layers": [["k", [["x"]]]]},
    {key: value for key, value in GOOD.items() if key != "layer_meta_states"},
    {key: value for key, value in GOOD.items() if key != "created_at"},
]


def put_text(manager: Any, said: Any) -> None:
    """A blob whose checksums are right and whose text is not."""
    text = said if isinstance(said, str) else json.dumps(said)
    slots = Slots([("0", mx.zeros((2, 2)), None, 0), ("1", mx.ones((2, 2)), None, 0)])
    key = blob_key(hash_of(1))
    status, _ = manager._store.put(key, _parent_of(key), 1, TokenBuffer([0]), slots, 0, 1, text, Part.state)
    assert status
    manager._store.flush()


def test_the_text_that_is_damaged_below_is_good(tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    put_text(manager, GOOD)
    assert equal(manager.load_block(hash_of(1)), [(mx.zeros((2, 2)), mx.ones((2, 2)))])


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_text_is_a_miss_and_goes(tmp_path: Path, number: int) -> None:
    manager = open_manager(tmp_path)
    put_text(manager, HOSTILE[number])
    assert manager.load_block(hash_of(1)) is None and manager.load_block(hash_of(1)) is None
    # Once, not for ever.
    assert manager.get_stats().errors == 1 and not manager.has_block(hash_of(1)) and part_count(tmp_path) == 0
    assert manager.save_block(hash_of(1), layers(1), 4) and equal(manager.load_block(hash_of(1)), layers(1))


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_text_does_not_stop_a_listing(tmp_path: Path, number: int) -> None:
    writer = open_manager(tmp_path)
    put_text(writer, HOSTILE[number])
    assert writer.save_block(hash_of(5), layers(5), 4, "m", ["KVCache", "KVCache"])
    writer.close()
    manager = open_manager(tmp_path, expected_model_name="m")
    manager.set_expected_layer_signature(["A", "B"])
    assert manager.invalidate_stale_layer_signature() == 1


def test_files_and_folders_are_this_users_alone(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "cache"
    before = os.umask(0)
    try:
        manager = open_manager(directory)
        assert manager.save_block(hash_of(1), layers(1), 4)
        manager.close()
    finally:
        os.umask(before)
    assert part_count(directory) == 1
    for path in [directory, *directory.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_disk_that_fails_leaves_the_ram_tier(tmp_path: Path) -> None:
    manager = open_manager(tmp_path / "cache", hot_cache_max_bytes=8 << 20)
    (tmp_path / "cache" / "v1").rename(tmp_path / "away")
    (tmp_path / "cache" / "v1").write_bytes(b"in the way")
    assert manager.save_block(hash_of(1), layers(1), 4)
    manager._store.flush()
    assert equal(manager.load_block(hash_of(1)), layers(1)) and manager.get_stats().errors == 1
    assert manager.max_size > 0 and manager.enforce_size_limit() == 0 and manager.size == 1


def test_a_block_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, max_size_bytes=1000)
    # Never on disk, as it does not fit; readable until its turn came.
    assert manager.save_block(hash_of(1), layers(1, tokens=64), 64) is True
    manager._store.flush()
    assert part_count(tmp_path) == 0 and manager.load_block(hash_of(1)) is None
    assert not manager.has_block(hash_of(1)) and manager.size == 0


def test_the_same_hash_saved_deleted_and_saved_again(tmp_path: Path) -> None:
    """Each file is written under a name of its own: no write ends in the middle of another one."""
    manager = open_manager(tmp_path)
    for number in range(100):
        assert manager.save_block(hash_of(1), layers(number), 4)
        if number < 99:
            assert manager.delete_block(hash_of(1))
    assert equal(manager.load_block(hash_of(1)), layers(99))
    manager.close()
    assert part_count(tmp_path) == 1 and equal(open_manager(tmp_path).load_block(hash_of(1)), layers(99))


def test_the_disk_is_asked_for_room_outside_of_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=8 << 20)
    real = shutil.disk_usage
    done: list[int] = []

    def slow(path: Any) -> Any:
        def work() -> None:
            assert manager.save_block(hash_of(len(done)), layers(len(done)), 4)
            manager.clear_hot_cache()
            done.append(manager._store.stats()["parts"])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        return real(path)

    monkeypatch.setattr(shutil, "disk_usage", slow)
    assert manager.max_size > 0 and manager.get_stats().max_size_bytes > 0 and manager.enforce_size_limit() == 0
    assert done == [1, 2, 3]


@pytest.mark.parametrize("failing", [False, True])
def test_the_bound_is_also_what_the_disk_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool) -> None:
    manager = open_manager(tmp_path)
    assert manager.save_block(hash_of(1), layers(1), 4)
    manager._store.flush()

    def usage(path: Any) -> Any:
        if failing:
            raise OSError("gone")
        return type("Usage", (), {"free": 10_000})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    used = manager.get_stats().total_size_bytes
    assert manager.max_size == (manager.configured_max_size if failing else int(0.99 * (used + 10_000)))
    assert manager.get_stats_dict()["configured_max_size"] == manager.configured_max_size == 1 << 30


def in_threads(count: int, work: Any) -> None:
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_no_count_is_lost_between_threads(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=8 << 20)
    data = [layers(number) for number in range(50)]
    mx.eval(data)

    def work(index: int) -> None:
        for number in range(50):
            assert manager.save_block(hash_of(number), data[number], 4)
            assert equal(manager.load_block(hash_of(number)), data[number])
            assert manager.load_block(hash_of(1000 + number)) is None
            assert manager.save_block(hash_of(2000), [(1, 2)], 4) is False
            manager.get_stats()

    in_threads(4, work)
    stats = manager.get_stats()
    assert (stats.loads, stats.misses, stats.errors) == (200, 200, 200)
    # Of four saves of a block one stores it.
    assert (stats.saves, stats.hits - stats.loads, manager.size) == (50, 150, 50)


def test_threads_that_save_forget_and_delete_the_same_blocks(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, hot_cache_max_bytes=2 << 20)
    data = [layers(number) for number in range(8)]
    full = [[*one, state(7)] for one in data]
    part = [[*one, MISSING] for one in data]
    mx.eval(full, part)

    def work(index: int) -> None:
        chance = random.Random(index)
        for _ in range(150):
            number = chance.randrange(8)
            name = hash_of(number)
            act = chance.randrange(8)
            if act < 3:
                assert manager.save_block(name, (full if act else part)[number], 4)
            elif act < 6:
                found = manager.load_block(name)
                assert found is None or equal(found, full[number]) or equal(found, part[number])
            elif act == 6:
                manager.forget_block(name)
            else:
                manager.delete_block(name)
                manager.clear_hot_cache()

    in_threads(4, work)
    for number in range(8):
        assert manager.save_block(hash_of(number), full[number], 4)
        assert equal(manager.load_block(hash_of(number)), full[number])
    manager.close()
    again = open_manager(tmp_path)
    assert again.size == 8 and equal(again.load_block(hash_of(3)), full[3])
