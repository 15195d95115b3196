"""The front door: ``PrefixCache`` and its ``Recorder``."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from prefixcache._core import BlockStore, KeyChain, Status, StatusCode, TokenBuffer
from prefixcache._keys import KvFormat, Salt, key_chain
from prefixcache._layer_state import LayerState, walk
from prefixcache._record import record
from prefixcache._restore import Restored, restore
from prefixcache._results import Hit, StoreReport
from prefixcache._sizes import parse_size
from prefixcache.errors import Unsupported
from prefixcache.type_registry import common_offset, describe_layers, handler_named

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
)
_TROUBLE = ("damaged", "lost", "io_error", "no_memory", "structure_mismatch", "queue_full")

# Requests in flight that may share the hashing of a prompt.
_REMEMBERED_CHAINS = 8
_MOST_SPARE = 1 << 30
# What a block file may hold.
_MOST_BLOCK_SIZE = 1 << 20


class PrefixCache:
    """KV of prompt prefixes, in blocks, in RAM and on SSD. Any method may be called from any thread.

    Open one with ``PrefixCache.open``; use it as a context manager or call ``close``. Two caches may be open on one
    directory, in one process or in several.
    """

    def __init__(self, store: BlockStore, namespace: str, prototypes: Sequence[Any], block_size: int) -> None:
        self._store = store
        self._namespace = namespace
        self._prototypes = list(prototypes)
        self._own = _own_layers(self._prototypes)
        self._spare_rows = self._own is not None and all(
            handler_named(state.type_name).spare_rows for _, state in walk(self._own)
        )
        self._block_size = block_size
        # Blocks of another size under the same parent would pass for shorter or longer ones of this cache.
        self._key_space = f"{namespace}/{block_size}"
        self._closed = False
        self._lock = threading.Lock()
        self._chains: deque[KeyChain] = deque(maxlen=_REMEMBERED_CHAINS)
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))
        self._hit_reasons: Counter[str] = Counter()
        self._store_reasons: Counter[str] = Counter()

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
    ) -> PrefixCache:
        """Opens, or makes, the cache below ``directory`` for one model.

        ``model`` gives the namespace (its fingerprint) and the cache classes (its ``make_cache()``, else mlx-lm's
        default); an explicit ``namespace`` (1..128 characters of ``[A-Za-z0-9._-]``) and empty prototype ``caches``,
        one a layer, may replace it. ``block_size`` is in tokens. ``ram``, ``disk`` and ``queue`` (what may wait to be
        written; default: half of ``ram``, at least 1 GB) are bytes or texts such as ``"4GB"``; ``ram=0`` means no RAM
        tier. ``write``: ``"through"``, or ``"ram_only"`` (then ``directory`` may be None). ``verify``: checksums are
        compared on the ``"first"`` read of a block since open, ``"always"`` or ``"never"``. ``threads``: for copies; 0
        chooses.

        ValueError or TypeError for bad options, and for a directory that others can write to.
        """
        if not _is_count(block_size) or not 1 <= block_size <= _MOST_BLOCK_SIZE:
            raise ValueError(f"block_size is {block_size!r}, expected an int, 1..{_MOST_BLOCK_SIZE}")
        if not _is_count(threads) or threads > 256:
            raise ValueError(f"threads is {threads!r}, expected an int, 0..256")
        if directory == "":
            raise ValueError("directory is '', expected a path (None only with write='ram_only')")
        if model is None and (namespace is None or caches is None):
            raise ValueError("open needs a model, or a namespace and prototype caches")
        prototypes = _make_caches(model) if caches is None else list(caches)
        _own_layers(prototypes)
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
        )
        return cls(store, name, prototypes, block_size)

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
    ) -> Hit:
        """The longest stored prefix of ``tokens``, as caches that are ready to go on.

        ``tokens``: a list, tuple, ``array.array``, numpy or MLX integer array of the prompt. ``salt``: who may share
        (None: everybody); ``extra_keys``: ``(start, end, key)`` for what stands behind a range of tokens, such as an
        image; ``kv_format``: ``(bits, group_size, start)`` of a quantised cache. ``spare``: rows of room behind the
        prefix; by default enough for the next prefill chunk and some decoding; 0 for rows to be merged into a batch.

        A miss is a ``Hit`` that is false and holds fresh caches. ValueError or TypeError for bad tokens or salts.
        """
        started = time.perf_counter()
        if spare is not None and (type(spare) is not int or not 0 <= spare <= _MOST_SPARE):
            raise ValueError(f"spare is {spare!r}, expected rows, 0..{_MOST_SPARE}")
        chain = self._chain(tokens, salt, extra_keys, kv_format)
        total = len(chain.tokens)
        restored = Restored(0, None, "too_short" if total < 2 else "unsupported_type")
        if self._closed:
            restored = Restored(0, None, "closed")
        elif total >= 2 and self._own is not None:
            room = spare if self._spare_rows else 0
            own = None if kv_format is not None else [state.type_name for state in self._own]
            restored = restore(self._store, chain, self._prototypes, own, total - 1, room)
        hit = Hit(
            caches=copy.deepcopy(self._prototypes) if restored.caches is None else restored.caches,
            cached_tokens=restored.n,
            remaining=tokens.slice(restored.n, total) if isinstance(tokens, TokenBuffer) else tokens[restored.n :],
            reason=restored.reason,
            diverged_at=restored.diverged_at,
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
            return Recorder(self, chain, hit, 0, kv_format)
        if hit.chain is not None and hit.chain.tokens.common_prefix(chain.tokens) < hit.cached_tokens:
            raise ValueError(f"the first {hit.cached_tokens} tokens are not those of the hit")
        # Under other salts or content keys, or in another form, nothing of it is stored yet.
        blocks = hit.cached_tokens // self._block_size
        same = hit.chain is not None and hit.chain.root == chain.root and hit.chain.keys[:blocks] == chain.keys[:blocks]
        return Recorder(self, chain, hit.caches, hit.cached_tokens if same else 0, kv_format)

    def store(
        self,
        tokens: Any,
        caches: Sequence[Any],
        *,
        covers: int | None = None,
        salt: Salt = None,
        extra_keys: ContentKeys | None = None,
        kv_format: KvFormat | None = None,
    ) -> StoreReport:
        """Stores the rows of ``tokens`` from ``caches``, whole blocks and the tail; what is there is not copied again.

        ``caches`` may stand at more tokens than these, never at fewer. ``covers``: how many tokens they stand at, if
        not what their layers count. Nothing is kept of a cache class that no handler knows: the report's ``reason``
        says so.

        ValueError or TypeError, naming the layer, for objects that are no caches, layers that disagree, several
        sequences in one cache, and for more tokens than rows. Nothing stored is harmed.
        """
        chain = self._chain(tokens, salt, extra_keys, kv_format)
        return self._record(chain, caches, len(chain.tokens), kv_format, covers)

    def flush(self) -> None:
        """Waits until everything accepted so far is on disk. OSError if a write failed since the last flush, ValueError
        on a closed cache."""
        _raise(self._store.flush())

    def stats(self) -> dict[str, Any]:
        """Counters since open and sizes now, in bytes and tokens; the store's own under its names."""
        with self._lock:
            return {
                **self._counts,
                "hit_reasons": dict(self._hit_reasons),
                "store_reasons": dict(self._store_reasons),
                **self._store.stats(),
            }

    def clear(self) -> None:
        """Forgets everything stored for this namespace. OSError if a file could not be removed, ValueError on a closed
        cache."""
        _raise(self._store.clear())

    def close(self) -> None:
        """Writes what waits and stops. Every later fetch is a miss. Safe to call twice."""
        self._closed = True
        self._store.close()

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

    def _record(
        self,
        chain: KeyChain,
        caches: Sequence[Any],
        upto: int,
        kv_format: KvFormat | None,
        covers: int | None = None,
        first_block: int = 0,
        tail: bool = True,
    ) -> StoreReport:
        try:
            states = describe_layers(caches)
        except Unsupported as refusal:
            return self._count_store(StoreReport(reason=refusal.reason, detail=str(refusal)))
        rows = common_offset(states)
        self._check_form(states, kv_format)
        if covers is not None and not _is_count(covers):
            raise ValueError(f"covers is {covers!r}, expected a number of tokens")
        stands_at = rows if covers is None else covers
        if rows is not None and stands_at is not None and stands_at > rows:
            raise ValueError(f"covers is {covers}, but the layers hold {rows} tokens")
        if stands_at is None or upto > stands_at:
            raise ValueError(f"{upto} tokens were given, but the caches stand at {stands_at}")
        if upto < 1:
            return self._count_store(StoreReport(reason="too_short", detail="there is no token to store"))
        return self._count_store(record(self._store, chain, states, upto, first_block, tail))

    def _check_form(self, states: Sequence[LayerState], kv_format: KvFormat | None) -> None:
        """ValueError for layers that could not be handed out again under these keys."""
        own = self._own or []
        if len(states) != len(own):
            raise ValueError(f"{len(states)} caches were given, the model has {len(own)} layers")
        for i, (state, mine) in enumerate(zip(states, own, strict=True)):
            if kv_format is None and (state.type_name, dict(state.meta)) != (mine.type_name, dict(mine.meta)):
                raise ValueError(
                    f"layer {i} is a {state.type_name} {dict(state.meta)}, the model's own is a {mine.type_name} "
                    f"{dict(mine.meta)}: say which form it has with kv_format=(bits, group_size, start)"
                )
            form = state.meta.get("bits"), state.meta.get("group_size")
            if kv_format is not None and form not in ((None, None), tuple(kv_format[:2])):
                raise ValueError(f"layer {i} has bits and group_size {form}, kv_format says {tuple(kv_format[:2])}")

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
            self._store_reasons[report.reason] += 1
            first = self._store_reasons[report.reason] == 1
        if first and report.reason in _TROUBLE:
            self._warn("a store kept less", report.reason)
        return report

    def _warn(self, what: str, reason: str) -> None:
        # Once for each reason: the counters tell how often. Imported here, since trouble is rare and import is not.
        import logging

        error = self._store.stats()["last_error"]
        logging.getLogger("prefixcache").warning("%s: %s (%s); from now on see stats()", what, reason, error)


