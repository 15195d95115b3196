"""What is handed over and must not be believed: states of other lengths, layers of other forms, calls that fail."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from omlx_doubles import ForeignSSD, build, finish, pair
from omlx_doubles import layer_dict as raw_layer
from test_own_blocks import FAMILIES, SIZE, assert_equal_layers, feed, run
from test_prefix_cache import TOKENS, Server

from prefixcache._omlx.layer_dicts import layer_dict
from prefixcache._omlx.sized_arrays import SizedArraysCache
from prefixcache.boundary_snapshot_store import BoundarySnapshotSSDStore
from prefixcache.paged_cache import PagedCacheManager
from prefixcache.paged_ssd_cache import PagedSSDCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache

LEFT_OUT = {"state": (), "meta_state": (), "class_name": "KVCache", "cache_type": "KVCache"}


def states_and_rows() -> list[Any]:
    return [ArraysCache(2), KVCache()]


@pytest.mark.parametrize("left_out", ["nothing", "its arrays"])
def test_a_snapshot_without_a_state_is_none(tmp_path: Path, left_out: str) -> None:
    """The state of the whole run must not stand in for it."""
    _, dicts, _ = run(states_and_rows, [8, 16, 24])
    state = {**dicts[16][0], "state": () if left_out == "nothing" else [None, None]}
    server = Server(tmp_path, states_and_rows)
    server.put("a", TOKENS[:24], dicts[24], boundary_snapshots={16: [state, LEFT_OUT]})
    assert server.get("b", [*TOKENS[:16], 99])[1] is None
    server.ssd.close()


def test_a_snapshot_whose_rows_end_elsewhere_is_none(tmp_path: Path) -> None:
    _, dicts, _ = run(states_and_rows, [8, 16, 24])
    server = Server(tmp_path, states_and_rows)
    server.put("a", TOKENS[:24], dicts[24], boundary_snapshots={16: dicts[24], 8: dicts[16]})
    for count in (16, 8):
        assert server.get(f"b{count}", [*TOKENS[:count], 99])[1] is None
    server.ssd.close()


def test_a_list_left_out_of_a_snapshot_is_none(tmp_path: Path) -> None:
    def make() -> list[Any]:
        return [CacheList(ArraysCache(1), KVCache()), KVCache()]

    _, dicts, _ = run(make, [8, 24])
    server = Server(tmp_path, make)
    left_out = {**LEFT_OUT, "class_name": "CacheList", "cache_type": "CacheList"}
    server.put("a", TOKENS[:24], dicts[24], boundary_snapshots={8: [left_out, LEFT_OUT]})
    assert server.get("b", [*TOKENS[:8], 99])[1] is None
    server.ssd.close()


def test_rows_without_those_of_a_layer_are_refused_and_stand_in_nobodys_way(tmp_path: Path) -> None:
    make = FAMILIES["plain"]
    _, dicts, copies = run(make, [16])
    server = Server(tmp_path, make)
    assert server.put("a", TOKENS[:16], [dicts[16][0], LEFT_OUT]) == 0
    assert server.put("b", TOKENS[:16], dicts[16]) == 2
    n, found = server.get("c", TOKENS)
    assert n == 16
    assert_equal_layers(found, copies[16])
    server.ssd.close()


def test_layers_of_another_form_than_expected_are_not_stored(tmp_path: Path) -> None:
    make = FAMILIES["plain"]
    _, dicts, _ = run(make, [16])
    server = Server(tmp_path, make)
    server.ssd.set_expected_layer_signature(["TurboQuantKVCache", "KVCache"])
    assert server.put("a", TOKENS[:16], dicts[16]) == 0
    assert server.get("b", TOKENS) == (0, None)
    server.ssd.close()


def test_rows_of_turboquant_come_back_for_a_model_of_plain_caches(tmp_path: Path) -> None:
    """A server turns plain caches into TurboQuant's at run time and says so."""
    turboquant = pytest.importorskip("mlx_vlm.turboquant", reason="mlx-vlm is not installed")
    cache = turboquant.TurboQuantKVCache(bits=4)
    rows = mx.random.normal((1, 2, 24, 64), key=mx.random.key(1))
    cache.update_and_fetch(rows, rows + 1)
    server = Server(tmp_path, lambda: [KVCache()])
    server.ssd.set_expected_layer_signature(["TurboQuantKVCache"])
    assert server.put("a", TOKENS[:24], [layer_dict(cache)]) == 3
    for request in ("b", "c"):
        n, found = server.get(request, TOKENS[:17])
        assert n == 16
        assert type(found[0]) is type(cache)
        for state, whole in ((found[0].keys, cache.keys), (found[0].values, cache.values)):
            for left, right in zip(state, whole, strict=True):
                assert mx.array_equal(left, right[:, :, :16]).item()
    server.ssd.close()


