"""What an SSD manager reports: the store's numbers and its own under oMLX's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixcache._omlx.blobs import BlobMetadata
from prefixcache._sizes import format_size
from prefixcache.stats import PagedSSDCacheStats

COUNTERS = ("saves", "loads", "hits", "misses", "errors", "hot_cache_hits")
PRELOAD = ("preload_calls", "preload_blocks_loaded", "preload_time_ms")

_OPERATIONS = (
    "hits",
    "misses",
    "evictions",
    "saves",
    "saves_persisted",
    "loads",
    "errors",
    "ssd_write_drops",
    "ssd_inline_write_fallbacks",
    "evict_unlink_failures",
    "hot_cache_hits",
    "hot_cache_evictions",
    "hot_cache_promotions",
)


def stats_of(
    counts: Mapping[str, int], store: Mapping[str, Any], sizes: tuple[int, int], hot_max: int
) -> PagedSSDCacheStats:
    """``counts``: the manager's own; ``store``: those of ``BlockStore.stats()``; ``sizes``: the bound in effect and the
    configured one."""
    return PagedSSDCacheStats(
        hits=counts["hits"],
        misses=counts["misses"],
        evictions=store["evicted_disk_parts"],
        saves=counts["saves"],
        saves_persisted=store["written_parts"],
        loads=counts["loads"],
        errors=counts["errors"] + store["write_errors"],
        ssd_write_drops=store["put_full"] + store["left_out_parts"],
        total_size_bytes=store["disk_bytes"],
        max_size_bytes=sizes[0],
        configured_max_size_bytes=sizes[1],
        num_files=store["parts"],
        hot_cache_entries=store["parts_in_ram"],
        hot_cache_size_bytes=store["ram_bytes"],
        hot_cache_max_bytes=hot_max,
        hot_cache_hits=counts["hot_cache_hits"],
        hot_cache_evictions=store["evicted_ram_parts"],
    )


def stats_dict(stats: PagedSSDCacheStats, directory: Path | None, preload: Mapping[str, int]) -> dict[str, Any]:
    """The same as a dict, with sizes as people read them."""
    total, most = stats.total_size_bytes, stats.max_size_bytes
    return {
        "cache_dir": "" if directory is None else str(directory),
        "max_size": most,
        "max_size_formatted": format_size(most),
        "configured_max_size": stats.configured_max_size_bytes,
        "configured_max_size_formatted": format_size(stats.configured_max_size_bytes),
        "total_size": total,
        "total_size_formatted": format_size(total),
        "utilization": total / most if most else 0.0,
        "num_files": stats.num_files,
        "hot_cache_entries": stats.hot_cache_entries,
        "hot_cache_size_bytes": stats.hot_cache_size_bytes,
        "hot_cache_max_bytes": stats.hot_cache_max_bytes,
        "hot_cache_size_formatted": format_size(stats.hot_cache_size_bytes),
        "hot_cache_max_formatted": format_size(stats.hot_cache_max_bytes),
        **{name: getattr(stats, name) for name in _OPERATIONS},
        **preload,
    }


def is_named(recorded: str, model_name: str) -> bool:
    """Whether a recorded name is this one, or a path that ends in it."""
    return model_name in (recorded, recorded.rsplit("/", 1)[-1])


def narrowed(
    stats: PagedSSDCacheStats, blobs: Sequence[BlobMetadata], in_ram: Sequence[bool], model_name: str, alone: bool
) -> PagedSSDCacheStats:
    """``stats`` with the sizes of one model. ``blobs``: all that are known; ``alone``: what is no blob is its too."""
    held = {id(blob): is_held for blob, is_held in zip(blobs, in_ram, strict=True)}
    mine = [blob for blob in blobs if is_named(blob.model_name, model_name)]
    rest = [blob for blob in blobs if not is_named(blob.model_name, model_name)]
    sums = [
        (len(part), sum(b.file_size for b in part), sum(held[id(b)] for b in part), _ram_bytes(part, held))
        for part in (mine, rest)
    ]
    names = ("num_files", "total_size_bytes", "hot_cache_entries", "hot_cache_size_bytes")
    for name, own, other in zip(names, *sums, strict=True):
        total = getattr(stats, name)
        setattr(stats, name, max(0, total - other) if alone else min(own, total))
    return stats


def _ram_bytes(blobs: Sequence[BlobMetadata], held: Mapping[int, bool]) -> int:
    return sum(blob.file_size for blob in blobs if held[id(blob)])
