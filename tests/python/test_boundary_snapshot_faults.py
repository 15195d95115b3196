"""Snapshots in trouble: broken caches, full queues, damage, failing disks, threads. Each is False or None."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from snapshots import (
    LEFT_OUT,
    as_given,
    check_loads,
    folder,
    layer,
    raw,
    ring,
    wait_written,
)

from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore, reset_boundary_snapshot_root


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BoundarySnapshotSSDStore]:
    made = BoundarySnapshotSSDStore(tmp_path)
    yield made
    made.cleanup_all()
    made.shutdown()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        ZeroDivisionError,
        OSError,
        MemoryError,
    ],
)
def test_errors_of_extraction_are_a_refusal(store: BoundarySnapshotSSDStore, error: type[Exception]) -> None:
    def broken(caches: Any) -> Any:
        raise error("broken cache")

    assert store.save("r", 4, [], broken) is False
    assert not store.has("r", 4)
    assert store.get_stats()["save_errors"] == 1


def test_a_bug_of_extraction_reaches_the_caller(store: BoundarySnapshotSSDStore) -> None:
    with pytest.raises(NameError):
        store.save("r", 4, [], lambda caches: undefined_name)  # type: ignore[name-defined]  # noqa: F821
    assert not store.has("r", 4)
    assert store.save("r", 4, [ring(1)], as_given)


@pytest.mark.parametrize("result", [None, ([], None), (None, None), ([None], None), ((), None), 5, ("ab", None)])
def test_an_extraction_that_gives_no_layers_is_refused(store: BoundarySnapshotSSDStore, result: Any) -> None:
    assert store.save("r", 4, [], lambda caches: result) is False
    assert store.load("r", 4) is None


def test_an_evaluation_that_fails_is_a_refusal(store: BoundarySnapshotSSDStore) -> None:
    """MLX 0.32 cannot evaluate here what another thread left unevaluated; 0.31 can."""
    lazy: list[mx.array] = []
    thread = threading.Thread(target=lambda: lazy.append(mx.ones((4, 4)) @ mx.ones((4, 4))))
    thread.start()
    thread.join()
    can = mx.__version__.startswith("0.31.")
    assert store.save("r", 4, [layer(lazy[0])], as_given) is can
    assert store.has("r", 4) is can
    assert store.get_stats()["save_errors"] == (not can)


def test_a_snapshot_that_the_queue_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Small(BoundarySnapshotSSDStore):
        _MOST_WAITING_BYTES = 1 << 20

    store = Small(tmp_path)
    assert store.save("r", 4, [ring(1)], as_given)
    assert store.save("r", 8, [layer(mx.zeros((1 << 19,)))], as_given) is False
    assert not store.has("r", 8)
    assert store.load("r", 8) is None
    assert store.get_stats()["queue_full"] == 1
    check_loads(store, "r", 4, [ring(1)])
    assert store.save("r", 4, [layer(mx.zeros((1 << 19,)))], as_given) is False
    check_loads(store, "r", 4, [ring(1)])  # the one before it stays
    store.shutdown()


def test_no_more_than_128_wait_to_be_written(tmp_path: Path) -> None:
    """Without a pause a burst of saves never lets the writer begin; then it is given a moment."""

    class Impatient(BoundarySnapshotSSDStore):
        _ROOM_WAIT_S = 0.0

    assert BoundarySnapshotSSDStore._MOST_WAITING == 128
    store = Impatient(tmp_path)
    kept = [store.save("r", count, [layer(mx.zeros((1 << 14,)))], as_given) for count in range(1, 600)]
    refused = kept.count(False)
    assert kept[:128] == [True] * 128
    assert store.get_stats()["queue_full"] == refused
    assert [store.has("r", count) for count in range(1, 600)] == kept
    store.shutdown()
    wait_written(store, tmp_path, kept.count(True))
    store.cleanup_all()
    patient = BoundarySnapshotSSDStore(tmp_path)
    assert all(patient.save("r", count, [ring(count)], as_given) for count in range(1, 300))
    patient.shutdown()


def test_a_writer_that_stands_still_makes_saves_refuse(tmp_path: Path) -> None:
    class NoRoom(BoundarySnapshotSSDStore):
        _MOST_WAITING = 0

    store = NoRoom(tmp_path)
    assert store.save("r", 4, [ring(1)], as_given) is False
    assert store.get_stats()["queue_full"] == 1
    assert not store.has("r", 4)


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "longer", "removed", "folder"])
def test_a_file_that_is_damaged_is_no_snapshot(store: BoundarySnapshotSSDStore, tmp_path: Path, damage: str) -> None:
    assert store.save("r", 4, [layer(mx.arange(4096))], as_given)
    assert store.save("r", 8, [ring(8)], as_given)
    path = max(wait_written(store, tmp_path, 2), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    if damage == "cut":
        os.truncate(path, len(content) // 2)
    elif damage == "flipped":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "longer":
        path.write_bytes(content + b"x")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    assert store.load("r", 4) is None
    assert not store.has("r", 4)
    assert store.load("r", 4) is None
    assert store.get_stats()["load_errors"] == 1
    check_loads(store, "r", 8, [ring(8)])


def test_a_file_that_is_cut_after_it_was_read_once(store: BoundarySnapshotSSDStore, tmp_path: Path) -> None:
    layers = [layer(mx.arange(1 << 18))]
    assert store.save("r", 4, layers, as_given)
    (path,) = wait_written(store, tmp_path, 1)
    found = store.load("r", 4)
    os.truncate(path, 4096)
    assert found is not None
    assert raw(found[0]["state"][0]) == raw(layers[0]["state"][0]), "reading is not left for later"
    assert store.load("r", 4) is None


def test_a_header_that_claims_more_than_there_is(store: BoundarySnapshotSSDStore, tmp_path: Path) -> None:
    assert store.save("r", 4, [ring(1)], as_given)
    (path,) = wait_written(store, tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[:8] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(content)
    assert store.load("r", 4) is None


def test_a_folder_that_is_removed_under_a_store_is_made_again(store: BoundarySnapshotSSDStore, tmp_path: Path) -> None:
    assert store.save("r", 4, [ring(1)], as_given)
    wait_written(store, tmp_path, 1)
    reset_boundary_snapshot_root(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert store.load("r", 4) is None
    assert store.save("r", 8, [ring(8)], as_given)
    wait_written(store, tmp_path, 1)
    check_loads(store, "r", 8, [ring(8)])
    store.cleanup_request("r")
    wait_written(store, tmp_path, 0)


def test_a_disk_that_refuses_costs_one_snapshot_and_then_saves_say_so(
    store: BoundarySnapshotSSDStore, tmp_path: Path
) -> None:
    """A file where the folder was: even root cannot write there."""
    session = folder(tmp_path)
    away = session.rename(session.with_name("away"))
    session.write_text("in the way")
    assert store.save("r", 4, [ring(1)], as_given) is True, "it is taken before it is written"
    end = time.monotonic() + 20
    while store.get_stats()["write_errors"] == 0:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert store.load("r", 4) is None
    assert not store.has("r", 4)
    assert store.save("r", 4, [ring(1)], as_given) is False
    session.unlink()
    away.rename(session)
    while not store.save("r", 8, [ring(8)], as_given):
        assert time.monotonic() < end, "the disk works again"
        time.sleep(0.01)
    wait_written(store, tmp_path, 1)
    check_loads(store, "r", 8, [ring(8)])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_base_is_refused_until_it_can_be_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    store = BoundarySnapshotSSDStore(tmp_path)
    assert store.save("r", 4, [ring(1)], as_given) is False
    tmp_path.chmod(0o700)
    assert store.save("r", 4, [ring(1)], as_given) is True


def test_a_base_that_cannot_be_used_is_refused_until_it_can(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_text("a file")
    store = BoundarySnapshotSSDStore(base)
    assert store.save("r", 4, [ring(1)], as_given) is False
    assert store.load("r", 4) is None
    assert not store.has("r", 4)
    store.cleanup_request("r")
    store.cleanup_all()
    assert store.get_stats()["save_errors"] == 1
    reset_boundary_snapshot_root(base)
    base.unlink()
    assert store.save("r", 4, [ring(1)], as_given) is True
    check_loads(store, "r", 4, [ring(1)])
    store.shutdown()


def test_a_root_that_others_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)  # to this user everything belongs to somebody else
    store = BoundarySnapshotSSDStore(tmp_path)
    assert store.save("r", 4, [ring(1)], as_given) is False


# Threads


def test_two_threads_save_load_and_clean_up(tmp_path: Path) -> None:
    store = BoundarySnapshotSSDStore(tmp_path)
    problems: list[str] = []
    stop = threading.Event()

    def write(rid: str, base: int) -> None:
        for turn in range(60):
            for count in (4, 8):
                if not store.save(rid, count, [ring(base + count), LEFT_OUT], as_given):
                    problems.append(f"{rid} {count} was not kept")
                found = store.load(rid, count)
                if found is None or raw(found[0]["state"][1]) != raw(ring(base + count)["state"][1]):
                    problems.append(f"{rid} {count} came back otherwise")
            if turn % 3 == 2:
                store.cleanup_request(rid)
                if store.has(rid, 4):
                    problems.append(f"{rid} was not cleaned up")

    def meddle() -> None:
        mine = ring(7)
        while not stop.is_set():
            store.save("shared", 4, [mine], as_given)
            for rid, base in (("a", 1000), ("b", 2000), ("shared", 3)):
                found = store.load(rid, 4)
                if found is not None and raw(found[0]["state"][0]) != raw(ring(base + 4)["state"][0]):
                    problems.append(f"{rid} was another's")
            store.cleanup_request("shared")

    # Arrays are made on the thread that uses them.
    threads = [threading.Thread(target=write, args=args) for args in (("a", 1000), ("b", 2000))]
    meddler = threading.Thread(target=meddle)
    for thread in [*threads, meddler]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    meddler.join()
    assert problems == []
    for rid in ("a", "b", "shared"):
        store.cleanup_request(rid)
    store.shutdown()
    wait_written(store, tmp_path, 0)
    assert store.get_stats()["load_errors"] == 0


def test_overwriting_while_another_thread_loads(tmp_path: Path) -> None:
    """A reader always finds one of them, whole."""
    store = BoundarySnapshotSSDStore(tmp_path)
    assert store.save("r", 4, [ring(0)], as_given)
    answers: list[Any] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            found = store.load("r", 4)
            answers.append(found and [int(array[0, 0, 0, 0].item()) for array in found[0]["state"]])

    reader = threading.Thread(target=read)
    reader.start()
    for code in range(200):
        assert store.save("r", 4, [ring(1000 * code)], as_given)
    done.set()
    reader.join()
    assert all(pair and pair[1] == pair[0] + 100 and pair[0] % 1000 == 0 for pair in answers)
    assert len(answers) > 0
    store.shutdown()
    wait_written(store, tmp_path, 1)


def test_a_load_that_an_overwrite_overtakes_looks_again(tmp_path: Path) -> None:
    class Overtaken(BoundarySnapshotSSDStore):
        after_the_key_was_read: list[Any] = []

        def _key(self, request_id: Any, token_count: int) -> bytes | None:
            key = super()._key(request_id, token_count)
            while self.after_the_key_was_read:
                self.after_the_key_was_read.pop()()
            return key

    store = Overtaken(tmp_path)
    assert store.save("r", 4, [ring(1)], as_given)
    store.after_the_key_was_read.append(lambda: store.save("r", 4, [ring(2)], as_given))
    check_loads(store, "r", 4, [ring(2)])
    store.after_the_key_was_read.append(lambda: store.cleanup_request("r"))
    assert store.load("r", 4) is None
    assert store.get_stats()["load_errors"] == 0
    store.shutdown()
