"""What a manager of stored blocks knows about each of them, and which of them are of its own kind.

``PagedSSDCacheIndex`` may be used from any thread; the other values are plain.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixcache._omlx.cache_types import canonical_types


def compat_signature(
    *, model_name: str, num_layers: int, block_size: int, layer_cache_types: Sequence[str] | None
) -> str:
    """What must be equal for blocks to be exchangeable, as canonical JSON."""
    value = {
        "block_size": block_size,
        "layer_cache_types": canonical_types(layer_cache_types),
        "model_name": model_name,
        "num_layers": num_layers,
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@dataclass
class PagedSSDBlockMetadata:
    """One stored block. ``file_size`` in bytes; times in seconds since the epoch.

    ``layer_cache_types``: the class name of each layer; ``layer_meta_states``: each layer's own ``meta_state``.
    """

    block_hash: bytes
    file_path: Path
    file_size: int
    token_count: int
    created_at: float
    last_access: float
    num_layers: int
    model_name: str = ""
    block_size: int = 0
    cache_signature: str = ""
    layer_cache_types: list[str] | None = None
    layer_meta_states: list[Any] | None = None

    def touch(self) -> None:
        """Used now."""
        self.last_access = time.time()

    def to_dict(self) -> dict[str, Any]:
        """A form that JSON can hold: the hash as hex, the path as text, meta states as lists; the types and the meta
        states only if there are any."""
        names = ("file_size", "token_count", "created_at", "last_access", "num_layers", "model_name", "block_size")
        out: dict[str, Any] = {"block_hash": self.block_hash.hex(), "file_path": str(self.file_path)}
        out |= {name: getattr(self, name) for name in (*names, "cache_signature")}
        if self.layer_cache_types:
            out["layer_cache_types"] = list(self.layer_cache_types)
        if self.layer_meta_states:
            metas = self.layer_meta_states
            out["layer_meta_states"] = [list(meta) if isinstance(meta, tuple) else meta for meta in metas]
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PagedSSDBlockMetadata:
        """The value that ``to_dict`` described. KeyError without one of the first seven fields."""
        metas = data.get("layer_meta_states")
        return cls(
            block_hash=bytes.fromhex(data["block_hash"]),
            file_path=Path(data["file_path"]),
            file_size=data["file_size"],
            token_count=data["token_count"],
            created_at=data["created_at"],
            last_access=data["last_access"],
            num_layers=data["num_layers"],
            model_name=data.get("model_name", ""),
            block_size=data.get("block_size", 0),
            cache_signature=data.get("cache_signature", ""),
            layer_cache_types=data.get("layer_cache_types"),
            layer_meta_states=None if not metas else [tuple(m) if isinstance(m, list) else m for m in metas],
        )


class PagedSSDCacheIndex:
    """Blocks by hash, in the order of their last use. Any thread.

    ``max_size`` is what its owner wants to hold, in bytes; the index itself evicts only when told to.
    """

    def __init__(self, max_size_bytes: int) -> None:
        self._max_size = max_size_bytes
        self._lock = threading.RLock()
        self._blocks: OrderedDict[bytes, PagedSSDBlockMetadata] = OrderedDict()  # least recently used first
        self._total_size = 0

    def add(self, metadata: PagedSSDBlockMetadata) -> None:
        """Adds a block, or replaces what was known of it, as the most recently used one."""
        with self._lock:
            self.remove(metadata.block_hash)
            self._blocks[metadata.block_hash] = metadata
            self._total_size += metadata.file_size

    def get(self, block_hash: bytes) -> PagedSSDBlockMetadata | None:
        """What is known of a block; its place in the order stays."""
        with self._lock:
            return self._blocks.get(block_hash)

    def remove(self, block_hash: bytes) -> PagedSSDBlockMetadata | None:
        """Forgets a block; what was known of it."""
        with self._lock:
            metadata = self._blocks.pop(block_hash, None)
            if metadata is not None:
                self._total_size -= metadata.file_size
            return metadata

    def touch(self, block_hash: bytes) -> None:
        """Makes a block the most recently used one."""
        with self._lock:
            metadata = self._blocks.get(block_hash)
            if metadata is not None:
                metadata.touch()
                self._blocks.move_to_end(block_hash)

    def contains(self, block_hash: bytes) -> bool:
        """Whether the block is known."""
        with self._lock:
            return block_hash in self._blocks

    def get_lru_entries(self, count: int) -> list[PagedSSDBlockMetadata]:
        """The ``count`` least recently used blocks, first the one to go first."""
        with self._lock:
            return [metadata for metadata, _ in zip(self._blocks.values(), range(count), strict=False)]

    def evict_until_size(self, target_size: int, max_count: int | None = None) -> list[PagedSSDBlockMetadata]:
        """Takes out the least recently used blocks until at most ``target_size`` bytes are left, or ``max_count`` are
        out. Files are the caller's."""
        out: list[PagedSSDBlockMetadata] = []
        with self._lock:
            while self._blocks and self._total_size > target_size and (max_count is None or len(out) < max_count):
                block_hash = next(iter(self._blocks))
                metadata = self.remove(block_hash)
                assert metadata is not None
                out.append(metadata)
        return out

    def update_file_size(self, block_hash: bytes, actual_size: int) -> None:
        """Corrects the size of a block that is known."""
        with self._lock:
            metadata = self._blocks.get(block_hash)
            if metadata is not None:
                self._total_size += actual_size - metadata.file_size
                metadata.file_size = actual_size

    def sort_lru_by_last_access(self) -> None:
        """Puts the blocks in the order of ``last_access``."""
        with self._lock:
            self._blocks = OrderedDict(sorted(self._blocks.items(), key=lambda item: item[1].last_access))

    def get_all_hashes(self) -> list[bytes]:
        """All hashes, least recently used first."""
        with self._lock:
            return list(self._blocks)

    def get_all_metadata(self) -> list[PagedSSDBlockMetadata]:
        """All that is known, least recently used first."""
        with self._lock:
            return list(self._blocks.values())

    @property
    def total_size(self) -> int:
        """Bytes of all blocks."""
        with self._lock:
            return self._total_size

    @property
    def max_size(self) -> int:
        """As given, in bytes."""
        return self._max_size

    @property
    def count(self) -> int:
        """How many blocks are known."""
        with self._lock:
            return len(self._blocks)


