"""Which attributes mlx-vlm's models may leave on a cache beside those of its class."""

from __future__ import annotations

from typing import Any

from prefixcache._handlers.base import check_fields

# Notes of Qwen models on a batch's padding. They are read where there is padding, which is refused, and made anew.
_NOTES = frozenset({"_qwen3_5_metadata_revision", "_qwen3_5_lengths_info", "_qwen3_5_ssm_no_mask_batch_size"})


def check_fields_and_notes(cache: Any, expected: frozenset[str], where: str) -> None:
    """``check_fields``, but for notes that a rebuilt cache does not need."""
    check_fields(cache, expected | (vars(cache).keys() & _NOTES), where)
