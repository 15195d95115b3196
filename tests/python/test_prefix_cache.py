"""The prefix cache over our own managers: what is served, to whom, and what a store on disk cannot change."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from test_own_blocks import FAMILIES, assert_equal_layers, feed, run

from prefixcache._omlx.layer_dicts import layer_dict
from prefixcache._omlx.sized_arrays import SizedArraysCache
from prefixcache._rotating_subclass import PrefillReadyRotatingKVCache
from prefixcache.paged_cache import PagedCacheManager
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache

SIZE = 8
TOKENS = list(range(1000, 1048))
ENDS = range(SIZE, 49, SIZE)


class Model:
    """What a model tells of its caches."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self.make_cache = make


class Server:
    """One prefix cache with managers of its own over a directory."""

    def __init__(
        self,
        directory: Path,
        make: Callable[[], list[Any]] = FAMILIES["plain"],
        name: str = "a-model",
        ssd: PagedSSDCacheManager | None = None,
        **options: Any,
    ) -> None:
        model = Model(make)
        self.paged = PagedCacheManager(SIZE, max_blocks=options.pop("max_blocks", 200), model_name=name)
        self.cache = BlockAwarePrefixCache(model, self.paged)
        if ssd is None:
            ssd = PagedSSDCacheManager(
                directory,
                options.pop("max_size", 1 << 28),
                expected_model_name=name,
                expected_num_layers=self.cache.expected_num_layers,
                expected_block_size=SIZE,
                **options,
            )
        self.ssd = ssd
        self.paged.set_paged_ssd_cache_manager(ssd)
        self.cache.set_paged_ssd_cache_manager(ssd)

    def put(self, request: str, tokens: Sequence[int], layers: Any, **options: Any) -> int:
        """Stores as a worker does; how many blocks."""
        table = self.cache.store_cache(request, list(tokens), layers, **options)
        count = len(table.block_ids)
        self.paged.release_for_eviction(table.block_ids)
        self.cache.clear_request_entry(request)
        return count

    def get(self, request: str, tokens: Sequence[int], **salts: Any) -> tuple[int, list[Any] | None]:
        """The number of tokens of a hit, and its caches; all references are given back."""
        table, remaining = self.cache.fetch_cache(request, list(tokens), **salts)
        if table is None:
            assert remaining == list(tokens)
            return 0, None
        assert remaining == list(tokens)[table.num_tokens :]
        caches = self.cache.reconstruct_cache(table)
        n = table.num_tokens
        assert n == SIZE * len(table.block_ids)
        self.cache.release_cache(request)
        return n, caches

    def references(self) -> int:
        return sum(block.ref_count for block in self.paged.allocated_blocks.values() if not block.is_null)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.ssd.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_served_here_and_after_a_restart(tmp_path: Path, family: str) -> None:
    make = FAMILIES[family]
    _, dicts, copies = run(make, [*ENDS, 50])
    server = Server(tmp_path, make)
    tokens = [*TOKENS, 7, 8]
    assert server.put("a", tokens, dicts[50], boundary_snapshots={n: dicts[n] for n in ENDS}) == 6
    for count in (50, 49, 48, 31, 8):
        n, caches = server.get(f"b{count}", [*tokens[:count], 5])
        assert n == count // SIZE * SIZE
        assert_equal_layers(caches, copies[n])
    assert server.references() == 0
    server.ssd.close()
    again = Server(tmp_path, make)
    n, caches = again.get("c", tokens)
    assert n == 48
    assert_equal_layers(caches, copies[48])
    assert again.ssd.get_stats().loads == 6
    again.ssd.close()


def test_restored_caches_have_the_classes_that_batches_merge(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda: [KVCache(), RotatingKVCache(max_size=12), ArraysCache(2)])
    caches = server.cache.model.make_cache()
    feed(caches, 0, 48)
    server.put("a", TOKENS, [layer_dict(cache) for cache in caches])
    n, found = server.get("b", TOKENS)
    assert n == 48
    assert [type(cache) for cache in found] == [KVCache, PrefillReadyRotatingKVCache, SizedArraysCache]
    assert [found[0].offset, found[0].keys.shape[2]] == [48, 48]
    assert [found[1].offset, found[1].size(), found[2].size()] == [48, 12, 48]
    server.ssd.close()


def test_a_changed_signature_shows_nothing_of_the_one_before(server: Server) -> None:
    _, dicts, _ = run(FAMILIES["plain"], [48])
    server.put("a", TOKENS, dicts[48])
    names = ["KVCache", "TurboQuantKVCache"]
    assert server.ssd.set_expected_layer_signature(names) is True
    server.ssd.invalidate_stale_layer_signature()
    server.cache.clear()
    assert server.get("b", TOKENS) == (0, None)
    assert server.ssd.set_expected_layer_signature(["KVCache", "KVCache"]) is True
    server.cache.clear()
    assert server.get("c", TOKENS)[0] == 48


