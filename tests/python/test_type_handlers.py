"""What every handler of oMLX's surface must do, over real caches of mlx-lm and mlx-vlm; then what each does alone."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import pytest
from handler_cases import OLD_CHUNKS
from handler_cases_vlm import CASES as VLM_CASES
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_vlm.models import cache as vlm
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3BatchKVCache, MiniMaxM3KVCache
from omlx_layers import check_same_layers, plain, rows, states, window
from parts import same

from prefixcache import type_handlers as th
from prefixcache._omlx.layer_dicts import live_caches, undressed
from prefixcache._registry import describe_layers
from prefixcache._rotating_subclass import PrefillReadyRotatingKVCache
from prefixcache.type_handlers import CacheType, CacheTypeHandler, SizedArraysCache
from prefixcache.type_registry import CacheTypeRegistry

BLOCK = 4


def fed(cache: Any, count: int, step: int = 7, dim: int = 4) -> Any:
    for start in range(0, count, step):
        stop = min(count, start + step)
        cache.update_and_fetch(rows(stop - start, start, dim=dim), -rows(stop - start, start, dim=dim))
    return cache


def minimax(count: int, index: bool = True) -> Any:
    cache = fed(MiniMaxM3KVCache(), count)
    if index and count:
        cache.update_index_and_fetch(rows(count, heads=1))
    return cache


def pool(count: int, ratio: int = 4) -> Any:
    return VLM_CASES["pooling-4"].donor(count) if count else vlm.PoolingCache(ratio)


def chunked(count: int) -> Any:
    cache = ChunkedKVCache(256)
    for start in range(0, count, 100):
        cache.maybe_trim_front()
        stop = min(count, start + 100)
        cache.update_and_fetch(rows(stop - start, start), -rows(stop - start, start))
    return cache


def batch(kind: Any, *caches: Any) -> Any:
    merged = kind.merge(list(caches))
    mx.eval(merged.keys, merged.values)
    return merged


def minimax_batch(*counts: int) -> Any:
    return MiniMaxM3BatchKVCache.merge([minimax(count) for count in counts])


def pool_batch(*counts: int) -> Any:
    return vlm.BatchPoolingCache.merge([pool(count) for count in counts])


@dataclass(frozen=True)
class Kind:
    """``make(n)`` gives a cache at n tokens. ``names``: of a state as a tuple, None where there is no fixed list."""

    handler: CacheTypeHandler
    make: Callable[[int], Any]
    names: tuple[str, ...] | None
    empty: bool = True


PAIR = ("keys", "values")
BATCH = (*PAIR, "offset", "left_padding")
SIX = tuple(f"{owner}{part}" for owner in PAIR for part in ("", "_scales", "_biases"))
KINDS = {
    "kv": Kind(th.KVCacheHandler(), lambda n: fed(KVCache(), n), PAIR),
    "default": Kind(th.DefaultCacheHandler(), lambda n: fed(KVCache(), n), PAIR),
    "concatenate": Kind(th.ConcatenateKVCacheHandler(), lambda n: fed(ConcatenateKVCache(), n), PAIR),
    "quantised": Kind(th.QuantizedKVCacheHandler(), lambda n: fed(QuantizedKVCache(32, 4), n, dim=64), SIX),
    "minimax": Kind(th.MiniMaxM3KVCacheHandler(), minimax, (*PAIR, "index_keys")),
    "minimax-dense": Kind(th.MiniMaxM3KVCacheHandler(), lambda n: minimax(n, False), (*PAIR, "index_keys")),
    "rotating": Kind(th.RotatingKVCacheHandler(), lambda n: fed(RotatingKVCache(8), n, step=1), PAIR),
    "rotating-keep": Kind(th.RotatingKVCacheHandler(), lambda n: fed(RotatingKVCache(8, 3), n), PAIR),
    "chunked": Kind(th.ChunkedKVCacheHandler(), chunked, PAIR),
    "arrays": Kind(th.ArraysCacheHandler(), lambda n: states((1, 3, 4), (1, 2, 2, 2), (1, n + 1)), None, False),
    "list": Kind(
        th.CacheListHandler(), lambda n: CacheList(fed(KVCache(), n), fed(RotatingKVCache(8), n)), None, False
    ),
    "pooling": Kind(th.PoolingCacheHandler(), pool, ("buf_kv", "buf_gate", "pooled")),
}
WHOLE = {
    "batch": Kind(th.BatchKVCacheHandler(), lambda n: batch(BatchKVCache, plain(n), plain(n + 3)), BATCH),
    "batch-rotating": Kind(
        th.BatchRotatingKVCacheHandler(),
        lambda n: batch(BatchRotatingKVCache, window(n, 16), window(n + 3, 16)),
        BATCH,
    ),
    "minimax-batch": Kind(th.MiniMaxM3BatchKVCacheHandler(), lambda n: minimax_batch(n, n + 3), (*BATCH, "index_keys")),
    "batch-pooling": Kind(
        th.BatchPoolingCacheHandler(), lambda n: pool_batch(n, n + 3), ("buf_kv", "buf_gate", "pooled")
    ),
}
SLICEABLE = {name: kind for name, kind in KINDS.items() if kind.handler.supports_block_slicing}
LENGTHS = (1, 4, 11, 300)


def each(kinds: dict[str, Kind]) -> Any:
    return pytest.mark.parametrize("kind", kinds.values(), ids=kinds.keys())


def check_same_cache(found: Any, expected: Any) -> None:
    if isinstance(undressed(expected), vlm.PoolingCache):
        check_same_pool(found, expected)
    else:
        check_same_layers([undressed(found)], [expected])


def check_same_pool(found: Any, expected: Any) -> None:
    """What a buffer has behind its tokens is never read."""
    assert (found.ratio, found.remainder) == (expected.ratio, expected.remainder)
    for one, other in zip(found.state, expected.state, strict=True):
        assert same(one, other)


@pytest.mark.parametrize("n", LENGTHS)
@each(KINDS)
def test_a_state_makes_the_same_cache(kind: Kind, n: int) -> None:
    cache = kind.make(n)
    state, meta = kind.handler.extract_state(cache), kind.handler.serialize_meta_state(cache)
    check_same_cache(kind.handler.reconstruct_cache(state, meta), cache)
    # An extracted state says all by itself.
    check_same_cache(kind.handler.reconstruct_cache(state), cache)


@pytest.mark.parametrize("n", LENGTHS)
@each(KINDS)
def test_a_tuple_makes_the_same_cache(kind: Kind, n: int) -> None:
    cache = kind.make(n)
    elements, meta = kind.handler.serialize_state(cache), kind.handler.serialize_meta_state(cache)
    assert isinstance(elements, tuple)
    assert isinstance(meta, tuple)
    back = kind.handler.deserialize_state(elements, meta)
    check_same_cache(back, cache)
    # What comes back can be stored again.
    again = kind.handler.deserialize_state(kind.handler.serialize_state(back), kind.handler.serialize_meta_state(back))
    check_same_cache(again, cache)


@pytest.mark.parametrize("n", LENGTHS)
@each(SLICEABLE)
def test_blocks_join_to_the_same_cache(kind: Kind, n: int) -> None:
    cache = kind.make(n)
    state = kind.handler.extract_state(cache)
    assert kind.handler.get_seq_len(state) == n
    blocks = [kind.handler.slice_state(state, start, start + BLOCK) for start in range(0, n, BLOCK)]
    assert all(block is not None for block in blocks)
    found = [block for block in blocks if block is not None]
    assert [kind.handler.get_seq_len(block) for block in found] == [min(BLOCK, n - i) for i in range(0, n, BLOCK)]
    joined = kind.handler.concatenate_states(found)
    # The first block's meta state, or that of the whole prompt: rows count.
    metas = (kind.handler.serialize_meta_state(cache), kind.handler.serialize_meta_state(kind.make(BLOCK)))
    for meta in metas:
        check_same_cache(kind.handler.reconstruct_cache(joined, meta), cache)


@each(SLICEABLE)
def test_no_block_beyond_the_rows(kind: Kind) -> None:
    state = kind.handler.extract_state(kind.make(11))
    for start, end in ((11, 15), (5, 5), (6, 2), (-3, 2), (400, 500)):
        assert kind.handler.slice_state(state, start, end) is None
    assert kind.handler.slice_state({}, 0, 4) is None
    cut = kind.handler.slice_state(state, 8, 100)
    assert cut is not None
    assert kind.handler.get_seq_len(cut) == 3


@each({name: kind for name, kind in {**KINDS, **WHOLE}.items() if name not in SLICEABLE})
def test_whole_states_are_not_cut(kind: Kind) -> None:
    early, late = kind.handler.extract_state(kind.make(5)), kind.handler.extract_state(kind.make(11))
    assert kind.handler.slice_state(late, 0, 4) is None
    joined = kind.handler.concatenate_states([early, late])
    assert joined == late
    assert joined is not late


@each({**KINDS, **WHOLE})
def test_it_tells_the_truth_about_itself(kind: Kind) -> None:
    handler, cache = kind.handler, kind.make(11)
    info, axes = handler.get_state_info(), handler.get_state_axis_info()
    assert info.cache_type == handler.cache_type.value
    assert info.supports_block_slicing is handler.supports_block_slicing
    assert info.is_full_state is not handler.supports_block_slicing
    assert info.state_keys == handler._get_state_keys()
    assert info.meta_state_keys == handler._get_meta_state_keys()
    elements = handler.serialize_state(cache)
    if kind.names is None:
        assert axes == ()
        assert handler.is_variable_length_state() or handler.is_composite_cache()
    else:
        assert tuple(axis.name for axis in axes) == info.state_keys == kind.names
        assert len(elements) == len(axes)
        assert not handler.is_variable_length_state()
        assert not handler.is_composite_cache()
        for axis, element in zip(axes, elements, strict=True):
            assert element is None or axis.sequence_axis is None or axis.sequence_axis < element.ndim
            assert handler.supports_block_slicing or not axis.sliceable
    expected = 11 if handler.supports_block_slicing else 0
    assert handler.get_state_seq_len_from_tuple(elements) == expected
    assert set(info.state_keys) <= handler.extract_state(cache).keys()


@each({name: kind for name, kind in KINDS.items() if kind.empty})
def test_a_cache_that_holds_nothing(kind: Kind) -> None:
    cache = kind.make(0)
    assert kind.handler.extract_state(cache) == {}
    assert kind.handler.serialize_state(cache) == ()
    assert kind.handler.get_seq_len({}) == 0
    assert kind.handler.get_state_seq_len_from_tuple(()) == 0
    assert kind.handler.concatenate_states([]) == {}


GARBAGE: list[Any] = [(), ("a", "b"), (None,), (None, None, None), (3, 4), ([], {}), (rows(2),), (rows(2), 7, "x", 0)]


@pytest.mark.parametrize("meta", [None, "", 3, "x", ("a", "b", "c", "d"), ([1], [2]), [None], ({}, {}, {}, {})])
@each({**KINDS, **WHOLE})
def test_garbage_is_none_or_a_cache_and_never_an_error(kind: Kind, meta: Any) -> None:
    for elements in GARBAGE:
        kind.handler.deserialize_state(elements, meta)
        kind.handler.reconstruct_cache(dict(zip(kind.handler._get_state_keys(), elements, strict=False)), meta)
    made = kind.handler.reconstruct_cache({"other": rows(2)}, meta)
    # A pool may hold nothing yet; nothing else comes of nothing.
    assert made is None or "buf_kv" in (kind.names or ())


@each({name: kind for name, kind in KINDS.items() if name not in ("arrays", "list", "pooling")})
def test_words_make_no_cache(kind: Kind) -> None:
    assert kind.handler.deserialize_state(("a", "b"), kind.handler.serialize_meta_state(kind.make(5))) is None
    assert kind.handler.deserialize_state((rows(2), None), kind.handler.serialize_meta_state(kind.make(5))) is None


@each(WHOLE)
def test_a_batch_comes_back_and_goes_on(kind: Kind) -> None:
    donor = kind.make(5)
    reference = copy.deepcopy(donor)
    state, meta = kind.handler.serialize_state(donor), kind.handler.serialize_meta_state(donor)
    back = kind.handler.deserialize_state(state, meta)
    assert type(back).__name__ == type(donor).__name__
    steps = [_step(back, i) for i in range(12)]
    for found, expected in zip(steps, [_step(reference, i) for i in range(12)], strict=True):
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            assert same(one, other)
    # The donor has not moved with it.
    for one, other in zip(kind.handler.serialize_state(donor), state, strict=True):
        assert same(one, other)


def _step(cache: Any, i: int) -> list[mx.array]:
    """One token for both sequences, and everything that attention then sees."""
    if isinstance(cache, vlm.BatchPoolingCache):
        new = mx.concatenate([rows(1, i)[0], rows(1, i + 50)[0]], axis=0)
        new = mx.concatenate([new] * 3, axis=-1)[:2]
        gate = mx.concatenate([rows(1, i)[0], rows(1, i + 9)[0]], axis=0)[:2]
        kv, gates, base = cache.accumulate_windows(new, gate, mx.array([5 + i, 8 + i]))
        seen = [kv, gates, *([base] if isinstance(base, mx.array) else [])]
        return [mx.array(one) for one in seen] + [mx.array(cache.remainder)]
    new = mx.concatenate([rows(1, i), rows(1, i + 50)], axis=0)
    seen = [*cache.update_and_fetch(new, -new), mx.array(cache.offset), mx.array(cache.left_padding)]
    if isinstance(cache, MiniMaxM3BatchKVCache):
        seen.append(cache.update_index_and_fetch(new[:, :1]))
    mask = cache.make_mask(1)
    copies = [mx.contiguous(one) for one in seen] + ([mask] if isinstance(mask, mx.array) else [])
    mx.eval(copies)
    return copies


@pytest.mark.parametrize("n", [3, 12, 30])
def test_a_pool_goes_on(n: int) -> None:
    case = VLM_CASES["pooling-4"]
    donor, handler = case.donor(n), th.PoolingCacheHandler()
    back = handler.deserialize_state(handler.serialize_state(donor), handler.serialize_meta_state(donor))
    for (what, one), (_, other) in zip(case.play(back, n), case.play(copy.deepcopy(donor), n), strict=True):
        assert same(one, other), what


def test_a_pool_takes_any_ratio_and_leaves_out_rows() -> None:
    handler = th.PoolingCacheHandler()
    assert handler.get_state_axis_info()[0].sequence_axis == 1
    pending = rows(2)[0]
    for meta, ratio in ((4, 4), ((4,), 4), ([4], 4)):
        cache = handler.deserialize_state((pending, pending), meta)
        assert (cache.ratio, cache.remainder, cache.pooled) == (ratio, 2, None)
    cache = handler.deserialize_state((None, None, pending), ())
    assert (cache.ratio, cache.remainder) == (1, 0)
    assert handler.deserialize_state((pending, pending), 2) is None


@pytest.mark.parametrize("form", [tuple, list])
def test_a_batch_of_pools_from_json(form: Any) -> None:
    handler, donor = th.BatchPoolingCacheHandler(), pool_batch(5, 8)
    meta = form(handler.serialize_meta_state(donor))
    for told in (meta, meta[:4]):
        back = handler.deserialize_state(handler.serialize_state(donor), told)
        assert back.remainder == donor.remainder
        assert back.remainder is not donor.remainder
    assert handler.deserialize_state(handler.serialize_state(donor), 4) is None


def test_a_shared_offset_never_counts_for_plain_rows() -> None:
    keys, values = rows(5), -rows(5)
    for meta in (None, "", (), (99,), ("99",), 99):
        cache = th.KVCacheHandler().reconstruct_cache({"keys": keys, "values": values}, meta)
        assert type(cache) is KVCache
        assert cache.offset == 5
        assert cache.keys is keys
    assert th.KVCacheHandler().serialize_meta_state(plain(5)) == ()
    assert th.DefaultCacheHandler().cache_type is CacheType.KVCACHE


def test_rows_without_a_batch_axis_are_cut_and_joined_as_rows() -> None:
    """A head size that equals the number of tokens hides the mistake: here it does not."""
    keys, values = rows(11, dim=3)[0], rows(11, dim=6)[0]
    handler = th.KVCacheHandler()
    state = {"keys": keys, "values": values}
    assert handler.get_seq_len(state) == 11
    assert handler.get_state_seq_len_from_tuple((keys, values)) == 11
    blocks = [handler.slice_state(state, start, start + 4) for start in (0, 4, 8)]
    joined = handler.concatenate_states([block for block in blocks if block])
    assert same(joined["keys"], keys)
    assert same(joined["values"], values)
    assert handler.reconstruct_cache(joined).offset == 11


def test_rows_that_do_not_fit_are_an_error_to_join() -> None:
    with pytest.raises(ValueError):
        th.KVCacheHandler().concatenate_states(
            [{"keys": rows(4), "values": rows(4)}, {"keys": rows(4, dim=8), "values": rows(4)}]
        )


def test_something_that_only_looks_like_a_cache() -> None:
    keys, values = rows(5), -rows(5)
    double = MagicMock()
    double.state, double.meta_state = (keys, values), ("5",)
    for handler in (th.KVCacheHandler(), th.DefaultCacheHandler()):
        assert handler.serialize_state(double) == (keys, values)
        assert handler.serialize_meta_state(double) == ("5",)
    assert th.KVCacheHandler().serialize_state(SimpleNamespace()) == ()
    for meta, normal in ((None, ()), ("", ()), ((1, 2), (1, 2)), ([1, 2], (1, 2)), (7, (7,)), ("7", ("7",))):
        double = SimpleNamespace(state=(keys, values), meta_state=meta)
        assert th.KVCacheHandler().serialize_meta_state(double) == normal
    shapes = {"keys": SimpleNamespace(shape=(1, 2, 9, 4)), "values": SimpleNamespace(shape=(1, 2, 9, 4))}
    assert th.KVCacheHandler().get_seq_len(shapes) == 9


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize(("count", "singles"), [(3, 0), (8, 0), (30, 0), (30, 1), (30, 5), (6, 9)])
def test_windows_come_back_ready(keep: int, count: int, singles: int) -> None:
    donor, handler = window(count, keep=keep, singles=singles), th.RotatingKVCacheHandler()
    raw = {"keys": donor.keys, "values": donor.values}
    raw_meta = tuple(map(str, (keep, 8, donor.offset, donor._idx)))
    for state, meta in ((raw, raw_meta), (handler.extract_state(donor), handler.serialize_meta_state(donor))):
        cache = handler.reconstruct_cache(state, meta)
        assert type(cache) is PrefillReadyRotatingKVCache
        assert cache._idx == cache.keys.shape[2] == cache.size() == min(8, count + singles)
        assert (cache.offset, cache.max_size, cache.keep) == (count + singles, 8, keep)
        check_same_layers([undressed(cache)], [donor])


def test_a_short_window_is_never_padded() -> None:
    handler = th.RotatingKVCacheHandler()
    cache = handler.reconstruct_cache({"keys": rows(5), "values": -rows(5)}, ("0", "8", "30", "8"))
    assert (cache.keys.shape[2], cache._idx, cache.offset, cache.size()) == (5, 5, 30, 5)
    for meta in (None, ("0", "8"), ("0", "8", "30"), "x"):
        assert handler.reconstruct_cache({"keys": rows(5), "values": -rows(5)}, meta) is None
    assert handler.reconstruct_cache({"keys": None, "values": None}, ("0", "8", "30", "8")) is None


@pytest.mark.skipif(OLD_CHUNKS, reason="this mlx-lm says nowhere where a chunk behind a cut front ends")
def test_chunks_need_their_offset_behind_a_cut_front() -> None:
    handler, cache = th.ChunkedKVCacheHandler(), chunked(500)
    assert cache.start_position > 0
    state, meta = handler.serialize_state(cache), handler.serialize_meta_state(cache)
    assert meta == ("256", str(cache.start_position), "500")
    check_same_layers([handler.deserialize_state(state, meta)], [cache])
    assert handler.deserialize_state(state, meta[:2]) is None


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_array_comes_back(size: int) -> None:
    handler, donor = th.ArraysCacheHandler(), states(*[(1, i + 2, 3) for i in range(size)])
    if size == 4:
        donor[2] = None
    assert handler._get_state_keys() == ("states",)
    for cache in (donor, SizedArraysCache(donor, 7)):
        elements = handler.serialize_state(cache)
        for back in (
            handler.deserialize_state(elements, ()),
            handler.deserialize_state(list(elements), None, token_count=12),
            handler.reconstruct_cache(handler.extract_state(cache), token_count=12),
        ):
            assert type(back) is SizedArraysCache
            check_same_layers([back._inner], [donor])
        assert back.size() == 12
    assert handler.deserialize_state(handler.serialize_state(donor)).size() == 0


def test_lists_need_a_name_and_a_meta_of_each() -> None:
    handler = th.CacheListHandler()
    donor = CacheList(plain(30), window(30, singles=2), SizedArraysCache(states((1, 2, 3)), 3))
    donor.caches[0].update_and_fetch(rows(2, 30), -rows(2, 30))
    elements, meta = handler.serialize_state(donor), handler.serialize_meta_state(donor)
    assert meta[0] == ["KVCache", "RotatingKVCache", "ArraysCache"]
    back = handler.deserialize_state(elements, meta)
    assert [type(child) for child in back.caches] == [KVCache, PrefillReadyRotatingKVCache, ArraysCache]
    check_same_layers([undressed(back)], [undressed(donor)])
    # From JSON, with the names that a running cache has.
    names = ["KVCache", "PrefillReadyRotatingKVCache", "SizedArraysCache"]
    check_same_layers([undressed(handler.deserialize_state(list(elements), [names, meta[1]]))], [undressed(donor)])
    for bad in (None, (), (meta[0],), (meta[0][:2], meta[1]), (meta[0], meta[1][:2]), ("abc", meta[1])):
        assert handler.deserialize_state(elements, bad) is None
    assert handler.deserialize_state(elements, (["KVCache", "NoSuchCache", "ArraysCache"], meta[1])) is None
    assert handler.is_composite_cache()


def test_minimax_from_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    class StandIn:
        def __init__(self) -> None:
            self.kv_cache, self.index_keys, self.index_offset = KVCache(), None, 0

    module = ModuleType("mlx_vlm.models.minimax_m3_vl.language")
    module.MiniMaxM3KVCache = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    handler = th.MiniMaxM3KVCacheHandler()
    cache = handler.deserialize_state((rows(8), -rows(8), rows(8, heads=1)), (999,))
    assert type(cache) is StandIn
    assert (cache.kv_cache.offset, cache.index_offset) == (8, 8)
    assert handler.deserialize_state(((rows(8), -rows(8)), rows(8, heads=1)), ()).index_offset == 8
    assert handler.deserialize_state((rows(8), -rows(8), None), (8,)).index_offset == 8
    assert handler.deserialize_state((None, None, rows(8)), (8,)) is None


@pytest.mark.parametrize("name", ["turbo-4", "turbo-2-odd", "turbo-of-plain", "turbo-prod", "turbo-polar"])
def test_turboquant_goes_through_the_plain_handler(name: str) -> None:
    case = VLM_CASES[name]
    donor = case.donor(21)
    handler = CacheTypeRegistry.get_handler_by_class_name("TurboQuantKVCache")
    assert handler.cache_type is CacheType.KVCACHE
    state, meta = handler.extract_state(donor), handler.serialize_meta_state(donor)
    assert handler.get_seq_len(state) == 21
    blocks = [handler.slice_state(state, start, start + BLOCK) for start in range(0, 21, BLOCK)]
    joined = handler.concatenate_states([block for block in blocks if block])
    back = handler.reconstruct_cache(joined, meta)
    if name in ("turbo-prod", "turbo-polar"):
        assert type(back.key_codec) is type(donor.key_codec)
    check_same_layers([back], [donor])


def test_the_dressed_arrays_delegate() -> None:
    inner = states((1, 2, 3), (1, 4))
    cache = SizedArraysCache(inner, 7)
    assert cache.size() == 7
    assert len(cache) == 2
    assert cache[0] is inner.cache[0]
    assert cache.cache is inner.cache
    assert str(cache.state) == str(inner.state)
    assert not cache.empty()
    cache[1] = rows(1)
    assert inner.cache[1] is cache[1]
    cache.lengths = mx.array([3])
    assert inner.lengths is cache.lengths
    assert cache.make_mask(4).tolist() == [[True, True, True, False]]
    cache.advance(1)
    assert inner.lengths.tolist() == [2]
    cache.prepare(lengths=[5])
    assert inner.lengths.tolist() == [5]
    cache.finalize()
    cache.cache = [rows(2), None]
    assert inner.cache[1] is None
    with pytest.raises(AttributeError):
        _ = cache.no_such_attribute
    assert SizedArraysCache(ArraysCache(1)).size() == 0


def test_the_dressed_arrays_pass_for_what_they_dress() -> None:
    """mlx-lm's mamba writes to an ArraysCache only: otherwise its state would stand still after a hit."""
    cache = SizedArraysCache(states((1, 2, 3), (1, 4)), 7)
    assert isinstance(cache, ArraysCache)
    assert isinstance(cache, SizedArraysCache)
    assert type(cache) is SizedArraysCache
    assert not isinstance(cache, KVCache)
    assert type(copy.copy(cache)) is SizedArraysCache
    assert copy.copy(cache)._inner is cache._inner
    kept = pickle.loads(pickle.dumps(SizedArraysCache(ArraysCache(2), 9)))
    assert type(kept) is SizedArraysCache
    assert (kept.size(), len(kept)) == (9, 2)


