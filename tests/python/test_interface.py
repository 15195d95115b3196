"""The base class of the cache managers."""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.interface import CacheManager
from prefixcache.paged_cache import PagedCacheManager

ABSTRACT = {"fetch", "store", "evict", "clear", "get_stats", "size", "max_size"}


class Shelf(CacheManager):
    """The least that a manager must have."""

    def __init__(self, most: int) -> None:
        self.items: dict[Any, Any] = {}
        self.most = most

    def fetch(self, key: Any) -> tuple[Any, bool]:
        return self.items.get(key), key in self.items

    def store(self, key: Any, value: Any) -> bool:
        self.items[key] = value
        return True

    def evict(self, key: Any) -> bool:
        return self.items.pop(key, None) is not None

    def clear(self) -> int:
        count = len(self.items)
        self.items.clear()
        return count

    def get_stats(self) -> None:
        return None

    @property
    def size(self) -> int:
        return len(self.items)

    @property
    def max_size(self) -> int:
        return self.most


def test_what_a_manager_must_have() -> None:
    assert CacheManager.__abstractmethods__ == ABSTRACT
    with pytest.raises(TypeError, match="abstract"):
        CacheManager()  # type: ignore[abstract]


@pytest.mark.parametrize("missing", sorted(ABSTRACT))
def test_a_manager_without_one_of_them_cannot_be_made(missing: str) -> None:
    body = {name: value for name, value in vars(Shelf).items() if name != missing and not name.startswith("__")}
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (CacheManager,), body)()


def test_utilization_is_the_share_of_the_largest_size() -> None:
    shelf = Shelf(4)
    assert shelf.utilization == 0.0
    shelf.store("a", 1)
    assert shelf.utilization == 0.25
    assert Shelf(0).utilization == 0.0


def test_a_manager_offers_nothing_beyond_the_base_unless_it_says_so() -> None:
    shelf = Shelf(1)
    flags = (shelf.supports_shared_cache, shelf.supports_partial_accept, shelf.supports_cache_transition)
    assert flags == (False, False, False)


def test_the_paged_cache_is_such_a_manager() -> None:
    manager = PagedCacheManager(4, 11, model_name="m")
    assert isinstance(manager, CacheManager)
    manager.get_new_blocks(5)
    assert (manager.size, manager.max_size, manager.utilization) == (5, 11, 5 / 11)