@dataclass(frozen=True)
class Expected:
    """What blocks must be to be this manager's. Empty text, 0 and None accept anything."""

    model_name: str = ""
    num_layers: int = 0
    block_size: int = 0
    layer_cache_types: tuple[str, ...] | None = None

    def accepts(self, block: PagedSSDBlockMetadata) -> bool:
        """Whether a block that was found may be shown."""
        if self.is_other_model(block.model_name):
            return False
        if self.num_layers > 0 and block.num_layers > 0 and block.num_layers != self.num_layers:
            return False
        if self.block_size > 0 and block.block_size != self.block_size:
            return False
        return self.layer_cache_types is None or (
            not self.is_stale(block) and block.layer_cache_types is not None and self._signature_agrees(block)
        )

    def is_other_model(self, model_name: str) -> bool:
        """Whether blocks of this name are none of the expected model's."""
        return bool(self.model_name and model_name and model_name != self.model_name)

    def is_stale(self, block: PagedSSDBlockMetadata) -> bool:
        """Whether the layers of a block are recorded and of other types than expected."""
        if block.layer_cache_types is None or self.layer_cache_types is None:
            return False
        return canonical_types(block.layer_cache_types) != canonical_types(self.layer_cache_types)

    def _signature_agrees(self, block: PagedSSDBlockMetadata) -> bool:
        if not block.cache_signature:
            return True
        # What a block leaves open is not held against it.
        own = compat_signature(
            model_name=block.model_name,
            num_layers=block.num_layers,
            block_size=block.block_size,
            layer_cache_types=self.layer_cache_types,
        )
        try:
            return bool(json.loads(block.cache_signature) == json.loads(own))
        except (ValueError, RecursionError):
            return False
