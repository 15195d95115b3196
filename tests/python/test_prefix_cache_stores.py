"""What oMLX's prefix cache does with an SSD manager that is not our own: the calls, roll-back, retry, rejection."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from mlx_lm.models.cache import KVCache
from omlx_doubles import (
    BLOCK,
    MODEL,
    SAVE_KEYWORDS,
    ForeignSSD,
    TerseSSD,
    arrays,
    arrays_layer,
    block,
    build,
    chain,
    check_kv,
    check_pair,
    check_slots,
    finish,
    kv_layer,
    layer_dict,
    mock_ssd,
    pair,
    seed,
    seed_prompt,
)

from prefixcache.paged_ssd_cache import PagedSSDCacheManager

TWELVE = list(range(1, 13))


def kv_block(number: int, **about: Any) -> Any:
    return block([pair(number * BLOCK, (number + 1) * BLOCK)], ["KVCache"], **about)


@pytest.mark.parametrize("spec", [None, PagedSSDCacheManager])
def test_saves_are_made_by_keyword(spec: type | None) -> None:
    ssd = mock_ssd(spec=spec)
    cache, _ = build(ssd=ssd)
    table = cache.store_cache("r", TWELVE[:8], [kv_layer(0, 8)])
    assert table.num_tokens == 8
    assert ssd.save_block.call_count == 2
    for number, call in enumerate(ssd.save_block.call_args_list):
        assert call.args == ()
        assert set(call.kwargs) == SAVE_KEYWORDS
        assert call.kwargs["block_hash"] == chain(TWELVE[:8])[number]
        assert call.kwargs["token_count"] == BLOCK
        assert call.kwargs["model_name"] == MODEL
        assert list(call.kwargs["layer_cache_types"]) == ["KVCache"]
        assert len(call.kwargs["cache_data"]) == 1
        check_pair(call.kwargs["cache_data"][0], pair(number * BLOCK, (number + 1) * BLOCK))
    ssd.delete_block.assert_not_called()
    ssd.forget_block.assert_not_called()


def test_write_back_is_passed_on_only_when_it_is_off() -> None:
    ssd = mock_ssd()
    cache, _ = build(ssd=ssd)
    cache.store_cache("r", TWELVE[:4], [kv_layer(0, 4)], hot_cache_write_back=False)
    assert ssd.save_block.call_args.kwargs["hot_cache_write_back"] is False
    assert set(ssd.save_block.call_args.kwargs) == SAVE_KEYWORDS | {"hot_cache_write_back"}


@pytest.mark.parametrize("spec", [None, PagedSSDCacheManager])
def test_loads_have_one_argument(spec: type | None) -> None:
    ssd = mock_ssd({b"hash1": kv_block(0), b"hash2": kv_block(1)}, spec)
    cache, paged = build(ssd=ssd)
    table = seed(paged, "r", [b"hash1", b"hash2"])
    caches = cache.reconstruct_cache(table)
    check_kv(caches[0], 8)
    assert {call.args for call in ssd.load_block_with_metadata.call_args_list} == {(b"hash1",), (b"hash2",)}
    assert [call.kwargs for call in ssd.load_block_with_metadata.call_args_list] == [{}, {}]
    ssd.forget_block.assert_not_called()


def test_promotion_is_passed_on_only_when_it_is_off() -> None:
    ssd = MagicMock()
    ssd.load_block_with_metadata.return_value = kv_block(0)
    cache, paged = build(ssd=ssd)
    check_kv(cache.reconstruct_cache(seed(paged, "r", [b"hash1"]), promote_to_hot_cache=False)[0], 4)
    ssd.load_block_with_metadata.assert_called_once_with(b"hash1", promote_to_hot_cache=False)


def test_attaching_sweeps_once_and_attaching_nothing_calls_nothing() -> None:
    ssd = MagicMock()
    cache, _ = build()
    cache.set_paged_ssd_cache_manager(ssd)
    assert cache.paged_ssd_cache is ssd
    ssd.invalidate_stale_layer_signature.assert_called_once_with()
    ssd.reset_mock()
    cache.set_paged_ssd_cache_manager(None)
    assert cache.paged_ssd_cache is None
    assert ssd.mock_calls == []


@pytest.mark.parametrize("error", [RuntimeError, OSError, ValueError, TypeError, KeyError, AttributeError])
def test_a_sweep_that_fails_does_not_keep_the_manager_out(error: type[Exception]) -> None:
    ssd = MagicMock()
    ssd.invalidate_stale_layer_signature.side_effect = error("no")
    cache, _ = build()
    cache.set_paged_ssd_cache_manager(ssd)
    assert cache.paged_ssd_cache is ssd


def test_a_manager_without_a_sweep_can_be_attached() -> None:
    ssd = ForeignSSD()
    cache, _ = build()
    cache.set_paged_ssd_cache_manager(ssd)
    assert cache.store_cache("r", TWELVE[:4], [kv_layer(0, 4)]).num_tokens == 4
    assert list(ssd.blocks) == chain(TWELVE[:4])


class Untouchable:
    """A tensor at which nobody may look."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize("make", [MagicMock, Untouchable])
