"""A prompt cache for MLX language models: KV of shared prefixes, kept in RAM and on SSD, handed back exactly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import prefixcache._check_mlx  # noqa: F401  (first: what follows loads the extension)
from prefixcache._build_info import VERSION as __version__
from prefixcache._recorder import Recorder
from prefixcache._results import HIT_REASONS, SNAPSHOT_REASONS, STORE_REASONS, Hit, StoreReport
from prefixcache.cache import PrefixCache

if TYPE_CHECKING:
    from prefixcache._fingerprint import model_fingerprint

__all__ = [
    "HIT_REASONS",
    "SNAPSHOT_REASONS",
    "STORE_REASONS",
    "Hit",
    "PrefixCache",
    "Recorder",
    "StoreReport",
    "__version__",
    "model_fingerprint",
]


def __getattr__(name: str) -> Any:
    # Only a cache opened with a model needs what the fingerprint imports.
    if name == "model_fingerprint":
        return import_module("prefixcache._fingerprint").model_fingerprint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
