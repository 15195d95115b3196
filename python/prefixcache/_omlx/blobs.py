"""Blocks that were handed over as tuples: each is one part of a store, its arrays as they were given.

A blob lies under a key made of its block's hash, so that a name tells that a file is one and whose it is. What else is
known of it stands in the part's own text.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from prefixcache._core import (
    BlockStore,
    Part,
    Slots,
    Status,
    StatusCode,
    TokenBuffer,
    check_part,
    group_key,
    parse_part_name,
    sha256,
)
from prefixcache._omlx.ssd_index import PagedSSDBlockMetadata
from prefixcache._omlx.tuples import decode_meta, encode_meta, flatten, placeholders, rebuild

NAMESPACE = "omlx"
"""Of every model: keys tell them apart. It names a folder: do not change it."""

SAID = (
    "num_layers",
    "token_count",
    "model_name",
    "block_size",
    "cache_signature",
    "layer_cache_types",
    "layer_meta_states",
)
"""What callers of ``load_block_with_metadata`` are told of a block."""

_VERSION = 1
# Both reach the disk: do not change them.
_BLOB = int.from_bytes(sha256(b"omlx blob")[:8], "little")
_PARENT = int.from_bytes(sha256(b"omlx blob parent")[:8], "little")
_MOST_HEADER_BYTES = 64 << 20
_FIELDS = {
    "block_hash": str,
    "token_count": int,
    "model_name": str,
    "block_size": int,
    "cache_signature": str,
    "created_at": float,
    "num_layers": int,
    "placeholders": list,
    "layers": list,
}


def store_key(block_hash: bytes) -> bytes:
    """The 32 bytes that stand for a block in a store: the hash itself where it is as long as ours."""
    return block_hash if len(block_hash) == 32 else sha256(b"omlx block hash" + block_hash)


def blob_key(block_hash: bytes) -> bytes:
    """The key of a block's blob."""
    return group_key(store_key(block_hash), _BLOB)


def _parent_of(key: bytes) -> bytes:
    # One for each blob: a store keeps the blocks below one parent in a list.
    return group_key(key, _PARENT)


@dataclass
class BlobMetadata(PagedSSDBlockMetadata):
    """A blob. ``placeholders``: where its layers have no real state."""

    placeholders: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Form:
    """What is stored with a block's arrays. ``layer_cache_types`` and ``layer_meta_states``: one a layer, or None."""

    token_count: int
    model_name: str
    block_size: int
    cache_signature: str
    layer_cache_types: Sequence[str] | None
    layer_meta_states: Sequence[Any] | None


@dataclass(frozen=True)
class LoadedBlob:
    """What ``load`` found; ``metadata`` is None if the status is not good."""

    status: Status
    layers: list[Any] = field(default_factory=list)
    metadata: BlobMetadata | None = None
    from_ram: bool = False


