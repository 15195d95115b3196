"""Where snapshots lie: nothing reaches outside of a session, and sessions go with their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import child_environment
from snapshots import (
    HOSTILE_IDS,
    as_given,
    check_loads,
    files,
    folder,
    ring,
    wait_written,
)

from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore, reset_boundary_snapshot_root


@pytest.mark.parametrize("rid", HOSTILE_IDS, ids=lambda rid: ascii(rid[:20]))
def test_ids_never_reach_outside(tmp_path: Path, rid: str) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "keep").write_text("x")
    (base / "evil").mkdir()
    (base / "evil" / "keep").write_text("x")
    store = BoundarySnapshotSSDStore(base)
    assert store.save(rid, 4, [ring(1)], as_given)
    (written,) = wait_written(store, base, 1)
    assert folder(base) in written.parents
    assert set(written.name) <= set("0123456789abcdef-.statefensors"), "nothing of the id in the name"
    check_loads(store, rid, 4, [ring(1)])
    store.cleanup_request(rid)
    wait_written(store, base, 0)
    store.cleanup_all()
    store.shutdown()
    assert [path.relative_to(tmp_path) for path in files(tmp_path)] == [Path("base/evil/keep"), Path("evil/keep")]
    assert folder(base).is_dir()


def test_files_are_private_whatever_the_umask_and_the_root_was(tmp_path: Path) -> None:
    root = tmp_path / "_boundary_snapshots"
    root.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        store = BoundarySnapshotSSDStore(tmp_path)
        assert store.save("r", 4, [ring(1)], as_given)
        wait_written(store, tmp_path, 1)
    finally:
        os.umask(before)
    modes = {oct(path.stat().st_mode & 0o777) for path in [root, *root.rglob("*")] if path.is_dir()}
    assert modes == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in root.rglob("*") if path.is_file()} == {"0o600"}


def test_a_link_in_the_place_of_the_root_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    session = elsewhere / f"{gone_process()}-{'0' * 32}"
    session.mkdir(parents=True)
    base = tmp_path / "base"
    base.mkdir()
    (base / "_boundary_snapshots").symlink_to(elsewhere)
    store = BoundarySnapshotSSDStore(base)
    assert store.save("r", 4, [ring(1)], as_given) is False
    reset_boundary_snapshot_root(base)
    assert list(elsewhere.iterdir()) == [session]


# Sessions


def gone_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def session_of(root: Path, process: int, tag: str = "0" * 32) -> Path:
    made = root / f"{process}-{tag}"
    (made / "some request").mkdir(parents=True)
    (made / "some request" / "4.safetensors").write_bytes(b"x")
    return made


def test_sessions_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "_boundary_snapshots"
    gone = session_of(root, gone_process())
    earlier_with_our_number = session_of(root, os.getpid())
    living = session_of(root, os.getppid())
    others = [root / "notes", root / f"{gone_process()}-short", root / f"0-{'0' * 32}"]
    for other in others:
        other.mkdir()
    link = root / f"{gone_process()}-{'1' * 32}"
    link.symlink_to(tmp_path)
    first = BoundarySnapshotSSDStore(tmp_path)
    assert first.save("r", 4, [ring(1)], as_given)
    second = BoundarySnapshotSSDStore(tmp_path)
    assert not gone.exists()
    assert not earlier_with_our_number.exists()
    assert (living / "some request" / "4.safetensors").exists()
    assert all(other.is_dir() for other in others)
    assert link.is_symlink()
    check_loads(first, "r", 4, [ring(1)])
    assert second.load("r", 4) is None, "stores share nothing"
    assert len(list(root.iterdir())) == 2 + 1 + len(others) + 1


def test_a_session_that_is_locked_stays_whatever_its_number_says(tmp_path: Path) -> None:
    """Process ids of another container mean nothing here; the lock does."""
    code = (
        "import sys, time\n"
        "from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore\n"
        "store = BoundarySnapshotSSDStore(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    living = folder(tmp_path)
    renamed = living.rename(living.with_name(f"{gone_process()}-{'2' * 32}"))
    BoundarySnapshotSSDStore(tmp_path)
    reset_boundary_snapshot_root(tmp_path)
    assert renamed.is_dir()
    child.stdin.close()
    assert child.wait(timeout=60) == 0
    BoundarySnapshotSSDStore(tmp_path)
    assert not renamed.exists()


KILLED = """
import sys
import mlx.core as mx
from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore
store = BoundarySnapshotSSDStore(sys.argv[1])
state = {"state": (mx.ones((1, 8, 256, 64)),) * 4, "meta_state": (), "class_name": "A", "cache_type": "A"}
for number in range(1, 1000000):
    assert store.save(f"r{number % 7}", number, [state], lambda layers: (layers, None))
    if number == 20:
        print("running", flush=True)
    if number % 10 == 0:
        store.cleanup_request(f"r{number % 7}")
"""


def test_a_process_that_is_killed_while_it_saves_leaves_nothing_behind(tmp_path: Path) -> None:
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=child_environment()
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"running\n"
        time.sleep(0.1)
        left = folder(tmp_path)
        child.send_signal(signal.SIGKILL)
        assert child.wait(timeout=60) == -signal.SIGKILL
        assert left.is_dir()
        store = BoundarySnapshotSSDStore(tmp_path)
        assert not left.exists()
        assert store.load("r1", 1) is None
        assert store.save("r1", 1, [ring(5)], as_given)
        wait_written(store, tmp_path, 1)
        check_loads(store, "r1", 1, [ring(5)])
        store.shutdown()
        reset_boundary_snapshot_root(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_reset_removes_every_session(tmp_path: Path) -> None:
    root = tmp_path / "_boundary_snapshots"
    (tmp_path / "blocks").mkdir()
    session_of(root, gone_process())
    session_of(root, os.getppid(), "1" * 32)
    (root / "stray").write_text("x")
    store = BoundarySnapshotSSDStore(tmp_path)
    assert store.save("r", 4, [ring(1)], as_given)
    store.shutdown()
    assert reset_boundary_snapshot_root(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["blocks"]
    assert store.load("r", 4) is None
    reset_boundary_snapshot_root(tmp_path)
    reset_boundary_snapshot_root(tmp_path / "no such folder")
