"""Golden part files as the safetensors package sees them: it knows nothing of this project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors

GOLDEN = Path(__file__).parents[1] / "golden" / "v1_kv.safetensors"
KEY = bytes(range(32)).hex()
PARENT = bytes((0xF0 + i) % 256 for i in range(32)).hex()
ODD_NAME = 'a "quoted"\\name:1,€\n'

# In the order they were put: name, dtype, shape, sequence axis, digest.
TENSORS = [
    ("0/keys.codes", "U8", [1, 4, 3], 1, "5ace6a511c10894b"),
    ("0/keys", "BF16", [1, 2, 4, 2], 2, "4c005edf48e90b80"),
    ("0/values", "F16", [4, 1], 0, "e5d40a4a17dde58a"),
    ("scales", "F32", [2], -1, "1808e40d6723f646"),
    ("count", "I64", [], -1, "0c88f66076c251c5"),
    ("flags", "BOOL", [3], -1, "6b9b25aeeffe0439"),
    ("empty", "U32", [2, 0], -1, "2d06800538d394c2"),
    (ODD_NAME, "I16", [1], -1, "140350d7644de202"),
]
ITEM_SIZE = {"I64": 8, "F32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1, "BOOL": 1}


def expected_data(place: int) -> bytes:
    """What the golden file holds for the tensor put at `place`."""
    _, dtype, shape, _, _ = TENSORS[place]
    size = ITEM_SIZE[dtype]
    for length in shape:
        size *= length
    return bytes(i % 2 if dtype == "BOOL" else 16 * place + i for i in range(size))


def header() -> tuple[dict[str, Any], int]:
    """The JSON header, read as any reader of safetensors would, and where the data start."""
    raw = GOLDEN.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), 8 + length


def test_tensors_are_those_that_were_put() -> None:
    opened = dict(safetensors.deserialize(GOLDEN.read_bytes()))  # type: ignore[no-untyped-call]
    assert sorted(opened) == sorted(name for name, *_ in TENSORS)
    for place, (name, dtype, shape, _, _) in enumerate(TENSORS):
        assert opened[name]["dtype"] == dtype
        assert list(opened[name]["shape"]) == shape
        assert bytes(opened[name]["data"]) == expected_data(place), name


def test_metadata_says_what_the_block_is() -> None:
    with safetensors.safe_open(GOLDEN, framework="np") as opened:
        metadata = opened.metadata()
    listed = ",".join(f"{axis}:{digest}:{len(name.encode())}:{name}" for name, _, _, axis, digest in TENSORS)
    assert metadata == {
        "format": "prefixcache.v1",
        "checksum": "128a84ecf4c15f5c",
        "key": KEY,
        "parent": PARENT,
        "depth": "8",
        "part": "kv",
        "rows": "4:8",
        "tokens": "1,49151,0,4294967295",
        "content": f"5:9:{PARENT},7:8:{KEY}",
        "meta": '{"caches": ["café", "tab\there"]}',
        "tensors": listed,
    }


def test_data_are_aligned_and_ordered_by_item_size() -> None:
    entries, data_start = header()
    assert data_start % 64 == 0
    del entries["__metadata__"]
    assert list(entries) == [name for name, *_ in TENSORS]
    position = 0
    for name, dtype, *_ in sorted(TENSORS, key=lambda tensor: -ITEM_SIZE[tensor[1]]):
        begin, end = entries[name]["data_offsets"]
        assert begin == position
        assert begin % ITEM_SIZE[dtype] == 0
        position = end
    assert data_start + position == GOLDEN.stat().st_size