class Blobs:
    """The blobs of one store. Any thread. ``directory`` is that of the store, None without one."""

    def __init__(self, store: BlockStore, directory: Path | None) -> None:
        self._store = store
        self._folder = None if directory is None else directory / "v1" / NAMESPACE

    def present(self, block_hash: bytes) -> bool:
        """Whether it is stored, by this store or by another one of its directory."""
        key = blob_key(block_hash)
        return self._store.longest_prefix([key], _parent_of(key), 1, Part.state) == 1

    def in_ram(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of them the RAM tier holds."""
        found = self._store.presence([blob_key(block_hash) for block_hash in hashes])
        return ["state" in parts and parts["state"][0] for parts in found]

    def known(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of them this store knows, without asking the disk."""
        return ["state" in parts for parts in self._store.presence([blob_key(one) for one in hashes])]

    def prepare(self, block_hash: bytes, cache_data: Sequence[Any], form: Form) -> tuple[Slots, str, BlobMetadata]:
        """What ``put`` needs. Lazy arrays are evaluated, on the calling thread.

        TypeError or ValueError for data that cannot be stored, RuntimeError for arrays that cannot be evaluated.
        """
        arrays, layers = flatten(cache_data, form.layer_cache_types)
        now = time.time()
        missing = placeholders(cache_data)
        metas = form.layer_meta_states
        text = json.dumps(
            {
                "version": _VERSION,
                "block_hash": block_hash.hex(),
                "token_count": int(form.token_count),
                "model_name": form.model_name,
                "block_size": int(form.block_size),
                "cache_signature": form.cache_signature,
                "created_at": now,
                "num_layers": len(cache_data),
                "layer_cache_types": None if form.layer_cache_types is None else list(form.layer_cache_types),
                "layer_meta_states": None if metas is None else [encode_meta(meta) for meta in metas],
                "placeholders": sorted(missing),
                "layers": layers,
            },
            separators=(",", ":"),
        )
        size = len(text) + sum(array.nbytes for _, array in arrays)
        # A part needs an array.
        slots = Slots([(name, array, None, 0) for name, array in arrays or [("", mx.zeros((1,), mx.uint8))]])
        metadata = _metadata(block_hash, json.loads(text), self.path_of(block_hash), size, now)
        return slots, text, metadata

    def put(self, block_hash: bytes, slots: Slots, text: str) -> Status:
        """Stores what ``prepare`` made; what is there stays. ValueError where it is more than a part can hold."""
        key = blob_key(block_hash)
        status, _ = self._store.put(key, _parent_of(key), 1, TokenBuffer([0]), slots, 0, 1, text, Part.state)
        return status

    def load(self, block_hash: bytes) -> LoadedBlob:
        """The layers and what is known of them; ValueError for a blob that cannot be understood."""
        found = self._store.load(blob_key(block_hash), Part.state)
        if not found.status:
            return LoadedBlob(found.status)
        arrays = found.take_slots()
        said = _parse(found.meta)
        if bytes.fromhex(said["block_hash"]) != block_hash:
            raise ValueError("the blob of another block")
        arrays.pop("", None)
        size = len(found.meta) + found.ram_bytes + found.disk_bytes
        metadata = _metadata(block_hash, said, self.path_of(block_hash), size, time.time())
        return LoadedBlob(found.status, rebuild(arrays, said["layers"]), metadata, found.ram_blocks > 0)

    def erase(self, block_hash: bytes) -> bool:
        """Removes it, file and all. False if a file could not be removed."""
        return bool(self._store.erase([blob_key(block_hash)], [Part.state]))

    def path_of(self, block_hash: bytes) -> Path:
        """Its file, once it is written. Relative without a directory."""
        key = blob_key(block_hash)
        name = f"{key.hex()}-{_parent_of(key)[:8].hex()}-1.{Part.state.name}.safetensors"
        return (self._folder or Path("ram")) / name[:2] / name

    def read(self, block_hash: bytes) -> BlobMetadata | None:
        """What the file's header says, which is checked but for its arrays; None without one (now).

        ValueError for a file that cannot be understood: it is not the one that was written.
        """
        found = None if self._folder is None else self._read_file(self.path_of(block_hash))
        if found is not None and found.block_hash != block_hash:
            raise ValueError("the blob of another block")
        return found

    def listed(self) -> Iterator[BlobMetadata]:
        """Those in files now; ones that cannot be understood are left out. Reads all names and each blob's header."""
        if self._folder is None:
            return
        for folder in _names(self._folder):
            for name in _names(self._folder / folder):
                path = self._folder / folder / name
                if not _is_blob_name(folder, name):
                    continue
                try:
                    found = self._read_file(path)
                except ValueError:
                    continue
                if found is not None and self.path_of(found.block_hash) == path:
                    yield found

    def _read_file(self, path: Path) -> BlobMetadata | None:
        status, _ = check_part(os.fsencode(path), data=False)
        if status.code in (StatusCode.NOT_FOUND, StatusCode.IO_ERROR):
            return None
        if not status:
            raise ValueError(status.message)
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
                info = os.fstat(file.fileno())
        except OSError:
            return None
        said = _parse(header["__metadata__"]["meta"])
        return _metadata(bytes.fromhex(said["block_hash"]), said, path, info.st_size, info.st_mtime)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _is_blob_name(folder: str, name: str) -> bool:
    if not name.endswith(f"-1.{Part.state.name}.safetensors") or not name.isascii() or not name.startswith(folder):
        return False
    said = parse_part_name(name)
    return said is not None and said[1] == int.from_bytes(_parent_of(said[0])[:8], "big")


def _parse(text: str) -> dict[str, Any]:
    """The fields of a blob's text, of the right types. ValueError for another text."""
    try:
        said = json.loads(text)
    except RecursionError:
        raise ValueError("a blob's text is nested too deeply") from None
    if not isinstance(said, dict) or said.get("version") != _VERSION:
        raise ValueError(f"not the text of a blob of version {_VERSION}: {text[:100]!r}")
    for name, kind in _FIELDS.items():
        value = said.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"a blob's {name} is {value!r:.100}")
    for name in ("layer_cache_types", "layer_meta_states"):
        if name not in said or not isinstance(said[name], list | None):
            raise ValueError(f"a blob's {name} is {said.get(name)!r:.100}")
    if said["num_layers"] != len(said["layers"]):
        raise ValueError(f"{len(said['layers'])} layers, expected {said['num_layers']}")
    return said


def _metadata(block_hash: bytes, said: dict[str, Any], path: Path, size: int, used: float) -> BlobMetadata:
    metas = said["layer_meta_states"]
    types = said["layer_cache_types"]
    return BlobMetadata(
        block_hash=block_hash,
        file_path=path,
        file_size=size,
        token_count=said["token_count"],
        created_at=said["created_at"],
        last_access=used,
        num_layers=said["num_layers"],
        model_name=said["model_name"],
        block_size=said["block_size"],
        cache_signature=said["cache_signature"],
        layer_cache_types=None if types is None else [str(name) for name in types],
        layer_meta_states=None if metas is None else [_shown(decode_meta(meta)) for meta in metas],
        placeholders=frozenset(str(path) for path in said["placeholders"]),
    )


def _shown(meta: Any) -> Any:
    # Callers know a tuple for each layer, and an empty one for none.
    if meta is None or meta == "":
        return ()
    return tuple(meta) if isinstance(meta, list) else meta
