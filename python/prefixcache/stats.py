"""Counters of the cache managers, as plain dataclasses. They hold no lock: their owner guards them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class BaseCacheStats:
    """Counts since the last ``reset``."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def total_queries(self) -> int:
        """Hits and misses together."""
        return self.hits + self.misses

    @property
    def hit_rate(self) -> float:
        """The share of hits, 0.0 to 1.0; 0.0 before the first query."""
        return self.hits / self.total_queries if self.total_queries else 0.0

    def record_hit(self) -> None:
        """Count a hit."""
        self.hits += 1

    def record_miss(self) -> None:
        """Count a miss."""
        self.misses += 1

    def record_eviction(self) -> None:
        """Count an eviction."""
        self.evictions += 1

    def reset(self) -> None:
        """Zero what is counted; sizes and settings stay."""
        _zero(self, ("hits", "misses", "evictions"))

    def to_dict(self) -> dict[str, Any]:
        """All fields, ``total_queries`` and ``hit_rate``."""
        return {**asdict(self), "total_queries": self.total_queries, "hit_rate": self.hit_rate}


@dataclass
class PrefixCacheStats(BaseCacheStats):
    """Of a prefix cache: hits and misses count requests; the rest counts tokens, except ``partial_block_skips``."""

    tokens_saved: int = 0
    partial_block_skips: int = 0
    partial_tokens_skipped: int = 0
    block_size: int = 0
    last_partial_tokens_skipped: int = 0
    last_tokens_to_next_block: int = 0
    tokens_matched_total: int = 0
    tokens_requested_total: int = 0
    _total_queries: int = field(default=0, repr=False)

    @property
    def total_queries(self) -> int:
        """Hits and misses together, or what was set here if that is above 0."""
        return self._total_queries if self._total_queries > 0 else self.hits + self.misses

    @total_queries.setter
    def total_queries(self, value: int) -> None:
        self._total_queries = value

    def reset(self) -> None:
        """Zero everything except ``block_size``."""
        super().reset()
        _zero(self, ("tokens_saved", "partial_block_skips", "partial_tokens_skipped", "_total_queries"))
        _zero(self, ("last_partial_tokens_skipped", "last_tokens_to_next_block"))
        _zero(self, ("tokens_matched_total", "tokens_requested_total"))


@dataclass
class PagedCacheStats(BaseCacheStats):
    """Of a paged cache: hits and misses count blocks.

    ``allocated_blocks`` holds the null block and the retained blocks too; ``shared_blocks`` are those with more than
    one reference; ``total_tokens_cached`` are the tokens of all allocated blocks.
    """

    total_blocks: int = 0
    allocated_blocks: int = 0
    free_blocks: int = 0
    shared_blocks: int = 0
    total_tokens_cached: int = 0
    cow_copies: int = 0

    @property
    def utilization(self) -> float:
        """The share of the blocks made so far that are allocated, 0.0 to 1.0."""
        return self.allocated_blocks / self.total_blocks if self.total_blocks else 0.0

    def reset(self) -> None:
        """Zero hits, misses, evictions and copies."""
        super().reset()
        self.cow_copies = 0

    def to_dict(self) -> dict[str, Any]:
        """As of the base, and ``utilization``."""
        return {**super().to_dict(), "utilization": self.utilization}


@dataclass
class VLMCacheStats(BaseCacheStats):
    """Of a cache of vision features."""

    tokens_saved: int = 0
    image_cache_hits: int = 0

    def record_image_hit(self) -> None:
        """Count an image that was known."""
        self.image_cache_hits += 1

    def reset(self) -> None:
        """Zero everything."""
        super().reset()
        _zero(self, ("tokens_saved", "image_cache_hits"))


@dataclass
class PagedSSDCacheStats(BaseCacheStats):
    """Of an SSD manager: operations since ``reset``, then sizes in bytes and counts as they are now."""

    saves: int = 0
    saves_persisted: int = 0
    loads: int = 0
    errors: int = 0
    ssd_write_drops: int = 0
    ssd_inline_write_fallbacks: int = 0
    evict_unlink_failures: int = 0
    total_size_bytes: int = 0
    max_size_bytes: int = 0
    configured_max_size_bytes: int = 0
    num_files: int = 0
    hot_cache_entries: int = 0
    hot_cache_size_bytes: int = 0
    hot_cache_max_bytes: int = 0
    hot_cache_hits: int = 0
    hot_cache_evictions: int = 0
    hot_cache_promotions: int = 0

    @property
    def save_rate(self) -> float:
        """The share of saves that were accepted, 0.0 to 1.0; 0.0 before the first."""
        tried = self.saves + self.errors
        return self.saves / tried if tried else 0.0

    def record_save(self) -> None:
        """Count an accepted save."""
        self.saves += 1

    def record_load(self) -> None:
        """Count a load, which is a hit."""
        self.loads += 1
        self.hits += 1

    def record_error(self) -> None:
        """Count an error."""
        self.errors += 1

    def reset(self) -> None:
        """Zero the base counters and the operations; sizes and the hot tier's counters stay."""
        super().reset()
        _zero(self, ("saves", "saves_persisted", "loads", "errors"))
        _zero(self, ("ssd_write_drops", "ssd_inline_write_fallbacks", "evict_unlink_failures"))

    def to_dict(self) -> dict[str, Any]:
        """As of the base, and ``save_rate``."""
        return {**super().to_dict(), "save_rate": self.save_rate}


def _zero(stats: BaseCacheStats, names: Iterable[str]) -> None:
    for name in names:
        setattr(stats, name, 0)
