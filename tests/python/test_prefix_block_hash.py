"""Chained block hashes under oMLX's names."""

from __future__ import annotations

import copy
import subprocess
import sys
from array import array
from itertools import combinations
from typing import Any

import key_encoding as reference
import mlx.core as mx
import numpy as np
import pytest
from conftest import child_environment, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache._core import KeyChain, TokenBuffer, sha256
from prefixcache._keys import encode_salt
from prefixcache._omlx.block_hash import block_hashes
from prefixcache.paged_cache import compute_block_hash, resolve_block_extra_keys

GOLDEN = [
    "2888df21380be09055529931734e615d21f1f1b9c8b5332d207b534abc1f19ab",
    "bfc602fb42eca161b8a46fe334136693d0191c64add70c297fbbeda298412fb0",
    "75217d0ec4566480df54b6300427d11b79da5c3eac2880a0ff3b914409ae2bfc",
]
TOKENS = [7, 0, 4_294_967_295, 5, 11, 12, 13]


def test_a_hash_is_the_key_of_its_block() -> None:
    root = reference.chain_root("model")
    first = compute_block_hash(None, TOKENS[:4], model_name="model")
    assert first == reference.block_key("model", root, TOKENS[:4])
    second = compute_block_hash(first, TOKENS[4:], ("image",), "model")
    digest = sha256(encode_salt(("image",)))
    assert second == reference.block_key("model", first, TOKENS[4:], [(0, 1, digest)])


def test_hashes_never_change() -> None:
    """They name files that outlive the process."""
    assert compute_block_hash(None, [1, 2, 3]).hex() == GOLDEN[0]
    assert compute_block_hash(b"parent", [1, 2, 3], ("image", 4), "model").hex() == GOLDEN[1]
    assert compute_block_hash(None, [1], [("list", 1.5)], "model").hex() == GOLDEN[2]  # type: ignore[arg-type]


def test_a_first_block_has_no_parent_in_two_spellings() -> None:
    assert compute_block_hash(None, TOKENS) == compute_block_hash(b"", TOKENS)
    assert compute_block_hash(None, TOKENS) == compute_block_hash(None, TOKENS, None, "")
    assert compute_block_hash(None, TOKENS, ()) == compute_block_hash(None, TOKENS, None)


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        lambda tokens: np.array(tokens, dtype=np.uint32),
        lambda tokens: np.array(tokens, dtype=np.int64),
        lambda tokens: [np.int64(token) for token in tokens],
        lambda tokens: array("q", tokens),
        lambda tokens: mx.array(tokens, dtype=mx.uint32),
        TokenBuffer,
    ],
)
def test_equal_tokens_give_equal_hashes_whatever_holds_them(make: Any) -> None:
    assert compute_block_hash(None, make(TOKENS)) == compute_block_hash(None, TOKENS)
    assert block_hashes(make(TOKENS), 3, "m", ("a",), 4) == block_hashes(TOKENS, 3, "m", ("a",), 4)


def test_parts_of_a_hash_cannot_be_taken_for_one_another() -> None:
    """Joined without lengths, the first two would be one."""
    hashes = [
        compute_block_hash(None, [1], model_name="x"),
        compute_block_hash(b"root", [1], model_name="xomlx-"),
        compute_block_hash(b"xroot", [1], model_name=""),
        compute_block_hash(b"root", [1], model_name="x"),
        compute_block_hash(b"x", [1], model_name="root"),
        compute_block_hash(None, [1], ("x",)),
        compute_block_hash(None, [1, 2]),
        compute_block_hash(None, [12]),
        compute_block_hash(None, [1], (2,)),
        compute_block_hash(None, []),
    ]
    assert len(set(hashes)) == len(hashes)
    assert {len(value) for value in hashes} == {32}


LOOKALIKE_SALTS: list[Any] = [
    ("a", "b"), ("ab",), (("a", "b"),), ["a", "b"], [("a", "b")], "ab", ("a", ["b"]), (1,), ("1",), (True,), (1.0,),
    (1.5,), ("1.5",), (b"1.5",), ({"a": 1},), (None,), ((),), ([],), (np.float32(1.5),), (np.int64(1),),
    (np.zeros(4, dtype=np.uint8),), (np.zeros(4, dtype=np.int8),), (np.zeros((2, 2), dtype=np.uint8),),
    (mx.zeros(4),), (mx.zeros(4, dtype=mx.bfloat16),), (bytearray(b"1.5"),), (frozenset({1}),),
]  # fmt: skip


def test_salts_of_any_kind_are_told_apart() -> None:
    for a, b in combinations(LOOKALIKE_SALTS, 2):
        assert compute_block_hash(None, [1], a) != compute_block_hash(None, [1], b), (a, b)


@pytest.mark.parametrize("salt", LOOKALIKE_SALTS, ids=repr)
def test_a_salt_gives_the_same_hash_again(salt: Any) -> None:
    assert compute_block_hash(None, [1], salt) == compute_block_hash(None, [1], copy.deepcopy(salt))