def test_without_a_manager_tensors_are_left_alone(make: Any) -> None:
    cache, _ = build()
    tensors = make(), make()
    table = cache.store_cache("r", TWELVE, [layer_dict("KVCache", tensors)])
    assert (len(table.block_ids), table.num_tokens) == (3, 12)
    assert [tensor.mock_calls for tensor in tensors if isinstance(tensor, MagicMock)] in ([], [[], []])


class Overridden(PagedSSDCacheManager):
    """Our own manager as a caller might extend it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.inner = ForeignSSD()
        super().__init__(*args, **kwargs)

    def save_block(self, **kwargs: Any) -> bool:
        return self.inner.save_block(**kwargs)

    def load_block_with_metadata(self, block_hash: bytes) -> Any:
        return self.inner.load_block_with_metadata(block_hash)

    def forget_block(self, block_hash: bytes) -> bool:
        return self.inner.forget_block(block_hash)


def test_a_subclass_of_our_own_manager_is_called_by_its_methods(tmp_path: Path) -> None:
    ssd = Overridden(cache_dir=tmp_path / "blocks", max_size_bytes=1 << 20)
    try:
        cache, _ = build(ssd=ssd)
        table = cache.store_cache("r", TWELVE[:8], [kv_layer(0, 8)])
        assert [save["block_hash"] for save in ssd.inner.saves] == chain(TWELVE[:8])
        check_kv(cache.reconstruct_cache(table)[0], 8)
        assert sorted(ssd.inner.loads) == sorted(chain(TWELVE[:8]))
    finally:
        ssd.close()


def test_nothing_to_store() -> None:
    cache, paged = build()
    assert cache.store_cache("r", [], []) is None
    assert cache.store_cache("r", [], [kv_layer(0, 4)]) is None
    assert paged.stats.allocated_blocks == 1


@pytest.mark.parametrize(
    ("count", "blocks", "counters"),
    [(3, 0, (1, 3, 3, 1)), (4, 1, (0, 0, 0, 0)), (10, 2, (1, 2, 2, 2)), (12, 3, (0, 0, 0, 0))],
)
def test_tokens_that_fill_no_block_are_counted(count: int, blocks: int, counters: tuple[int, ...]) -> None:
    cache, _ = build()
    table = cache.store_cache("r", TWELVE[:count], [])
    assert (len(table.block_ids), table.num_tokens) == (blocks, blocks * BLOCK)
    names = ("_partial_block_skips", "_partial_tokens_skipped", "_last_partial_tokens_skipped")
    assert tuple(getattr(cache, name) for name in (*names, "_last_tokens_to_next_block")) == counters
    cache.store_cache("s", TWELVE[:6], [])
    assert cache._partial_block_skips == counters[0] + 1
    assert cache._partial_tokens_skipped == counters[1] + 2
    assert (cache._last_partial_tokens_skipped, cache._last_tokens_to_next_block) == (2, 2)


def test_blocks_without_tensors_are_registered_and_found() -> None:
    cache, paged = build()
    stored = cache.store_cache("r", TWELVE, [])
    hashes = chain(TWELVE)
    found = [paged.cached_block_hash_to_block.get_block(block_hash) for block_hash in hashes]
    assert [own.block_id for own in found] == stored.block_ids
    assert [own.token_count for own in found] == [BLOCK] * 3
    table, remaining = cache.fetch_cache("s", [*TWELVE[:8], 90, 91, 92, 93, 94])
    assert table.block_ids == stored.block_ids[:2]
    assert (table.num_tokens, list(remaining)) == (8, [90, 91, 92, 93, 94])
    assert [own.ref_count for own in found] == [2, 2, 1]


def test_a_miss_gives_back_the_same_list() -> None:
    cache, _ = build()
    tokens = list(TWELVE)
    table, remaining = cache.fetch_cache("r", tokens)
    assert table is None
    assert remaining is tokens


@pytest.mark.parametrize(
    ("ranges", "matched"),
    [
        ([(4, ("one",)), (8, ("one", "two"))], 12),
        ([(4, ("one",)), (8, ("one", "other"))], 8),
        ([(4, ("other",)), (8, ("other", "two"))], 4),
        (None, 4),
    ],
)
def test_salts_by_segment(ranges: Any, matched: int) -> None:
    cache, _ = build()
    cache.store_cache("r", TWELVE, [], extra_key_ranges=[(4, ("one",)), (8, ("one", "two"))])
    table, remaining = cache.fetch_cache("s", TWELVE, extra_key_ranges=ranges)
    assert table.num_tokens == matched
    assert list(remaining) == TWELVE[matched:]


@pytest.mark.parametrize(
    ("keys", "start", "matched"), [(("one",), 4, 12), (("two",), 4, 4), (("one",), 8, 4), (("one",), None, 0)]
)
def test_one_salt_with_a_start(keys: Any, start: int | None, matched: int) -> None:
    cache, _ = build()
    cache.store_cache("r", TWELVE, [], extra_keys=("one",), extra_key_token_start=4)
    table, remaining = cache.fetch_cache("s", TWELVE, extra_keys=keys, extra_key_token_start=start)
    assert (table.num_tokens if table else 0) == matched
    assert list(remaining) == TWELVE[matched:]


def test_only_the_new_blocks_of_a_whole_sequence_are_saved() -> None:
    ssd = ForeignSSD()
    cache, paged = build(ssd=ssd)
    before = list(seed_prompt(paged, "r", TWELVE, 1).block_ids)
    table = cache.store_cache("r", TWELVE[:8], [kv_layer(0, 8)])
    assert [save["block_hash"] for save in ssd.saves] == chain(TWELVE[:8])[1:]
    check_pair(ssd.saves[0]["cache_data"][0], pair(4, 8))
    assert table.block_ids[:1] == before
    assert table.num_tokens == 8


def test_a_refused_first_block_leaves_nothing_behind() -> None:
    ssd = mock_ssd()
    ssd.save_block.return_value = False
    cache, paged = build(ssd=ssd)
    table = cache.store_cache("r", TWELVE[:8], [kv_layer(0, 8)])
    assert (table.block_ids, table.num_tokens) == ([], 0)
    assert ssd.save_block.call_count == 1
    assert paged.stats.allocated_blocks == 1
    assert paged.cached_block_hash_to_block.get_block(chain(TWELVE)[0]) is None
    assert cache.fetch_cache("s", TWELVE[:8]) == (None, TWELVE[:8])


@pytest.mark.parametrize("refusal", [False, None, 0])
def test_a_refused_later_block_ends_the_table_and_a_retry_saves_the_rest(refusal: Any) -> None:
    ssd = ForeignSSD([True, refusal])
    cache, paged = build(ssd=ssd)
    hashes = chain(TWELVE)
    seed_prompt(paged, "r", TWELVE, 1)
    ssd.blocks[hashes[0]] = kv_block(0)
    table = cache.store_cache("r", TWELVE, [kv_layer(0, 12)])
    assert (len(table.block_ids), table.num_tokens) == (2, 8)
    assert [save["block_hash"] for save in ssd.saves] == hashes[1:]
    assert paged.cached_block_hash_to_block.get_block(hashes[2]) is None
    assert paged.stats.allocated_blocks == 3
    found, remaining = cache.fetch_cache("s", TWELVE)
    assert (found.block_ids, list(remaining)) == (table.block_ids, TWELVE[8:12])

    table = cache.store_cache("r", TWELVE, [kv_layer(0, 12)])
    assert [save["block_hash"] for save in ssd.saves] == [*hashes[1:], hashes[2]]
    assert len(set(table.block_ids)) == 3
    check_kv(cache.reconstruct_cache(table)[0], 12)
    for block_hash, block_id in zip(hashes, table.block_ids, strict=True):
        assert paged.cached_block_hash_to_block.pop(block_hash, block_id) is not None
    assert paged.find_shared_prefix(TWELVE)[0] == []
    found, remaining = cache.fetch_cache("t", TWELVE)
    assert (found.block_ids, found.num_tokens, list(remaining)) == (table.block_ids, 12, [])


def test_stored_blocks_are_freed_by_their_release() -> None:
    cache, paged = build(ssd=ForeignSSD())
    free = paged.free_blocks
    cache.store_cache("r", TWELVE[:4], [kv_layer(0, 4)])
    assert paged.free_blocks == free - 1
    cache.release_cache("r")
    assert paged.free_blocks == free


@pytest.mark.parametrize("about", [{"block_size": 2048}, {"model_name": "another"}, {"num_layers": 7}])
@pytest.mark.parametrize("place", [0, 1])
def test_a_block_of_another_shape_is_forgotten_once(about: dict[str, Any], place: int) -> None:
    blocks = [kv_block(number) for number in range(2)]
    blocks[place] = kv_block(place, **about)
    ssd = mock_ssd(dict(zip([b"hash1", b"hash2"], blocks, strict=True)))
    cache, paged = build(ssd=ssd)
    table = seed(paged, "r", [b"hash1", b"hash2"])
    caches = cache.reconstruct_cache(table)
    assert table.num_tokens == place * BLOCK
    assert len(table.block_ids) == place
    if place:
        check_kv(caches[0], 4)
    else:
        assert caches is None
    ssd.forget_block.assert_called_once_with([b"hash1", b"hash2"][place])
    ssd.delete_block.assert_not_called()


def test_a_block_of_another_size_alone_is_a_miss() -> None:
    ssd = mock_ssd({b"hash1": kv_block(0, block_size=2048)})
    cache, paged = build(ssd=ssd)
    assert cache.reconstruct_cache(seed(paged, "r", [b"hash1"])) is None
    ssd.forget_block.assert_called_once_with(b"hash1")
    ssd.delete_block.assert_not_called()


def test_a_block_that_cannot_be_loaded_ends_the_hit() -> None:
    ssd = mock_ssd({b"hash1": kv_block(0), b"hash3": kv_block(2)})
    cache, paged = build(ssd=ssd)
    table = seed(paged, "r", [b"hash1", b"hash2", b"hash3"], refs=2)
    own = [paged.allocated_blocks.get(block_id) for block_id in table.block_ids]
    ids = table.block_ids
    check_kv(cache.reconstruct_cache(table)[0], 4)
    assert table.block_ids is ids
    assert (ids, table.num_tokens) == ([own[0].block_id], 4)
    assert [one.ref_count for one in own] == [2, 1, 1]


def test_blocks_are_loaded_once_and_in_order() -> None:
    ssd = MagicMock()
    ssd.load_block_with_metadata.side_effect = [kv_block(0), kv_block(1), kv_block(2)]
    cache, paged = build(ssd=ssd)
    check_kv(cache.reconstruct_cache(seed(paged, "r", [b"hash1", b"hash2", b"hash3"]))[0], 12)
    assert [call.args for call in ssd.load_block_with_metadata.call_args_list] == [
        (b"hash1",),
        (b"hash2",),
        (b"hash3",),
    ]


def test_a_first_block_that_cannot_be_loaded_is_a_miss() -> None:
    cache, paged = build(ssd=mock_ssd({b"hash2": kv_block(1)}))
    assert cache.reconstruct_cache(seed(paged, "r", [b"hash1", b"hash2"])) is None


def test_nothing_to_reconstruct() -> None:
    cache, paged = build(ssd=mock_ssd())
    assert cache.reconstruct_cache(paged.create_block_table("r")) is None
    assert build()[0].reconstruct_cache(seed(paged, "s", [b"hash1"])) is None


@pytest.mark.parametrize("double", [ForeignSSD, TerseSSD])
def test_a_hybrid_model_through_a_hand_written_manager(double: type[ForeignSSD]) -> None:
    cache, paged = build(KVCache, arrays, ssd=double())
    snapshots = {count: [layer_dict("KVCache", ()), arrays_layer(count, layer=1)] for count in (4, 8)}
    table = cache.store_cache("r", TWELVE, [kv_layer(0, 12), arrays_layer(12, layer=1)], boundary_snapshots=snapshots)
    finish(cache, paged, "r", table)
    for count in (4, 8, 12):
        found, remaining = cache.fetch_cache(f"s{count}", [*TWELVE[:count], 99])
        caches = cache.reconstruct_cache(found)
        assert (found.num_tokens, list(remaining)) == (count, [99])
        check_kv(caches[0], count)
        check_slots(caches[1], count, layer=1)
