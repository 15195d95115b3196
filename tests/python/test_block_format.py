"""docs/block_format.md is enough to write a reader from: one that uses nothing else reads every file we write."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from part_reader import PartOnDisk, Tensor, header_text, read_part, write_sealed
from sessions import MODELS, check, open_for, serve
from support import chain_files, coded_rows, filled, open_cache, part_files
from xxh3 import xxh3_64

from prefixcache._core import BlockStore, Part, Slots, TokenBuffer

PROMPT = [*range(40, 90), 7, 7, 3]
DTYPES = {"F32": np.float32, "F16": np.float16, "U32": np.uint32, "I64": np.int64, "U8": np.uint8}


def array_of(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.data, DTYPES[tensor.dtype]).reshape(tensor.shape)


@pytest.fixture(params=sorted(MODELS))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    with open_for(request.param, tmp_path) as cache:
        serve(cache, PROMPT, [9, 8, 7])
        serve(cache, [*PROMPT[:30], 1, 2, 3])
    return chain_files(tmp_path)


def test_a_stranger_reads_every_file(stored: list[Path]) -> None:
    parts = [read_part(path) for path in stored]
    sequences = ([*PROMPT, 9, 8, 7], [*PROMPT[:30], 1, 2, 3])
    for part in parts:
        start = part.depth - len(part.tokens)
        assert any(part.tokens == tokens[start : part.depth] for tokens in sequences)
        assert part.content == []
    assert sum(len(part.tensors) for part in parts) > 0


def test_safetensors_opens_every_file(stored: list[Path]) -> None:
    for path in stored:
        part = read_part(path)
        opened = dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
        assert opened.keys() == part.tensors.keys()
        for name, tensor in part.tensors.items():
            assert opened[name]["dtype"] == tensor.dtype
            assert list(opened[name]["shape"]) == tensor.shape
            assert bytes(opened[name]["data"]) == tensor.data


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_rows_are_those_of_their_tokens(tmp_path: Path, dtype: mx.Dtype) -> None:
    with open_cache(tmp_path) as cache:
        cache.store(PROMPT, filled(PROMPT, dtype=dtype))
    parts = [read_part(path) for path in chain_files(tmp_path)]
    assert [part.depth for part in parts] == [8, 16, 24, 32, 40, 48, 53]
    assert [part.rows for part in parts] == [(part.depth - len(part.tokens), part.depth) for part in parts]
    for before, part in zip([None, *parts], parts, strict=False):
        assert before is None or part.parent == before.key
        for layer in (0, 1):
            for is_value, name in ((False, "keys"), (True, "values")):
                tensor = part.tensors[f"{layer}/{name}"]
                expected = coded_rows(layer, is_value, part.tokens, part.rows[0], dtype)
                assert tensor.axis == 2
                assert tensor.shape == list(expected.shape)
                assert tensor.data == np.array(expected.view(mx.uint8)).tobytes()


def combined(key: bytes, text: str) -> bytes:
    """What the document says about the keys of windows."""
    number = struct.unpack("<Q", hashlib.sha256(text.encode()).digest()[:8])[0]
    return struct.pack("<Q", struct.unpack("<Q", key[:8])[0] ^ number) + key[8:]


def test_rows_of_windows_lie_under_their_own_keys(tmp_path: Path) -> None:
    with open_for("kept rows over blocks", tmp_path) as cache:
        serve(cache, PROMPT)
    parts: list[PartOnDisk] = [read_part(path) for path in part_files(tmp_path)]
    blocks = {part.key: part for part in parts if part.part == "kv"}
    met = set()
    for part in parts:
        if part.part != "win":
            continue
        # Applied again the number gives the block's key, and the parent's was combined with the same one.
        text = next(text for text in ("window 16 10", "head 16 10") if combined(part.key, text) in blocks)
        assert combined(part.parent, text) == blocks[combined(part.key, text)].parent
        met.add(text)
    assert met == {"window 16 10", "head 16 10"}


def test_files_written_by_a_stranger_are_served(tmp_path: Path) -> None:
    with open_for("everything", tmp_path) as cache:
        serve(cache, PROMPT)
    for path in part_files(tmp_path):
        raw = path.read_bytes()
        write_sealed(path, *header_text(path))
        assert path.read_bytes() == raw
    with open_for("everything", tmp_path, ram=0) as cache:
        hit = cache.fetch([*PROMPT, 1])
        assert hit.cached_tokens == len(PROMPT)
        check(hit.caches, PROMPT)


def test_content_keys_and_salts(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.store(PROMPT, filled(PROMPT), salt="tenant", extra_keys=[(10, 20, "image"), (45, 53, b"other")])
    parts = [read_part(path) for path in chain_files(tmp_path)]
    assert [[(lo, hi) for lo, hi, _ in part.content] for part in parts] == [
        [], [(10, 20)], [], [], [], [(45, 53)], [],
    ]  # fmt: skip


LENGTHS = [*range(20), 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 191, 239, 240, 241, 255, 256, 1023, 1024, 1025,
           1088, 2047, 2048, 2049, 5000]  # fmt: skip


def test_digests_of_every_length(tmp_path: Path) -> None:
    """Every length at which XXH3 takes another way."""
    arrays = {str(n): bytes((7 * i + n) % 256 for i in range(n)) for n in LENGTHS}
    slots = Slots([(name, mx.array(np.frombuffer(data, np.uint8)), None, 0) for name, data in arrays.items()])
    store = BlockStore.open(
        directory=str(tmp_path), namespace="test", ram_bytes=0, disk_bytes=1 << 30, queue_bytes=1 << 30
    )
    status, _ = store.put(bytes(32), bytes(32), 3, TokenBuffer([1, 2, 3]), slots, 3, 3, "", Part.state)
    assert status
    store.close()
    # It compares all digests.
    part = read_part(part_files(tmp_path)[0])
    assert {name: tensor.data for name, tensor in part.tensors.items()} == arrays
    assert xxh3_64(b"") == 0x2D06800538D394C2
