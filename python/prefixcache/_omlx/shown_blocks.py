"""Which of a store's blobs a manager shows: its own kind, as far as it was not told to forget them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from prefixcache._omlx.blobs import BlobMetadata, Blobs
from prefixcache._omlx.ssd_index import Expected, PagedSSDCacheIndex

_logger = logging.getLogger("prefixcache")


class ShownBlocks:
    """What is known of each blob that was seen, and whether it may be shown. Any thread.

    A blob that was found is judged by what is expected of it when it is first seen; one that was saved here is shown.
    """

    def __init__(self, blobs: Blobs, max_size_bytes: int) -> None:
        self._blobs = blobs
        self._lock = threading.RLock()
        self._shown = PagedSSDCacheIndex(max_size_bytes)
        self._others = PagedSSDCacheIndex(max_size_bytes)
        self._forgotten: set[bytes] = set()
        self._all_seen = False
        self.damaged = 0

    def find(self, block_hash: bytes, expected: Expected) -> BlobMetadata | None:
        """What is known of a blob that is there and may be shown."""
        before = self._known(block_hash)
        if not self._blobs.present(block_hash):
            with self._lock:
                # Unless it was saved since it was looked for.
                if before is not None and self._known(block_hash) is before:
                    self.dropped(block_hash)
            return None
        with self._lock:
            known = self._shown.get(block_hash)
            if block_hash in self._forgotten or self._others.contains(block_hash):
                return None
        if isinstance(known, BlobMetadata):
            return known
        try:
            found = self._blobs.read(block_hash)
        except ValueError as error:
            self.drop_damaged(block_hash, error)
            return None
        return None if found is None else self.judge(found, expected)

    def _known(self, block_hash: bytes) -> object:
        with self._lock:
            return self._shown.get(block_hash) or self._others.get(block_hash)

    def judge(self, blob: BlobMetadata, expected: Expected) -> BlobMetadata | None:
        """The blob if it may be shown. It is judged again only after ``judge_anew``."""
        with self._lock:
            mine = expected.accepts(blob) and blob.block_hash not in self._forgotten
            (self._shown if mine else self._others).add(blob)
            (self._others if mine else self._shown).remove(blob.block_hash)
        return blob if mine else None

    def judge_anew(self) -> None:
        """What is expected has changed: blobs that may not be shown are to be looked at again."""
        with self._lock:
            for block in self._others.get_all_metadata():
                self._others.remove(block.block_hash)
            self._all_seen = False

    def see_all(self, expected: Expected) -> list[BlobMetadata]:
        """Judges the blobs of the directory that were not seen yet, once; those that may not be shown."""
        with self._lock:
            if self._all_seen:
                return []
            self._all_seen = True
        others = []
        for blob in self._blobs.listed():
            with self._lock:
                seen = self._shown.contains(blob.block_hash) or self._others.contains(blob.block_hash)
            if not seen and self.judge(blob, expected) is None:
                others.append(blob)
        return others

    def sweep(self, expected: Expected) -> int:
        """Hides blobs of the expected model whose layers are of other types than expected; how many."""
        found = self.see_all(expected)
        with self._lock:
            stale = [
                block
                for block in (*self._shown.get_all_metadata(), *found)
                if block.model_name == expected.model_name and expected.is_stale(block)
            ]
            for block in stale:
                self._shown.remove(block.block_hash)
                self._others.add(block)
        return len(stale)

    def saved(self, blob: BlobMetadata) -> None:
        """It was saved here: shown, whatever it is."""
        with self._lock:
            self._forgotten.discard(blob.block_hash)
            self._others.remove(blob.block_hash)
            self._shown.add(blob)

    def remember(self, block_hashes: Iterable[bytes]) -> None:
        """They were stored, in whatever form: they are not forgotten any more."""
        with self._lock:
            self._forgotten.difference_update(block_hashes)

    def touch(self, block_hash: bytes) -> None:
        """Used now."""
        self._shown.touch(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Hides a block until it is saved again."""
        with self._lock:
            self._forgotten.add(block_hash)
            known = self._shown.remove(block_hash)
            if known is not None:
                self._others.add(known)

    def is_forgotten(self, block_hash: bytes) -> bool:
        """Whether it was forgotten and not saved since."""
        return block_hash in self._forgotten

    def dropped(self, block_hash: bytes) -> None:
        """The blob is not there (any more)."""
        with self._lock:
            self._shown.remove(block_hash)
            self._others.remove(block_hash)

    def drop_damaged(self, block_hash: bytes, error: Exception) -> None:
        """Removes a blob that cannot be understood: asked for again and again, it would fail again and again."""
        _logger.warning("a stored block is dropped: %s", error)
        self._blobs.erase(block_hash)
        with self._lock:
            self.dropped(block_hash)
            self.damaged += 1

    def clear(self) -> None:
        """Everything is gone."""
        with self._lock:
            for index in (self._shown, self._others):
                for block_hash in index.get_all_hashes():
                    index.remove(block_hash)
            self._forgotten.clear()

    def shown(self) -> list[BlobMetadata]:
        """What is shown and still known to the store, least recently used first."""
        return self._there(self._shown)

    def others(self) -> list[BlobMetadata]:
        """What was seen, is still known to the store and is not shown."""
        return self._there(self._others)

    def _there(self, index: PagedSSDCacheIndex) -> list[BlobMetadata]:
        blocks = [block for block in index.get_all_metadata() if isinstance(block, BlobMetadata)]
        there = self._blobs.known([block.block_hash for block in blocks])
        return [block for block, known in zip(blocks, there, strict=True) if known]
