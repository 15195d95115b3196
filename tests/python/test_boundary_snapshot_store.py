"""Snapshots come back bit for bit and with their types, each for its request and count, until they are cleaned up."""

from __future__ import annotations

import enum
import threading
import tracemalloc
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache
from parts import DTYPES
from snapshots import (
    HOSTILE_IDS,
    LEFT_OUT,
    LayerDict,
    as_given,
    check_loads,
    check_same,
    files,
    folder,
    layer,
    raw,
    ring,
    wait_written,
)

from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BoundarySnapshotSSDStore]:
    made = BoundarySnapshotSSDStore(tmp_path)
    yield made
    made.cleanup_all()
    made.shutdown()


def extract(caches: list[Any]) -> tuple[list[LayerDict], None]:
    """Layer dicts of live caches whose states are the caches' own arrays, as they stand."""

    def state(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return [state(inner) for inner in cache.caches]
        return list(cache.cache) if isinstance(cache, ArraysCache) else (cache.keys, cache.values)

    return [layer(*state(cache), name=type(cache).__name__) for cache in caches], None


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
