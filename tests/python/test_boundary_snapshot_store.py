"""Snapshots come back bit for bit and with their types, nothing reaches outside, and trouble is False or None."""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import child_environment
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache

from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore, reset_boundary_snapshot_root

LayerDict = dict[str, Any]
LEFT_OUT: LayerDict = {"state": (), "meta_state": (), "class_name": "KVCache", "cache_type": "KVCache"}
HOSTILE_IDS = [
    "../../../evil",
    "..",
    ".",
    "/",
    "/etc/passwd",
    "",
    "a/b",
    "a\\b",
    "nul\0byte",
    "x" * 10_000,
    "ü漢字🎈",
    "\ud800",
    "v1",
    " ",
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BoundarySnapshotSSDStore]:
    made = BoundarySnapshotSSDStore(tmp_path)
    yield made
    made.cleanup_all()
    made.shutdown()


def as_given(layers: list[LayerDict]) -> tuple[list[LayerDict], None]:
    """What a scheduler passes as `extract_fn`, for layer dicts that are made already."""
    return layers, None


def layer(*state: Any, meta: Any = ("0", "8", "4", "4"), name: str = "RotatingKVCache") -> LayerDict:
    return {"state": tuple(state), "meta_state": meta, "class_name": name, "cache_type": name}


def extract(caches: list[Any]) -> tuple[list[LayerDict], None]:
    """Layer dicts of live caches whose states are the caches' own arrays, as they stand."""

    def state(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return [state(inner) for inner in cache.caches]
        return list(cache.cache) if isinstance(cache, ArraysCache) else (cache.keys, cache.values)

    return [layer(*state(cache), name=type(cache).__name__) for cache in caches], None


def ring(code: int, rows: int = 4) -> LayerDict:
    return layer(*(mx.arange(rows * 8).reshape(1, 2, rows, 4) + code + 100 * i for i in range(2)))


def raw(array: mx.array) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes. numpy has no bfloat16; as float32 its bits are the same and zeros behind them."""
    plain = array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
    return str(array.dtype), tuple(array.shape), np.array(plain).tobytes()


def check_same(found: Any, expected: Any) -> None:
    """Equal in every type and bit, but no array is the very same object."""
    assert type(found) is type(expected)
    if isinstance(expected, mx.array):
        assert found is not expected
        assert raw(found) == raw(expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            check_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    else:
        assert repr(found) == repr(expected)


def check_loads(store: BoundarySnapshotSSDStore, rid: Any, count: int, expected: list[LayerDict]) -> None:
    """The layers as they were handed in, and at which token their states stand."""
    found = store.load(rid, count)
    assert found is not None
    check_same(found, [{**one, "token_count": count} if one["state"] else one for one in expected])


def folder(base: Path) -> Path:
    """The only session below `base`."""
    (only,) = (base / "_boundary_snapshots").iterdir()
    return only


def files(base: Path) -> list[Path]:
    """All files but the store's own account of its size, which holds nothing of a request."""
    return sorted(path for path in base.rglob("*") if path.is_file() and path.name != ".usage")


def wait_written(store: BoundarySnapshotSSDStore, base: Path, count: int) -> list[Path]:
    end = time.monotonic() + 10
    while True:
        found = [path for path in files(base) if path.suffix == ".safetensors"]
        if len(found) == count:
            return found
        assert time.monotonic() < end, f"{len(found)} files, expected {count}"
        time.sleep(0.005)


# What comes back


@pytest.mark.parametrize("written", [False, True], ids=["before it is written", "from its file"])
def test_layers_come_back_as_they_were_handed_in(
    store: BoundarySnapshotSSDStore, tmp_path: Path, written: bool
) -> None:
    layers = [ring(1), LEFT_OUT, layer([mx.ones((2, 3))], None, name="ArraysCache", meta=())]
    before = [dict(one) for one in layers]
    assert store.save("r", 8, layers, as_given) is True
    if written:
        wait_written(store, tmp_path, 1)
    check_loads(store, "r", 8, layers)
    check_loads(store, "r", 8, layers)
    assert layers == before, "what the caller handed in must stay as it is"
    assert "token_count" not in layers[0]


DTYPES = [
    mx.bool_,
    mx.uint8,
    mx.uint16,
    mx.uint32,
    mx.uint64,
    mx.int8,
    mx.int16,
    mx.int32,
    mx.int64,
    mx.float16,
    mx.bfloat16,
    mx.float32,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(store: BoundarySnapshotSSDStore, tmp_path: Path, dtype: mx.Dtype) -> None:
    values = (mx.arange(24) % 2).astype(dtype)
    shapes = [values, values.reshape(2, 3, 4), values[5], mx.zeros((0,), dtype), mx.zeros((1, 2, 0, 64), dtype)]
    assert store.save("r", 4, [layer(*shapes)], as_given)
    check_loads(store, "r", 4, [layer(*shapes)])
    wait_written(store, tmp_path, 1)
    check_loads(store, "r", 4, [layer(*shapes)])


def test_views_of_larger_arrays_are_stored_as_they_look(store: BoundarySnapshotSSDStore) -> None:
    whole = mx.random.normal((2, 6, 5, 4))
    views = [whole[:, 1:4], whole[..., ::-1], whole.transpose(3, 0, 2, 1), mx.broadcast_to(whole[:1], (3, 6, 5, 4))]
    assert store.save("r", 4, [layer(*views)], as_given)
    check_loads(store, "r", 4, [layer(*views)])


class Colour(str, enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        (),
        [],
        (1, (2, [3, (4,)], ())),
        [[1, 2], (3, 4)],
        None,
        True,
        False,
        7,
        -(2**80),
        0.1,
        float("inf"),
        float("-inf"),
        float("nan"),
        -0.0,
        "text",
        "",
        "ü漢\ud800\0",
        b"\0bytes\xff",
        {"a": (1, [2]), 3: None, ("k", 1): {}},
        {"array": 0},
        {"tuple": []},
        {"dict": [["a", 1]], "bytes": "00"},
        ("4", "1024", "12", "12"),
        (["KVCache", "RotatingKVCache"], ["", ("0", "8", "4", "4")]),
    ],
    ids=repr,
)
def test_what_is_no_array_keeps_its_type(store: BoundarySnapshotSSDStore, value: Any) -> None:
    layers = [layer(mx.ones((2,)), value, meta=value)]
    assert store.save("r", 4, layers, as_given)
    check_loads(store, "r", 4, layers)


def test_members_of_enums_come_back_as_the_plain_values_that_they_equal(store: BoundarySnapshotSSDStore) -> None:
    assert store.save("r", 4, [{**ring(1), "cache_type": Colour.RED}], as_given)
    check_loads(store, "r", 4, [{**ring(1), "cache_type": "red"}])
    assert Colour.RED == "red"


Point = namedtuple("Point", "x y")


class Odd:
    pass


@pytest.mark.parametrize(
    "value",
    [Odd(), Point(1, 2), {1, 2}, 1j, np.ones(2), mx.array([1j]), mx.float16, [(Odd(),)], {"a": Odd()}],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("where", ["state", "meta_state"])
def test_what_could_not_come_back_as_it_was_is_refused(store: BoundarySnapshotSSDStore, value: Any, where: str) -> None:
    refused = {**ring(1), where: (mx.ones((2,)), value)}
    assert store.save("r", 4, [ring(0), refused], as_given) is False
    assert not store.has("r", 4)
    assert store.load("r", 4) is None
    assert store.get_stats()["save_errors"] == 1


def test_a_state_that_holds_itself_is_refused(store: BoundarySnapshotSSDStore) -> None:
    endless: list[Any] = [mx.ones((2,))]
    endless.append(endless)
    assert store.save("r", 4, [layer(endless)], as_given) is False
    assert store.get_stats()["save_errors"] == 1


def test_further_keys_of_a_layer_are_kept(store: BoundarySnapshotSSDStore) -> None:
    layers = [{**ring(1), "sub_class_names": ("A", "B"), "extra": {"n": 1}}]
    assert store.save("r", 4, layers, as_given)
    check_loads(store, "r", 4, layers)


def test_layers_without_a_state_do_not_claim_a_token(store: BoundarySnapshotSSDStore) -> None:
    layers = [LEFT_OUT, {**LEFT_OUT, "state": []}]
    assert store.save("r", 4, layers, as_given)
    found = store.load("r", 4)
    check_same(found, layers)


def test_a_state_of_another_token_is_refused(store: BoundarySnapshotSSDStore) -> None:
    assert store.save("r", 8, [{**ring(1), "token_count": 7}], as_given) is False
    assert store.save("r", 8, [{**ring(1), "token_count": 8}], as_given) is True
    check_loads(store, "r", 8, [ring(1)])


def test_real_caches_may_go_on_while_their_snapshot_waits(store: BoundarySnapshotSSDStore) -> None:
    """mlx-lm writes into a ring's own arrays: the snapshot must not see it, and a loaded one must not be the stored."""
    caches = [RotatingKVCache(max_size=8), ArraysCache(2), CacheList(RotatingKVCache(max_size=8))]
    step = mx.arange(2 * 4, dtype=mx.float32).reshape(1, 2, 1, 4)

    def feed(number: int) -> None:
        for cache in (caches[0], caches[2].caches[0]):
            mx.eval(cache.update_and_fetch(step + number, step - number))
        caches[1][0], caches[1][1] = step + number, mx.array(number)

    for number in range(12):
        feed(number)
    expected, _ = extract(caches)
    kept = [[raw(array) for array in leaves(one["state"])] for one in expected]
    assert store.save("r", 12, caches, extract)
    for number in range(12, 16):
        feed(number)
    found = store.load("r", 12)
    assert found is not None
    assert [[raw(array) for array in leaves(one["state"])] for one in found] == kept
    assert [one["class_name"] for one in found] == [one["class_name"] for one in expected]
    found[0]["state"][0][..., 0, :] = 99  # as an in-place update of a restored ring does
    assert [[raw(array) for array in leaves(one["state"])] for one in store.load("r", 12) or []] == kept


def leaves(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    return [array for item in value for array in leaves(item)] if isinstance(value, list | tuple) else []


def test_arrays_are_evaluated_on_the_calling_thread_and_together(store: BoundarySnapshotSSDStore) -> None:
    """A lazy array belongs to its thread's stream. Once saved it can be read on any thread."""
    lazy = [mx.random.normal((64, 64)) @ mx.random.normal((64, 64)) for _ in range(4)]
    assert store.save("r", 4, [layer(*lazy)], as_given)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(raw(store.load("r", 4)[0]["state"][0])))  # type: ignore[index]
    thread.start()
    thread.join()
    assert found == [raw(lazy[0])]


def test_one_copy_to_save_and_one_to_load(store: BoundarySnapshotSSDStore) -> None:
    """No clones in MLX's memory and no `bytes` in Python's."""
    megabytes = 32
    big = [layer(*(mx.ones((megabytes << 17,)) for _ in range(2)))]
    mx.eval(big[0]["state"])
    small = 1 << 20
    tracemalloc.start()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert store.save("r", 4, big, as_given)
    assert mx.get_peak_memory() - before < small
    found = store.load("r", 4)
    assert found is not None
    _, python_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mx.get_peak_memory() - before < (megabytes << 20) + small
    assert python_peak < small
    check_loads(store, "r", 4, big)


# Which snapshot is which


def test_snapshots_are_told_apart_by_request_and_count(store: BoundarySnapshotSSDStore) -> None:
    ids: list[Any] = [*HOSTILE_IDS, 1, "1", None, ("a", 1)]
    for number, rid in enumerate(ids):
        for count in (4, 8):
            assert store.save(rid, count, [ring(1000 * number + count)], as_given), rid
    for number, rid in enumerate(ids):
        for count in (4, 8):
            check_loads(store, rid, count, [ring(1000 * number + count)])
        assert not store.has(rid, 12)
        assert store.load(rid, 12) is None


def test_a_second_snapshot_for_a_count_takes_the_place_of_the_first(
    store: BoundarySnapshotSSDStore, tmp_path: Path
) -> None:
    for code in range(3):
        assert store.save("r", 4, [ring(code)], as_given)
        check_loads(store, "r", 4, [ring(code)])
        wait_written(store, tmp_path, 1)
        check_loads(store, "r", 4, [ring(code)])
    store.shutdown()
    assert len(wait_written(store, tmp_path, 1)) == 1


@pytest.mark.parametrize("count", [0, -4, 2**63, 2**80, "4", 4.5, None])
def test_a_count_that_is_none_is_refused(store: BoundarySnapshotSSDStore, count: Any) -> None:
    assert store.save("r", count, [ring(1)], as_given) is False
    assert not store.has("r", count)
    assert store.load("r", count) is None


def test_counts_of_numpy_are_counts(store: BoundarySnapshotSSDStore) -> None:
    assert store.save("r", np.int64(4), [ring(1)], as_given)  # type: ignore[arg-type]
    check_loads(store, "r", 4, [ring(1)])


# Ends


def test_cleanup_of_a_request_leaves_the_others(store: BoundarySnapshotSSDStore, tmp_path: Path) -> None:
    for rid in ("a", "b"):
        for count in (4, 8):
            assert store.save(rid, count, [ring(count)], as_given)
    wait_written(store, tmp_path, 4)
    assert store.cleanup_request("a") is None
    assert not store.has("a", 4) and not store.has("a", 8)
    assert store.load("a", 4) is None
    check_loads(store, "b", 4, [ring(4)])
    check_loads(store, "b", 8, [ring(8)])
    wait_written(store, tmp_path, 2)
    store.cleanup_request("nobody")
    store.cleanup_request("a")
    check_loads(store, "b", 8, [ring(8)])


def test_what_is_cleaned_up_before_it_is_written_leaves_no_file(
    store: BoundarySnapshotSSDStore, tmp_path: Path
) -> None:
    big = [layer(*(mx.zeros((1 << 20,)) for _ in range(8)))]
    for count in range(4, 24, 4):
        assert store.save("r", count, big, as_given)
    store.cleanup_request("r")
    assert store.save("r", 4, [ring(1)], as_given), "the id can be used again"
    store.shutdown()
    (file,) = wait_written(store, tmp_path, 1)
    assert file.stat().st_size < 1 << 20
    check_loads(store, "r", 4, [ring(1)])


def test_cleanup_of_all(store: BoundarySnapshotSSDStore, tmp_path: Path) -> None:
    for rid in ("a", "b"):
        assert store.save(rid, 4, [ring(1)], as_given)
    wait_written(store, tmp_path, 2)
    assert store.save("c", 4, [ring(1)], as_given)
    store.cleanup_all()
    assert [store.has(rid, 4) for rid in ("a", "b", "c")] == [False] * 3
    wait_written(store, tmp_path, 0)
    assert store.save("a", 4, [ring(2)], as_given)
    check_loads(store, "a", 4, [ring(2)])
    assert folder(tmp_path).is_dir()


def test_a_request_that_is_cleaned_up_while_it_is_saved_leaves_nothing(
    store: BoundarySnapshotSSDStore, tmp_path: Path
) -> None:
    def cleaned_meanwhile(layers: list[LayerDict]) -> tuple[list[LayerDict], None]:
        store.cleanup_request("r")
        return layers, None

    def all_cleaned_meanwhile(layers: list[LayerDict]) -> tuple[list[LayerDict], None]:
        store.cleanup_all()
        return layers, None

    assert store.save("other", 4, [ring(1)], as_given)
    assert store.save("r", 4, [ring(1)], cleaned_meanwhile) is False
    assert not store.has("r", 4)
    check_loads(store, "other", 4, [ring(1)])
    assert store.save("r", 4, [ring(1)], all_cleaned_meanwhile) is False
    assert not store.has("r", 4) and not store.has("other", 4)
    assert store.get_stats()["overtaken"] == 2
    store.shutdown()
    wait_written(store, tmp_path, 0)


def test_shutdown_writes_what_waits_and_keeps_the_files(store: BoundarySnapshotSSDStore, tmp_path: Path) -> None:
    for count in range(4, 44, 4):
        assert store.save("r", count, [ring(count)], as_given)
    store.shutdown()
    assert len([path for path in files(tmp_path) if path.suffix == ".safetensors"]) == 10
    assert store.save("r", 48, [ring(1)], as_given) is False
    check_loads(store, "r", 8, [ring(8)])
    store.shutdown()
    store.cleanup_request("r")
    assert not store.has("r", 8)
    assert files(tmp_path) == []


# Nothing reaches outside


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


# Trouble


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
