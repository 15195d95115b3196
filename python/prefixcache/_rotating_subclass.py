"""A restored sliding window, as oMLX hands it to mlx-lm's batch generator. Importing this imports mlx-lm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class RotatingKVCache:
        """What is used of mlx-lm's class, which has no types."""

        keys: Any
        values: Any
        offset: int
        _idx: int

        def __init__(self, max_size: int, keep: int = 0) -> None: ...
        def size(self) -> int: ...

else:
    from mlx_lm.models.cache import RotatingKVCache


class PrefillReadyRotatingKVCache(RotatingKVCache):
    """mlx-lm's ``RotatingKVCache`` whose ``size()`` is the number of rows that are really there.

    Merging caches into a batch copies the last ``size()`` rows of each. The class itself answers ``min(offset,
    max_size)``, more than a buffer that holds fewer rows has. Not safe from several threads, as every cache.
    """

    def size(self) -> int:
        """Rows in the buffer, at most ``max_size``; 0 if it holds nothing."""
        if self.keys is None or self.keys.size == 0:
            return 0
        held: int = min(super().size(), self.keys.shape[2])
        return held
