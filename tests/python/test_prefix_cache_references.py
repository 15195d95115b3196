"""References, memory and threads of oMLX's prefix cache: what is taken is given back, finished blocks stay."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from mlx_lm.models.cache import KVCache
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
    refs,
)

TWELVE = list(range(1, 13))


def test_a_release_gives_back_what_a_fetch_took() -> None:
    cache, paged = build()
    ids = list(cache.store_cache("r", TWELVE, []).block_ids)
    free = paged.free_blocks
    cache.fetch_cache("s", [*TWELVE, 99])
    assert refs(paged, ids) == [2, 2, 2]
    cache.release_cache("s")
    assert refs(paged, ids) == [1, 1, 1]
    cache.release_cache("s")
    assert refs(paged, ids) == [1, 1, 1]
    assert paged.free_blocks == free
    cache.fetch_cache("t", TWELVE[:9])
    cache.store_cache("t", TWELVE, [])
    cache.release_cache("t")
    assert refs(paged, ids) == [1, 1, 1]


def test_a_second_fetch_of_a_request_takes_no_more() -> None:
    cache, paged = build()
    ids = list(cache.store_cache("r", TWELVE, []).block_ids)
    cache.store_cache("s", TWELVE, [])
    assert refs(paged, ids) == [2, 2, 2]
    cache.fetch_cache("t", [*TWELVE, 99])
    cache.fetch_cache("t", [*TWELVE[:4], 99])
    assert refs(paged, ids) == [3, 2, 2]
    cache.release_cache("t")
    assert refs(paged, ids) == [2, 2, 2]
    cache.fetch_cache("s", [*TWELVE, 99])
    cache.release_cache("s")
    assert refs(paged, ids) == [1, 1, 1]


def test_a_shortened_hit_is_given_back_once() -> None:
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd)
    ids = list(cache.store_cache("r", TWELVE, [kv_layer(0, 12)]).block_ids)
    del ssd.blocks[chain(TWELVE)[1]]
    table, _ = cache.fetch_cache("s", [*TWELVE, 99])
    check_kv(cache.reconstruct_cache(table)[0], 4)
    assert refs(paged, ids) == [2, 1, 1]
    cache.release_cache("s")
    assert refs(paged, ids) == [1, 1, 1]


def test_a_rejected_hit_leaves_finished_blocks_to_be_hit() -> None:
    cache, paged = build()
    stored = cache.store_cache("r", TWELVE, [])
    ids = list(stored.block_ids)
    finish(cache, paged, "r", stored)
    assert refs(paged, ids) == [0, 0, 0]
    for attempt in range(3):
        table, _ = cache.fetch_cache(f"s{attempt}", [*TWELVE, 99])
        check_table(paged, table, TWELVE, 3)
        assert refs(paged, ids) == [1, 1, 1]
        cache.release_cache(f"s{attempt}")
        assert refs(paged, ids) == [0, 0, 0]


def test_a_failed_restore_leaves_finished_blocks_to_be_hit() -> None:
    """The scheduler gives the table of such a hit back to the paged manager."""
    cache, paged = build(KVCache, arrays, ssd=ForeignSSD())
    stored = cache.store_cache("r", TWELVE, [kv_layer(0, 12), arrays_layer(12)])
    ids = list(stored.block_ids)
    finish(cache, paged, "r", stored)
    for attempt in range(2):
        table, _ = cache.fetch_cache(f"s{attempt}", [*TWELVE[:8], 99])
        check_table(paged, table, TWELVE, 2)
        assert cache.reconstruct_cache(table) is None
        paged.delete_block_table(f"s{attempt}")
        cache.release_cache(f"s{attempt}")
        assert refs(paged, ids) == [0, 0, 0]
    table, _ = cache.fetch_cache("t", TWELVE)
    check_slots(cache.reconstruct_cache(table)[1], 12)
    assert table.num_tokens == 12


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_block_that_was_lost_can_be_stored_again(place: int) -> None:
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd)
    finish(cache, paged, "r", cache.store_cache("r", TWELVE, [kv_layer(0, 12)]))
    del ssd.blocks[chain(TWELVE)[place]]
    table, _ = cache.fetch_cache("s", [*TWELVE, 99])
    caches = cache.reconstruct_cache(table)
    assert table.num_tokens == place * BLOCK
    assert (caches is None) == (place == 0)
    finish(cache, paged, "s", cache.store_cache("s", TWELVE, [kv_layer(0, 12)]))
    table, _ = cache.fetch_cache("t", [*TWELVE, 99])
    check_table(paged, table, TWELVE, 3)
    check_kv(cache.reconstruct_cache(table)[0], 12)


def test_an_exact_hit_that_is_not_used_leaves_its_blocks() -> None:
    cache, paged = build(KVCache, arrays, ssd=ForeignSSD())
    stored = cache.store_cache("r", TWELVE, [kv_layer(0, 12), arrays_layer(12)])
    ids = list(stored.block_ids)
    finish(cache, paged, "r", stored)
    for attempt in range(2):
        table, remaining = cache.fetch_cache(f"s{attempt}", TWELVE)
        assert (table.block_ids, list(remaining)) == (ids, [])
        paged.delete_block_table(f"s{attempt}")
        cache.release_cache(f"s{attempt}")
        assert refs(paged, ids) == [0, 0, 0]


def test_tables_of_finished_requests_do_not_pile_up() -> None:
    cache, paged = build()
    for number in range(10_000):
        request_id = f"request-{number}"
        cache.fetch_cache(request_id, TWELVE[:4])
        finish(cache, paged, request_id, cache.store_cache(request_id, TWELVE[:4], []))
        assert request_id in paged.request_tables
    assert len(paged.request_tables) < 5_000
    assert len(cache) == 0


def index_bytes(blocks: int) -> int:
    """The memory that a prompt of so many blocks takes once it is stored and its request is over."""
    cache, paged = build(max_blocks=blocks + 1)
    tokens = list(range(blocks * BLOCK))
    tracemalloc.start()
    try:
        finish(cache, paged, "r", cache.store_cache("r", tokens, []))
        assert cache.fetch_cache("s", tokens)[0].num_tokens == len(tokens)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_the_prefix_index_grows_with_the_blocks_and_not_with_their_square() -> None:
    small, large = index_bytes(500), index_bytes(4000)
    assert large < 12 * small


def test_several_threads_at_once() -> None:
    """Each request sees its own prompt or nothing, and every reference is given back."""
    cache, paged = build(max_blocks=256)

    def serve(thread: int) -> None:
        for turn in range(40):
            request_id, first = f"{thread}-{turn}", 1 + turn % 5
            tokens = list(range(first, first + 12))
            table, remaining = cache.fetch_cache(request_id, [*tokens, 99])
            cached = table.num_tokens if table else 0
            assert list(remaining) == [*tokens, 99][cached:]
            if table:
                check_table(paged, table, tokens, len(table.block_ids))
            stored = cache.store_cache(request_id, tokens, [])
            check_table(paged, stored, tokens, 3)
            finish(cache, paged, request_id, stored)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(serve, range(4))) == [None] * 4
    assert {own.ref_count for own in paged.allocated_blocks.values() if not own.is_null} == {0}
    assert len(cache) == 0
