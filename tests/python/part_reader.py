"""A reader of part files written from docs/block_format.md alone: struct, json, and the checksum that it names."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxh3 import xxh3_64

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
METADATA = ["format", "checksum", "key", "parent", "depth", "part", "rows", "tokens", "content", "meta", "tensors"]
NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})-([1-9][0-9]*)\.(kv|win|state)\.safetensors")
CHECKSUM_AT = 63


@dataclass
class Tensor:
    """``axis``: the one that runs along the sequence, -1 if none does."""

    dtype: str
    shape: list[int]
    axis: int
    data: bytes


@dataclass
class PartOnDisk:
    """What a part file says. ``rows``: positions of the first row and behind the last."""

    key: bytes
    parent: bytes
    depth: int
    part: str
    rows: tuple[int, int]
    tokens: list[int]
    content: list[tuple[int, int, bytes]]
    meta: str
    tensors: dict[str, Tensor]


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    assert len(found) == len(items), "a key twice"
    return found


def _listed(text: str) -> list[tuple[int, str, str]]:
    """Axis, digest and name of each tensor. A name may hold anything, so it is read by its length in UTF-8."""
    raw, found = text.encode(), []
    while raw:
        axis, digest, length, rest = raw.split(b":", 3)
        name, rest = rest[: int(length)], rest[int(length) :]
        found.append((int(axis), digest.decode(), name.decode()))
        assert rest[:1] in (b"", b",")
        raw = rest[1:]
    return found


def read_part(path: Path) -> PartOnDisk:
    """The part at ``path``, everything about it checked."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    start = 8 + length
    assert start % 64 == 0
    assert start <= min(len(raw), 64 << 20)
    text = raw[8:start].decode()
    assert len(text) - len(text.rstrip(" ")) < 64
    header = json.loads(text, object_pairs_hook=_pairs)
    metadata, data = header.pop("__metadata__"), raw[start:]
    assert list(metadata) == METADATA
    assert metadata["format"] == "prefixcache.v1"
    assert raw[CHECKSUM_AT : CHECKSUM_AT + 16].decode() == metadata["checksum"]
    zeroed = raw[:CHECKSUM_AT] + b"0" * 16 + raw[CHECKSUM_AT + 16 : start]
    assert f"{xxh3_64(zeroed):016x}" == metadata["checksum"]
    lo, hi = map(int, metadata["rows"].split(":"))
    tokens = [int(token) for token in metadata["tokens"].split(",")]
    content = []
    for item in filter(None, metadata["content"].split(",")):
        begin, end, digest = item.split(":")
        content.append((int(begin), int(end), bytes.fromhex(digest)))
    listed = _listed(metadata["tensors"])
    assert [name for _, _, name in listed] == list(header)
    tensors = {}
    for axis, digest, name in listed:
        begin, end = header[name]["data_offsets"]
        tensors[name] = Tensor(header[name]["dtype"], header[name]["shape"], axis, data[begin:end])
        assert f"{xxh3_64(data[begin:end]):016x}" == digest, name
        assert axis == -1 or header[name]["shape"][axis] == hi - lo
    _check_places(header, len(data))
    part = PartOnDisk(
        bytes.fromhex(metadata["key"]), bytes.fromhex(metadata["parent"]), int(metadata["depth"]), metadata["part"],
        (lo, hi), tokens, content, metadata["meta"], tensors,
    )  # fmt: skip
    _check_name(path, part)
    return part


def _check_places(header: dict[str, Any], data_bytes: int) -> None:
    """Larger items first, without holes, up to the end of the file."""
    position = 0
    for entry in sorted(header.values(), key=lambda entry: -ITEM_SIZES[entry["dtype"]]):
        begin, end = entry["data_offsets"]
        size = ITEM_SIZES[entry["dtype"]]
        for extent in entry["shape"]:
            size *= extent
        assert (begin, end) == (position, position + size)
        position = end
    assert position == data_bytes


def _check_name(path: Path, part: PartOnDisk) -> None:
    named = NAME.fullmatch(path.name)
    assert named is not None
    assert bytes.fromhex(named[1]) == part.key
    assert bytes.fromhex(named[2]) == part.parent[:8]
    assert (int(named[3]), named[4]) == (part.depth, part.part)
    assert path.parent.name == named[1][:2]
    assert 0 <= part.rows[0] <= part.rows[1] <= part.depth
    assert 1 <= len(part.tokens) <= part.depth


def header_text(path: Path) -> tuple[str, bytes]:
    """The JSON text of a file's header without its padding, and the data."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return raw[8 : 8 + length].decode().rstrip(" "), raw[8 + length :]


def write_sealed(path: Path, text: str, data: bytes) -> None:
    """Writes a file with this header text, padded and with a checksum that matches: only its meaning may be wrong."""
    raw = text.encode()
    raw += b" " * (-(8 + len(raw)) % 64)
    raw = struct.pack("<Q", len(raw)) + raw
    raw = raw[:CHECKSUM_AT] + b"0" * 16 + raw[CHECKSUM_AT + 16 :]
    digest = f"{xxh3_64(raw):016x}".encode()
    path.write_bytes(raw[:CHECKSUM_AT] + digest + raw[CHECKSUM_AT + 16 :] + data)
    path.chmod(0o600)