@pytest.mark.parametrize(
    "other",
    [
        {"name": "another-model"},
        {"make": lambda: [KVCache()]},
        {"make": lambda: [KVCache(), RotatingKVCache(max_size=64)]},
    ],
)
def test_other_models_in_the_same_directory_see_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    _, dicts, copies = run(FAMILIES["plain"], [48])
    first = Server(tmp_path)
    first.put("a", TOKENS, dicts[48])
    second = Server(tmp_path, **other)
    assert second.get("b", TOKENS) == (0, None)
    caches = second.cache.model.make_cache()
    feed(caches, 0, 48)
    second.put("a", TOKENS, [layer_dict(cache) for cache in caches])
    assert second.get("c", TOKENS)[0] == 48
    n, found = first.get("d", TOKENS)
    assert n == 48
    assert_equal_layers(found, copies[48])
    first.ssd.close()
    second.ssd.close()


def test_a_draft_model_shares_the_manager_and_nothing_else(tmp_path: Path) -> None:
    target = Server(tmp_path)
    draft = Server(tmp_path, lambda: [KVCache()], "a-draft", ssd=target.ssd)
    caches = [KVCache()]
    feed(caches, 0, 48)
    draft.put("r", TOKENS, [layer_dict(caches[0])])
    assert target.ssd._expected_layer_cache_types is None
    target.ssd.set_expected_layer_signature(["TurboQuantKVCache", "KVCache"])
    target.ssd.invalidate_stale_layer_signature()
    n, found = draft.get("s", TOKENS)
    assert n == 48
    assert_equal_layers(found, caches)
    assert target.get("t", TOKENS) == (0, None)
    target.ssd.close()


def test_equal_tokens_with_other_salts_are_other_blocks(server: Server) -> None:
    """An image stands in the third block; the first two do not depend on it."""
    salts = [{"extra_key_ranges": [(17, (image,))]} for image in ("cat", "dog")]
    copies = []
    for number, salt in enumerate(salts):
        caches = [KVCache(), KVCache()]
        feed(caches, 0, 16)
        for cache in caches:
            rows = mx.full((1, 2, 32, 4), 100 + number)
            cache.update_and_fetch(rows, rows)
        copies.append(caches)
        assert server.put(f"a{number}", TOKENS, [layer_dict(cache) for cache in caches], **salt) == 6
    for number, salt in enumerate(salts):
        n, found = server.get(f"b{number}", TOKENS, **salt)
        assert n == 48
        assert_equal_layers(found, copies[number])
    assert server.get("c", TOKENS)[0] == 16
    assert server.get("d", TOKENS, extra_key_ranges=[(17, ("bird",))])[0] == 16


def test_rows_that_are_not_there_are_not_stored(server: Server) -> None:
    _, dicts, copies = run(FAMILIES["plain"], [SIZE, 15])
    assert server.put("a", TOKENS[:16], dicts[15]) == 1
    n, found = server.get("b", TOKENS[:16])
    assert n == SIZE
    assert_equal_layers(found, copies[SIZE])


def test_a_state_that_comes_later_completes_its_blocks(tmp_path: Path) -> None:
    make = FAMILIES["states"]
    _, dicts, copies = run(make, [*ENDS, 50])
    server = Server(tmp_path, make)
    server.put("a", [*TOKENS, 1, 2], dicts[50])
    assert server.get("b", TOKENS)[1] is None
    server.put("c", TOKENS[:24], dicts[24])
    n, found = server.get("d", TOKENS)
    assert n == 24
    assert_equal_layers(found, copies[24])
    server.ssd.close()


def test_a_block_that_was_removed_shortens_the_hit(server: Server) -> None:
    _, dicts, copies = run(FAMILIES["plain"], [16, 48])
    server.put("a", TOKENS, dicts[48])
    table, _ = server.cache.fetch_cache("b", TOKENS)
    hashes = [server.paged.allocated_blocks[block_id].block_hash for block_id in table.block_ids]
    assert server.ssd.delete_block(hashes[2]) is True
    caches = server.cache.reconstruct_cache(table)
    assert (table.num_tokens, len(table.block_ids)) == (16, 2)
    assert_equal_layers(caches, copies[16])
    server.cache.release_cache("b")
    assert server.references() == 0
    assert server.get("c", TOKENS)[0] == 16


def test_a_forgotten_block_is_a_miss_until_it_is_stored_again(server: Server) -> None:
    _, dicts, _ = run(FAMILIES["plain"], [48])
    server.put("a", TOKENS, dicts[48])
    table, _ = server.cache.fetch_cache("b", TOKENS)
    block_hash = server.paged.allocated_blocks[table.block_ids[1]].block_hash
    assert server.ssd.forget_block(block_hash) is True
    assert server.cache.reconstruct_cache(table) is not None
    assert table.num_tokens == SIZE
    server.cache.release_cache("b")
    server.put("c", TOKENS, dicts[48])
    assert server.get("d", TOKENS)[0] == 48


