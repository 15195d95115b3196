"""Where the tensors of blocks go and come from: our own store, or somebody else's SSD manager."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from prefixcache._omlx import foreign_blocks
from prefixcache._omlx.block_data import block_slices, is_cut, layer_class, problematic, sequence_length
from prefixcache._omlx.block_hash import block_digests
from prefixcache._omlx.cache_types import canonical
from prefixcache._omlx.foreign_blocks import Expected, told_types
from prefixcache._omlx.foreign_calls import answer_of
from prefixcache._omlx.own_blocks import OwnBlocks, Snapshots
from prefixcache._omlx.private_names import PrivateNames
from prefixcache._omlx.request_tables import HASH_LENGTH, RequestTables, Salts
from prefixcache.errors import Unsupported
from prefixcache.paged_cache import BlockTable
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.type_registry import CacheTypeRegistry

Layers = Sequence[Mapping[str, Any]]


class TensorStore(RequestTables, PrivateNames):
    """Mixed into ``BlockAwarePrefixCache``."""

    model: Any
    paged_ssd_cache: Any
    expected_num_layers: int

    def __init__(self, prototypes: Sequence[Any]) -> None:
        super().__init__()
        self._prototypes = prototypes
        self._stored_types: list[str] | None = None
        self._own: tuple[object, OwnBlocks | None] = (None, None)
        # Blocks of a foreign store that were saved without a state that a later request may bring.
        self._lacking: dict[bytes, None] = {}

    def _expected_types(self) -> list[str] | None:
        """The layer types that the SSD manager was told to expect of this model."""
        types = told_types(getattr(self.paged_ssd_cache, "_expected_layer_cache_types", None))
        if not types:
            return None
        # A draft model may share the manager: what is expected of the target says nothing of it.
        judged = getattr(self.paged_ssd_cache, "_expected_model_name", None)
        if isinstance(judged, str) and judged and judged != self._model_name():
            return None
        return types

    def _model_name(self) -> str:
        return self.paged_cache.model_name or ""

    def _own_blocks(self, layers: Layers | None = None) -> OwnBlocks | None:
        """Our own store's view of this model; None for another SSD manager, and for a model that does not tell its
        cache classes. ``layers``: what is about to be stored tells their types."""
        manager = self.paged_ssd_cache
        if type(manager) is not PagedSSDCacheManager or not self._prototypes:
            return None
        types = self._expected_types()
        with self._lock:
            if types is None:
                if layers is not None and len(layers) == len(self._prototypes):
                    self._stored_types = foreign_blocks.type_names(layers, None)
                types = self._stored_types or [canonical(type(cache).__name__) for cache in self._prototypes]
            form = (manager, self._model_name(), self.expected_num_layers, tuple(types), self.block_size)
            if self._own[0] != form:
                self._own = (form, self._new_own(manager, types))
            return self._own[1]

    def _new_own(self, manager: PagedSSDCacheManager, types: Sequence[str]) -> OwnBlocks | None:
        form = (self.expected_num_layers, list(types))
        try:
            prototypes = [_prototype(cache, name) for cache, name in zip(self._prototypes, types, strict=True)]
            own = OwnBlocks(manager._store, prototypes, self._model_name(), form, self.block_size)
        except (Unsupported, ValueError, TypeError, ImportError):
            return None
        manager._attach_space(self._model_name(), own.space)
        return own

    def _restore_own(
        self, own: OwnBlocks, table: BlockTable, hashes: Sequence[bytes], promote: bool
    ) -> tuple[int, int, list[Any] | None]:
        """(blocks that caches stand at, blocks whose rows are there, caches or None)."""
        forgotten = self.paged_ssd_cache._shown.is_forgotten
        known = takewhile(lambda value: len(value) == HASH_LENGTH and not forgotten(value), hashes)
        ours = list(known)
        restored = own.restore(ours)
        count = 0 if restored.caches is None else restored.n // self.block_size
        if count == 0 and ours and self.paged_ssd_cache._find(ours[0]) is not None:
            # Whole blocks that somebody saved through save_block.
            return self._restore_foreign(table, hashes, promote)
        hot = restored.tiers.get("ram", 0) // self.block_size
        self.paged_ssd_cache._count(loads=count, hits=count, hot_cache_hits=hot, misses=len(hashes) - count)
        return count, count if count == len(hashes) else own.stored(ours), restored.caches

    def _save_own(
        self,
        own: OwnBlocks,
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        layers: Layers,
        snapshots: Snapshots | None,
        salts: Salts,
    ) -> int:
        """How many blocks are stored now."""
        digests = block_digests(len(hashes), self.block_size, *salts)
        expected = self._expected_types()
        try:
            if expected is not None and foreign_blocks.type_names(layers, None) != expected:
                raise Unsupported("structure_mismatch", f"layers of other types than {expected}")
            kept = own.store(hashes, tokens, layers, snapshots, digests)
        except (Unsupported, ValueError, TypeError, RuntimeError, LookupError, OSError, MemoryError):
            # What nobody can store: arrays of another thread, snapshots that are gone.
            self.paged_ssd_cache._count(errors=1)
            return 0
        self.paged_ssd_cache._note_parts_saved(hashes[:kept])
        return kept

    def _load_foreign(self, hashes: Sequence[bytes], promote: bool) -> foreign_blocks.Loaded:
        manager = self.paged_ssd_cache

        # Stand-ins know one argument.
        options = {} if promote else {"promote_to_hot_cache": False}

        def load_one(value: bytes) -> Any:
            return answer_of(manager.load_block_with_metadata, value, otherwise=(None, None), **options)

        expected = Expected(self._model_name(), self.expected_num_layers, self.block_size, self._expected_types())
        return foreign_blocks.load(hashes, load_one, expected)

    def _restore_foreign(
        self, table: BlockTable, hashes: Sequence[bytes], promote: bool
    ) -> tuple[int, int, list[Any] | None]:
        """(blocks that caches stand at, blocks whose tensors are there, caches or None)."""
        found = self._load_foreign(hashes, promote)
        sound = len(found.data)
        if found.rejected:
            self._forget_incompatible_ssd_block(hashes[sound], table.block_ids[sound])
        count = foreign_blocks.usable(found)
        caches = foreign_blocks.rebuild(found, count, self.block_size) if count else None
        return (0 if caches is None else count), sound, caches

    def _save_foreign(
        self,
        table: BlockTable,
        hashes: Sequence[bytes],
        layers: Layers,
        config: Any,
        snapshots: Snapshots | None,
        write_back: bool,
    ) -> None:
        """Saves the blocks behind the table's one by one, and stops at the first that is refused."""
        types = foreign_blocks.type_names(layers, config)
        known = CacheTypeRegistry.list_known_class_names()
        if type(self.paged_ssd_cache) is PagedSSDCacheManager and not all(name in known for name in types):
            # Others decide for themselves whether such a class may come back as plain rows.
            self.paged_ssd_cache._count(errors=1)
            return
        layers = foreign_blocks.as_omlx(layers, config)
        rows = _rows(layers, config, len(hashes) * self.block_size)
        standing = foreign_blocks.stand_at(layers, config)
        for number in range(len(table.block_ids), len(hashes)):
            value, end = hashes[number], (number + 1) * self.block_size
            if end > rows:
                return
            block_id = self._take_mapped(value)
            if block_id is None or value in self._lacking:
                snapshot = _snapshot_at(end, snapshots, config)
                # Where nothing tells what the states are those of, callers rely on their being stored.
                last = number == len(hashes) - 1 and standing in (None, end)
                data = block_slices(layers, end - self.block_size, end, config, last, snapshot)
                metas = foreign_blocks.block_metas(layers, snapshot)
                if block_id is None:
                    block_id = self._save_new(value, data, types, metas, write_back)
                    if block_id is None:
                        return
                elif data is not None and not any(problematic(data, types)):
                    self._save_one(value, data, types, metas, write_back)
            table.add_block(block_id, self.block_size)

    def _save_new(self, value: bytes, data: Any, types: list[str], metas: list[Any], write_back: bool) -> int | None:
        """A new block for data that could be saved; None, and no block more in use, if it could not."""
        block = None if data is None else self.paged_cache.allocate_block()
        if block is None:
            return None
        if not self._save_one(value, data, types, metas, write_back):
            self.paged_cache.free_block(block.block_id)
            return None
        return self._register(block, value)

    def _save_one(self, value: bytes, data: Any, types: list[str], metas: list[Any], write_back: bool) -> bool:
        # Stand-ins do not know what is the default.
        options = {} if write_back else {"hot_cache_write_back": False}
        saved = answer_of(
            self.paged_ssd_cache.save_block,
            block_hash=value,
            cache_data=data,
            token_count=self.block_size,
            model_name=self._model_name(),
            layer_cache_types=types,
            layer_meta_states=metas,
            otherwise=False,
            **options,
        )
        with self._lock:
            self._lacking.pop(value, None)
            if saved and any(problematic(data, types)):
                self._lacking[value] = None
                if len(self._lacking) > self.paged_cache.max_blocks:
                    del self._lacking[next(iter(self._lacking))]
        return bool(saved)


