"""One bound in bytes on the RAM tiers of several managers."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from prefixcache._omlx.hot_budget import SharedHotCacheBudget


class Owner:
    """A manager that accounts for each of its blocks, as others than ours do."""

    def __init__(self, budget: SharedHotCacheBudget) -> None:
        self.budget = budget
        self.blocks: dict[bytes, int] = {}
        self.evicted: list[bytes] = []

    def keep(self, block_hash: bytes, size: int) -> None:
        self.blocks[block_hash] = size
        for owner, victim in self.budget.put(self, block_hash, size):
            owner._hot_cache_remove(victim, update_budget=False)

    def _hot_cache_remove(self, block_hash: bytes, update_budget: bool = True) -> Any:
        assert not update_budget
        return self.blocks.pop(block_hash, None)

    def _handle_hot_cache_eviction(self, block_hash: bytes, entry: Any) -> None:
        self.evicted.append(block_hash)

    def clear_hot_cache(self) -> int:
        count = len(self.blocks)
        self.blocks.clear()
        self.budget.forget_owner(self)
        return count


class Tier:
    """A manager whose RAM tier keeps its own order: blocks of a size each, oldest first."""

    def __init__(self, budget: SharedHotCacheBudget) -> None:
        self.budget = budget
        self.blocks: dict[bytes, int] = {}
        budget.attach(self)

    def keep(self, block_hash: bytes, size: int) -> None:
        self.blocks[block_hash] = size
        self.budget.settle(self)

    def hot_bytes(self) -> int:
        return sum(self.blocks.values())

    def trim_hot(self, target_bytes: int, protected_hashes: Iterable[bytes]) -> int:
        freed = 0
        for block_hash in list(self.blocks):
            if self.hot_bytes() <= target_bytes:
                break
            if block_hash not in protected_hashes:
                freed += self.blocks.pop(block_hash)
        return freed

    def clear_hot_cache(self) -> int:
        count = len(self.blocks)
        self.blocks.clear()
        return count


def test_the_oldest_of_all_owners_go_first() -> None:
    budget = SharedHotCacheBudget(100)
    a, b = object(), object()
    assert budget.put(a, b"1", 40) == [] and budget.put(b, b"1", 40) == []
    assert (budget.total_bytes, budget.remaining_bytes) == (80, 20)
    assert budget.put(b, b"2", 40) == [(a, b"1")]
    assert budget.put(a, b"3", 100) == [(b, b"1"), (b, b"2")]
    assert (budget.total_bytes, budget.remaining_bytes) == (100, 0)


def test_the_same_block_again_is_counted_once() -> None:
    budget = SharedHotCacheBudget(100)
    owner = object()
    budget.put(owner, b"1", 60)
    assert budget.put(owner, b"1", 70) == [] and budget.total_bytes == 70


def test_one_block_above_the_bound_stays() -> None:
    budget = SharedHotCacheBudget(100)
    owner = object()
    budget.put(owner, b"1", 10)
    assert budget.put(owner, b"2", 500) == [(owner, b"1")]
    assert (budget.total_bytes, budget.remaining_bytes) == (500, 0)
    assert budget.put(owner, b"3", 1) == [(owner, b"2")]


def test_touched_blocks_stay_longer() -> None:
    budget = SharedHotCacheBudget(100)
    owner = object()
    for name in (b"1", b"2"):
        budget.put(owner, name, 50)
    budget.touch(owner, b"1")
    budget.touch(owner, b"nobody's")
    assert budget.put(owner, b"3", 50) == [(owner, b"2")]


def test_what_is_forgotten_is_not_counted() -> None:
    budget = SharedHotCacheBudget(100)
    a, b = object(), object()
    for owner, name in ((a, b"1"), (a, b"2"), (b, b"1")):
        budget.put(owner, name, 20)
    budget.forget(a, b"1")
    budget.forget(a, b"1")
    assert budget.total_bytes == 40 and not budget.holds(a, b"1") and budget.holds(a, b"2")
    budget.forget_owner(a)
    assert budget.total_bytes == 20 and budget.holds(b, b"1")


def test_shrinking_asks_owners_to_drop_and_passes_protected_blocks_over() -> None:
    budget = SharedHotCacheBudget(1000)
    a, b = Owner(budget), Owner(budget)
    for number in range(4):
        (a if number % 2 else b).keep(bytes([number]), 100)
    assert budget.shrink_to(150, [bytes([0])]) == 300
    assert budget.total_bytes == 100 and list(b.blocks) == [bytes([0])] and not a.blocks
    assert a.evicted == [bytes([1]), bytes([3])] and b.evicted == [bytes([2])]
    # All that is left is protected: nothing more can go.
    assert budget.shrink_to(0, {bytes([0])}) == 0
    assert budget.shrink_to(0) == 100 and budget.total_bytes == 0


def test_shrinking_calls_owners_without_the_lock() -> None:
    budget = SharedHotCacheBudget(1000)

    class Asking(Owner):
        def _handle_hot_cache_eviction(self, block_hash: bytes, entry: Any) -> None:
            thread = threading.Thread(target=lambda: self.evicted.append(str(budget.total_bytes).encode()))
            thread.start()
            thread.join(10)
            assert not thread.is_alive(), "another thread could not ask the budget meanwhile"

    owner = Asking(budget)
    owner.keep(b"1", 10)
    assert budget.shrink_to(0) == 10 and owner.evicted == [b"0"]


def test_a_block_that_was_put_again_is_not_dropped() -> None:
    """A victim on its way out may come back before its owner drops it: the account says which it is."""
    budget = SharedHotCacheBudget(100)
    a, b = Owner(budget), Owner(budget)
    a.keep(b"1", 60)
    (victim,) = budget.put(b, b"2", 60)
    assert victim == (a, b"1") and not budget.holds(*victim)
    assert budget.put(a, b"1", 30) == []  # again, and it fits
    assert budget.holds(*victim) and budget.total_bytes == 90
    # In shrink_to too.
    come_back = [True]

    class Returning(Owner):
        def _hot_cache_remove(self, block_hash: bytes, update_budget: bool = True) -> Any:
            if come_back.pop():
                come_back.append(False)
                self.keep(b"4", 10)  # the next victim, stored anew by another thread
            return super()._hot_cache_remove(block_hash, update_budget)

    budget = SharedHotCacheBudget(100)
    owner = Returning(budget)
    owner.keep(b"3", 10)
    owner.keep(b"4", 10)
    budget.shrink_to(0)
    assert owner.blocks == {b"4": 10} and budget.total_bytes == 10


def test_clearing_all_owners_passes_over_one_that_fails() -> None:
    budget = SharedHotCacheBudget(1000)
    a, tier = Owner(budget), Tier(budget)

    class Broken(Owner):
        def clear_hot_cache(self) -> int:
            raise RuntimeError("closed")

    broken = Broken(budget)
    a.keep(b"1", 1)
    a.keep(b"2", 1)
    broken.keep(b"3", 1)
    tier.keep(b"4", 1)
    assert budget.clear_all_owners() == 3
    assert not a.blocks and not tier.blocks and broken.blocks
    assert budget.total_bytes == 1


def test_tiers_that_stored_longest_ago_are_trimmed_first() -> None:
    budget = SharedHotCacheBudget(100)
    a, b = Tier(budget), Tier(budget)
    a.keep(b"1", 40)
    a.keep(b"2", 40)
    b.keep(b"3", 20)
    assert budget.total_bytes == 100 and budget.remaining_bytes == 0
    b.keep(b"4", 30)
    assert list(a.blocks) == [b"2"] and list(b.blocks) == [b"3", b"4"]
    assert budget.total_bytes <= 100
    # Its own last.
    b.keep(b"5", 90)
    assert not a.blocks and list(b.blocks) == [b"5"]


def test_tiers_and_blocks_share_the_bound() -> None:
    budget = SharedHotCacheBudget(100)
    tier, owner = Tier(budget), Owner(budget)
    tier.keep(b"1", 60)
    owner.keep(b"2", 30)
    owner.keep(b"3", 30)
    assert budget.total_bytes == 90 and list(owner.blocks) == [b"3"]
    tier.keep(b"4", 60)
    assert budget.total_bytes <= 100 and list(tier.blocks) == [b"4"]
    assert budget.shrink_to(10) == 90 and budget.total_bytes == 0


def test_shrinking_tiers_passes_protected_blocks_over() -> None:
    budget = SharedHotCacheBudget(1000)
    a, b = Tier(budget), Tier(budget)
    a.keep(b"1", 10)
    a.keep(b"2", 10)
    b.keep(b"3", 10)
    assert budget.shrink_to(0, [b"1", b"3"]) == 10
    assert list(a.blocks) == [b"1"] and list(b.blocks) == [b"3"]


def test_a_tier_is_not_kept_alive() -> None:
    budget = SharedHotCacheBudget(100)
    tier = Tier(budget)
    tier.keep(b"1", 50)
    reference = weakref.ref(tier)
    del tier
    gc.collect()
    assert reference() is None and budget.total_bytes == 0
    # One that is closed is forgotten.
    other = Tier(budget)
    other.keep(b"1", 50)
    budget.forget_owner(other)
    assert budget.total_bytes == 0


def test_threads_keep_the_account() -> None:
    budget = SharedHotCacheBudget(500)
    owners = [object() for _ in range(4)]

    def work(owner: object) -> None:
        for number in range(500):
            budget.put(owner, bytes([number % 50]), 10)
            budget.touch(owner, bytes([number % 7]))
            if number % 3 == 0:
                budget.forget(owner, bytes([number % 11]))

    threads = [threading.Thread(target=work, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < budget.total_bytes <= 500
    held = sum(budget.holds(owner, bytes([number])) for owner in owners for number in range(50))
    assert budget.total_bytes == 10 * held