def test_a_model_that_tells_no_classes_is_served_whole_blocks(tmp_path: Path) -> None:
    _, dicts, copies = run(FAMILIES["plain"], [48])

    def refuse() -> list[Any]:
        raise RuntimeError("no caches yet")

    server = Server(tmp_path, refuse)
    assert server.cache.expected_num_layers == 0
    assert server.put("a", TOKENS, dicts[48]) == 6
    n, found = server.get("b", TOKENS)
    assert n == 48
    assert_equal_layers(found, copies[48])
    server.ssd.close()


def test_layers_that_nobody_understands_are_refused_and_counted(server: Server) -> None:
    _, dicts, _ = run(FAMILIES["plain"], [48])
    for layers in (
        [{**dicts[48][0], "class_name": "StrangeCache"}, dicts[48][1]],
        [{**dicts[48][0], "state": 7}, dicts[48][1]],
        dicts[48][:1],
    ):
        before = server.ssd.get_stats().errors
        assert server.put("a", TOKENS, layers) == 0
        assert server.ssd.get_stats().errors == before + 1
    assert server.get("b", TOKENS) == (0, None)


@pytest.mark.parametrize("tokens", [[-1] * 16, ["a"] * 16, [1 << 40] * 16])
def test_tokens_that_are_none_are_a_miss(server: Server, tokens: list[Any]) -> None:
    _, dicts, _ = run(FAMILIES["plain"], [16])
    assert server.cache.store_cache("a", tokens, dicts[16]) is None
    table, remaining = server.cache.fetch_cache("b", tokens)
    assert table is None
    assert remaining is tokens


def test_the_pool_reuses_what_nobody_holds_and_never_mixes_prompts(tmp_path: Path) -> None:
    """A pool of nine blocks, prompts of six: what is forgotten is found again on disk."""
    server = Server(tmp_path, max_blocks=10)
    prompts = [[seed * 100 + token for token in range(48)] for seed in range(5)]
    copies = []
    for seed, prompt in enumerate(prompts):
        caches = [KVCache(), KVCache()]
        feed(caches, seed * 1000, seed * 1000 + 48)
        copies.append(copy.deepcopy(caches))
        assert server.put(f"a{seed}", prompt, [layer_dict(cache) for cache in caches]) == 6
    for _ in range(2):
        for seed, prompt in enumerate(prompts):
            n, found = server.get(f"b{seed}", prompt)
            assert n == 48
            assert_equal_layers(found, copies[seed])
    server.ssd.close()


def test_threads_may_call_everything_at_once(tmp_path: Path) -> None:
    """Two inference threads and two workers over prompts that share their beginnings; every hit is exact."""
    server = Server(tmp_path, max_blocks=60, hot_cache_max_bytes=1 << 16)
    beginning = TOKENS[:16]
    prompts = [beginning + [seed * 50 + token for token in range(24)] for seed in range(8)]
    copies: list[list[Any]] = []
    for seed in range(8):
        caches = [KVCache(), KVCache()]
        feed(caches, 0, 16)
        for cache in caches:
            rows = mx.arange(24, dtype=mx.float32).reshape(1, 1, 24, 1) + mx.zeros((1, 2, 1, 4)) + seed
            cache.update_and_fetch(rows, rows)
        mx.eval([cache.state[:2] for cache in caches])
        copies.append(caches)
    dicts = [[layer_dict(cache) for cache in caches] for caches in copies]
    mx.eval([[layer["state"][:2] for layer in layers] for layers in dicts])
    failures: list[str] = []
    start = threading.Barrier(5)

    def store(worker: int) -> None:
        start.wait()
        for turn in range(30):
            seed = (turn * 3 + worker) % 8
            server.put(f"s{worker}.{turn}", prompts[seed], dicts[seed])

    def serve(thread: int) -> None:
        start.wait()
        for turn in range(60):
            seed = (turn * 5 + thread) % 8
            n, found = server.get(f"f{thread}.{turn}", prompts[seed])
            for cache, whole in zip(found or (), copies[seed], strict=False):
                if not mx.array_equal(cache.keys, whole.keys[..., :n, :]).item():
                    failures.append(f"prompt {seed}, {n} tokens")

    def administer() -> None:
        start.wait()
        for _ in range(30):
            server.cache.get_stats_dict()
            server.ssd.get_stats()
            server.ssd.shrink_hot_cache_to(1 << 14)
            server.paged.handle_memory_pressure(20)
            server.ssd.clear_hot_cache()

    with ThreadPoolExecutor(5) as pool:
        tasks = [pool.submit(store, i) for i in range(2)] + [pool.submit(serve, i) for i in range(2)]
        tasks.append(pool.submit(administer))
        for task in tasks:
            task.result()
    assert failures == []
    assert server.references() == 0
    stats = server.cache.get_stats()
    assert stats.hits + stats.misses == 120
    server.ssd.close()


def test_a_store_without_data_is_found_and_not_restored(server: Server) -> None:
    assert server.put("a", TOKENS, []) == 6
    table, remaining = server.cache.fetch_cache("b", TOKENS)
    assert (table.num_tokens, remaining) == (48, [])
    assert server.cache.reconstruct_cache(table) is None
    assert (table.num_tokens, table.block_ids) == (0, [])
    assert server.references() == 0
