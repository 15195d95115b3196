"""Which blocks an SSD manager takes for its own, by model, sizes and classes of layers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from prefixcache._omlx.cache_types import canonical_types
from prefixcache._omlx.shown_blocks import ShownBlocks
from prefixcache._omlx.ssd_index import Expected


class LayerSignature:
    """The part of an SSD manager that says what its blocks must be. Any thread.

    Blocks of other models neither set the expected class names nor are judged by them: a draft model's, say.
    """

    def __init__(
        self,
        shown: ShownBlocks,
        model_name: str,
        num_layers: int,
        block_size: int,
        layer_cache_types: Sequence[str] | None,
    ) -> None:
        self._shown = shown
        self._expected_model_name = model_name
        self._expected_num_layers = num_layers
        self._expected_block_size = block_size
        self._signature_lock = threading.RLock()
        self._expected_layer_cache_types = None if layer_cache_types is None else [*layer_cache_types]
        self._signature_sweep_completed = False

    def _expectation(self) -> Expected:
        with self._signature_lock:
            types = self._expected_layer_cache_types
            return Expected(
                self._expected_model_name,
                self._expected_num_layers,
                self._expected_block_size,
                None if types is None else tuple(types),
            )

    def adopt_layer_signature_if_unset(self, layer_cache_types: Sequence[str] | None) -> bool:
        """Makes these the expected class names if none are; True if it did. Blocks of others are then swept."""
        with self._signature_lock:
            if self._expected_layer_cache_types is not None or not layer_cache_types:
                return False
            self._expected_layer_cache_types = list(layer_cache_types)
            self._signature_sweep_completed = False
        self.invalidate_stale_layer_signature()
        return True

    def set_expected_layer_signature(self, layer_cache_types: Sequence[str] | None) -> bool:
        """Sets the expected class names; True if they are others than before but for wrappers."""
        types = None if layer_cache_types is None else list(layer_cache_types)
        with self._signature_lock:
            changed = canonical_types(types) != canonical_types(self._expected_layer_cache_types)
            self._expected_layer_cache_types = types
            if changed:
                self._signature_sweep_completed = False
        if changed:
            self._shown.judge_anew()
        return changed

    def invalidate_stale_layer_signature(self) -> int:
        """Hides blocks of the expected model whose recorded class names are others than expected; how many.

        Once for each signature. Their files stay: they are another configuration's.
        """
        with self._signature_lock:
            if not self._expected_layer_cache_types or not self._expected_model_name or self._signature_sweep_completed:
                return 0
            self._signature_sweep_completed = True
        return self._shown.sweep(self._expectation())
