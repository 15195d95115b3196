"""Blocks that the prefix cache stored as parts, as an SSD manager sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefixcache._core import BlockStore, Part, group_key
from prefixcache._omlx.blobs import store_key
from prefixcache._omlx.part_tuples import load_parts, window_keys
from prefixcache._omlx.ssd_index import PagedSSDBlockMetadata, compat_signature


class PartBlocks:
    """The parts of one store, found by the hashes of their blocks. Any thread.

    ``spaces``: where the parts of each model lie, by its name. ``is_forgotten`` tells which blocks must not be seen.
    """

    def __init__(self, store: BlockStore, is_forgotten: Callable[[bytes], bool], directory: Path | None) -> None:
        self.spaces: dict[str, int] = {}
        self._store = store
        self._is_forgotten = is_forgotten
        self._directory = directory
        self._lock = threading.Lock()
        self._values: tuple[int, ...] = ()

    def attach(self, model_name: str, space: int) -> None:
        """Parts of this model lie in ``space`` from now on; those of its former space are not seen any more."""
        with self._lock:
            self.spaces[model_name] = space
            self._values = tuple(self.spaces.values())

    def models(self) -> list[str]:
        """The names of all models that were attached."""
        with self._lock:
            return list(self.spaces)

    def keys(self, block_hash: bytes) -> list[bytes]:
        """Where parts of a block may lie."""
        return [group_key(store_key(block_hash), space) for space in self._values]

    def find(self, block_hash: bytes) -> list[tuple[str, bytes, tuple[bool, bool, int, int]]]:
        """The models for which the rows of a block are stored: name, key, and what ``presence`` says of part ``kv``."""
        with self._lock:
            spaces = list(self.spaces.items())
        if not spaces or self._is_forgotten(block_hash):
            return []
        keys = [group_key(store_key(block_hash), space) for _, space in spaces]
        found = zip(spaces, keys, self._store.presence(keys), strict=True)
        return [(name, key, parts["kv"]) for (name, _), key, parts in found if "kv" in parts]

    def has(self, block_hash: bytes) -> bool:
        """Whether ``find`` finds anything. Asked for each block of a prompt."""
        spaces = self._values
        if not spaces or self._is_forgotten(block_hash):
            return False
        key = store_key(block_hash)
        return any("kv" in parts for parts in self._store.presence([group_key(key, space) for space in spaces]))

    def in_ram(self, block_hashes: Sequence[bytes]) -> list[bool]:
        """Of which blocks the RAM tier holds the rows."""
        held = [False] * len(block_hashes)
        for space in self._values:
            parts = self._store.presence([group_key(store_key(one), space) for one in block_hashes])
            held = [old or ("kv" in part and part["kv"][0]) for old, part in zip(held, parts, strict=True)]
        return held

    def load(self, block_hash: bytes, block_size: int) -> tuple[list[Any], PagedSSDBlockMetadata, bool] | None:
        """The layers of a block, what is known of it, and whether it was in RAM. ValueError for a structure that cannot
        be understood."""
        for model_name, key, _ in self.find(block_hash):
            found = load_parts(self._store, key)
            if found is not None:
                block = self._metadata(block_hash, model_name, block_size or found.tokens, found.tokens, found.types)
                block.layer_meta_states = found.metas
                return found.layers, block, found.from_ram
        return None

    def metadata(self, block_hash: bytes, block_size: int, types: list[str] | None) -> PagedSSDBlockMetadata | None:
        """What is known of a block without reading it: its model and, once its file was read, its tokens."""
        for model_name, _, (_, _, start, end) in self.find(block_hash):
            tokens = block_size if start < 0 else end - start
            return self._metadata(block_hash, model_name, block_size or tokens, tokens, types)
        return None

    def erase(self, block_hash: bytes) -> bool:
        """Removes the rows, windows and states of a block, of all models. False if there were none."""
        there = False
        for key in self.keys(block_hash):
            windows = window_keys(self._store, key)
            there = any(self._store.presence([key, *windows])) or there
            self._store.erase([key], [Part.kv, Part.state])
            self._store.erase(windows, [Part.win])
        return there

    def _metadata(
        self, block_hash: bytes, model_name: str, block_size: int, tokens: int, types: list[str] | None
    ) -> PagedSSDBlockMetadata:
        layers = 0 if types is None else len(types)
        signature = compat_signature(
            model_name=model_name, num_layers=layers, block_size=block_size, layer_cache_types=types
        )
        now = time.time()
        path = self._directory or Path("ram")
        return PagedSSDBlockMetadata(
            block_hash, path, 0, tokens, now, now, layers, model_name, block_size, signature, types
        )
