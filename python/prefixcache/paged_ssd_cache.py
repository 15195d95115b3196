"""Blocks of KV on SSD and in RAM, by their hashes: oMLX's ``PagedSSDCacheManager`` over the block store."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from prefixcache._core import BlockStore, Part, StatusCode, eviction_order
from prefixcache._directory import scan
from prefixcache._omlx.blobs import NAMESPACE, SAID, BlobMetadata, Blobs, Form, blob_key
from prefixcache._omlx.cache_types import canonical_types
from prefixcache._omlx.hot_budget import SharedHotCacheBudget
from prefixcache._omlx.layer_signature import LayerSignature
from prefixcache._omlx.part_blocks import PartBlocks
from prefixcache._omlx.shown_blocks import ShownBlocks
from prefixcache._omlx.ssd_index import (
    PagedSSDBlockMetadata,
    PagedSSDCacheIndex,
    compat_signature,
)
from prefixcache._omlx.ssd_stats import COUNTERS, PRELOAD, is_named, narrowed, stats_dict, stats_of
from prefixcache._omlx.tuples import placeholders
from prefixcache._sizes import format_size
from prefixcache._sizes import parse_size as parse_bytes
from prefixcache.interface import CacheManager
from prefixcache.stats import PagedSSDCacheStats

__all__ = [
    "PagedSSDBlockMetadata",
    "PagedSSDCacheIndex",
    "PagedSSDCacheManager",
    "SharedHotCacheBudget",
    "parse_size",
]

_canonicalize_layer_cache_types = canonical_types
_cache_compat_signature = compat_signature

# What may wait to be written, beside what the RAM tier holds.
_LEAST_QUEUE_BYTES = 1 << 30
_logger = logging.getLogger("prefixcache")

Loaded: TypeAlias = tuple[list[Any], PagedSSDBlockMetadata, bool]


def parse_size(size_str: str) -> int:
    """Bytes of a text such as ``"1.5GB"`` (binary units, either case) or a whole number. ValueError for others."""
    text = size_str.strip() if isinstance(size_str, str) else size_str
    if isinstance(text, str) and text[-1:].isdigit() and not text.isdecimal():
        raise ValueError(f"size is {size_str!r}, expected whole bytes or a text such as '512MB' or '1.5GB'")
    return parse_bytes(text)


class PagedSSDCacheManager(LayerSignature, CacheManager):
    """Blocks by hash, in one directory that managers of any number of models may share. Any thread.

    ``max_size_bytes``: the bound on everything below ``cache_dir``; ``hot_cache_max_bytes``: the bound on the RAM tier,
    0 for none; ``hot_cache_only``: nothing is written, and ``cache_dir`` may be None; ``hot_cache_budget``: a bound
    that several managers share, instead of ``hot_cache_max_bytes``. Blocks found in the directory are shown only if
    they are what ``expected_...`` says: model name, number of layers, tokens in a block, class names of the layers
    (empty, 0 or None: any).

    What is saved is on its way to the disk when ``save_block`` returns, and can be loaded from then on.
    ValueError for a directory that others can write to, and for bounds that are none.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None,
        max_size_bytes: int,
        hot_cache_max_bytes: int = 0,
        hot_cache_only: bool = False,
        hot_cache_budget: SharedHotCacheBudget | None = None,
        expected_model_name: str = "",
        expected_num_layers: int = 0,
        expected_block_size: int = 0,
        expected_block_size_tokens: int = 256,
        expected_kv_bytes_per_token: int = 200_000,
        expected_layer_cache_types: Sequence[str] | None = None,
    ) -> None:
        self._cache_dir = None if cache_dir is None else Path(os.path.abspath(os.path.expanduser(cache_dir)))
        self._max_size = max_size_bytes
        self._hot_cache_only = hot_cache_only
        self._hot_cache_budget = hot_cache_budget
        self._hot_cache_max_bytes = hot_cache_max_bytes if hot_cache_budget is None else hot_cache_budget.max_bytes
        # Hints for a queue that is counted in blocks; ours is counted in bytes.
        self._expected_block_size_tokens = expected_block_size_tokens
        self._expected_kv_bytes_per_token = expected_kv_bytes_per_token

        self._disk = None if hot_cache_only else self._cache_dir
        self._store = BlockStore.open(
            directory="" if self._disk is None else str(self._disk),
            namespace=NAMESPACE,
            ram_bytes=self._hot_cache_max_bytes,
            disk_bytes=max_size_bytes,
            queue_bytes=max(_LEAST_QUEUE_BYTES, self._hot_cache_max_bytes // 2),
            write="ram_only" if hot_cache_only else "through",
        )
        self._blobs = Blobs(self._store, self._disk)
        self._shown = ShownBlocks(self._blobs, max_size_bytes)
        expected = (expected_model_name, expected_num_layers, expected_block_size)
        super().__init__(self._shown, *expected, expected_layer_cache_types)
        self._lock = threading.Lock()
        self._parts = PartBlocks(self._store, self._shown.is_forgotten, self._disk)
        self._spaces = self._parts.spaces
        # Guarded by _lock.
        self._counts: Counter[str] = Counter(dict.fromkeys((*COUNTERS, *PRELOAD), 0))
        self._saving = threading.Lock()
        if hot_cache_budget is not None:
            hot_cache_budget.attach(self)

    # What the prefix cache uses, which stores parts instead of tuples.

    def _attach_space(self, model_name: str, space: int) -> None:
        """Blocks of this model that are stored as parts lie in ``space`` from now on; those of its former space are
        not seen any more."""
        self._parts.attach(model_name, space)

    def _note_parts_saved(self, block_hashes: Iterable[bytes]) -> None:
        """Blocks were stored as parts: they count, are not forgotten any more, and the shared budget is to hold."""
        hashes = list(block_hashes)
        self._shown.remember(hashes)
        self._count(saves=len(hashes))
        self._settle()

    def has_block(self, block_hash: bytes) -> bool:
        """Whether ``load_block`` would find the block."""
        return self._parts.has(block_hash) or self._find(block_hash) is not None

    def _find(self, block_hash: bytes) -> BlobMetadata | None:
        return self._shown.find(block_hash, self._expectation())

    def close(self) -> None:
        """Writes what waits and stops. Later calls are misses. Safe to call twice."""
        self._store.close()
        if self._hot_cache_budget is not None:
            self._hot_cache_budget.forget_owner(self)

    # Saving.

    def save_block(
        self,
        block_hash: bytes,
        cache_data: Sequence[Any],
        token_count: int,
        model_name: str = "",
        layer_cache_types: Sequence[str] | None = None,
        layer_meta_states: Sequence[Any] | None = None,
        hot_cache_write_back: bool = True,
    ) -> bool:
        """Stores the layers of a block (shapes: see ``_omlx.tuples``) under its hash, which may be any bytes.

        True if the block is stored, or was: the first one stays, unless it lacks a state that this one has. False, with
        a counter, for data that cannot be stored and where there is no room. Lazy arrays are evaluated on the calling
        thread. Everything is written at once, whatever ``hot_cache_write_back`` says.
        """
        if self._hot_cache_only and self._hot_cache_max_bytes == 0:
            return False
        if layer_cache_types and not self._expectation().is_other_model(model_name):
            self.adopt_layer_signature_if_unset(layer_cache_types)
        try:
            if self._is_saved(block_hash, cache_data):
                self._shown.touch(block_hash)
                self._count(hits=1)
                return True
            return self._save(
                block_hash,
                cache_data,
                self._form(token_count, model_name, cache_data, layer_cache_types, layer_meta_states),
            )
        except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError):
            self._count(errors=1)
            return False

    def _is_saved(self, block_hash: bytes, cache_data: Sequence[Any]) -> bool:
        known = self._find(block_hash)
        if known is None:
            return self._parts.has(block_hash)
        return not known.placeholders or not placeholders(cache_data) < known.placeholders

    def _form(
        self,
        token_count: int,
        model_name: str,
        cache_data: Sequence[Any],
        types: Sequence[str] | None,
        metas: Sequence[Any] | None,
    ) -> Form:
        block_size = self._expected_block_size or token_count
        model_name = model_name or ""
        signature = compat_signature(
            model_name=model_name, num_layers=len(cache_data), block_size=block_size, layer_cache_types=types
        )
        return Form(token_count, model_name, block_size, signature, types or None, metas or None)

    def _save(self, block_hash: bytes, cache_data: Sequence[Any], form: Form) -> bool:
        slots, text, metadata = self._blobs.prepare(block_hash, cache_data, form)
        with self._saving:
            if self._blobs.present(block_hash):
                if self._is_saved(block_hash, cache_data):
                    self._count(hits=1)
                    return True  # by another thread, meanwhile
                # Another model's, forgotten, or without states: in a store the first one wins.
                self._blobs.erase(block_hash)
            status = self._blobs.put(block_hash, slots, text)
            if status:
                self._shown.saved(metadata)
        self._count(saves=1 if status else 0)
        self._settle()
        return bool(status)

    # Loading.

    def load_block(self, block_hash: bytes) -> list[Any] | None:
        """The layers of a block as ``save_block`` was given them, in new arrays; None for a miss."""
        return self.load_block_with_metadata(block_hash)[0]

    def load_block_with_metadata(
        self, block_hash: bytes, promote_to_hot_cache: bool = True
    ) -> tuple[list[Any], dict[str, Any]] | tuple[None, None]:
        """``load_block``, and what was said of the block: ``num_layers``, ``token_count``, ``model_name``,
        ``block_size``, ``cache_signature``, ``layer_cache_types``, ``layer_meta_states``.

        Every byte is compared with its checksum on the first read. What is damaged is removed: a miss from then on.
        Nothing is copied to RAM beside, whatever ``promote_to_hot_cache`` says: the system's page cache holds it.
        """
        try:
            found = self._load_blob(block_hash) or self._parts.load(block_hash, self._expected_block_size)
        except ValueError as error:
            self._drop_damaged(block_hash, error)
            found = None
        if found is None:
            self._count(misses=1)
            return None, None
        layers, block, from_ram = found
        self._count(loads=1, hits=1, hot_cache_hits=from_ram)
        return layers, {name: getattr(block, name) for name in SAID}

    def _load_blob(self, block_hash: bytes) -> Loaded | None:
        known = self._find(block_hash)
        if known is None:
            return None
        found = self._blobs.load(block_hash)
        if found.metadata is None:
            self._shown.dropped(block_hash)
            self._count(errors=found.status.code not in (StatusCode.NOT_FOUND, StatusCode.CLOSED))
            return None
        # Another manager may have put its own in the place of what was judged.
        changed = found.metadata.cache_signature != known.cache_signature
        if changed and self._shown.judge(found.metadata, self._expectation()) is None:
            return None
        self._shown.touch(block_hash)
        return found.layers, found.metadata, found.from_ram

    def _drop_damaged(self, block_hash: bytes, error: ValueError) -> None:
        """A block that cannot be understood goes: asked for again and again, it would fail again and again."""
        _logger.warning("a stored block is dropped: %s", error)
        self.delete_block(block_hash)
        self._count(errors=1)

    def preload_matched_blocks(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these blocks the RAM tier holds now; 0 without one.

        Nothing is read ahead: a load copies from the page cache to where it is needed, once.
        """
        if self._hot_cache_max_bytes == 0:
            return 0
        hashes = list(block_hashes)
        held = zip(self._blobs.in_ram(hashes), self._parts.in_ram(hashes), strict=True)
        count = sum(blob or rows for blob, rows in held)
        self._count(preload_calls=1, preload_blocks_loaded=count)
        return count

    # Forgetting.

    def forget_block(self, block_hash: bytes) -> bool:
        """Hides a block from this manager until it is saved again; its file stays. False if it was not there."""
        there = self.has_block(block_hash)
        if there:
            self._shown.forget(block_hash)
        return there

    def delete_block(self, block_hash: bytes) -> bool:
        """Removes a block, files and all, in whatever form it is stored. False if it was not there."""
        there = self._parts.erase(block_hash) | self._blobs.present(block_hash)
        self._blobs.erase(block_hash)
        self._shown.dropped(block_hash)
        return there

    def clear(self) -> int:
        """Removes all blocks of all models of the directory; how many parts there were."""
        count = self._part_count()
        self._store.clear()
        self._shown.clear()
        return count

    def clear_hot_cache(self) -> int:
        """Drops the RAM copies of what is on disk (and everything, where nothing is written); how many parts."""
        before = int(self._store.stats()["parts_in_ram"])
        self.trim_hot(0)
        return max(0, before - int(self._store.stats()["parts_in_ram"]))

    def shrink_hot_cache_to(self, target_bytes: int, protected_hashes: Iterable[bytes] | None = None) -> int:
        """``trim_hot``, of all managers if they share a budget. Bytes freed."""
        if self._hot_cache_budget is not None:
            return self._hot_cache_budget.shrink_to(target_bytes, protected_hashes)
        return self.trim_hot(target_bytes, protected_hashes or ())

    def get_block_metadata(self, block_hash: bytes) -> PagedSSDBlockMetadata | None:
        """What is known of a block; None if it is not there. Of one stored as parts: its model and its tokens."""
        parts = self._parts.metadata(block_hash, self._expected_block_size, self._expected_layer_cache_types)
        if parts is not None:
            return parts
        known = self._find(block_hash)
        if known is None:
            return None
        try:
            return replace(known, file_size=known.file_path.stat().st_size)
        except OSError:
            return replace(known)  # not written yet

    def hot_bytes(self) -> int:
        """Bytes that the RAM tier holds now."""
        return int(self._store.stats()["ram_bytes"])

    def trim_hot(self, target_bytes: int, protected_hashes: Iterable[bytes] = ()) -> int:
        """Drops RAM copies of what is on disk, least recently used first, until the RAM tier holds at most so many
        bytes; those of protected blocks stay. Bytes freed. Without a disk what is dropped is gone."""
        protected = []
        for block_hash in protected_hashes:
            protected += [blob_key(block_hash), *self._parts.keys(block_hash)]
        return int(self._store.trim_ram(max(0, target_bytes), protected))

    # Sizes and counters.

    def enforce_size_limit(self) -> int:
        """Removes what was not used for longest until 90 % of ``max_size`` are left, deepest blocks first. Bytes freed.

        The bound itself always holds: the store makes room before it writes.
        """
        target = int(0.9 * self.max_size)
        left = int(self._store.stats()["disk_bytes"])
        if self._disk is None or left <= target:
            return 0
        before = left
        parts = scan(self._disk, NAMESPACE).parts
        for place, _ in eviction_order([(part.name, part.modified) for part in parts]):
            if left <= target:
                break
            self._store.erase([parts[place].key], [Part[parts[place].part]])
            left -= parts[place].bytes
        return max(0, before - int(self._store.stats()["disk_bytes"]))

    @property
    def size(self) -> int:
        """Parts that this manager may show. A block is one part, and one more if its layers have windows or states."""
        self._shown.see_all(self._expectation())
        return max(0, self._part_count() - len(self._shown.others()))

    @property
    def max_size(self) -> int:
        """Bytes that the directory may hold: as configured, or 99 % of what is used and free if that is less."""
        if self._disk is None:
            return self._max_size
        used = int(self._store.stats()["disk_bytes"])
        try:
            free = shutil.disk_usage(self._disk).free
        except OSError:
            return self._max_size
        return min(self._max_size, int(0.99 * (used + free)))

    @property
    def configured_max_size(self) -> int:
        """Bytes, as configured."""
        return self._max_size

    def _part_count(self) -> int:
        return int(self._store.stats()["parts"])

    def get_stats(self) -> PagedSSDCacheStats:
        """Counters since open, and sizes now; of everything in the directory."""
        now = self._store.stats()
        with self._lock:
            counts = dict(self._counts)
        counts["errors"] += self._shown.damaged
        if self._disk is None:
            now["parts"] = 0  # of files
        return stats_of(counts, now, (self.max_size, self._max_size), self._hot_cache_max_bytes)

    def get_stats_for_model(self, model_name: str) -> PagedSSDCacheStats:
        """``get_stats`` with the sizes of one model: of the blocks whose model name, or the last part of it, is this.

        Of blocks that are stored as parts nothing tells the model: they count if it is the only one attached.
        """
        self._shown.see_all(self._expectation())
        attached = self._parts.models()
        alone = bool(attached) and all(is_named(name, model_name) for name in attached)
        blobs = [*self._shown.shown(), *([] if not alone else self._shown.others())]
        return narrowed(self.get_stats(), blobs, self._blobs.in_ram([b.block_hash for b in blobs]), model_name, alone)

    def get_stats_dict(self) -> dict[str, Any]:
        """``get_stats`` as a dict, with the directory, sizes as people read them, and what preloading did."""
        stats = self.get_stats()
        with self._lock:
            preload = {name: self._counts[name] for name in PRELOAD}
        return stats_dict(stats, self._cache_dir, preload)

    # As every cache manager.

    def fetch(self, key: bytes) -> tuple[Any, bool]:
        """``(load_block(key), True)``, or ``(None, False)``."""
        layers = self.load_block(key)
        return layers, layers is not None

    def store(self, key: bytes, value: Any) -> bool:
        """``save_block`` of ``(layers, token_count)``, ``(layers, token_count, model_name)``, or layers alone."""
        if isinstance(value, tuple) and len(value) in (2, 3) and isinstance(value[1], int):
            return self.save_block(key, value[0], *value[1:])
        return self.save_block(key, value, 0)

    def evict(self, key: bytes) -> bool:
        """``delete_block``."""
        return self.delete_block(key)

    def _settle(self) -> None:
        if self._hot_cache_budget is not None:
            self._hot_cache_budget.settle(self)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def __repr__(self) -> str:
        return (
            f"PagedSSDCacheManager(cache_dir={str(self._cache_dir)!r}, parts={self._part_count()}, "
            f"size={format_size(int(self._store.stats()['disk_bytes']))}, "
            f"max_size={format_size(self._max_size)})"
        )
