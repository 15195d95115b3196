"""The front door: ``PrefixCache``."""

from __future__ import annotations

import copy
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from prefixcache._boundary import deepest_boundary
from prefixcache._core import BlockStore, KeyChain, Status, StatusCode, TokenBuffer, sha256
from prefixcache._doors import Doors
from prefixcache._keys import KvFormat, Salt, key_chain
from prefixcache._layer_state import LayerState, encode_structure, walk
from prefixcache._parts import needs_of
from prefixcache._recorder import Recorder
from prefixcache._registry import common_offset, describe_layers, handler_named, reaches_of
from prefixcache._restore import Restored, restore
from prefixcache._results import Hit, StoreReport
from prefixcache._sizes import checked_wait, is_count, parse_size
from prefixcache._storing import Snapshots, Storing, check_snapshots
from prefixcache.errors import Unsupported

ContentKeys = Iterable[tuple[int, int, Salt]]

_COUNTERS = (
    "fetches",
    "hits",
    "requested_tokens",
    "cached_tokens",
    "cached_tokens_ram",
    "cached_tokens_ssd",
    "stores",
    "stored_bytes",
    "stored_states",
    "dropped_states",
)
_TROUBLE = ("damaged", "lost", "io_error", "no_memory", "structure_mismatch", "queue_full")

# Requests in flight that may share the hashing of a prompt.
_REMEMBERED_CHAINS = 8
_MOST_SPARE = 1 << 30
# Tokens that a further recurrent state must save.
_LEAST_GAIN = 64
# What a block file may hold.
_MOST_BLOCK_SIZE = 1 << 20
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,128}")


