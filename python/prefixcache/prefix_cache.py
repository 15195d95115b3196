"""oMLX's prefix cache: block tables over a paged manager, with KV in an SSD manager.

With our own ``PagedSSDCacheManager`` rows, windows and states are stored as parts and restored by the same code as
``PrefixCache``'s. With any other object in its place (a subclass, a stand-in) blocks go through ``save_block`` and
``load_block_with_metadata``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixcache._omlx import prefix_index
from prefixcache._omlx.foreign_calls import answer_of
from prefixcache._omlx.own_blocks import Snapshots
from prefixcache._omlx.tensor_store import TensorStore, layer_count, made_caches
from prefixcache.interface import CacheManager
from prefixcache.paged_cache import BlockTable, PagedCacheManager
from prefixcache.stats import PrefixCacheStats


@dataclass
class BlockCacheEntry:
    """The table of a request. ``last_access``: seconds of the wall clock."""

    block_table: BlockTable
    last_access: float = field(default_factory=time.time)


class BlockAwarePrefixCache(TensorStore, CacheManager):
    """Finds the blocks of a prompt, hands back caches, stores those of finished requests. Any method, any thread.

    ``model``: gives the number of layers and, with our own SSD manager, the cache classes. ``expected_num_layers``: 0
    if the model does not tell.
    """

    def __init__(self, model: Any, paged_cache_manager: PagedCacheManager, paged_ssd_cache_manager: Any = None) -> None:
        super().__init__(made_caches(model))
        self.model = model
        self.paged_cache = paged_cache_manager
        self.paged_ssd_cache = paged_ssd_cache_manager
        self.block_size = paged_cache_manager.block_size
        self.expected_num_layers = len(self._prototypes) or layer_count(model)
        self._cold_restore_callback: Any = None
        self.reset_stats()
        self._own_blocks()

    # What a scheduler calls, in the order of a request.

    def fetch_cache(
        self,
        request_id: str,
        tokens: Any,
        extra_keys: Any = None,
        extra_key_token_start: int | None = None,
        extra_key_ranges: Any = None,
    ) -> tuple[BlockTable | None, Any]:
        """A table of the longest known prefix of whole blocks, with a reference on each, and the tokens behind it.

        ``(None, tokens)``, the same object, for a miss. ``release_cache`` gives the references back.
        """
        if len(tokens) == 0:
            return None, tokens
        salts = (extra_keys, extra_key_token_start, extra_key_ranges)
        try:
            hashes = self._hashes(tokens, salts)
        except (ValueError, TypeError):
            # Such as the negative numbers that stand for images somewhere.
            hashes = []
        self._own_blocks()
        with self._lock, self.paged_cache._lock:
            self._tokens_requested += len(tokens)
            blocks = self.paged_cache._acquire(hashes)
            ids = [block.block_id for block in blocks]
            ids += self._acquire_indexed(hashes, len(ids))
            if not ids:
                self._misses += 1
                return None, tokens
            matched = len(ids) * self.block_size
            self._hits += 1
            self._tokens_saved += matched
            self._tokens_matched += matched
            self._give_back(request_id)
            table = self.paged_cache.create_block_table(request_id)
            self.paged_cache._add_blocks(table, ids, self.block_size)
            table._found = True
            self._fetched[request_id] = table
        return table, tokens[matched:]

    def preload_blocks(self, block_table: BlockTable) -> int:
        """Asks the SSD manager to bring the table's blocks into its RAM tier. How many it did."""
        preload = getattr(self.paged_ssd_cache, "preload_matched_blocks", None)
        if preload is None:
            return 0
        count = answer_of(preload, self._table_hashes(block_table), otherwise=0)
        return count if isinstance(count, int) else 0

    def reconstruct_cache(self, block_table: BlockTable, promote_to_hot_cache: bool = True) -> list[Any] | None:
        """One cache a layer, standing at ``block_table.num_tokens``; None if there is nothing to stand on.

        The table is shortened in place to what can be served: a block may be lost, damaged or of another form, and
        windows and states must be those of the last block's end. Dropped blocks lose the table's reference.
        """
        if block_table is None or not block_table.block_ids or self.paged_ssd_cache is None:
            return None
        hashes = self._table_hashes(block_table)
        own = self._own_blocks()
        if own is None:
            count, sound, caches = self._restore_foreign(block_table, hashes, promote_to_hot_cache)
        else:
            count, sound, caches = self._restore_own(own, block_table, hashes, promote_to_hot_cache)
        self._shorten(block_table, count, sound)
        return caches

    def store_cache(
        self,
        request_id: str,
        tokens: Any,
        cache_data: Sequence[Mapping[str, Any]],
        model_cache_config: Any = None,
        boundary_snapshots: Snapshots | None = None,
        extra_keys: Any = None,
        extra_key_token_start: int | None = None,
        extra_key_ranges: Any = None,
        hot_cache_write_back: bool = True,
    ) -> BlockTable | None:
        """Stores the whole blocks of ``tokens`` from layer dicts; the request's table, with a reference on each block.

        ``cache_data``: a dict a layer (``state``, ``meta_state``, ``class_name``, ``cache_type``); empty: the blocks
        are only noted. ``boundary_snapshots``: such lists by token count, of which only ``in`` and ``[]`` are used.
        Stops at the first block that is refused or that the layers have no rows for. None without tokens.
        """
        if len(tokens) == 0:
            return None
        salts = (extra_keys, extra_key_token_start, extra_key_ranges)
        try:
            hashes = self._hashes(tokens, salts)
        except (ValueError, TypeError):
            return None
        with self._lock:
            self._count_partial(len(tokens))
            table = self._table_to_extend(request_id, hashes)
        if not isinstance(cache_data, list | tuple) or not all(isinstance(layer, Mapping) for layer in cache_data):
            return None
        own = self._own_blocks(cache_data)
        if self.paged_ssd_cache is None or not cache_data:
            self._extend(table, self._continued(table, tokens, hashes, salts))
        elif own is not None:
            kept = self._save_own(own, hashes, tokens, cache_data, boundary_snapshots or None, salts)
            self._extend(table, hashes[:kept])
        else:
            hashes = self._continued(table, tokens, hashes, salts)
            snapshots = boundary_snapshots or None
            self._save_foreign(table, hashes, cache_data, model_cache_config, snapshots, hot_cache_write_back)
        with self._lock:
            self._fetched.pop(request_id, None)
            self._request_tables[request_id] = BlockCacheEntry(table)
            table._found = False
            most = self.paged_cache.max_blocks
            prefix_index.add(self._prefix_index, hashes, table.block_ids, self.block_size, most)
        return table

    def get_cache_for_generation(self, request_id: str) -> tuple[list[Any] | None, bool]:
        """The caches of a stored request, its shared blocks replaced by records of its own, and whether any was."""
        with self._lock:
            entry = self._request_tables.get(request_id)
            if entry is None:
                return None, False
            entry.last_access = time.time()
            _, copied = self.paged_cache.get_blocks_for_generation(entry.block_table)
        return self.reconstruct_cache(entry.block_table), copied

    def release_cache(self, request_id: str) -> None:
        """Gives the request's references back: after ``fetch_cache`` its blocks stay findable, those of a stored
        request are freed where nobody else holds them."""
        with self._lock:
            entry = self._request_tables.get(request_id)
            if entry is None:
                self._give_back(request_id)
                return
            del self._request_tables[request_id]
            self._fetched.pop(request_id, None)
            if self.paged_cache.get_block_table(request_id) is entry.block_table:
                self.paged_cache.delete_block_table(request_id)
            else:
                self.paged_cache._free_table(entry.block_table)

    def clear_request_entry(self, request_id: str) -> None:
        """Forgets a request whose references the caller gives back itself. The paged manager keeps its table."""
        with self._lock:
            for table in self._tables_of(request_id):
                table._cleared = True
            self._request_tables.pop(request_id, None)
            self._fetched.pop(request_id, None)

    def fork_cache(self, source_request_id: str, new_request_id: str) -> BlockTable | None:
        """A table of the same blocks for another request, with references of its own. None for an unknown source.

        Those of a table that ``new_request_id`` had are given back.
        """
        with self._lock:
            entry = self._request_tables.get(source_request_id)
            source = entry.block_table if entry else self._fetched.get(source_request_id)
            if source is None:
                return None
            before = self._tables_of(new_request_id)
            table = self.paged_cache.fork_block_table(source, new_request_id)
            for old in before:
                if not old._cleared:
                    self.paged_cache._release_table(old)
            self._fetched.pop(new_request_id, None)
            self._request_tables[new_request_id] = BlockCacheEntry(table)
        return table

    # Wiring.

    def set_paged_ssd_cache_manager(self, manager: Any) -> None:
        """Attaches, with None detaches, the manager of tensors; what it holds of another form is hidden first."""
        self.paged_ssd_cache = manager
        if manager is None:
            return
        self._own_blocks()
        # Whatever is stale is refused when it is loaded, too.
        answer_of(getattr(manager, "invalidate_stale_layer_signature", _nothing))

    def set_cold_restore_callback(self, callback: Any) -> None:
        """Kept for callers that set one; nothing calls it."""
        self._cold_restore_callback = callback

    # Statistics.

    def get_stats(self) -> PrefixCacheStats:
        """Counters since the last ``reset_stats``."""
        with self._lock:
            return PrefixCacheStats(
                hits=self._hits,
                misses=self._misses,
                evictions=self.paged_cache.stats.evictions,
                tokens_saved=self._tokens_saved,
                partial_block_skips=self._partial_block_skips,
                partial_tokens_skipped=self._partial_tokens_skipped,
                block_size=self.block_size,
                last_partial_tokens_skipped=self._last_partial_tokens_skipped,
                last_tokens_to_next_block=self._last_tokens_to_next_block,
                tokens_matched_total=self._tokens_matched,
                tokens_requested_total=self._tokens_requested,
            )

    def get_stats_dict(self) -> dict[str, Any]:
        """``get_stats`` with its rates, ``active_requests`` and the paged manager's memory usage."""
        stats = self.get_stats().to_dict()
        return {**stats, "active_requests": len(self._request_tables), **self.paged_cache.get_memory_usage()}

    def _count_partial(self, tokens: int) -> None:
        rest = tokens % self.block_size
        self._partial_block_skips += rest > 0
        self._partial_tokens_skipped += rest
        self._last_partial_tokens_skipped = rest
        self._last_tokens_to_next_block = self.block_size - rest if rest else 0

    def reset_stats(self) -> None:
        """Zeroes the counters."""
        with self._lock:
            self._hits = self._misses = self._tokens_saved = 0
            self._tokens_matched = self._tokens_requested = 0
            self._partial_block_skips = self._partial_tokens_skipped = 0
            self._last_partial_tokens_skipped = self._last_tokens_to_next_block = 0

    # The interface of all cache managers.

    def fetch(self, key: Any) -> tuple[Any, bool]:
        """``fetch_cache`` of ``(request_id, tokens)``: (table, True) or (None, False)."""
        if not _is_request(key):
            return None, False
        table, _ = self.fetch_cache(key[0], key[1])
        return table, table is not None

    def store(self, key: Any, value: Any) -> bool:
        """``store_cache`` of ``(request_id, tokens)`` and layer dicts. Whether there is a table now."""
        if not _is_request(key) or not isinstance(value, list | tuple):
            return False
        return self.store_cache(key[0], key[1], value) is not None

    def evict(self, key: Any) -> bool:
        """``release_cache`` of a request. Whether it was known."""
        with self._lock:
            known = isinstance(key, str) and (key in self._request_tables or key in self._fetched)
            if known:
                self.release_cache(key)
        return known

    def clear(self) -> int:
        """Forgets all tables and blocks, not what the SSD manager holds. How many requests there were."""
        with self._lock:
            count = len(self._request_tables) + len(self._fetched)
            self._request_tables.clear()
            self._fetched.clear()
            self._prefix_index.clear()
            self.paged_cache.clear()
        return count

    @property
    def size(self) -> int:
        """Stored requests."""
        return len(self._request_tables)

    @property
    def max_size(self) -> int:
        """The paged manager's blocks."""
        return self.paged_cache.max_blocks

    def __len__(self) -> int:
        return len(self._request_tables)


def _nothing() -> None:
    """For managers without a signature."""


def _is_request(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], list | tuple)