def test_long_arrays_as_salts_are_hashed_whole() -> None:
    """Their repr leaves out the middle."""
    image = np.zeros(100_000, dtype=np.float32)
    other = image.copy()
    other[50_000] = 1
    assert repr(image) == repr(other)
    assert compute_block_hash(None, [1], (image,)) != compute_block_hash(None, [1], (other,))
    pair = (mx.array(image).astype(mx.bfloat16), mx.array(other).astype(mx.bfloat16))
    assert compute_block_hash(None, [1], pair[:1]) != compute_block_hash(None, [1], pair[1:])
    assert compute_block_hash(None, [1], (image[::2],)) == compute_block_hash(None, [1], (image[:50_000],))


def test_hashes_are_equal_in_other_processes() -> None:
    code = (
        "from prefixcache.paged_cache import compute_block_hash as h\n"
        "print(h(None, [1, 2], ('a', [1.5, frozenset({'x'})]), 'm').hex())"
    )
    run = [sys.executable, "-c", code]
    env = {**child_environment(), "PYTHONHASHSEED": "123"}
    found = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert found == compute_block_hash(None, [1, 2], ("a", [1.5, frozenset({"x"})]), "m").hex()


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1, 2**70]])
def test_tokens_out_of_range_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="outside"):
        compute_block_hash(None, tokens)


@pytest.mark.parametrize("tokens", [["1"], [1.5], [None], [True], 5])
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(TypeError):
        compute_block_hash(None, tokens)
    with pytest.raises(TypeError):
        block_hashes(tokens, 4)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hashes(TOKENS, block_size)


# Which salt a block gets


def test_a_salt_alone_is_that_of_every_block() -> None:
    assert [resolve_block_extra_keys(end, ("a",)) for end in (1, 4, 400)] == [("a",)] * 3
    assert resolve_block_extra_keys(4) is None
    assert resolve_block_extra_keys(4, None, 2) is None


def test_a_salt_begins_with_the_block_that_reaches_behind_its_start() -> None:
    found = [resolve_block_extra_keys(end, ("a",), 8) for end in (4, 8, 9, 12)]
    assert found == [None, None, ("a",), ("a",)]
    assert resolve_block_extra_keys(1, ("a",), 0) == ("a",)


def test_of_several_ranges_the_last_that_has_begun_counts() -> None:
    ranges = [(2, ("a",)), (8, ("a", "b")), (8, ("a", "c")), (20, ("d",))]
    found = [resolve_block_extra_keys(end, None, None, ranges) for end in (1, 2, 3, 8, 9, 20, 21)]
    assert found == [None, None, ("a",), ("a",), ("a", "c"), ("a", "c"), ("d",)]
    assert resolve_block_extra_keys(1, None, None, [(0, ("z",))]) == ("z",)


def test_ranges_win_over_a_single_salt_and_an_empty_list_of_them_does_not() -> None:
    assert resolve_block_extra_keys(4, ("a",), 0, [(4, ("b",))]) is None
    assert resolve_block_extra_keys(4, ("a",), 0, []) == ("a",)


def test_ranges_out_of_order_are_an_assertion_error() -> None:
    """In optimised Python too, where assert statements are left out."""
    ranges = [(8, ("a",)), (2, ("b",))]
    with pytest.raises(AssertionError, match="ascend"):
        resolve_block_extra_keys(4, None, None, ranges)
    with pytest.raises(AssertionError, match="ascend"):
        block_hashes(TOKENS, 4, extra_key_ranges=ranges)
    code = (
        "from prefixcache.paged_cache import resolve_block_extra_keys as r\n"
        "try:\n    r(4, None, None, [(8, (1,)), (2, (2,))])\nexcept AssertionError: print('refused')"
    )
    run = [sys.executable, "-O", "-c", code]
    assert subprocess.run(run, env=child_environment(), capture_output=True, text=True).stdout == "refused\n"


SALT = st.sampled_from([None, (), ("a",), ("b",), ("a", "b"), (("a",), 1.5)])


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.sampled_from(["", "m", "xomlx-"]),
    SALT,
    st.none() | st.integers(-3, 45),
    st.none() | st.lists(st.tuples(st.integers(0, 45), SALT), max_size=5).map(lambda r: sorted(r, key=lambda p: p[0])),
)
@settings(deadline=None, max_examples=examples(300))
def test_a_prompts_hashes_are_those_of_its_blocks_one_by_one(
    tokens: list[int], block_size: int, model: str, salt: Any, start: int | None, ranges: Any
) -> None:
    expected, parent = [], None
    for end in range(block_size, len(tokens) + 1, block_size):
        keys = resolve_block_extra_keys(end, salt, start, ranges)
        parent = compute_block_hash(parent, tokens[end - block_size : end], keys, model)
        expected.append(parent)
    assert block_hashes(tokens, block_size, model, salt, start, ranges) == expected


def test_without_salts_the_hashes_are_a_plain_chain() -> None:
    tokens = list(range(1000))
    found = block_hashes(tokens, 64, "m")
    assert found == KeyChain("m", [], tokens, 64).keys == reference.chain_hashes("m", tokens, 64)
