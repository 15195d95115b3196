"""One bound on what several managers hold in RAM."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

_logger = logging.getLogger("prefixcache")


class Tier(Protocol):
    """A RAM tier that keeps its own order. What a manager of our own is to the budget."""

    def hot_bytes(self) -> int:
        """Bytes held now."""

    def trim_hot(self, target_bytes: int, protected_hashes: Iterable[bytes]) -> int:
        """Drops what was not used for longest until at most so many bytes are held; bytes freed."""

    def clear_hot_cache(self) -> int:
        """Drops everything that may be dropped; how many blocks."""


class SharedHotCacheBudget:
    """A bound in bytes on the RAM tiers of several managers, of several models, say. Any thread.

    Two kinds of owners: those that account for each of their blocks with ``put`` (any object with the methods that
    ``shrink_to`` and ``clear_all_owners`` call; kept alive while they have blocks here), and those that hold a tier
    with an order of its own (``attach``; not kept alive): these are asked how much they hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        # Least recently used first, over all owners: (owner, bytes).
        self._entries: OrderedDict[tuple[int, bytes], tuple[Any, int]] = OrderedDict()
        self._entry_bytes = 0
        # The one that stored last is the last one.
        self._tiers: OrderedDict[int, weakref.ref[Tier]] = OrderedDict()
        self._settling = threading.Lock()

    def put(self, owner: Any, block_hash: bytes, size: int) -> list[tuple[Any, bytes]]:
        """Accounts for a block as the most recently used one.

        Returns what must go to be within the bound, oldest first: (owner, hash), already taken off the account. The
        block itself stays, however large. The caller drops each one that ``holds`` does not know again by then.
        """
        with self._lock:
            self._take_out((id(owner), block_hash))
            self._entries[(id(owner), block_hash)] = (owner, size)
            self._entry_bytes += size
            victims: list[tuple[Any, bytes]] = []
            bound = self.max_bytes - sum(tier.hot_bytes() for tier in self._live_tiers())
            while self._entry_bytes > bound and len(self._entries) > 1:
                key = next(iter(self._entries))
                victims.append((self._entries[key][0], key[1]))
                self._take_out(key)
            return victims

    def holds(self, owner: Any, block_hash: bytes) -> bool:
        """Whether a block is accounted for: a victim may have been put again before its owner dropped it."""
        with self._lock:
            return (id(owner), block_hash) in self._entries

    def touch(self, owner: Any, block_hash: bytes) -> None:
        """Makes a block the most recently used one."""
        with self._lock:
            if (id(owner), block_hash) in self._entries:
                self._entries.move_to_end((id(owner), block_hash))

    def forget(self, owner: Any, block_hash: bytes) -> None:
        """Takes a block off the account."""
        with self._lock:
            self._take_out((id(owner), block_hash))

    def forget_owner(self, owner: Any) -> None:
        """Takes everything of an owner off the account, and lets go of it."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == id(owner)]:
                self._take_out(key)
            self._tiers.pop(id(owner), None)

    def attach(self, owner: Tier) -> None:
        """Counts the tier of ``owner`` from now on, until ``forget_owner`` or until it is gone."""
        with self._lock:
            self._tiers[id(owner)] = weakref.ref(owner)

    def settle(self, owner: Tier) -> int:
        """``owner`` has just stored something: frees RAM of the tiers that stored longest ago, its own last, until the
        bound holds. Bytes freed."""
        with self._lock:
            if id(owner) in self._tiers:
                self._tiers.move_to_end(id(owner))
        return self._trim_tiers(self.max_bytes, ())

    @property
    def total_bytes(self) -> int:
        """Bytes held by all owners now."""
        with self._lock:
            return self._entry_bytes + sum(tier.hot_bytes() for tier in self._live_tiers())

    @property
    def remaining_bytes(self) -> int:
        """Bytes left below the bound; not below 0."""
        return max(0, self.max_bytes - self.total_bytes)

    def shrink_to(self, target_bytes: int, protected_hashes: Iterable[bytes] | None = None) -> int:
        """Frees RAM until at most ``target_bytes`` are held, least recently used first, protected blocks never.

        Returns the bytes freed.
        """
        protected = frozenset(protected_hashes or ())
        victims: list[tuple[Any, bytes, int]] = []
        with self._lock:
            excess = self.total_bytes - target_bytes
            for (number, block_hash), (owner, size) in list(self._entries.items()):
                if excess <= 0:
                    break
                if block_hash not in protected:
                    victims.append((owner, block_hash, size))
                    self._take_out((number, block_hash))
                    excess -= size
        # Outside of the lock: owners take their own locks and may call back.
        for owner, block_hash, _ in victims:
            if self.holds(owner, block_hash):
                continue
            entry = owner._hot_cache_remove(block_hash, update_budget=False)
            if entry is not None:
                owner._handle_hot_cache_eviction(block_hash, entry)
        return sum(size for _, _, size in victims) + self._trim_tiers(target_bytes, protected)

    def clear_all_owners(self) -> int:
        """``clear_hot_cache()`` of every owner; how many blocks they dropped. One that fails is passed over."""
        with self._lock:
            owners = {id(owner): owner for owner, _ in self._entries.values()}
            owners |= {id(tier): tier for tier in self._live_tiers()}
        dropped = 0
        for owner in owners.values():
            try:
                dropped += owner.clear_hot_cache() or 0
            except (ValueError, TypeError, AttributeError, LookupError, RuntimeError, OSError) as error:
                _logger.warning("the RAM tier of %r could not be cleared: %s", type(owner).__name__, error)
        return dropped

    def _trim_tiers(self, target_bytes: int, protected: Iterable[bytes]) -> int:
        # One at a time: two that settle at once would both free the same excess.
        with self._settling:
            freed = 0
            for tier in self._live_tiers():
                excess = self.total_bytes - target_bytes
                if excess <= 0:
                    break
                freed += tier.trim_hot(max(0, tier.hot_bytes() - excess), protected)
            return freed

    def _live_tiers(self) -> list[Tier]:
        with self._lock:
            tiers = [(number, reference()) for number, reference in self._tiers.items()]
            for number, tier in tiers:
                if tier is None:
                    del self._tiers[number]
            return [tier for _, tier in tiers if tier is not None]

    def _take_out(self, key: tuple[int, bytes]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._entry_bytes -= entry[1]
