"""Private names of oMLX's prefix cache that its tests and its scheduler use. Each is a line or two over the real thing;
nothing of our own calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefixcache._omlx import block_data, prefix_index
from prefixcache._omlx.block_hash import block_hashes
from prefixcache._omlx.foreign_blocks import told_types
from prefixcache._omlx.foreign_calls import answer_of


class PrivateNames:
    """Mixed into ``BlockAwarePrefixCache``, whose attributes it uses."""

    paged_cache: Any
    paged_ssd_cache: Any
    block_size: int
    _prefix_index: dict[bytes, prefix_index.PrefixEntry]

    def _update_prefix_index(self, tokens: Sequence[int], block_ids: Sequence[int], extra_keys: Any = None) -> None:
        hashes = block_hashes(tokens, self.block_size, self.paged_cache.model_name, extra_keys)
        prefix_index.add(self._prefix_index, hashes, block_ids, self.block_size, self.paged_cache.max_blocks)

    def _find_best_prefix_match(
        self, tokens: Sequence[int], extra_keys: Any = None
    ) -> tuple[int, Sequence[int], int] | None:
        hashes = block_hashes(tokens, self.block_size, self.paged_cache.model_name, extra_keys)
        return prefix_index.best(self._prefix_index, hashes)

    def _forget_incompatible_ssd_block(self, block_hash: bytes | None, block_id: int | None = None) -> None:
        if block_hash is None:
            return
        if block_id is not None:
            self.paged_cache.cached_block_hash_to_block.pop(block_hash, block_id)
        if self.paged_ssd_cache is None:
            return
        answer_of(self.paged_ssd_cache.forget_block, block_hash)

    def _validate_block_cache_data(self, data: Sequence[Any], layer_cache_types: Sequence[str] | None = None) -> bool:
        return block_data.valid(data, layer_cache_types)

    def _extract_block_tensor_slice(
        self,
        cache_data: Sequence[Mapping[str, Any]],
        start: int,
        end: int,
        model_cache_config: Any = None,
        is_last_block: bool = False,
        snapshot_cache_data: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any] | None:
        return block_data.block_slices(cache_data, start, end, model_cache_config, is_last_block, snapshot_cache_data)

    def _get_cache_seq_len(self, cache_data: Sequence[Mapping[str, Any]]) -> int:
        return block_data.sequence_length(cache_data)

    @staticmethod
    def _is_placeholder_state(data: Any) -> bool:
        return block_data.is_placeholder(data)

    def _find_walk_back_truncation_point(
        self, all_block_data: Sequence[Sequence[Any]], layer_cache_types: Sequence[str] | None
    ) -> int | None:
        return block_data.walk_back(all_block_data, layer_cache_types)

    def _find_kv_shape_ref(
        self, all_block_data: Sequence[Sequence[Any]], layer_cache_types: Sequence[str] | None
    ) -> tuple[int, int] | None:
        return block_data.kv_shape(all_block_data, layer_cache_types)

    @staticmethod
    def _canonical_layer_cache_types(types: Sequence[str] | None) -> list[str] | None:
        return told_types(types)
