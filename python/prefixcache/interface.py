"""What every cache manager of oMLX's surface offers, whatever its keys and values are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class CacheManager(ABC):
    """A cache of values under keys. What keys, values and thread-safety are is up to the class that implements it."""

    @abstractmethod
    def fetch(self, key: Any) -> tuple[Any, bool]:
        """``(value, True)``, or ``(None, False)`` where there is none."""

    @abstractmethod
    def store(self, key: Any, value: Any) -> bool:
        """Keep a value. False if it was not kept."""

    @abstractmethod
    def evict(self, key: Any) -> bool:
        """Drop a value. False if it was not there or is in use."""

    @abstractmethod
    def clear(self) -> int:
        """Drop everything; the number of entries that there were."""

    @abstractmethod
    def get_stats(self) -> Any:
        """The counters of this manager."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Entries now, in the unit of ``max_size``."""

    @property
    @abstractmethod
    def max_size(self) -> int:
        """The most that there may be."""

    @property
    def utilization(self) -> float:
        """``size / max_size``; 0.0 where nothing may be kept."""
        most = self.max_size
        return self.size / most if most else 0.0

    @property
    def supports_shared_cache(self) -> bool:
        """Whether several models may use one manager."""
        return False

    @property
    def supports_partial_accept(self) -> bool:
        """Whether a part of what is stored may be accepted."""
        return False

    @property
    def supports_cache_transition(self) -> bool:
        """Whether entries may change from one kind of cache to another."""
        return False