def test_the_size_of_a_dressed_state_is_no_proof(tmp_path: Path) -> None:
    """It is the length at which it was restored; the request has gone on since."""
    server = Server(tmp_path, lambda: [ArraysCache(2)])
    cache = SizedArraysCache(ArraysCache(2), 8)
    feed([cache._inner], 8, 14)
    server.put("a", TOKENS[:12], [layer_dict(cache)])
    assert server.get("b", TOKENS[:9])[1] is None
    server.ssd.close()


def test_padding_behind_rows_is_not_stored(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda: [KVCache()])
    padded = mx.concatenate([mx.ones((1, 2, 23, 4)), mx.zeros((1, 2, 233, 4))], axis=2)
    layer = {"state": (padded, padded), "meta_state": ("23",), "class_name": "KVCache", "cache_type": "KVCache"}
    assert server.put("a", TOKENS[:24], [layer]) == 2
    n, found = server.get("b", TOKENS[:24])
    assert n == 16
    assert mx.array_equal(found[0].keys, mx.ones((1, 2, 16, 4))).item()
    server.ssd.close()


def test_a_window_that_keeps_more_than_the_first_block(tmp_path: Path) -> None:
    def make() -> list[Any]:
        return [RotatingKVCache(max_size=24, keep=12)]

    _, dicts, copies = run(make, range(SIZE, 49, SIZE))
    server = Server(tmp_path, make)
    server.put("a", TOKENS, dicts[48], boundary_snapshots={n: dicts[n] for n in range(SIZE, 48, SIZE)})
    for n in range(SIZE, 49, SIZE):
        count, found = server.get(f"b{n}", [*TOKENS[:n], 7])
        assert count == n
        assert_equal_layers(found, copies[n])
    server.ssd.close()


@pytest.mark.parametrize("data", [[1], [None], "x", 5, [{}], [{"state": 3}, {}]])
def test_what_is_no_list_of_layers_stores_nothing(tmp_path: Path, data: Any) -> None:
    for ssd in (ForeignSSD(), PagedSSDCacheManager(tmp_path, 1 << 26)):
        cache, paged = build(KVCache, KVCache, ssd=ssd)
        table = cache.store_cache("r", TOKENS[:16], data)
        assert table is None or table.block_ids == []
        assert paged.stats.allocated_blocks == 1


