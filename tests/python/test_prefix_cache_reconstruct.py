"""What oMLX's prefix cache gives back per kind of layer: walk-back, meta states, snapshots, the two lines of mlx-lm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, QuantizedKVCache
from omlx_doubles import (
    BLOCK,
    ForeignSSD,
    arrays,
    arrays_layer,
    block,
    build,
    check_kv,
    check_pair,
    check_same,
    check_slots,
    kv_layer,
    layer_dict,
    mock_ssd,
    pair,
    placeholder,
    rows,
    seed,
    state_at,
    window,
    window_layer,
)

from prefixcache._rotating_subclass import PrefillReadyRotatingKVCache
from prefixcache.hybrid_cache import ModelCacheConfig
from prefixcache.type_handlers import SizedArraysCache

TWELVE = list(range(1, 13))
HASHES = [b"hash1", b"hash2", b"hash3"]
KV, ARRAYS, LIST, ROTATING = "KVCache", "ArraysCache", "CacheList", "RotatingKVCache"


def two_lists() -> CacheList:
    return CacheList(KVCache(), KVCache())


def arrays_block(number: int, real: bool) -> Any:
    """A block of a KV layer and a recurrent layer, which has its state or not."""
    start, stop = number * BLOCK, (number + 1) * BLOCK
    return block([pair(start, stop), tuple(state_at(stop)) if real else placeholder()], [KV, ARRAYS])


def loaded(blocks: list[Any], *makers: Callable[[], Any], refs: int = 1) -> Any:
    """A cache over these blocks, its paged manager, a table of them, and the stand-in."""
    ssd = mock_ssd(dict(zip(HASHES, blocks, strict=False)))
    cache, paged = build(*makers, ssd=ssd)
    return cache, paged, seed(paged, "r", HASHES[: len(blocks)], refs), ssd


def test_a_placeholder_in_the_only_block_is_a_miss() -> None:
    cache, *_, table, _ = loaded([block([placeholder()], [ARRAYS])], arrays)
    assert cache.reconstruct_cache(table) is None
    cache, *_, table, _ = loaded([block([placeholder()], [LIST], [([KV, KV], [("4",), ("4",)])])], two_lists)
    assert cache.reconstruct_cache(table) is None


def test_placeholders_in_every_block_are_a_miss() -> None:
    cache, *_, table, _ = loaded([arrays_block(number, False) for number in range(3)], KVCache, arrays)
    assert cache.reconstruct_cache(table) is None


def test_a_state_in_the_last_block_is_enough() -> None:
    blocks = [block([placeholder()], [ARRAYS]), block([tuple(state_at(8))], [ARRAYS])]
    cache, *_, table, _ = loaded(blocks, arrays)
    caches = cache.reconstruct_cache(table)
    assert len(caches) == 1
    assert isinstance(caches[0], SizedArraysCache)
    assert caches[0].size() == 8
    check_slots(caches[0], 8)
    assert (len(table.block_ids), table.num_tokens) == (2, 8)


def test_a_hit_walks_back_to_the_last_state() -> None:
    blocks = [arrays_block(0, False), arrays_block(1, True), arrays_block(2, False)]
    cache, paged, table, ssd = loaded(blocks, KVCache, arrays, refs=2)
    own = [paged.allocated_blocks.get(block_id) for block_id in table.block_ids]
    caches = cache.reconstruct_cache(table)
    check_kv(caches[0], 8)
    check_slots(caches[1], 8)
    assert (table.block_ids, table.num_tokens) == ([own[0].block_id, own[1].block_id], 8)
    assert [one.ref_count for one in own] == [2, 2, 1]
    ssd.forget_block.assert_not_called()


def test_a_hit_walks_back_to_where_every_layer_has_its_state() -> None:
    types = [ARRAYS, ARRAYS]
    real = [[tuple(state_at(n * BLOCK, layer=layer)) for layer in range(2)] for n in range(1, 4)]
    blocks = [
        block(real[0], types),
        block([real[1][0], placeholder()], types),
        block([placeholder(), real[2][1]], types),
    ]
    cache, _, table, _ = loaded(blocks, arrays, arrays)
    caches = cache.reconstruct_cache(table)
    assert table.num_tokens == 4
    check_slots(caches[0], 4)
    check_slots(caches[1], 4, layer=1)


def test_names_of_one_kind_are_equal() -> None:
    blocks = [
        block([placeholder(), pair(0, 4)], ["SizedArraysCache", KV]),
        block([tuple(state_at(8)), pair(4, 8)], [ARRAYS, KV]),
    ]
    cache, _, table, ssd = loaded(blocks, arrays, KVCache)
    ssd._expected_layer_cache_types = [ARRAYS, KV]
    caches = cache.reconstruct_cache(table)
    assert isinstance(caches[0], SizedArraysCache)
    assert caches[0].size() == 8
    check_slots(caches[0], 8)
    check_kv(caches[1], 8)
    ssd.forget_block.assert_not_called()


def saved_metas(ssd: ForeignSSD) -> list[list[tuple[Any, ...]]]:
    return [[tuple(meta) for meta in save["layer_meta_states"]] for save in ssd.saves]


def test_meta_states_of_a_config_are_those_of_the_layers() -> None:
    ssd = ForeignSSD()
    cache, _ = build(KVCache, window, ssd=ssd)
    config = ModelCacheConfig.from_type_list([KV, ROTATING])
    layers = [{**kv_layer(0, 8), "meta_state": ("own",)}, window_layer(8, 1)]
    cache.store_cache("r", TWELVE[:8], layers, model_cache_config=config)
    assert saved_metas(ssd) == [[("own",), ("0", "4", "8", "4")]] * 2
    assert [list(save["layer_cache_types"]) for save in ssd.saves] == [[KV, ROTATING]] * 2


class Provider:
    """Snapshots as a scheduler hands them over: no dict, and one of them can be gone by the time it is asked for."""

    def __init__(self, snapshots: dict[int, Any]) -> None:
        self.snapshots = snapshots

    def __bool__(self) -> bool:
        return bool(self.snapshots)

    def __contains__(self, count: int) -> bool:
        return count in self.snapshots

    def __getitem__(self, count: int) -> Any:
        return self.snapshots[count]


@pytest.mark.parametrize("wrap", [dict, Provider])
def test_a_block_with_a_snapshot_has_its_state_and_its_meta(wrap: Callable[[Any], Any]) -> None:
    ssd = ForeignSSD()
    cache, _ = build(KVCache, window, ssd=ssd)
    config = ModelCacheConfig.from_type_list([KV, ROTATING])
    snapshots = {count: [layer_dict(KV, ()), window_layer(count, 1)] for count in (4, 12)} | {8: None}
    layers = [kv_layer(0, 13), window_layer(13, 1)]
    table = cache.store_cache("r", [*TWELVE, 13], layers, config, wrap(snapshots))
    assert table.num_tokens == 12
    shared = ("13",)
    assert saved_metas(ssd) == [
        [shared, ("0", "4", "4", "4")],
        [shared, ("0", "4", "13", "4")],
        [shared, ("0", "4", "12", "4")],
    ]
    check_pair(ssd.saves[0]["cache_data"][1], pair(0, 4, 1))
    assert [tuple(array.shape) for array in ssd.saves[1]["cache_data"][1]] == [(1,), (1,)]
    check_pair(ssd.saves[2]["cache_data"][1], pair(8, 12, 1))


def test_a_pure_recurrent_model_stores_its_final_state_once() -> None:
    ssd = ForeignSSD()
    cache, _ = build(arrays, ssd=ssd)
    cache.store_cache("r", TWELVE[:7], [arrays_layer(7)])
    assert len(ssd.saves) == 1
    assert len(ssd.saves[0]["cache_data"]) == 1
    check_pair(tuple(ssd.saves[0]["cache_data"][0]), tuple(state_at(7)))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_recurrent_states_of_any_number_come_back(size: int) -> None:
    cache, _ = build(lambda: arrays(size), KVCache, ssd=ForeignSSD())
    table = cache.store_cache("r", TWELVE[:8], [arrays_layer(8, size), kv_layer(0, 8, 1)])
    caches = cache.reconstruct_cache(table)
    assert table.num_tokens == 8
    check_slots(caches[0], 8, size)
    assert caches[0].size() == 8
    check_kv(caches[1], 8, 1)


def test_a_window_comes_back_ready_for_a_prefill() -> None:
    cache, _ = build(window, KVCache, ssd=ForeignSSD())
    table = cache.store_cache("r", TWELVE, [window_layer(12), kv_layer(0, 12, 1)])
    caches = cache.reconstruct_cache(table)
    assert isinstance(caches[0], PrefillReadyRotatingKVCache)
    assert (caches[0].offset, caches[0]._idx, caches[0].max_size, caches[0].keep) == (12, 4, 4, 0)
    check_pair((caches[0].keys, caches[0].values), pair(8, 12))
    assert caches[0].size() == 4
    check_kv(caches[1], 12, 1)


def test_positions_after_a_restore() -> None:
    """KV stands where its rows end, whatever the meta says; a window where its meta says."""
    types, meta = [KV, ROTATING], [("999",), ("0", "4", "8", "4")]
    blocks = [block([pair(0, 4), placeholder()], types, meta), block([pair(4, 8), pair(4, 8, 1)], types, meta)]
    cache, _, table, _ = loaded(blocks, KVCache, window)
    caches = cache.reconstruct_cache(table)
    check_kv(caches[0], 8)
    assert (caches[1].offset, caches[1]._idx) == (8, 4)


def test_restored_rows_end_with_the_prefix() -> None:
    """A caller may read `keys` as they are: there are no rows behind the last token."""
    cache, _, table, _ = loaded([block([pair(0, 4)], [KV]), block([pair(4, 8)], [KV])])
    check_pair((lambda one: (one.keys, one.values))(cache.reconstruct_cache(table)[0]), pair(0, 8))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_an_exact_hit_can_give_back_its_last_token(dtype: mx.Dtype) -> None:
    cache, _ = build(KVCache, ssd=ForeignSSD())
    cache.store_cache("r", TWELVE[:8], [kv_layer(0, 8, dtype=dtype)])
    table, remaining = cache.fetch_cache("s", TWELVE[:8])
    assert list(remaining) == []
    restored = cache.reconstruct_cache(table)[0]
    check_kv(restored, 8, dtype=dtype)
    assert restored.trim(1) == 1
    assert restored.offset == 7
    keys, values = restored.update_and_fetch(*pair(7, 9, dtype=dtype))
    check_pair((keys, values), pair(0, 9, dtype=dtype))


META = ([KV, KV], [("8",), ("8",)])


@pytest.mark.parametrize("meta", [META, [list(META[0]), [["8"], ["8"]]]])
def test_a_list_of_plain_rows_comes_back(meta: Any) -> None:
    blocks = [block([[pair(n * 4, n * 4 + 4), pair(n * 4, n * 4 + 4, 1)]], [LIST], [meta]) for n in range(2)]
    cache, _, table, _ = loaded(blocks, two_lists)
    caches = cache.reconstruct_cache(table)
    assert type(caches[0]).__name__ == LIST
    assert len(caches[0].caches) == 2
    for layer, one in enumerate(caches[0].caches):
        check_kv(one, 8, layer)
    assert caches[0].trim(1) == 1
    assert [one.offset for one in caches[0].caches] == [7, 7]


MIXED = ([KV, ARRAYS], [("8",), ""])


def mixed() -> CacheList:
    return CacheList(KVCache(), arrays())


def mixed_layer(tokens: int) -> dict[str, Any]:
    return layer_dict(LIST, [pair(0, tokens), tuple(state_at(tokens))], ([KV, ARRAYS], [(str(tokens),), ""]))


def check_mixed(cache: Any, tokens: int) -> None:
    assert type(cache).__name__ == LIST
    check_kv(cache.caches[0], tokens)
    check_slots(cache.caches[1], tokens)


def test_a_whole_list_in_the_last_block_is_enough() -> None:
    blocks = [block([placeholder()], [LIST], [MIXED]), block([[pair(0, 8), tuple(state_at(8))]], [LIST], [MIXED])]
    cache, _, table, _ = loaded(blocks, mixed)
    caches = cache.reconstruct_cache(table)
    assert len(caches) == 1
    check_mixed(caches[0], 8)


def test_a_list_with_a_recurrent_part_comes_back() -> None:
    cache, _ = build(mixed, ssd=ForeignSSD())
    table = cache.store_cache("r", TWELVE[:8], [mixed_layer(8)])
    caches = cache.reconstruct_cache(table)
    assert table.num_tokens == 8
    check_mixed(caches[0], 8)


def test_whole_lists_in_every_block_are_not_joined() -> None:
    """Each block has all rows up to its end: those of the last one are the answer."""
    cache, _ = build(mixed, KVCache, ssd=ForeignSSD())
    snapshots = {count: [mixed_layer(count), layer_dict(KV, ())] for count in (4, 8)}
    cache.store_cache("r", TWELVE, [mixed_layer(12), kv_layer(0, 12, 1)], boundary_snapshots=snapshots)
    for count in (4, 8, 12):
        table, _ = cache.fetch_cache(f"s{count}", [*TWELVE[:count], 99])
        caches = cache.reconstruct_cache(table)
        assert table.num_tokens == count
        check_mixed(caches[0], count)
        check_kv(caches[1], count, 1)


def test_a_list_with_a_window_is_that_of_its_last_block() -> None:
    meta = ([KV, ROTATING], [("8",), ("0", "4", "8", "4")])
    cache, _ = build(lambda: CacheList(KVCache(), window()), ssd=ForeignSSD())
    table = cache.store_cache("r", TWELVE[:8], [layer_dict(LIST, [pair(0, 8), pair(4, 8, 1)], meta)])
    caches = cache.reconstruct_cache(table)
    assert table.num_tokens == 8
    rows_of, ring = caches[0].caches
    check_kv(rows_of, 8)
    assert (ring.offset, ring.max_size, ring._idx) == (8, 4, 4)
    check_pair((ring.keys, ring.values), pair(4, 8, 1))


def test_rows_without_a_batch_are_joined_on_their_own_axis() -> None:
    keys, values = (array[0] for array in pair(0, 8))
    cache, _ = build(KVCache, ssd=ForeignSSD())
    table = cache.store_cache("r", TWELVE[:8], [layer_dict(KV, (keys, values), ("8",))])
    caches = cache.reconstruct_cache(table)
    assert caches is not None
    found = caches[0].keys
    check_same(found if found.ndim == 3 else found[0], keys)
    assert caches[0].offset == table.num_tokens == 8


def live(cache: Any) -> dict[str, Any]:
    """The layer dict of a live cache as a scheduler makes it, on either line of mlx-lm."""
    if isinstance(cache, CacheList):
        subs = [live(sub) for sub in cache.caches]
        meta = ([sub["class_name"] for sub in subs], [sub["meta_state"] for sub in subs])
        return layer_dict(LIST, [sub["state"] for sub in subs], meta)
    return layer_dict(type(cache).__name__, cache.state, getattr(cache, "meta_state", ()))


def appended(cache: Any, layer: int = 0, tokens: int = 8, dim: int = 4) -> Any:
    for start in range(0, tokens, BLOCK):
        mx.eval(cache.update_and_fetch(*pair(start, min(start + BLOCK, tokens), layer, dim=dim)))
    return cache


def stored_and_restored(first: Any, make_first: Callable[[], Any]) -> tuple[Any, Any]:
    """Stores the states of two live caches of 8 tokens as they are, the second one plain; what a fetch restores."""
    cache, _ = build(make_first, KVCache, ssd=ForeignSSD())
    cache.store_cache("r", TWELVE[:8], [live(own) for own in (first, appended(KVCache(), 1))])
    table, _ = cache.fetch_cache("s", TWELVE)
    return table, cache.reconstruct_cache(table) if table else None


def test_live_caches_of_plain_rows() -> None:
    table, restored = stored_and_restored(appended(KVCache()), KVCache)
    assert table.num_tokens == 8
    check_kv(restored[0], 8)
    check_kv(restored[1], 8, 1)


def test_a_live_recurrent_cache() -> None:
    recurrent = arrays()
    recurrent[0], recurrent[1] = state_at(8)
    table, restored = stored_and_restored(recurrent, arrays)
    assert table.num_tokens == 8
    check_slots(restored[0], 8)
    check_kv(restored[1], 8, 1)


def test_a_live_list() -> None:
    table, restored = stored_and_restored(CacheList(appended(KVCache()), appended(KVCache(), 1)), two_lists)
    assert table.num_tokens == 8
    for layer, one in enumerate(restored[0].caches):
        check_kv(one, 8, layer)


@pytest.mark.parametrize("make", [lambda: QuantizedKVCache(group_size=32, bits=8), lambda: ChunkedKVCache(16)])
def test_kinds_that_are_not_handled_come_back_whole_or_not_at_all(make: Callable[[], Any]) -> None:
    original = appended(make(), dim=32)
    table, restored = stored_and_restored(original, make)
    if restored is None:
        return
    assert type(restored[0]) is type(original)
    assert restored[0].offset == table.num_tokens == 8
    more = pair(8, 9, dim=32)
    found, expected = restored[0].update_and_fetch(*more), original.update_and_fetch(*more)
    for one, other in zip(found, expected, strict=True):
        pairs = zip(one, other, strict=True) if isinstance(one, tuple | list) else [(one, other)]
        for left, right in pairs:
            check_same(left, right)
    check_kv(restored[1], 8, 1)


def test_the_caches_of_a_request() -> None:
    cache, paged = build(KVCache, ssd=ForeignSSD())
    assert cache.get_cache_for_generation("never seen") == (None, False)
    table = cache.store_cache("r", TWELVE[:8], [kv_layer(0, 8)])
    caches, copied = cache.get_cache_for_generation("r")
    assert copied is False
    check_kv(caches[0], 8)
    cache.fork_cache("r", "s")
    caches, copied = cache.get_cache_for_generation("s")
    assert copied is True
    check_kv(caches[0], 8)
    assert [paged.allocated_blocks.get(block_id).ref_count for block_id in table.block_ids] == [1, 1]
    check_kv(cache.get_cache_for_generation("r")[0][0], 8)


@pytest.mark.parametrize("make", [lambda: None, ForeignSSD, mock_ssd])
def test_a_preload_promises_a_number(make: Callable[[], Any]) -> None:
    cache, paged = build(KVCache, ssd=make())
    number = cache.preload_blocks(seed(paged, "r", HASHES))
    assert isinstance(number, int)
    assert number >= 0
    assert cache.preload_blocks(paged.create_block_table("s")) == 0


def test_rows_of_heads_are_told_apart() -> None:
    """The rows that these tests compare differ between layers, keys and values, heads and positions."""
    flat = mx.concatenate([array.reshape(-1) for layer in range(2) for array in pair(0, 12, layer)]).tolist()
    assert len(set(flat)) == len(flat) == 2 * rows(0, 12).size * 2
