"""Full states of layers at block boundaries, kept on SSD until their request is done.

Layers that cannot be cut (rings, recurrent states) are copied at each block's end, because what they held there cannot
be had later. One store serves one process; its files mean nothing to others and are removed once it is gone.

A snapshot is one part file of the block store in a session's folder: checksums, one copy, a writer thread that sees
bytes only. Names of files come from a counter, so no request id can reach outside.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import mlx.core as mx

from prefixcache._core import BlockStore, Part, Slots, StatusCode, TokenBuffer, sha256
from prefixcache._omlx.snapshot_layers import decode_layers, encode_layers, slot_name
from prefixcache._omlx.snapshot_sessions import Session, remove_abandoned, remove_all

LayerDict = dict[str, Any]
ExtractFn = Callable[[Any], tuple[list[LayerDict], Any]]

logger = logging.getLogger(__name__)

_NO_PARENT = bytes(32)
_ANY_TOKEN = TokenBuffer([0])
# What broken caches, MLX and the file system raise. Anything else is a bug in `extract_fn` and reaches the caller.
_TROUBLE = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    OSError,
    MemoryError,
)


class BoundarySnapshotSSDStore:
    """Snapshots by request id and token count.

    Any method from any thread. Arrays are evaluated on the thread that calls ``save``, all at once, and copied before
    it returns: the caches may go on. A snapshot can be loaded from then on; its file is written behind. Trouble of any
    kind is False or None and a number in ``get_stats``.
    """

    _MOST_WAITING = 128
    """Snapshots that may wait to be written."""
    _MOST_WAITING_BYTES = 8 << 30
    _ROOM_WAIT_S = 0.02
    """How long ``save`` waits if they do: the writer lets a burst of saves pass before it begins."""
    _SHUTDOWN_TIMEOUT_S = 5.0

    def __init__(self, base_dir: str | os.PathLike[str]) -> None:
        """Takes a new folder below ``<base_dir>/_boundary_snapshots``, and removes those of processes that are gone.

        A base that cannot be used is no error: ``save`` returns False until it can.
        """
        self._base = base_dir
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._keys: dict[Hashable, dict[int, bytes]] = {}
        self._saving: dict[int, Hashable] = {}
        self._waiting: set[bytes] = set()
        self._counts: Counter[str] = Counter()
        self._stopped = False
        self._session: Session | None = None
        self._blocks: BlockStore | None = None
        remove_abandoned(base_dir)
        self._ready()

    def save(self, request_id: Hashable, token_count: int, caches: Any, extract_fn: ExtractFn) -> bool:
        """Keeps what ``extract_fn(caches)`` gives: a list of layer dicts, and a configuration that is not looked at.

        Takes the place of an earlier snapshot for the same count. False, and nothing changed, if it cannot be kept: too
        many wait to be written, the last write failed and the disk was not seen to work since, an element could not
        come back as it was, this request was cleaned up meanwhile.
        """
        number = next(self._numbers)
        with self._lock:
            if self._stopped:
                return False
            self._saving[number] = request_id
        key: bytes | None = None
        try:
            key = self._put(number, token_count, extract_fn(caches)[0])
        except _TROUBLE as error:
            self._note("save_errors", "snapshot of %r at %s not kept: %s", request_id, token_count, error)
        finally:
            kept = self._enter(number, token_count, key)
        return kept

    def _put(self, number: int, token_count: int, layers: list[LayerDict]) -> bytes | None:
        blocks = self._ready()
        if blocks is None:
            raise OSError(f"no folder for snapshots below {self._base}")
        if blocks.stats()["degraded"]:
            raise OSError(f"the disk below {self._base} fails")
        if not layers:
            raise ValueError("no layers")
        for layer in layers:
            if layer.get("token_count", token_count) != token_count:
                raise ValueError(f"a layer's state is that of {layer['token_count']} tokens")
        if self._is_full(blocks):
            self._note("queue_full", "%d snapshots wait to be written", self._MOST_WAITING)
            return None
        count = operator.index(token_count)
        text, arrays = encode_layers(layers)
        slots = Slots([(slot_name(index), array, None, 0) for index, array in enumerate(arrays or [mx.zeros((0,))])])
        key = sha256(b"snapshot %d" % number)
        status, _ = blocks.put(key, _NO_PARENT, count, _ANY_TOKEN, slots, count, count, meta=text, part=Part.state)
        if not status:
            self._note("queue_full" if status.code == StatusCode.FULL else "save_errors", "%s", status.message)
            return None
        return key

    def _enter(self, number: int, token_count: int, key: bytes | None) -> bool:
        """Ends a save. It counts only if nobody cleaned up meanwhile: nothing would ever remove it."""
        with self._lock:
            absent = object()
            request_id = self._saving.pop(number, absent)
            if key is None:
                return False
            useless: bytes | None = key
            if request_id is not absent:
                counts = self._keys.setdefault(request_id, {})
                useless = counts.get(token_count)
                counts[token_count] = key
                self._waiting.add(key)
            self._counts["overtaken" if useless == key else "saves"] += 1
        if useless is not None:
            self._erase([useless])
        return useless != key

    def load(self, request_id: Hashable, token_count: int) -> list[LayerDict] | None:
        """New layer dicts, equal to those that were saved, with evaluated arrays of their own; None if there are none.

        A layer that has a state carries ``"token_count"`` too: its state is that of exactly so many tokens.
        """
        while True:
            key = self._key(request_id, token_count)
            if key is None or self._blocks is None:
                self._count("load_misses")
                return None
            found = self._blocks.load(key, Part.state)
            if found.status:
                return self._decoded(found.meta, found.take_slots(), token_count)
            if found.status.code == StatusCode.FULL:  # no memory now
                self._note("load_errors", "%s", found.status.message)
                return None
            if self._forget(request_id, token_count, key):
                self._note("load_errors", "snapshot of %r at %d: %s", request_id, token_count, found.status.message)
                return None
            # Another took its place, or it was cleaned up: look again.

    def _decoded(self, text: str, arrays: dict[str, mx.array], token_count: int) -> list[LayerDict] | None:
        try:
            layers = decode_layers(text, arrays)
        except (ValueError, TypeError, KeyError) as error:
            self._note("load_errors", "a snapshot that this version cannot read: %s", error)
            return None
        for layer in layers:
            state = layer.get("state")
            if state is not None and not (isinstance(state, tuple | list) and not state):
                layer["token_count"] = token_count
        self._count("loads")
        return layers

    def has(self, request_id: Hashable, token_count: int) -> bool:
        """Whether ``load`` would find it. Reads no file."""
        key = self._key(request_id, token_count)
        return key is not None and self._blocks is not None and bool(self._blocks.presence([key])[0])

    def cleanup_request(self, request_id: Hashable) -> None:
        """Removes all snapshots of a request, those that are being saved or written at this moment too."""
        with self._lock:
            keys = list(self._keys.pop(request_id, {}).values())
            for number in [number for number, owner in self._saving.items() if owner == request_id]:
                del self._saving[number]
        self._erase(keys)

    def cleanup_all(self) -> None:
        """Removes the snapshots of all requests. The store can be used again."""
        with self._lock:
            keys = [key for counts in self._keys.values() for key in counts.values()]
            self._keys.clear()
            self._saving.clear()
        self._erase(keys)

    def shutdown(self) -> None:
        """Takes no more snapshots, and waits up to 5 seconds for those that wait to be written. Files stay."""
        with self._lock:
            self._stopped = True
        end = time.monotonic() + self._SHUTDOWN_TIMEOUT_S
        while self._blocks is not None and self._still_waiting(self._blocks) and time.monotonic() < end:
            time.sleep(0.002)

    def get_stats(self) -> dict[str, int]:
        """Counters: ``saves``, ``save_errors``, ``queue_full``, ``overtaken`` (cleaned up while being saved),
        ``write_errors``, ``loads``, ``load_misses`` (none there) and ``load_errors`` (damaged, lost or no memory).
        """
        names = ("saves", "save_errors", "queue_full", "overtaken", "loads", "load_misses", "load_errors")
        with self._lock:
            counts = {name: self._counts[name] for name in names}
        errors = self._blocks.stats()["write_errors"] if self._blocks is not None else 0
        return {**counts, "write_errors": int(errors)}

    def _ready(self) -> BlockStore | None:
        with self._lock:
            if self._blocks is not None:
                return self._blocks
            try:
                self._session = self._session or Session(self._base)
                # Snapshots go with their requests: nothing is evicted.
                self._blocks = BlockStore.open(
                    directory=os.fspath(self._session.path),
                    namespace="snapshots",
                    ram_bytes=0,
                    disk_bytes=1 << 60,
                    queue_bytes=self._MOST_WAITING_BYTES,
                    put_wait_seconds=0.0,
                    verify="always",
                )
            except (OSError, ValueError, TypeError, RuntimeError) as error:
                logger.debug("no snapshots below %s: %s", self._base, error)
            return self._blocks

    def _is_full(self, blocks: BlockStore) -> bool:
        # Most calls end here: the store is asked only when many may wait.
        with self._lock:
            if len(self._waiting) < self._MOST_WAITING:
                return False
        end = time.monotonic() + self._ROOM_WAIT_S
        while self._still_waiting(blocks) >= self._MOST_WAITING:
            if time.monotonic() >= end:
                return True
            time.sleep(0.005)
        return False

    def _still_waiting(self, blocks: BlockStore) -> int:
        """How many are in no file yet, those apart that are gone."""
        with self._lock:
            keys = list(self._waiting)
        parts = [found.get(Part.state.name) for found in blocks.presence(keys)]
        done = [key for key, part in zip(keys, parts, strict=True) if part is None or part[1]]
        with self._lock:
            self._waiting.difference_update(done)
            return len(self._waiting)

    def _key(self, request_id: Hashable, token_count: int) -> bytes | None:
        with self._lock:
            return self._keys.get(request_id, {}).get(token_count)

    def _forget(self, request_id: Hashable, token_count: int, key: bytes) -> bool:
        """Forgets a snapshot that is lost. False if another one is there by now, or none."""
        with self._lock:
            counts = self._keys.get(request_id, {})
            if counts.get(token_count) != key:
                return False
            del counts[token_count]
            if not counts:
                del self._keys[request_id]
            return True

    def _erase(self, keys: list[bytes]) -> None:
        if self._blocks is not None and keys:
            status = self._blocks.erase(keys, [Part.state])
            if not status:
                logger.debug("files of snapshots stay until the next start: %s", status.message)
            with self._lock:
                self._waiting.difference_update(keys)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _note(self, counter: str, message: str, *values: object) -> None:
        self._count(counter)
        logger.debug(message, *values)


def reset_boundary_snapshot_root(base: str | os.PathLike[str]) -> None:
    """Removes all sessions below ``base``, for the start of a server; those that another living process holds stay.

    Never raises an OSError: what cannot be removed stays.
    """
    remove_all(base)