class PrefixCache:
    """KV of prompt prefixes, in blocks, in RAM and on SSD. Any method may be called from any thread.

    Open one with ``PrefixCache.open``; use it as a context manager or call ``close``. Two caches may be open on one
    directory, in one process or in several.
    """

    def __init__(
        self,
        store: BlockStore,
        namespace: str,
        prototypes: Sequence[Any],
        own: list[LayerState] | None,
        block_size: int,
        state_interval: int,
        doors: Doors[PrefixCache] | None = None,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._prototypes = list(prototypes)
        self._own = own
        self._spare_rows = self._own is not None and all(
            handler_named(state.type_name).spare_rows for _, state in walk(self._own)
        )
        self._block_size = block_size
        self._needs = needs_of(reaches_of(self._prototypes) if self._own is not None else ())
        # Blocks of another size under the same parent would pass for shorter or longer ones of this cache, and rows of
        # layers with another window for those of these.
        form = "" if self._own is None else sha256(encode_structure(self._own).encode()).hex()
        self._key_space = f"{namespace}/{block_size}/{form}"
        interval = -(-state_interval // block_size) * block_size
        self._storing = Storing(store, self._own, self._needs, interval, self._count_store)
        self._lock = threading.Lock()
        self._chains: deque[KeyChain] = deque(maxlen=_REMEMBERED_CHAINS)
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))
        self._hit_reasons: Counter[str] = Counter()
        self._store_reasons: Counter[str] = Counter()
        self._snapshot_reasons: Counter[str] = Counter()
        self._doors = Doors(self._key_space, self) if doors is None else doors

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str] | None,
        model: Any = None,
        *,
        namespace: str | None = None,
        caches: Sequence[Any] | None = None,
        block_size: int = 256,
        ram: int | str = "4GB",
        disk: int | str = "100GB",
        write: str = "through",
        verify: str = "first",
        queue: int | str | None = None,
        threads: int = 0,
        state_interval: int = 8192,
        disk_wait_seconds: float = 2.0,
        flush_wait_seconds: float = 60.0,
    ) -> PrefixCache:
        """Opens, or makes, the cache below ``directory`` for one model.

        ``model`` gives the namespace (its fingerprint) and the cache classes (its ``make_cache()``, else mlx-lm's
        default); an explicit ``namespace`` (1..128 characters of ``[A-Za-z0-9._-]``) and empty prototype ``caches``,
        one a layer, may replace it. ``block_size`` is in tokens. ``ram``, ``disk`` and ``queue`` (what may wait to be
        written; default: half of ``ram``, at least 1 GB) are bytes or texts such as ``"4GB"``; ``ram=0`` means no RAM
        tier. ``write``: ``"through"``, ``"back"`` (when a part leaves the RAM, at ``flush`` and at ``close``), or
        ``"ram_only"`` (then ``directory`` may be None). ``verify``: checksums are
        compared on the ``"first"`` read of a block since open, ``"always"`` or ``"never"``. ``threads``: for copies; 0
        chooses. ``state_interval``: of the recurrent states of a growing conversation the newest are kept, and one
        every so many tokens (rounded up to whole blocks). ``disk_wait_seconds``: how long a fetch may wait for the
        disk (reads: a second more for each 64 MB) before it is a miss; ``flush_wait_seconds``: how long ``flush`` and
        ``close`` wait without a sign of life from it.

        ValueError or TypeError for bad options, and for a directory that others can write to.
        """
        if not is_count(block_size) or not 1 <= block_size <= _MOST_BLOCK_SIZE:
            raise ValueError(f"block_size is {block_size!r}, expected an int, 1..{_MOST_BLOCK_SIZE}")
        if not is_count(threads) or threads > 256:
            raise ValueError(f"threads is {threads!r}, expected an int, 0..256")
        if not is_count(state_interval) or state_interval < 1:
            raise ValueError(f"state_interval is {state_interval!r}, expected a number of tokens, 1 or more")
        if directory == "":
            raise ValueError("directory is '', expected a path (None only with write='ram_only')")
        if model is None and (namespace is None or caches is None):
            raise ValueError("open needs a model, or a namespace and prototype caches")
        prototypes = _make_caches(model) if caches is None else list(caches)
        own = _own_layers(prototypes)
        ram_bytes = parse_size(ram, "ram")
        queue_bytes = max(1 << 30, ram_bytes // 2) if queue is None else parse_size(queue, "queue")
        name = _fingerprint(model) if namespace is None else namespace
        store = BlockStore.open(
            directory="" if directory is None else os.path.abspath(os.path.expanduser(directory)),
            namespace=name,
            ram_bytes=ram_bytes,
            disk_bytes=parse_size(disk, "disk"),
            queue_bytes=queue_bytes,
            write=write,
            verify=verify,
            threads=threads,
            disk_wait_seconds=checked_wait(disk_wait_seconds, "disk_wait_seconds"),
            flush_wait_seconds=checked_wait(flush_wait_seconds, "flush_wait_seconds"),
        )
        return cls(store, name, prototypes, own, block_size, state_interval)

    def beside(
        self, model: Any = None, *, namespace: str | None = None, caches: Sequence[Any] | None = None
    ) -> PrefixCache:
        """Another front door to the same store: for a draft model, or for other cache classes of this model.

        ``model`` gives the namespace and the cache classes as in ``open``; its fingerprint is taken once. Without it
        ``caches`` must be given, and ``namespace`` is this cache's own unless given. The two share RAM, disk, block
        size and state interval, never a block: keys cover the namespace and the form of the caches. Where these are
        equal the same object is returned. ``flush``, ``clear`` and ``close`` of one are for all; counters are each
        one's own.

        ValueError or TypeError without cache classes, and for prototypes that are not empty or are no caches.
        """
        if model is None and caches is None:
            raise ValueError("beside needs a model or prototype caches")
        plain = model is not None and namespace is None and caches is None
        known = self._doors.of_model(model) if plain else None
        if known is not None:
            return known
        name = namespace
        if name is None:
            name = self._namespace if model is None else _fingerprint(model)
        if not _NAMESPACE.fullmatch(name):
            raise ValueError(f"namespace is {name!r}, expected 1..128 characters of [A-Za-z0-9._-]")
        prototypes = _make_caches(model) if caches is None else list(caches)
        # The interval is in whole blocks already.
        own, interval = _own_layers(prototypes), self._storing.interval
        door = PrefixCache(self._store, name, prototypes, own, self._block_size, interval, self._doors)
        if door._own is not None:
            door = self._doors.the_one(door._key_space, door)
        if plain:
            self._doors.remember(model, door)
        return door

    @property
    def namespace(self) -> str:
        """What must be equal for KV to be shared."""
        return self._namespace

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    def fetch(
        self,
        tokens: Any,
        *,
        salt: Salt = None,
        extra_keys: ContentKeys | None = None,
        kv_format: KvFormat | None = None,
        spare: int | None = None,
        limit: int | None = None,
    ) -> Hit:
        """The longest stored prefix of ``tokens``, as caches that are ready to go on.

        ``tokens``: a list, tuple, ``array.array``, numpy or MLX integer array of the prompt. ``salt``: who may share
        (None: everybody); ``extra_keys``: ``(start, end, key)`` for what stands behind a range of tokens, such as an
        image; ``kv_format``: ``(bits, group_size, start)`` of a quantised cache (before token ``start`` its rows are
        plain: fetch and record them without it). ``spare``: rows of room behind the
        prefix; by default enough for the next prefill chunk and some decoding; 0 for rows to be merged into a batch.
        ``limit``: no longer prefix than this many tokens.

        A miss is a ``Hit`` that is false and holds fresh caches. ValueError or TypeError for bad tokens or salts.
        """
        started = time.perf_counter()
        if spare is not None and (type(spare) is not int or not 0 <= spare <= _MOST_SPARE):
            raise ValueError(f"spare is {spare!r}, expected rows, 0..{_MOST_SPARE}")
        if limit is not None and not is_count(limit):
            raise ValueError(f"limit is {limit!r}, expected a number of tokens")
        chain = self._chain(tokens, salt, extra_keys, kv_format)
        total = len(chain.tokens)
        most = total - 1 if limit is None else min(limit, total - 1)
        restored = Restored(0, None, "too_short" if total < 2 else "unsupported_type")
        if self._doors.closed:
            restored = Restored(0, None, "closed")
        elif total >= 2 and self._own is not None:
            room = spare if self._spare_rows else 0
            own = None if kv_format is not None else [state.type_name for state in self._own]
            find = partial(deepest_boundary, self._store, chain, self._needs)
            restored = restore(self._store, chain, find, self._prototypes, own, self._needs, most, room)
        hit = Hit(
            caches=copy.deepcopy(self._prototypes) if restored.caches is None else restored.caches,
            cached_tokens=restored.n,
            remaining=tokens.slice(restored.n, total) if isinstance(tokens, TokenBuffer) else tokens[restored.n :],
            reason=restored.reason,
            diverged_at=restored.diverged_at,
            checkpoint=self._wanted_checkpoint(restored),
            tiers=restored.tiers,
            bytes=restored.bytes,
            seconds=time.perf_counter() - started,
            chain=chain,
        )
        self._count_fetch(hit, total)
        return hit

    def record(
        self,
        tokens: Any,
        hit: Hit | Sequence[Any],
        *,
        salt: Salt = None,
        extra_keys: ContentKeys | None = None,
        kv_format: KvFormat | None = None,
    ) -> Recorder:
        """Follows a request while it is prefilled and decoded, and stores each block as it becomes complete.

        ``hit``: what ``fetch`` returned for these tokens, or the list of live caches. The salts are those of the fetch.
        """
        chain = self._chain(tokens, salt, extra_keys, kv_format, lend=False)
        if not isinstance(hit, Hit):
            return Recorder(self._storing, chain, hit, 0, 0, None, kv_format)
        if hit.chain is not None and hit.chain.tokens.common_prefix(chain.tokens) < hit.cached_tokens:
            raise ValueError(f"the first {hit.cached_tokens} tokens are not those of the hit")
        # Under other salts or content keys, or in another form, nothing of it is stored yet.
        blocks = hit.cached_tokens // self._block_size
        same = hit.chain is not None and hit.chain.root == chain.root and hit.chain.keys[:blocks] == chain.keys[:blocks]
        stored = hit.cached_tokens if same else 0
        return Recorder(self._storing, chain, hit.caches, hit.cached_tokens, stored, hit.checkpoint, kv_format)

    def store(
        self,
        tokens: Any,
        caches: Sequence[Any],
        *,
        covers: int | None = None,
        salt: Salt = None,
        extra_keys: ContentKeys | None = None,
        kv_format: KvFormat | None = None,
        snapshots: Snapshots | None = None,
    ) -> StoreReport:
        """Stores the rows of ``tokens`` from ``caches``, whole blocks and the tail; what is there is not copied again.

        ``caches`` may stand at more tokens than these, never at fewer. ``covers``: how many tokens they stand at, if
        not what their layers count. Nothing is kept of a cache class that no handler knows: the report's ``reason``
        says so. A sliding window still holds only its last rows, and a recurrent state only the last one: enough to
        stand at the end of ``tokens``, not before. ``snapshots`` adds what earlier ends need: it maps numbers of tokens
        to the caches as they stood there (copies, lists like ``caches``; None for one that is missing after all).

        ValueError or TypeError, naming the layer, for objects that are no caches, layers that disagree, several
        sequences in one cache, and for more tokens than rows. Nothing stored is harmed.
        """
        if covers is not None and not is_count(covers):
            raise ValueError(f"covers is {covers!r}, expected a number of tokens")
        check_snapshots(snapshots)
        chain = self._chain(tokens, salt, extra_keys, kv_format)
        upto = len(chain.tokens)
        return self._storing.store(chain, caches, upto, kv_format, covers=covers, snapshots=snapshots)

    def flush(self) -> None:
        """Waits until everything accepted so far is on disk.

        OSError if a write failed since the last flush, TimeoutError if the disk gives no sign of life for
        ``flush_wait_seconds`` (what waits still does), ValueError on a closed cache.
        """
        _raise(self._store.flush())

    def stats(self) -> dict[str, Any]:
        """Counters since open and sizes now, in bytes and tokens; the store's own under its names."""
        with self._lock:
            return {
                **self._counts,
                "hit_reasons": dict(self._hit_reasons),
                "store_reasons": dict(self._store_reasons),
                "snapshot_reasons": dict(self._snapshot_reasons),
                **self._store.stats(),
            }

    def clear(self) -> None:
        """Forgets everything stored for this namespace. OSError if a file could not be removed, ValueError on a closed
        cache."""
        _raise(self._store.clear())

    def close(self) -> None:
        """Writes what waits and stops. Every later fetch is a miss. Safe to call twice.

        What cannot be written, or not in time (``flush_wait_seconds``), is lost: a warning is logged.
        """
        self._doors.closed = True
        status = self._store.close()
        if not status:
            _log("not all was written at close: %s", status.message)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chain(
        self,
        tokens: Any,
        salt: Salt,
        extra_keys: ContentKeys | None,
        kv_format: KvFormat | None,
        lend: bool = True,
    ) -> KeyChain:
        """The keys of a request, hashed once: a chain of a recent request lends those of equal leading blocks."""
        buffer = tokens if isinstance(tokens, TokenBuffer) else TokenBuffer(tokens)
        with self._lock:
            recent = list(self._chains)
        nearest = max(recent, key=lambda chain: chain.tokens.common_prefix(buffer), default=None)
        chain = key_chain(self._key_space, buffer, self._block_size, salt, extra_keys, kv_format, nearest)
        # A recorder's chain grows: no other thread may read it meanwhile.
        if lend:
            with self._lock:
                self._chains.append(chain)
        return chain

    def _wanted_checkpoint(self, restored: Restored) -> int | None:
        """Where a state would make later hits longer, unless by few tokens: a state has the bytes of many rows."""
        gain = restored.rows_to - restored.n
        worth = gain >= min(self._block_size, _LEAST_GAIN) or (gain > 0 and restored.n == 0)
        return restored.rows_to if self._needs.state and worth else None

    def _count_fetch(self, hit: Hit, total: int) -> None:
        with self._lock:
            self._counts["fetches"] += 1
            self._counts["hits"] += bool(hit)
            self._counts["requested_tokens"] += total
            self._counts["cached_tokens"] += hit.cached_tokens
            for tier, tokens in hit.tiers.items():
                self._counts[f"cached_tokens_{tier}"] += tokens
            self._hit_reasons[hit.reason] += 1
            first = self._hit_reasons[hit.reason] == 1
        if first and hit.reason in _TROUBLE:
            self._warn("a hit got shorter", hit.reason)

    def _count_store(self, report: StoreReport) -> StoreReport:
        with self._lock:
            self._counts["stores"] += 1
            self._counts["stored_bytes"] += report.bytes
            self._counts["stored_states"] += report.state_bytes > 0
            self._counts["stored_states"] += list(report.snapshots.values()).count("kept") if self._needs.state else 0
            self._counts["dropped_states"] += report.dropped_states
            self._store_reasons[report.reason] += 1
            self._snapshot_reasons.update(report.snapshots.values())
            first = self._store_reasons[report.reason] == 1
        if first and report.reason in _TROUBLE:
            self._warn("a store kept less", report.reason)
        return report

    def _warn(self, what: str, reason: str) -> None:
        # Once for each reason: the counters tell how often.
        _log("%s: %s (%s); from now on see stats()", what, reason, self._store.stats()["last_error"])


def _log(text: str, *values: object) -> None:
    # Imported here, since trouble is rare and import is not.
    import logging

    logging.getLogger("prefixcache").warning(text, *values)


def _raise(status: Status) -> None:
    if status.code == StatusCode.CLOSED:
        raise ValueError("the cache is closed")
    if not status:
        raise OSError(status.error_number, status.message)


def _make_caches(model: Any) -> list[Any]:
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def _own_layers(prototypes: Sequence[Any]) -> list[LayerState] | None:
    """What the model's own caches are; None if there is a class that no handler knows.

    ValueError unless the prototypes are empty.
    """
    try:
        states = describe_layers(prototypes)
    except Unsupported:
        # Their store is refused, with a reason, each time; fetch stays a miss.
        return None
    if common_offset(states):
        raise ValueError(f"prototype caches must be empty, but they hold {common_offset(states)} tokens")
    return states


def _fingerprint(model: Any) -> str:
    # Only a cache opened with a model needs what it imports.
    from prefixcache._fingerprint import model_fingerprint

    return model_fingerprint(model)
