"""Blocks that do not fit together, states with gaps, and the ends of requests: oMLX's prefix cache over stand-ins."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_vlm.turboquant import TurboQuantKVCache
from omlx_doubles import (
    BLOCK,
    MODEL,
    ForeignSSD,
    arrays,
    arrays_layer,
    block,
    build,
    chain,
    check_kv,
    check_pair,
    check_same,
    check_table,
    finish,
    kv_layer,
    layer_dict,
    mock_ssd,
    pair,
    placeholder,
    refs,
    rows,
    seed,
    slots,
    state_at,
    window_layer,
)

from prefixcache._rotating_subclass import PrefillReadyRotatingKVCache
from prefixcache.paged_cache import compute_block_hash

TWELVE = list(range(1, 13))
KV, ARRAYS, ROTATING = "KVCache", "ArraysCache", "RotatingKVCache"

MISFITS = {
    "more heads": pair(4, 8, heads=3),
    "other head size": pair(4, 8, dim=8),
    "other type": pair(4, 8, dtype=mx.float16),
    "too few rows": pair(4, 7),
    "too many rows": pair(4, 9),
    "no rows": pair(4, 4),
    "keys and values of two lengths": (pair(4, 8)[0], pair(4, 7)[1]),
    "no batch": tuple(array[0] for array in pair(4, 8)),
    "a placeholder": placeholder(),
}


@pytest.mark.parametrize("case", MISFITS)
def test_rows_that_do_not_fit_are_not_joined(case: str) -> None:
    ssd = mock_ssd({b"hash1": block([pair(0, 4)], [KV]), b"hash2": block([MISFITS[case]], [KV])})
    cache, paged = build(ssd=ssd)
    table = seed(paged, "r", [b"hash1", b"hash2"])
    caches = cache.reconstruct_cache(table)
    if caches is None:
        assert (table.block_ids, table.num_tokens) == ([], 0)
    else:
        assert (len(table.block_ids), table.num_tokens) == (1, 4)
        check_kv(caches[0], 4)
    ssd.delete_block.assert_not_called()


@pytest.mark.parametrize("case", ["too few rows", "too many rows", "no rows", "a placeholder"])
def test_a_first_block_of_another_length_is_a_miss(case: str) -> None:
    cache, paged = build(ssd=mock_ssd({b"hash1": block([MISFITS[case]], [KV])}))
    assert cache.reconstruct_cache(seed(paged, "r", [b"hash1"])) is None


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_a_slot_without_a_state_comes_back_without_one(gap: int) -> None:
    """A model tells a slot that was never set from one that is: an empty array is neither."""
    for size in (2, 3):
        state: list[Any] = state_at(8, size)
        state[gap % size] = None
        cache, _ = build(lambda size=size: arrays(size), KVCache, ssd=ForeignSSD())
        table = cache.store_cache("r", TWELVE[:8], [layer_dict(ARRAYS, state), kv_layer(0, 8, 1)])
        caches = cache.reconstruct_cache(table)
        if caches is None:
            continue
        assert table.num_tokens == 8
        for found, expected in zip(slots(caches[0]), state, strict=True):
            if expected is None:
                assert found is None
            else:
                check_same(found, expected)


def test_a_long_window_is_cut_to_its_size() -> None:
    keys, values = (mx.concatenate(parts, axis=2) for parts in zip(pair(0, 1), pair(2, 8), strict=True))
    data = block([(keys, values)], [ROTATING], [("1", "4", "8", "7")])
    ssd = mock_ssd({b"hash1": block([placeholder()], [ROTATING]), b"hash2": data})
    cache, paged = build(lambda: RotatingKVCache(max_size=4, keep=1), ssd=ssd)
    restored = cache.reconstruct_cache(seed(paged, "r", [b"hash1", b"hash2"]))[0]
    assert isinstance(restored, PrefillReadyRotatingKVCache)
    assert (restored.keep, restored.max_size, restored.offset, restored._idx) == (1, 4, 8, 4)
    wanted = (mx.concatenate(parts, axis=2) for parts in zip(pair(0, 1), pair(5, 8), strict=True))
    check_pair((restored.keys, restored.values), tuple(wanted))


def test_a_short_window_is_not_filled_up() -> None:
    cache, _ = build(lambda: RotatingKVCache(max_size=16), ssd=ForeignSSD())
    table = cache.store_cache("r", TWELVE[:8], [window_layer(8, size=16)])
    restored = cache.reconstruct_cache(table)[0]
    check_pair((restored.keys, restored.values), pair(0, 8))
    assert (restored.offset, restored._idx, restored.max_size, restored.size()) == (8, 8, 16, 8)


TURBO = {
    "4 bits": ((4.0,), {}, 64),
    "3 bits of 80": ((3.0,), {}, 80),
    "2 bits of 48": ((2.0,), {"seed": 3}, 48),
    "3.5 bits": ((3.5,), {}, 64),
    "4.5 bits": ((4.5,), {}, 64),
    "two widths": ((3.0,), {"key_bits": 2.0, "value_bits": 4.0}, 64),
    "two broken widths": ((3.0,), {"key_bits": 2.5, "value_bits": 3.5}, 64),
}


@pytest.mark.parametrize("case", TURBO)
def test_codes_of_any_width_come_back_whole_or_not_at_all(case: str) -> None:
    bits, settings, dim = TURBO[case]

    def make() -> TurboQuantKVCache:
        return TurboQuantKVCache(*bits, **settings)

    original = make()
    original.update_and_fetch(*pair(0, 8, dim=dim, dtype=mx.float16))
    cache, _ = build(ssd=ForeignSSD())
    layer = layer_dict("TurboQuantKVCache", original.state, original.meta_state)
    table = cache.store_cache("r", TWELVE[:8], [layer])
    caches = cache.reconstruct_cache(table)
    if caches is None:
        assert case != "4 bits"
        return
    assert type(caches[0]) is TurboQuantKVCache
    assert caches[0].offset == table.num_tokens == 8
    assert caches[0].meta_state == original.meta_state
    for one in (caches[0], original):
        one.update_and_fetch(*pair(8, 9, dim=dim, dtype=mx.float16))
    for found, expected in zip(caches[0].dequantize(), original.dequantize(), strict=True):
        check_same(found, expected)


def test_a_table_can_name_blocks_that_are_gone() -> None:
    blocks = {value: block([pair(n * 4, n * 4 + 4)], [KV]) for n, value in enumerate([b"hash1", b"hash2"])}
    cache, paged = build(ssd=mock_ssd(blocks))
    table = seed(paged, "r", [b"hash1", b"hash2"])
    table.block_ids.append(60)
    table.num_tokens += BLOCK
    check_kv(cache.reconstruct_cache(table)[0], 8)
    assert (len(table.block_ids), table.num_tokens) == (2, 8)
    table = seed(paged, "s", [b"hash1", b"hash2"])
    paged.allocated_blocks[table.block_ids[0]].block_hash = None
    assert cache.reconstruct_cache(table) is None


def test_blocks_are_chained_to_the_hash_that_a_caller_gave() -> None:
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd)
    seed(paged, "r", [b"hash1"])
    table = cache.store_cache("r", TWELVE, [kv_layer(0, 12)])
    first = compute_block_hash(b"hash1", TWELVE[4:8], model_name=MODEL)
    second = compute_block_hash(first, TWELVE[8:12], model_name=MODEL)
    assert [save["block_hash"] for save in ssd.saves] == [first, second]
    check_pair(ssd.saves[0]["cache_data"][0], pair(4, 8))
    check_pair(ssd.saves[1]["cache_data"][0], pair(8, 12))
    assert (len(table.block_ids), table.num_tokens) == (3, 12)


EARLY = {
    "the layer tells it": (arrays, {**arrays_layer(4, layer=1), "token_count": 4}, arrays_layer(12, layer=1)),
    "a window tells its offset": (lambda: RotatingKVCache(max_size=4), window_layer(4, 1), window_layer(12, 1)),
}


@pytest.mark.parametrize("case", EARLY)
def test_a_snapshot_of_another_length_is_not_used(case: str) -> None:
    make, early, final = EARLY[case]
    cache, _ = build(KVCache, make, ssd=ForeignSSD())
    snapshots = {8: [layer_dict(KV, ()), early]}
    cache.store_cache("r", TWELVE, [kv_layer(0, 12), final], boundary_snapshots=snapshots)
    table, _ = cache.fetch_cache("s", [*TWELVE[:8], 99])
    assert table is None or cache.reconstruct_cache(table) is None
    table, _ = cache.fetch_cache("t", TWELVE)
    check_kv(cache.reconstruct_cache(table)[0], 12)
    assert table.num_tokens == 12


def test_snapshots_without_the_lengths_of_blocks_are_passed_over() -> None:
    ssd = ForeignSSD()
    cache, _ = build(KVCache, arrays, ssd=ssd)
    snapshots = {3: [layer_dict(KV, ()), arrays_layer(3)], 9: [layer_dict(KV, ()), arrays_layer(9)]}
    cache.store_cache("r", TWELVE[:8], [kv_layer(0, 8), arrays_layer(8)], boundary_snapshots=snapshots)
    assert [tuple(array.shape) for array in ssd.saves[0]["cache_data"][1]] == [(1,), (1,)]
    check_pair(tuple(ssd.saves[1]["cache_data"][1]), tuple(state_at(8)))


def test_turns_of_a_conversation() -> None:
    """Each turn fetches what the one before stored and adds to it; between turns nobody holds a block."""
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd)
    tokens: list[int] = []
    for turn in range(4):
        request_id = f"turn-{turn}"
        known = len(tokens)
        tokens = [*tokens, *range(100 * turn + 1, 100 * turn + 7)]
        table, remaining = cache.fetch_cache(request_id, tokens)
        cached = table.num_tokens if table else 0
        assert cached == known // BLOCK * BLOCK
        assert list(remaining) == tokens[cached:]
        if table:
            check_kv(cache.reconstruct_cache(table)[0], cached)
        stored = cache.store_cache(request_id, tokens, [kv_layer(0, len(tokens))])
        check_table(paged, stored, tokens, len(tokens) // BLOCK)
        finish(cache, paged, request_id, stored)
        assert refs(paged, stored.block_ids) == [0] * len(stored.block_ids)
    assert [save["block_hash"] for save in ssd.saves] == chain(tokens)
    assert (len(cache), cache._hits, cache._misses) == (0, 3, 1)


def test_an_aborted_request_gives_back_what_it_fetched() -> None:
    cache, paged = build()
    stored = cache.store_cache("r", TWELVE, [])
    ids = list(stored.block_ids)
    finish(cache, paged, "r", stored)
    table, _ = cache.fetch_cache("s", TWELVE)
    finish(cache, paged, "s", table)
    cache.release_cache("s")
    assert refs(paged, ids) == [0, 0, 0]
    assert cache.fetch_cache("t", TWELVE)[0].block_ids == ids


def test_nothing_is_found_after_a_clear() -> None:
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd)
    cache.store_cache("r", TWELVE, [kv_layer(0, 12)])
    assert cache.clear() > 0
    assert cache.fetch_cache("s", TWELVE) == (None, TWELVE)
    assert paged.stats.allocated_blocks == 1
    table = cache.store_cache("r", TWELVE, [kv_layer(0, 12)])
    check_table(paged, table, TWELVE, 3)
    check_kv(cache.reconstruct_cache(table)[0], 12)


def test_tokens_are_left_as_they_were() -> None:
    cache, _ = build()
    tokens, layers = list(TWELVE), [{"state": (rows(0, 12), rows(0, 12)), "cache_type": KV, "class_name": KV}]
    cache.store_cache("r", tokens, layers)
    _, remaining = cache.fetch_cache("s", tokens)
    remaining.append(5)
    assert tokens == TWELVE
    assert set(layers[0]) == {"state", "cache_type", "class_name"}
