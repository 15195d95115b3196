"""A small serving scheduler: the calls that one makes of the cache, in their order and on their threads.

It wires up this package's managers as a server of oMLX does, runs requests of one sequence each on the caller's thread
(the *inference thread*), and hands finished ones to a store worker of one thread. It asks the cache for nothing that
such a server would not ask, and trusts it with as much.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache
from omlx_extract import LayerDict, evaluate, extract, extract_boundary, is_sliceable, is_stateful, merged
from runs import KvFormat

from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore
from prefixcache.paged_cache import BlockTable, PagedCacheManager
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache

# One for the process: a worker's whole store keeps the inference thread from clearing MLX's buffers.
_MX_BUFFERS = threading.RLock()


@dataclass(frozen=True)
class Salts:
    """What else than tokens and model a request's rows depend on."""

    extra_keys: tuple[Any, ...] | None = None
    extra_key_token_start: int | None = None
    extra_key_ranges: list[tuple[int, tuple[Any, ...]]] | None = None

    def arguments(self) -> dict[str, Any]:
        return vars(self).copy()


TEXT = Salts()


@dataclass
class Request:
    """``tokens``: the prompt and what was emitted; the caches stand at ``n``. ``inputs``: what the model is fed in
    their place (an image has tokens that say nothing about what it shows)."""

    rid: str
    prompt: list[int]
    salts: Salts
    inputs: list[int]
    caches: list[Any]
    cached_tokens: int = 0
    n: int = 0
    full_hit: bool = False
    output: list[int] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)
    # Where each chunk ended that the model was run for.
    ends: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class SnapshotProvider:
    """Snapshots of other boundaries than the one stored: read when they are asked for, on the thread that asks."""

    def __init__(self, load: Callable[[int], list[LayerDict] | None], counts: Sequence[int]) -> None:
        self._load = load
        self._counts = set(counts)
        self.asked: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, count: object) -> bool:
        return count in self._counts

    def __getitem__(self, count: int) -> list[LayerDict] | None:
        self.asked.append(count)
        return self._load(count) if count in self._counts else None