def test_the_dressed_arrays_in_batches() -> None:
    one, other = SizedArraysCache(states((1, 2, 3)), 7), SizedArraysCache(states((1, 2, 3)), 9)
    merged = SizedArraysCache.merge([one, other])
    assert type(merged) is SizedArraysCache
    assert merged.size() == 7
    assert same(merged[0], mx.concatenate([one[0], other[0]]))
    row = merged.extract(1)
    assert type(row) is SizedArraysCache
    assert same(row[0], other[0])
    merged.extend(other)
    merged.extend(other._inner)
    assert merged[0].shape == (4, 2, 3)
    merged.filter(mx.array([3]))
    assert same(merged[0], other[0])
    inner = states((1, 2, 3))
    assert SizedArraysCache.merge([inner, inner]).size() == 0
    restored = copy.deepcopy(one)
    assert restored.size() == 7
    assert restored._inner is not one._inner
    restored.state = inner.state
    assert restored[0] is inner[0]


def test_every_registered_handler_has_a_kind() -> None:
    covered = {kind.handler.cache_type for kind in (*KINDS.values(), *WHOLE.values())}
    assert covered == set(CacheTypeRegistry.list_registered_types())


def test_quantised_rows_are_refused_where_they_are_no_codes() -> None:
    back = th.QuantizedKVCacheHandler().deserialize_state(
        (rows(3),) * 6, th.QuantizedKVCacheHandler().serialize_meta_state(KINDS["quantised"].make(3))
    )
    with pytest.raises(ValueError, match="do not fit"):
        describe_layers([back])
    assert live_caches([{"state": (), "meta_state": ("0", "32", "4"), "class_name": "QuantizedKVCache"}])[0].bits == 4