class Recorder:
    """Stores one request's blocks as they become complete. For one thread at a time.

    It keeps the list of caches it was given, and reads their arrays only inside ``advance`` and ``finish``.
    """

    def __init__(
        self, cache: PrefixCache, chain: KeyChain, caches: Sequence[Any], start: int, kv_format: KvFormat | None
    ) -> None:
        self._cache = cache
        self._chain = chain
        self._caches = caches
        self._kv_format = kv_format
        self._stored_blocks = start // cache.block_size

    def next_cut(self, n: int) -> int:
        """Where the next prefill chunk that starts at token ``n`` should end at the earliest: a block boundary."""
        if not _is_count(n):
            raise ValueError(f"n is {n!r}, expected a number of tokens")
        return (n // self._cache.block_size + 1) * self._cache.block_size

    def advance(self, n: int, tokens: Any = None) -> StoreReport:
        """Says that the caches now stand at ``n`` tokens, the last ``len(tokens)`` of them decoded behind the prompt.

        Stores the blocks that became complete; where none did, it returns at once and looks at nothing. ValueError if
        the caches stand at fewer tokens, or if ``n`` is beyond the tokens known.
        """
        if tokens is not None and len(tokens) > 0:
            self._chain.extend(tokens)
        self._check(n)
        whole = n // self._cache.block_size
        if whole <= self._stored_blocks:
            return StoreReport(stored_tokens=self._stored_blocks * self._cache.block_size)
        report = self._cache._record(
            self._chain, self._caches, n, self._kv_format, first_block=self._stored_blocks, tail=False
        )
        self._stored_blocks = max(self._stored_blocks, report.stored_tokens // self._cache.block_size)
        return report

    def _check(self, n: int) -> None:
        if not _is_count(n) or n > len(self._chain.tokens):
            raise ValueError(f"n is {n!r}, but only {len(self._chain.tokens)} tokens are known")

    def finish(self, n: int | None = None) -> StoreReport:
        """Stores what is left, the short block behind the last whole one included. ``n``: tokens the caches stand at;
        default: all tokens known."""
        upto = len(self._chain.tokens) if n is None else n
        self._check(upto)
        return self._cache._record(self._chain, self._caches, upto, self._kv_format, first_block=self._stored_blocks)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
