"""Where oMLX's prefix cache could give a wrong answer, leak or grow: what it must do instead, over foreign managers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache
from omlx_doubles import (
    BLOCK,
    ForeignSSD,
    arrays,
    arrays_layer,
    build,
    chain,
    check_kv,
    check_slots,
    check_table,
    finish,
    kv_layer,
    layer_dict,
    mock_ssd,
    pair,
    refs,
    seed_prompt,
    state_at,
    window,
    window_layer,
)

from prefixcache.paged_cache import PagedCacheManager
from prefixcache.prefix_cache import BlockAwarePrefixCache

TWELVE = list(range(1, 13))
OTHER = list(range(101, 113))


def free_by_release(cache: BlockAwarePrefixCache, paged: PagedCacheManager, table: Any) -> None:
    cache.release_cache("r")


def free_by_eviction(cache: BlockAwarePrefixCache, paged: PagedCacheManager, table: Any) -> None:
    ids = list(table.block_ids)
    finish(cache, paged, "r", table)
    assert [paged.evict_block_permanently(block_id) for block_id in ids] == [True] * len(ids)


@pytest.mark.parametrize("free", [free_by_release, free_by_eviction])
@pytest.mark.parametrize("count", [4, 8, 12])
def test_blocks_of_another_prompt_are_never_returned(free: Any, count: int) -> None:
    """The ids of a prompt that is gone are given to another one; the first prompt is a miss then."""
    cache, paged = build(max_blocks=4)
    free(cache, paged, cache.store_cache("r", TWELVE, []))
    assert paged.free_blocks == 3
    check_table(paged, cache.store_cache("s", OTHER, []), OTHER, 3)
    tokens = TWELVE[:count]
    table, remaining = cache.fetch_cache("t", tokens)
    assert table is None
    assert remaining is tokens
    table, _ = cache.fetch_cache("u", OTHER)
    check_table(paged, table, OTHER, 3)


def test_a_part_of_a_prompt_that_is_left_is_found() -> None:
    cache, paged = build(max_blocks=5)
    stored = cache.store_cache("r", TWELVE, [])
    ids = list(stored.block_ids)
    finish(cache, paged, "r", stored)
    for block_id in ids[1:]:
        assert paged.evict_block_permanently(block_id) is True
    check_table(paged, cache.store_cache("s", OTHER, []), OTHER, 3)
    table, remaining = cache.fetch_cache("t", TWELVE)
    check_table(paged, table, TWELVE, 1)
    assert list(remaining) == TWELVE[4:]


def list_layer(tokens: int) -> dict[str, Any]:
    """A list of plain rows and a recurrent state, which is stored whole."""
    meta = (["KVCache", "ArraysCache"], [(str(tokens),), ""])
    return layer_dict("CacheList", [pair(0, tokens), tuple(state_at(tokens))], meta)


def list_with_a_window(tokens: int) -> dict[str, Any]:
    inner = window_layer(tokens, 1)
    meta = (["KVCache", "RotatingKVCache"], [(str(tokens),), inner["meta_state"]])
    return layer_dict("CacheList", [pair(0, tokens), inner["state"]], meta)


LATE = {
    "rows tell the length": ((KVCache, arrays), [kv_layer(0, 7), arrays_layer(7)]),
    "a window tells its offset": ((window,), [window_layer(7)]),
    "a window beside rows": ((KVCache, window), [kv_layer(0, 7), window_layer(7, 1)]),
    "the layer tells it": ((arrays,), [{**arrays_layer(7), "token_count": 7}]),
    "one window is ahead": ((window, window), [window_layer(4), window_layer(7, 1)]),
    "rows in a list tell it": ((lambda: CacheList(KVCache(), arrays()),), [list_layer(7)]),
    "a window in a list tells it": ((lambda: CacheList(KVCache(), window()),), [list_with_a_window(7)]),
    "a list beside rows": ((KVCache, lambda: CacheList(KVCache(), arrays())), [kv_layer(0, 7, 2), list_layer(7)]),
}


@pytest.mark.parametrize("case", LATE)
def test_a_state_is_not_stored_for_an_earlier_length(case: str) -> None:
    makers, layers = LATE[case]
    cache, _ = build(*makers, ssd=ForeignSSD())
    cache.store_cache("r", TWELVE[:7], layers)
    table, _ = cache.fetch_cache("s", [*TWELVE[:4], 90, 91, 92])
    assert table is None or cache.reconstruct_cache(table) is None


def test_a_state_between_two_boundaries_leaves_those_with_a_snapshot() -> None:
    cache, _ = build(KVCache, arrays, ssd=ForeignSSD())
    snapshots = {4: [layer_dict("KVCache", ()), arrays_layer(4)]}
    cache.store_cache("r", TWELVE[:11], [kv_layer(0, 11), arrays_layer(11)], boundary_snapshots=snapshots)
    table, _ = cache.fetch_cache("s", TWELVE)
    caches = cache.reconstruct_cache(table)
    assert table.num_tokens == 4
    check_kv(caches[0], 4)
    check_slots(caches[1], 4)


def test_a_lost_parent_does_not_make_a_later_block_the_first_one() -> None:
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd)
    lost = seed_prompt(paged, "r", TWELVE, 1).block_ids[0]
    paged.release_for_eviction([lost])
    assert paged.evict_block_permanently(lost) is True
    cache.store_cache("r", TWELVE[:8], [kv_layer(0, 8)])
    assert {save["block_hash"] for save in ssd.saves} <= set(chain(TWELVE[:8]))
    assert paged.cached_block_hash_to_block.get_block(chain(TWELVE[4:8])[0]) is None
    assert cache.fetch_cache("s", TWELVE[4:8])[0] is None
    table, remaining = cache.fetch_cache("t", TWELVE[:8])
    if table is not None:
        check_table(paged, table, TWELVE, len(table.block_ids))
        restored = cache.reconstruct_cache(table)
        assert restored is None or restored[0].offset == table.num_tokens
    assert list(remaining) == TWELVE[len(table.block_ids) * BLOCK if table else 0 : 8]


def test_a_state_that_comes_later_is_added_to_its_block() -> None:
    cache, paged = build(KVCache, arrays, ssd=ForeignSSD())
    finish(cache, paged, "r", cache.store_cache("r", TWELVE, [kv_layer(0, 12), arrays_layer(12)]))
    table, _ = cache.fetch_cache("s", TWELVE[:8])
    assert cache.reconstruct_cache(table) is None
    paged.delete_block_table("s")
    cache.release_cache("s")
    finish(cache, paged, "t", cache.store_cache("t", TWELVE[:8], [kv_layer(0, 8), arrays_layer(8)]))
    table, _ = cache.fetch_cache("u", TWELVE[:8])
    caches = cache.reconstruct_cache(table)
    assert caches is not None
    assert table.num_tokens == 8
    check_kv(caches[0], 8)
    check_slots(caches[1], 8)


def test_a_block_with_too_few_rows_is_not_stored() -> None:
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd)
    stored = cache.store_cache("r", TWELVE[:8], [kv_layer(0, 7)])
    check_table(paged, stored, TWELVE, 1)
    assert [save["cache_data"][0][0].shape[2] for save in ssd.saves] == [BLOCK]
    table, remaining = cache.fetch_cache("s", TWELVE[:8])
    assert list(remaining) == TWELVE[4:8]
    check_kv(cache.reconstruct_cache(table)[0], table.num_tokens)


@pytest.mark.parametrize("state", [(), (None, None), ("a", "b")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_that_cannot_be_cut_does_not_move_the_others(state: Any, place: int) -> None:
    ssd = ForeignSSD()
    cache, _ = build(KVCache, KVCache, ssd=ssd)
    layers = [kv_layer(0, 8), kv_layer(0, 8, 1)]
    layers[place] = layer_dict("KVCache", state)
    cache.store_cache("r", TWELVE[:8], layers)
    for save in ssd.saves:
        assert len(save["cache_data"]) == len(save["layer_cache_types"]) == 2
    table, _ = cache.fetch_cache("s", TWELVE[:8])
    assert table is None or cache.reconstruct_cache(table) is None


@pytest.mark.parametrize("fetch_first", [False, True])
@pytest.mark.parametrize("tokens", [OTHER, [*TWELVE[:4], *OTHER[:8]], TWELVE[:8], OTHER[:4], [*TWELVE, *OTHER]])
def test_a_reused_request_id_does_not_inherit_a_table(tokens: list[int], fetch_first: bool) -> None:
    cache, paged = build(ssd=ForeignSSD())
    first = cache.store_cache("r", TWELVE, [kv_layer(0, 12)])
    old = list(first.block_ids)
    finish(cache, paged, "r", first)
    assert "r" in paged.request_tables
    if fetch_first:
        cache.fetch_cache("r", tokens)
    stored = cache.store_cache("r", tokens, [kv_layer(0, len(tokens))])
    check_table(paged, stored, tokens, len(tokens) // BLOCK)
    finish(cache, paged, "r", stored)
    assert refs(paged, stored.block_ids) == [0] * len(stored.block_ids)
    assert refs(paged, old) == [0, 0, 0]
    table, _ = cache.fetch_cache("s", [*TWELVE, 99])
    check_table(paged, table, TWELVE, 3)


class Racing(PagedCacheManager):
    """Where another thread takes the last block of a hit between its lookup and its use."""

    taken: int | None = None

    def increment_ref(self, block_id: int) -> bool:
        if block_id == self.taken and block_id in self.allocated_blocks:
            self.evict_block_permanently(block_id)
        return super().increment_ref(block_id)

    def find_shared_prefix(self, *args: Any, **kwargs: Any) -> Any:
        return self._take(super().find_shared_prefix(*args, **kwargs))

    def get_computed_blocks(self, *args: Any, **kwargs: Any) -> Any:
        return self._take(super().get_computed_blocks(*args, **kwargs))

    def _take(self, found: Any) -> Any:
        if self.taken in self.allocated_blocks:
            self.evict_block_permanently(self.taken)
        return found


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_table_and_what_remains_agree_when_a_block_goes_meanwhile(place: int) -> None:
    paged = Racing(block_size=BLOCK, max_blocks=16, model_name="model-a")
    cache = BlockAwarePrefixCache(None, paged)
    stored = cache.store_cache("r", TWELVE, [])
    ids = list(stored.block_ids)
    finish(cache, paged, "r", stored)
    paged.taken = ids[place]
    table, remaining = cache.fetch_cache("s", [*TWELVE, 99])
    cached = table.num_tokens if table else 0
    assert list(remaining) == [*TWELVE, 99][cached:]
    if table:
        assert set(table.block_ids) <= set(paged.allocated_blocks)
        check_table(paged, table, TWELVE, len(table.block_ids))
        assert refs(paged, table.block_ids) == [1] * len(table.block_ids)


def test_two_models_share_a_manager() -> None:
    ssd = ForeignSSD()
    target, _ = build(ssd=ssd)
    draft, _ = build(KVCache, KVCache, ssd=ssd, model_name="draft")
    target.store_cache("r", TWELVE, [kv_layer(0, 12)])
    draft.store_cache("r", TWELVE, [kv_layer(0, 12, 2), kv_layer(0, 12, 3)])
    assert len(ssd.blocks) == 6
    table, _ = target.fetch_cache("s", TWELVE)
    check_kv(target.reconstruct_cache(table)[0], 12)
    table, _ = draft.fetch_cache("s", TWELVE)
    for layer, restored in enumerate(draft.reconstruct_cache(table), 2):
        check_kv(restored, 12, layer)
    assert ssd.forgotten == []


@pytest.mark.parametrize(
    "answer", [(None, None), ([], {}), ([None, None], {}), ([pair(0, 4)], {}), (7, {}), ("ab", {})]
)
def test_an_answer_that_is_no_block_of_this_model_is_a_miss(answer: Any) -> None:
    ssd = mock_ssd()
    ssd.load_block_with_metadata.side_effect = None
    ssd.load_block_with_metadata.return_value = answer
    cache, paged = build(KVCache, KVCache, ssd=ssd)
    assert cache.reconstruct_cache(seed_prompt(paged, "r", TWELVE, 2)) is None
    ssd.delete_block.assert_not_called()


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError, KeyError, MemoryError])
def test_a_manager_that_raises_is_a_miss(error: type[Exception]) -> None:
    ssd = mock_ssd()
    for method in (ssd.save_block, ssd.load_block_with_metadata, ssd.forget_block):
        method.side_effect = error("no")
    cache, paged = build(ssd=ssd)
    table = cache.store_cache("r", TWELVE, [kv_layer(0, 12)])
    assert (table.block_ids, paged.stats.allocated_blocks) == ([], 1)
    assert cache.reconstruct_cache(seed_prompt(paged, "s", TWELVE, 2)) is None
    cache._forget_incompatible_ssd_block(b"hash1")


def test_a_full_pool_ends_a_store() -> None:
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd, max_blocks=3)
    check_table(paged, cache.store_cache("r", TWELVE, [kv_layer(0, 12)]), TWELVE, 2)
    assert [save["block_hash"] for save in ssd.saves] == chain(TWELVE)[:2]
    stored = cache.store_cache("s", OTHER, [kv_layer(0, 12)])
    assert stored.block_ids == []
    table, remaining = cache.fetch_cache("t", TWELVE)
    check_table(paged, table, TWELVE, 2)
    assert list(remaining) == TWELVE[8:]


def test_numbers_of_numpy_are_the_same_tokens() -> None:
    cache, paged = build()
    cache.store_cache("r", TWELVE, [])
    for tokens in (np.array(TWELVE), [np.int32(token) for token in TWELVE], tuple(TWELVE)):
        table, remaining = cache.fetch_cache("s", tokens)
        check_table(paged, table, TWELVE, 3)
        assert list(remaining) == []