def aligned_block_size(wanted: int, caches: Sequence[Any], least: int = 16) -> int:
    """Blocks of a model with a window are a multiple of it. ValueError for several. ``least``: 512 in a server."""
    windows = {cache.max_size for cache in _leaves(caches) if isinstance(cache, RotatingKVCache)}
    if not windows:
        return wanted
    if len(windows) > 1:
        raise ValueError(f"several windows: {sorted(windows)}")
    window = windows.pop()
    return window if window >= least else -(-least // window) * window


def _leaves(caches: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for cache in caches:
        found += _leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


class Scheduler:
    """One engine. ``ssd``: another engine's manager, which a draft model shares.
    ``raw``: states are handed over as the installed mlx-lm has them. ``align``: blocks fit the model's window."""

    def __init__(
        self,
        model: Any,
        directory: Path | None,
        *,
        model_name: str = "model",
        block_size: int = 16,
        step: int | None = None,
        max_blocks: int = 1000,
        initial_blocks: int = 8,
        ssd: PagedSSDCacheManager | None = None,
        layer_types: list[str] | None = None,
        kv_format: KvFormat | None = None,
        raw: bool = False,
        align: bool = True,
        **ssd_options: Any,
    ) -> None:
        self.model, self.model_name, self.kv_format, self.raw = model, model_name, kv_format, raw
        prototype = make_prompt_cache(model)
        self.stateful = is_stateful(prototype)
        self.block_size = aligned_block_size(block_size, prototype) if align else block_size
        self.step = step or self.block_size
        self.paged = PagedCacheManager(
            block_size=self.block_size, max_blocks=max_blocks, model_name=model_name, initial_blocks=initial_blocks
        )
        self.prefix = BlockAwarePrefixCache(model, self.paged)
        self.directory, self.owns_ssd = directory, ssd is None
        self.ssd = ssd or self._open_ssd(directory, ssd_options)
        self.paged.set_paged_ssd_cache_manager(self.ssd)
        self.prefix.set_paged_ssd_cache_manager(self.ssd)
        ram_only = ssd_options.get("hot_cache_only", False)
        self.boundaries = None if ram_only or directory is None else BoundarySnapshotSSDStore(directory)
        self.prefix.set_cold_restore_callback(lambda *_: False)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="omlx-store-cache")
        if self.owns_ssd:
            self.refresh_layer_signature(layer_types or [type(cache).__name__ for cache in prototype])
        # In place of a file: the layer dicts themselves, where there is no store or it refused.
        self._snapshots: dict[str, dict[int, list[LayerDict] | None]] = {}
        self._stores: dict[str, Future[BlockTable | None]] = {}
        self.providers: list[SnapshotProvider] = []
        self.captured: list[tuple[str, int]] = []
        self._names = itertools.count()

    def _open_ssd(self, directory: Path | None, options: dict[str, Any]) -> PagedSSDCacheManager:
        settings: dict[str, Any] = {
            "max_size_bytes": 1 << 30,
            "expected_model_name": self.model_name,
            "expected_num_layers": self.prefix.expected_num_layers,
            "expected_block_size": self.block_size,
            "expected_block_size_tokens": self.block_size,
            "expected_kv_bytes_per_token": 1024,
        }
        return PagedSSDCacheManager(directory, **{**settings, **options})

    def refresh_layer_signature(self, layer_types: list[str]) -> int:
        """Once the form of the rows is known. Returns how many blocks of another form were dropped."""
        self.ssd.set_expected_layer_signature(layer_types)
        return self.ssd.invalidate_stale_layer_signature()

    # The inference thread: a request from its arrival to its end.

    def admit(
        self, prompt: Sequence[int], salts: Salts = TEXT, *, inputs: Sequence[int] | None = None, pressure: bool = False
    ) -> Request:
        """Fetches what is known of the prompt. ``inputs``: what the model is to be fed, if not the tokens."""
        self.poll()
        prompt = list(prompt)
        rid = f"request-{next(self._names)}"
        request = Request(rid, prompt, salts, list(inputs or prompt), make_prompt_cache(self.model))
        table, remaining = self.prefix.fetch_cache(rid, prompt, **salts.arguments())
        if table is None or table.num_tokens == 0:
            assert table is not None or remaining is prompt, "a miss gives the caller's own list back"
            return request
        if not pressure:
            self.prefix.preload_blocks(table)
        caches = self.prefix.reconstruct_cache(table, **({"promote_to_hot_cache": False} if pressure else {}))
        if caches is None:
            self.paged.delete_block_table(rid)
            return request
        cached = table.num_tokens
        assert 0 < cached <= len(prompt)
        assert cached == self.block_size * len(table.block_ids)
        if cached == len(prompt):
            request.full_hit = True
            if self.stateful or not _trim_one(caches):
                self.paged.delete_block_table(rid)
                return request
            cached -= 1
        request.caches, request.cached_tokens, request.n = caches, cached, cached
        return request

    def prefill(self, request: Request, upto: int | None = None) -> None:
        """All tokens of the prompt but the last, which starts the answer. Stops at ``upto`` if that is before."""
        end = len(request.prompt) - 1
        while request.n < min(end, upto or end):
            stop = min(request.n + self.step, end)
            if self.stateful:
                stop = min(stop, (request.n // self.block_size + 1) * self.block_size)
            self._run(request, stop)
            if self.stateful and stop % self.block_size == 0:
                self._capture(request, again=False)
        if upto is None:
            self._run(request, end + 1)

    def decode(self, request: Request, answer: Sequence[int], feed_last: bool = True) -> None:
        """Emits tokens one by one; each has been fed to the model when it is. A stop token need not be."""
        for number, token in enumerate(answer, 1):
            request.output.append(token)
            if len(request.inputs) < len(request.tokens):
                request.inputs.append(token)
            if number == len(answer) and not feed_last:
                return
            self._run(request, request.n + 1)
            if self.stateful and len(request.tokens) % self.block_size == 0:
                self._capture(request, again=True)

    def _run(self, request: Request, stop: int) -> None:
        logits = self.model(mx.array([request.inputs[request.n : stop]]), cache=request.caches)
        if self.kv_format is not None:
            bits, group_size, first = self.kv_format
            maybe_quantize_kv_cache(request.caches, first, group_size, bits)
        mx.eval(logits)
        request.logits.append(logits)
        request.ends.append(stop)
        request.n = stop

    def _capture(self, request: Request, again: bool) -> None:
        """A copy of what cannot be sliced later, at the number of tokens that the caches stand at."""
        kept = self._snapshots.setdefault(request.rid, {})
        if request.n in kept and not again:
            return
        self.captured.append((request.rid, request.n))
        caches = [None if is_sliceable(cache) else cache for cache in request.caches]
        if self.boundaries is not None and self.boundaries.save(
            request.rid, request.n, caches, partial(extract_boundary, raw=self.raw)
        ):
            kept[request.n] = None
            return
        layers, _ = extract_boundary(caches, self.raw)
        layers = [{**layer, "state": _own_arrays(layer["state"])} for layer in layers]
        evaluate(layers)
        kept[request.n] = layers

    def finish(self, request: Request, *, thinking: bool = False, pressure: bool = False) -> None:
        """Hands the request to the store worker. ``thinking``: the answer is not part of what is kept."""
        tokens = request.prompt if thinking else request.tokens
        layers, config = extract(request.caches, self.model_name, self.raw)
        if not layers:
            self._forget(request)
            return
        tokens, layers, snapshots = self._at_boundary(request, tokens, layers)
        evaluate(layers)
        options: dict[str, Any] = {"model_cache_config": config, "boundary_snapshots": snapshots}
        if pressure:
            options["hot_cache_write_back"] = False
        self._stores[request.rid] = self.worker.submit(
            self._store, request.rid, tokens, layers, {**options, **request.salts.arguments()}
        )

    def _at_boundary(
        self, request: Request, tokens: list[int], layers: list[LayerDict]
    ) -> tuple[list[int], list[LayerDict], SnapshotProvider | None]:
        """What is stored of a model that cannot be sliced: up to the latest boundary of which a snapshot is there."""
        kept = self._snapshots.get(request.rid, {})
        counts = sorted(count for count in kept if count <= len(tokens))
        boundary = self._snapshot(request.rid, counts[-1]) if counts else None
        if boundary is None:
            return tokens, layers, None
        rid = request.rid
        provider = SnapshotProvider(lambda count: self._snapshot(rid, count), counts[:-1])
        self.providers.append(provider)
        return tokens[: counts[-1]], merged(boundary, layers), provider

    def _snapshot(self, rid: str, count: int) -> list[LayerDict] | None:
        kept = self._snapshots.get(rid, {}).get(count)
        if kept is None and self.boundaries is not None:
            return self.boundaries.load(rid, count)
        return kept

    # The store worker.

    def _store(
        self, rid: str, tokens: list[int], layers: list[LayerDict], options: dict[str, Any]
    ) -> BlockTable | None:
        with _MX_BUFFERS:
            mx.synchronize()
            stored = self.prefix.store_cache(rid, tokens, layers, **options)
            table = stored or self.paged.get_block_table(rid)
            if table is not None:
                self.paged.release_for_eviction(table.block_ids)
            self.prefix.clear_request_entry(rid)
            return stored

    # The inference thread again: what happens between steps.

    def poll(self) -> None:
        """Cleans up after stores that have ended; what went wrong in one is raised here."""
        for rid in [rid for rid, store in self._stores.items() if store.done()]:
            self._stores.pop(rid).result()
            self._drop_snapshots(rid)
        with _MX_BUFFERS:
            mx.clear_cache()

    def settle(self) -> None:
        """Waits for all stores."""
        for store in list(self._stores.values()):
            store.result(timeout=60)
        self.poll()

    def abort(self, request: Request) -> None:
        """The client went away, at any time before the end."""
        table = self.paged.get_block_table(request.rid)
        if table is not None:
            self.paged.release_for_eviction(table.block_ids)
        self.prefix.clear_request_entry(request.rid)
        self._drop_snapshots(request.rid)

    def reject(self, request: Request) -> None:
        """There was no room for it after all."""
        self.prefix.release_cache(request.rid)

    def _forget(self, request: Request) -> None:
        self.abort(request)

    def _drop_snapshots(self, rid: str) -> None:
        self._snapshots.pop(rid, None)
        if self.boundaries is not None:
            self.boundaries.cleanup_request(rid)

    def recover(self) -> None:
        """After an error in the engine: nothing that is held in memory is trusted any more."""
        self.settle()
        self.prefix.clear()
        self._snapshots.clear()
        if self.boundaries is not None:
            self.boundaries.cleanup_all()

    def serve(
        self,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        salts: Salts = TEXT,
        *,
        thinking: bool = False,
        feed_last: bool = True,
        **how: Any,
    ) -> Request:
        """A whole request, up to the end of its store."""
        request = self.admit(prompt, salts, **how)
        self.prefill(request)
        self.decode(request, answer, feed_last)
        self.finish(request, thinking=thinking, pressure=how.get("pressure", False))
        self.settle()
        return request

    def close(self) -> None:
        self.settle()
        self.worker.shutdown()
        if self.boundaries is not None:
            self.boundaries.shutdown()
        if self.owns_ssd:
            self.ssd.close()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own_arrays(state: Any) -> Any:
    """Array objects of our own: caches change theirs in place."""
    if isinstance(state, mx.array):
        return mx.array(state)
    if isinstance(state, list | tuple):
        return type(state)(_own_arrays(item) for item in state)
    return state


def _trim_one(caches: Sequence[Any]) -> bool:
    """Takes the last token back on every layer. False where one cannot."""
    for cache in caches:
        if isinstance(cache, CacheList):
            if not _trim_one(cache.caches):
                return False
            continue
        taken = cache.trim(1)
        if taken is not None and taken < 1:
            return False
    return True
