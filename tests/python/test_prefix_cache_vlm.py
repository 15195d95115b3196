"""Layers of mlx-vlm in oMLX's prefix cache: TurboQuant rows, and MiniMax M3's three arrays."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from mlx_vlm.models.minimax_m3_vl import language
from mlx_vlm.turboquant import TurboQuantKVCache
from omlx_doubles import (
    ForeignSSD,
    block,
    build,
    check_kv,
    check_pair,
    check_same,
    finish,
    kv_layer,
    layer_dict,
    mock_ssd,
    pair,
    rows,
    seed,
)

from prefixcache.hybrid_cache import ModelCacheConfig
from prefixcache.prefix_cache import BlockAwarePrefixCache

EIGHT = list(range(1, 9))
DIM = 64
TURBO, KV, MINIMAX = "TurboQuantKVCache", "KVCache", "MiniMaxM3KVCache"


def turbo(tokens: int = 8, seed_number: int = 7) -> TurboQuantKVCache:
    cache = TurboQuantKVCache(4.0, seed=seed_number)
    mx.eval([state._state for state in cache.update_and_fetch(*pair(0, tokens, dim=DIM, dtype=mx.float16))])
    return cache


def turbo_layer(cache: Any) -> dict[str, Any]:
    return layer_dict(TURBO, cache.state, cache.meta_state)


def check_states(found: Any, expected: Any, start: int, stop: int) -> None:
    """Two TurboQuant states hold the same codes for the tokens from `start` to `stop`."""
    assert type(found) is type(expected)
    for one, other in zip(found, expected, strict=True):
        check_same(one, other[:, :, start:stop])


def cut(layers: list[dict[str, Any]], start: int, stop: int) -> Any:
    cache, _ = build()
    config = ModelCacheConfig.from_type_list([layer["class_name"] for layer in layers])
    return cache._extract_block_tensor_slice(layers, start, stop, model_cache_config=config)


@pytest.mark.parametrize("wrapped", [False, True])
def test_codes_of_a_block(wrapped: bool) -> None:
    keys, values = turbo().state
    state = tuple(SimpleNamespace(_state=one) if wrapped else one for one in (keys, values))
    for start, stop in ((0, 4), (4, 8), (2, 3)):
        marker, (found_keys, found_values) = cut([layer_dict(TURBO, state)], start, stop)[0]
        assert marker == "__turboquant_v2__"
        check_states(found_keys, keys, start, stop)
        check_states(found_values, values, start, stop)


@pytest.mark.parametrize("state", [(None, None), (), None])
def test_codes_that_are_not_there_leave_a_placeholder(state: Any) -> None:
    found = cut([layer_dict(TURBO, state), kv_layer(0, 8)], 0, 4)
    assert BlockAwarePrefixCache._is_placeholder_state(found[0]) is True
    check_pair(found[1], pair(0, 4))


def test_codes_come_back() -> None:
    ssd, original = ForeignSSD(), turbo()
    cache, _ = build(ssd=ssd)
    table = cache.store_cache("r", EIGHT, [turbo_layer(original)])
    assert [list(save["layer_cache_types"]) for save in ssd.saves] == [[TURBO]] * 2
    restored = cache.reconstruct_cache(table)[0]
    assert type(restored) is TurboQuantKVCache
    assert (restored.offset, restored.bits, restored.seed) == (8, 4.0, 7)
    for one, other in zip(restored.state, original.state, strict=True):
        check_states(one, other, 0, 8)
    for one, other in zip(restored.dequantize(), original.dequantize(), strict=True):
        check_same(one, other)
    more = pair(8, 9, dim=DIM, dtype=mx.float16)
    restored.update_and_fetch(*more)
    original.update_and_fetch(*more)
    for one, other in zip(restored.dequantize(), original.dequantize(), strict=True):
        check_same(one, other)


def turbo_block(start: int, stop: int) -> Any:
    cache = turbo()
    states = tuple(type(state)(*(field[:, :, start:stop] for field in state)) for state in cache.state)
    return block([("__turboquant_v2__", states)], [TURBO], [("8", "4.0", "7", "4.0", "4.0")])


def plain_block(start: int, stop: int) -> Any:
    return block([pair(start, stop, dim=DIM, dtype=mx.float16)], [KV], [(str(stop),)])


def test_a_plain_tail_behind_codes_is_cut_off_and_forgotten() -> None:
    ssd = mock_ssd({b"hash1": turbo_block(0, 4), b"hash2": plain_block(4, 8)})
    cache, paged = build(ssd=ssd)
    table = seed(paged, "r", [b"hash1", b"hash2"])
    restored = cache.reconstruct_cache(table)
    assert [type(one) for one in restored] == [TurboQuantKVCache]
    assert restored[0].offset == 4
    for one, other in zip(restored[0].state, turbo().state, strict=True):
        check_states(one, other, 0, 4)
    assert (len(table.block_ids), table.num_tokens) == (1, 4)
    ssd.forget_block.assert_called_once_with(b"hash2")
    ssd.delete_block.assert_not_called()
    assert paged.cached_block_hash_to_block.get_block(b"hash2") is None
    assert paged.cached_block_hash_to_block.get_block(b"hash1") is not None


def test_a_plain_block_is_refused_where_the_manager_expects_codes() -> None:
    ssd = mock_ssd({b"hash1": plain_block(0, 4)})
    ssd._expected_layer_cache_types = [TURBO]
    cache, paged = build(ssd=ssd)
    table = seed(paged, "r", [b"hash1"])
    assert cache.reconstruct_cache(table) is None
    assert (table.block_ids, table.num_tokens) == ([], 0)
    ssd.forget_block.assert_called_once_with(b"hash1")
    ssd.delete_block.assert_not_called()


@pytest.mark.parametrize("expected", [[], (), None, "TurboQuantKVCache", [KV], (KV,)])
def test_only_a_filled_list_or_tuple_is_an_expectation(expected: Any) -> None:
    ssd = mock_ssd({b"hash1": block([pair(0, 4)], [KV])})
    ssd._expected_layer_cache_types = expected
    cache, paged = build(ssd=ssd)
    check_kv(cache.reconstruct_cache(seed(paged, "r", [b"hash1"]))[0], 4)
    ssd.forget_block.assert_not_called()


def test_an_expectation_can_be_a_tuple() -> None:
    ssd = mock_ssd({b"hash1": plain_block(0, 4)})
    ssd._expected_layer_cache_types = (TURBO,)
    cache, paged = build(ssd=ssd)
    assert cache.reconstruct_cache(seed(paged, "r", [b"hash1"])) is None


class Rows:
    """The inner cache of the stand-in below."""

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0

    @property
    def state(self) -> Any:
        return self.keys, self.values

    @state.setter
    def state(self, pair: Any) -> None:
        self.keys, self.values = pair
        self.offset = self.keys.shape[2]


class StandIn:
    """MiniMax M3's cache as a caller may put it in place of mlx-vlm's."""

    def __init__(self) -> None:
        self.kv_cache = Rows()
        self.index_keys: Any = None
        self.index_offset = 0


StandIn.__name__ = StandIn.__qualname__ = MINIMAX


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type:
    module = ModuleType("mlx_vlm.models.minimax_m3_vl.language")
    module.MiniMaxM3KVCache = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return StandIn


def indexed(meta: Any = ("999",)) -> dict[str, Any]:
    return layer_dict(MINIMAX, (*pair(0, 8), rows(0, 8, 9, heads=1)), meta)


def check_indexed(cache: Any) -> None:
    check_pair(tuple(array[..., :8, :] for array in (cache.kv_cache.keys, cache.kv_cache.values)), pair(0, 8))
    assert cache.kv_cache.offset == 8
    check_same(cache.index_keys[..., :8, :], rows(0, 8, 9, heads=1))
    assert cache.index_offset == 8


def store_indexed(ssd: ForeignSSD) -> Any:
    cache, paged = build(StandIn, ssd=ssd)
    table = cache.store_cache("r", EIGHT, [indexed()], ModelCacheConfig.from_type_list([MINIMAX]))
    assert table.num_tokens == 8
    assert len(ssd.saves) == 2
    for number, save in enumerate(ssd.saves):
        start, stop = number * 4, number * 4 + 4
        marker, name, elements = save["cache_data"][0]
        assert (marker, name, len(elements)) == ("__nstate__", MINIMAX, 3)
        check_pair((elements[0], elements[1]), pair(start, stop))
        check_same(elements[2], rows(start, stop, 9, heads=1))
        assert list(save["layer_cache_types"]) == [MINIMAX]
    finish(cache, paged, "r", table)
    table, remaining = cache.fetch_cache("s", [*EIGHT, 99])
    assert list(remaining) == [99]
    return cache.reconstruct_cache(table)


def test_rows_with_an_index_come_back_in_the_class_that_is_in_place(stand_in: type) -> None:
    restored = store_indexed(ForeignSSD())
    assert [type(one) for one in restored] == [stand_in]
    check_indexed(restored[0])


def test_rows_with_an_index_come_back_in_the_class_of_mlx_vlm() -> None:
    restored = store_indexed(ForeignSSD())
    assert [type(one) for one in restored] == [language.MiniMaxM3KVCache]
    check_indexed(restored[0])
    assert restored[0].trim(1) == 1
    assert (restored[0].offset, restored[0].index_offset) == (7, 7)


def test_plain_layers_beside_an_index(stand_in: type) -> None:
    cache, _ = build(KVCache, StandIn, ssd=ForeignSSD())
    config = ModelCacheConfig.from_type_list([KV, MINIMAX])
    table = cache.store_cache("r", EIGHT, [kv_layer(0, 8, 1), indexed()], config)
    restored = cache.reconstruct_cache(table)
    check_kv(restored[0], 8, 1)
    assert type(restored[1]) is stand_in
    check_indexed(restored[1])
