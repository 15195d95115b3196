"""Boundary snapshots for tests: layer dicts that differ, stores' files, and what must come back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore

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


def as_given(layers: list[LayerDict]) -> tuple[list[LayerDict], None]:
    """What a scheduler passes as `extract_fn`, for layer dicts that are made already."""
    return layers, None


def layer(*state: Any, meta: Any = ("0", "8", "4", "4"), name: str = "RotatingKVCache") -> LayerDict:
    return {"state": tuple(state), "meta_state": meta, "class_name": name, "cache_type": name}


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