def made_caches(model: Any) -> list[Any]:
    """A model's own fresh caches, one a layer; [] if it does not tell."""
    make = getattr(model, "make_cache", None)
    caches = None if make is None else answer_of(make)
    return caches if isinstance(caches, list) else []


def layer_count(model: Any) -> int:
    """The number of a model's layers, from its layers or its configuration; 0 if it does not tell."""
    layers = getattr(model, "layers", None)
    if isinstance(layers, Sequence) and len(layers):
        return len(layers)
    for name in ("args", "config"):
        count = getattr(getattr(model, name, None), "num_hidden_layers", None)
        if isinstance(count, int) and count > 0:
            return count
    return 0


def _snapshot_at(end: int, snapshots: Snapshots | None, config: Any) -> Layers | None:
    """The layers as they were at ``end`` tokens, unless they say that they were elsewhere."""
    if snapshots is None or end not in snapshots:
        return None
    layers = answer_of(snapshots.__getitem__, end)
    layers = None if layers is None else foreign_blocks.as_omlx(layers, config)
    return None if layers is None or foreign_blocks.stand_at(layers, config) not in (None, end) else layers


def _rows(layers: Layers, config: Any, tokens: int) -> int:
    """Tokens that every plain layer has rows of; all of them if there is no such layer."""
    rows = [
        sequence_length([layer])
        for index, layer in enumerate(layers)
        if _has_rows(layer, canonical(layer_class(layer, index, config)))
    ]
    return min([tokens, *rows])


def _has_rows(layer: Mapping[str, Any], name: str) -> bool:
    """Whether the layer is cut into rows, one for each token."""
    if name == "CacheList":
        return is_cut(layer)
    return bool(CacheTypeRegistry.get_handler_by_class_name(name).supports_block_slicing)


def _prototype(cache: Any, name: str) -> Any:
    """The model's own cache; where a server turns its rows into TurboQuant's, one of the package they come from."""
    if name != "TurboQuantKVCache" or type(cache).__name__ != "KVCache":
        return cache
    module: Any = importlib.import_module("mlx_vlm.models.cache")
    return module.KVCache()
