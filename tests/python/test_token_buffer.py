"""Tokens from any container of integers, and the buffer that holds them."""

from __future__ import annotations

import array
import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any

import key_encoding as reference
import mlx.core as mx
import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache._core import KeyChain, TokenBuffer, chain_hashes

LARGEST = 2**32 - 1
TOKEN = st.integers(0, LARGEST)

# --- tokens ------------------------------------------------------------------------------------------------------

NUMPY_TYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "longlong", "ulonglong"]
MLX_TYPES = [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64]


class Index:
    """An integer only by way of __index__."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Int(int):
    pass


def containers(tokens: list[int]) -> dict[str, Any]:
    """The same tokens (0..127) in everything that holds integers."""
    given: dict[str, Any] = {
        "list": tokens,
        "tuple": tuple(tokens),
        "deque": deque(tokens),
        "TokenBuffer": TokenBuffer(tokens),
        "list of int64": [np.int64(token) for token in tokens],
        "list of uint8": [np.uint8(token) for token in tokens],
        "list of a subclass": [Int(token) for token in tokens],
        "list of __index__": [Index(token) for token in tokens],
        "object array": np.array(tokens, dtype=object),
        "ctypes": (ctypes.c_int32 * len(tokens))(*tokens),
        "memoryview": memoryview(array.array("q", tokens)),
        "reversed memoryview": memoryview(array.array("H", tokens[::-1]))[::-1],
        "column": np.array([tokens, tokens], dtype=np.int32, order="F")[0],
    }
    for code in "bBhHiIlLqQ":
        given[f"array {code}"] = array.array(code, tokens)
    for name in NUMPY_TYPES:
        given[f"numpy {name}"] = np.array(tokens, dtype=name)
        given[f"every third of numpy {name}"] = np.repeat(np.array(tokens, dtype=name), 3)[::3]
        given[f"reversed numpy {name}"] = np.array(tokens[::-1], dtype=name)[::-1]
    for dtype in MLX_TYPES:
        given[f"mlx {dtype}"] = mx.array(tokens, dtype=dtype)
        given[f"lazy strided mlx {dtype}"] = mx.repeat(mx.array(tokens, dtype=dtype), 2)[::2]
    return given


@pytest.mark.parametrize("size", [0, 1, 7, 100])
def test_equal_tokens_in_any_container_give_equal_keys(size: int) -> None:
    tokens = [(7 * i) % 128 for i in range(size)]
    for block_size in (1, 3, 16):
        expected = reference.chain_hashes("n", tokens, block_size)
        for name, container in containers(tokens).items():
            assert KeyChain("n", [], container, block_size).keys == expected, name
            assert chain_hashes("n", container, block_size) == expected, name


@given(st.lists(TOKEN, max_size=20))
@settings(deadline=None)
def test_tokens_of_all_32_bits_are_kept(tokens: list[int]) -> None:
    for container in (
        tokens,
        tuple(tokens),
        array.array("I", tokens),
        np.array(tokens, dtype=np.int64),
        np.array(tokens, dtype=np.uint64),
        mx.array(np.array(tokens, dtype=np.uint32)),
    ):
        assert TokenBuffer(container).tolist() == tokens


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**32, 2**32 + 5, 2**62, 2**63, -(2**63), 2**64, 10**30, -(10**30)])
def test_tokens_out_of_range_are_named(bad: int) -> None:
    cases: list[Sequence[int]] = [[5, 6, bad], (5, 6, bad), [5, 6, Index(bad)], [5, 6, Int(bad)]]  # type: ignore[list-item]
    if -(2**63) <= bad < 2**63:
        cases += [array.array("q", [5, 6, bad]), np.array([5, 6, bad]), mx.array(np.array([5, 6, bad]))]
    if 0 <= bad < 2**64:
        cases += [array.array("Q", [5, 6, bad]), np.array([5, 6, bad], dtype=np.uint64)]
    for case in cases:
        with pytest.raises(ValueError, match=f"token {bad} at position 2 is outside of 0..4294967295"):
            TokenBuffer(case)


def test_a_huge_integer_is_still_a_value_error() -> None:
    with pytest.raises(ValueError, match="at position 0"):
        TokenBuffer([10**5000])


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_negative_numbers_of_any_width_are_named(dtype: str) -> None:
    numbers = np.arange(1000, dtype=np.int64).astype(dtype) * 0
    numbers[700] = -3
    for container in (numbers, mx.array(numbers), array.array(numbers.dtype.char, numbers.tolist()), numbers.tolist()):
        with pytest.raises(ValueError, match="token -3 at position 700"):
            TokenBuffer(container)


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        ([1, 2.0], "position 1 must be an integer, not float"),
        ([True], "position 0 must be an integer, not bool"),
        ((1, None), "position 1 must be an integer, not NoneType"),
        (["1"], "position 0 must be an integer, not str"),
        ([[1], [2]], "position 0 must be an integer, not list"),
        ([np.float32(1)], "position 0 must be an integer, not numpy.float32"),
        ([np.bool_(True)], "position 0 must be an integer, not numpy.bool"),
        (np.array([1.0]), "format 'd'"),
        (np.array([1], dtype=np.float16), "format 'e'"),
        (np.array([True]), r"format '\?'"),
        (np.array([1], dtype=">i4"), "format '>i'"),
        (np.array([[1, 2]]), "2 dimensions"),
        (np.array(3), "0 dimensions"),
        (array.array("f", [1.0]), "format 'f'"),
        (mx.array([1.0]), "holds no integers"),
        (mx.array([True]), "holds no integers"),
        (mx.array([[1, 2]]), "2 dimensions"),
        (mx.array(1), "0 dimensions"),
        ("12", "not str"),
        (b"12", "not bytes"),
        (bytearray(b"12"), "not bytearray"),
        (None, "not NoneType"),
        (12, "not int"),
        ({1: 2}, "not dict"),
        ({1, 2}, "not set"),
        (iter([1, 2]), "not list_iterator"),
    ],
)
def test_what_holds_no_integers_is_a_type_error(tokens: Any, what: str) -> None:
    for take in (TokenBuffer, lambda given: KeyChain("n", [], given, 4)):
        with pytest.raises(TypeError, match=what):
            take(tokens)


def test_errors_of_an_element_come_through() -> None:
    class Broken:
        def __index__(self) -> int:
            raise OSError("no number today")

    with pytest.raises(OSError, match="no number today"):
        TokenBuffer([1, Broken()])


def test_a_list_that_changes_while_it_is_read_is_refused() -> None:
    tokens: list[Any] = list(range(1000))

    class Shrinks:
        def __index__(self) -> int:
            tokens.clear()
            return 1

    tokens[3] = Shrinks()
    with pytest.raises(ValueError, match="changed its length"):
        TokenBuffer(tokens)


# --- TokenBuffer -------------------------------------------------------------------------------------------------


def test_token_buffer_reads_as_a_sequence() -> None:
    tokens = TokenBuffer([10, 20, LARGEST])
    assert len(tokens) == 3
    assert [tokens[0], tokens[-1]] == [10, LARGEST]
    assert list(tokens) == tokens.tolist() == [10, 20, LARGEST]
    assert tokens.tobytes() == np.array([10, 20, LARGEST], dtype=np.uint32).tobytes()
    for i in (3, -4):
        with pytest.raises(IndexError, match=f"token {i} of 3"):
            tokens[i]


def test_token_buffers_are_equal_by_value() -> None:
    tokens = TokenBuffer([1, 2, 3])
    assert tokens == TokenBuffer((1, 2, 3)) and hash(tokens) == hash(TokenBuffer((1, 2, 3)))
    assert tokens != TokenBuffer([1, 2]) and tokens != TokenBuffer([1, 2, 4])
    assert tokens != [1, 2, 3]


def test_slices_share_and_outlive() -> None:
    tokens = TokenBuffer(range(1000))
    part = tokens.slice(10, 20)
    del tokens
    assert part.tolist() == list(range(10, 20))
    assert part.slice(10, 10).tolist() == []
    for lo, hi in ((-1, 2), (3, 2), (0, 11)):
        with pytest.raises(ValueError, match=r"is not within the 10 tokens"):
            part.slice(lo, hi)


def test_the_buffer_protocol_shares_and_is_read_only() -> None:
    tokens = TokenBuffer([1, 2, LARGEST])
    view = memoryview(tokens)
    assert (view.format, view.shape, view.itemsize, view.readonly) == ("I", (3,), 4, True)
    numbers = np.asarray(tokens)
    assert numbers.dtype == np.uint32 and numbers.tolist() == [1, 2, LARGEST]
    del tokens
    assert view.tolist() == [1, 2, LARGEST]
    assert bytes(memoryview(TokenBuffer([]))) == b""


@given(st.lists(st.integers(0, 2), max_size=3000), st.integers(0, 3001), st.integers(0, 20))
@settings(deadline=None, max_examples=examples(60))
def test_common_prefix(tokens: list[int], change: int, start: int) -> None:
    other = list(tokens)
    if change < len(other):
        other[change] = 9
    expected = next((i for i in range(start, len(tokens)) if tokens[i] != other[i]), len(tokens)) - start
    assert TokenBuffer(tokens).common_prefix(other, start) == max(expected, 0)
    assert TokenBuffer(tokens).common_prefix(TokenBuffer(tokens + [1]), start) == max(len(tokens) - start, 0)


def test_common_prefix_of_long_runs() -> None:
    tokens = list(range(5000))
    for change in (0, 1023, 1024, 1025, 4999):
        other = list(tokens)
        other[change] = LARGEST
        assert TokenBuffer(tokens).common_prefix(TokenBuffer(other)) == change
