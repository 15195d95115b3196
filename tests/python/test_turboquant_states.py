"""TurboQuant states: cut, joined and rebuilt; the rebuilt cache goes on as its donor, whatever its head size."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from handler_cases_vlm import CASES, rows
from mlx_vlm import turboquant
from parts import same

from prefixcache._omlx import turboquant_states as ts
from prefixcache._omlx.layer_dicts import layer_dict, live_caches

N, BLOCK = 21, 8
# Plain codes, signs beside codes, nested polar codes, split codes and split signs.
NAMES = ["turbo-4", "turbo-2-odd", "turbo-3.5", "turbo-prod", "turbo-polar", "turbo-split", "turbo-split-prod"]


def arrays(state: Any) -> list[mx.array]:
    return [state] if isinstance(state, mx.array) else [array for part in state for array in arrays(part)]


def check_same_state(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    left, right = arrays(found), arrays(expected)
    assert len(left) == len(right) > 1
    for one, other in zip(left, right, strict=True):
        assert same(mx.contiguous(one), mx.contiguous(other))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_join_to_the_same_state(name: str) -> None:
    donor = CASES[name].donor(N)
    for state in donor.state:
        assert ts.is_state(state)
        assert ts.token_count(state) == N
        blocks = [ts.sliced(state, start, start + BLOCK) for start in range(0, N, BLOCK)]
        assert [ts.token_count(block) for block in blocks] == [8, 8, 5]
        check_same_state(ts.joined(blocks), state)
        check_same_state(ts.joined([state]), state)
        assert ts.token_count(ts.sliced(state, N, N + 3)) == 0


def test_what_attention_gets_is_unwrapped() -> None:
    cache = turboquant.TurboQuantKVCache(4)
    keys, _ = cache.update_and_fetch(rows(1, 64, 0, 5), rows(2, 64, 0, 5))
    assert ts.is_state(keys)
    check_same_state(ts.sliced(keys, 0, 5), cache.state[0])
    assert ts.unwrapped(keys) is keys._state


HEADS = [(bits, k, v) for bits in (2, 3, 4) for k, v in ((64, 80), (72, 120), (128, 96), (48, 112))]


@pytest.mark.parametrize(("bits", "k_dim", "v_dim"), HEADS)
def test_head_sizes_are_found_out_where_codes_end_inside_a_word(bits: int, k_dim: int, v_dim: int) -> None:
    donor = turboquant.TurboQuantKVCache(bits, seed=5)
    donor.update_and_fetch(rows(1, k_dim, 0, 9), rows(2, v_dim, 0, 9))
    reference = copy.deepcopy(donor)
    (keys, values), meta = donor.state, donor.meta_state
    for dims in (None, (k_dim, v_dim)):
        back = ts.rebuilt(keys, values, meta, dims=dims)
        assert (back.key_codec.dim, back.value_codec.dim) == (k_dim, v_dim)
        assert back.offset == 9
    back.update_and_fetch(rows(1, k_dim, 9, 10), rows(2, v_dim, 9, 10))
    reference.update_and_fetch(rows(1, k_dim, 9, 10), rows(2, v_dim, 9, 10))
    for found, expected in zip(back.state, reference.state, strict=True):
        check_same_state(found, expected)
    for found, expected in zip(back.dequantize(), reference.dequantize(), strict=True):
        assert same(found, expected)


def test_head_sizes_by_the_bits_in_use() -> None:
    def words(*last: int) -> mx.array:
        return mx.array([[1] * 11 + [word] for word in last], dtype=mx.uint32)

    assert ts.head_dim(words(0, 7), 3) == 120  # 12 words: 120 codes and 24 bits of nothing, or 128
    assert ts.head_dim(words(0, 1 << 8), 3) == 128
    assert ts.head_dim(words(0, 0), 3) == 128
    assert ts.head_dim(words(0), 3, 121) == 121
    assert ts.head_dim(words(0)[..., :2], 1) == 40
    assert ts.head_dim(mx.zeros((0, 12), mx.uint32), 4) == 96
    assert ts.head_dim(mx.zeros((1, 1), mx.uint32), 8) == 4  # no multiple of 8 fits
    for dim in (117, 129):
        with pytest.raises(ValueError, match=f"a head size of {dim} does not fit 12 words of 3-bit codes"):
            ts.head_dim(words(0), 3, dim)
    with pytest.raises(ValueError, match="no head size fits 0 words"):
        ts.head_dim(mx.zeros((1, 0), mx.uint32), 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_rebuilt_goes_on_as_its_donor(name: str) -> None:
    case = CASES[name]
    donor = case.donor(N)
    layer = layer_dict(donor)
    (back,) = live_caches([layer])
    seen = 0
    for (what, one), (_, other) in zip(case.play(back, N, (1, 5)), case.play(donor, N, (1, 5)), strict=True):
        assert same(one, other), what
        seen += isinstance(one, mx.array)
    assert seen > 2


def test_split_codes_need_their_donors_codecs() -> None:
    layer = layer_dict(CASES["turbo-split"].donor(N))
    del layer["codecs"]
    with pytest.raises(ValueError, match="a split codec depends on the donor's first tokens"):
        live_caches([layer])


def test_fractional_bits_are_those_of_keys_and_values() -> None:
    donor = CASES["turbo-3.5"].donor(N)
    assert (donor.key_bits, donor.value_bits) == (3, 4)
    for meta in (donor.meta_state, donor.meta_state[:3], ("0", 3.5, 0)):
        back = ts.rebuilt(*donor.state, meta)
        assert (back.key_codec.bits, back.value_codec.bits, back.seed) == (3, 4, 0)


def test_defaults() -> None:
    donor = turboquant.TurboQuantKVCache(4.0)
    donor.update_and_fetch(rows(1, 64, 0, 5), rows(2, 64, 0, 5))
    assert donor.seed == ts.DEFAULT_SEED
    back = ts.rebuilt(*donor.state)
    assert (back.bits, back.seed, back.offset) == (4.0, 0, 5)
    for found, expected in zip(back.dequantize(), donor.dequantize(), strict=True):
        assert same(found, expected)


def test_an_empty_cache_keeps_its_settings() -> None:
    donor = turboquant.TurboQuantKVCache(3, seed=9, key_bits=2.5)
    (back,) = live_caches([layer_dict(donor)])
    assert (back.bits, back.seed, back.key_bits, back.value_bits) == (3, 9, 2.5, 3)
    assert back.empty()
    assert back.offset == 0


def states(name: str = "turbo-4", count: int = 5) -> Any:
    return CASES[name].donor(count).state[0]


def test_what_does_not_fit_is_a_value_error() -> None:
    state = states()
    for wrong in (None, (1, 2), rows(1, 4, 0, 2), "state", (), (rows(1, 4, 0, 2),) * 2):
        assert not ts.is_state(wrong)
        for act in (ts.token_count, lambda s: ts.sliced(s, 0, 1), lambda s: ts.joined([state, s])):
            with pytest.raises(ValueError, match="not a TurboQuant state"):
                act(wrong)
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="expected 0 <= start <= stop"):
            ts.sliced(state, start, stop)
    with pytest.raises(ValueError, match="no TurboQuant state to join"):
        ts.joined([])
    with pytest.raises(ValueError, match="different classes"):
        ts.joined([state, states("turbo-prod")])
    with pytest.raises(ValueError, match="different shapes"):
        ts.joined([state, states("turbo-2-odd")])
    with pytest.raises(ValueError, match="different numbers of tokens"):
        ts.token_count(state._replace(norms=state.norms[:, :, :3]))
    with pytest.raises(ValueError, match="5 tokens of keys, 4 of values"):
        ts.rebuilt(state, ts.sliced(state, 0, 4))
    for meta in (("5", "words"), ("5", "0.3"), ("5", "4", "x")):
        with pytest.raises(ValueError):
            ts.rebuilt(state, state, meta)
    with pytest.raises(ValueError, match="a head size of 8 does not fit"):
        ts.rebuilt(state, state, dims=(8, 8))