def test_arrays_that_only_their_thread_can_compute_are_refused(tmp_path: Path) -> None:
    lazy: list[Any] = []

    def work() -> None:
        stream = mx.new_stream(mx.default_device())
        with mx.stream(stream):
            lazy.append(mx.ones((1, 2, 16, 4)) * 2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    server = Server(tmp_path, lambda: [KVCache()])
    layer = {"state": (lazy[0], lazy[0]), "meta_state": (), "class_name": "KVCache", "cache_type": "KVCache"}
    # Some releases of MLX can evaluate it here: then it is right.
    n = SIZE * server.put("a", TOKENS[:16], [layer])
    assert server.get("b", TOKENS[:16])[0] == n
    assert server.references() == 0
    server.ssd.close()


class Gone(dict[int, Any]):
    """Snapshots that were cleaned up after somebody asked whether they are there."""

    def __getitem__(self, n: int) -> Any:
        raise OSError(f"snapshot {n} is gone")


@pytest.mark.parametrize("own", [True, False])
def test_snapshots_that_are_gone_cost_themselves_only(tmp_path: Path, own: bool) -> None:
    _, dicts, _ = run(states_and_rows, [24])
    ssd = PagedSSDCacheManager(tmp_path, 1 << 26) if own else ForeignSSD()
    cache, paged = build(lambda: ArraysCache(2), KVCache, ssd=ssd)
    table = cache.store_cache("a", TOKENS[:24], dicts[24], boundary_snapshots=Gone({8: 1, 16: 1}))
    assert table.num_tokens == 24


def test_a_snapshot_that_no_part_can_hold_costs_itself_only(tmp_path: Path) -> None:
    _, dicts, copies = run(states_and_rows, [16, 24])
    strange = {**dicts[16][0], "state": [mx.zeros((1, 2), mx.complex64)] * 2}
    server = Server(tmp_path, states_and_rows)
    assert server.put("a", TOKENS[:24], dicts[24], boundary_snapshots={16: [strange, LEFT_OUT]}) == 3
    n, found = server.get("b", TOKENS[:24])
    assert n == 24
    assert_equal_layers(found, copies[24])
    server.ssd.close()


class Strange(Exception):
    """Of nobody's kind."""


class Raising:
    """An SSD manager, and a model, of which every call fails in its own way."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*values: Any, **named: Any) -> Any:
            raise Strange(name)

        return call

    layers = (1, 2, 3)


def test_whatever_others_raise_is_a_miss() -> None:
    model, paged = Raising(), PagedCacheManager(4, max_blocks=20, model_name="m")
    cache = BlockAwarePrefixCache(model, paged)
    assert cache.expected_num_layers == 3
    cache.set_paged_ssd_cache_manager(Raising())
    layers = [raw_layer("KVCache", pair(0, 8, layer)) for layer in range(3)]
    assert cache.store_cache("a", TOKENS[:8], layers).block_ids == []
    assert paged.stats.allocated_blocks == 1
    table = cache.store_cache("b", TOKENS[:8], [])
    assert cache.preload_blocks(table) == 0
    assert cache.reconstruct_cache(table) is None
    assert (table.block_ids, table.num_tokens) == ([], 0)


@pytest.mark.parametrize("entry", [("__nstate__", "KVCache", None), (None,), 7, "ab", ("__cache_list__", 3), [None]])
def test_entries_of_no_known_shape_are_a_miss(entry: Any) -> None:
    class Odd(ForeignSSD):
        def load_block_with_metadata(self, block_hash: bytes) -> Any:
            return [entry], {}

    cache, paged = build(ssd=Odd())
    finish(cache, paged, "a", cache.store_cache("a", TOKENS[:8], []))
    table, _ = cache.fetch_cache("b", TOKENS[:8])
    assert cache.reconstruct_cache(table) is None


def test_lists_of_rows_are_stored_as_far_as_they_reach() -> None:
    """The last token was never fed: the last block is not whole."""
    ssd = ForeignSSD()
    cache, paged = build(lambda: CacheList(KVCache(), KVCache()), ssd=ssd)

    def layer(n: int) -> dict[str, Any]:
        return raw_layer("CacheList", [pair(0, n), pair(0, n, 1)], (["KVCache", "KVCache"], [(str(n),)] * 2))

    table = cache.store_cache("a", TOKENS[:8], [layer(7)])
    assert table.num_tokens == 4
    finish(cache, paged, "a", table)
    finish(cache, paged, "b", cache.store_cache("b", TOKENS[:12], [layer(12)]))
    table, _ = cache.fetch_cache("c", TOKENS[:13])
    restored = cache.reconstruct_cache(table)
    assert table.num_tokens == 12
    assert [sub.offset for sub in restored[0].caches] == [12, 12]


def test_blobs_of_another_manager_class_are_served(tmp_path: Path) -> None:
    """A directory that was filled through save_block is of use to a manager that stores parts."""

    class Other(PagedSSDCacheManager):
        pass

    make = FAMILIES["plain"]
    _, dicts, copies = run(make, [16])
    first = Server(tmp_path, make, ssd=Other(tmp_path, 1 << 26, expected_model_name="a-model"))
    assert first.put("a", TOKENS[:16], dicts[16]) == 2
    first.ssd.close()
    second = Server(tmp_path, make)
    for request in ("b", "c"):
        n, found = second.get(request, TOKENS[:16])
        assert n == 16
        assert_equal_layers(found, copies[16])
    second.ssd.close()


def test_a_snapshot_of_a_bare_array_loads(tmp_path: Path) -> None:
    store = BoundarySnapshotSSDStore(tmp_path)
    assert store.save("r", 4, None, lambda _: ([{"state": mx.arange(3), "class_name": "Odd"}], None))
    (layer,) = store.load("r", 4)
    assert layer["state"].tolist() == [0, 1, 2]
    assert layer["token_count"] == 4
    store.shutdown()
