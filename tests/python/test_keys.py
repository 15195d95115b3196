"""Salts and content keys of a request."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import key_encoding as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache._core import Purpose, sha256
from prefixcache._keys import encode_salt, key_chain, normalise_content, request_salts

# Pairs of these are easily taken for one another by a repr, a join or an equality.
LOOKALIKES: list[Any] = [
    None, "None", b"None", 1, "1", b"1", True, "True", 0, False, -1, 255, -255, 256, 2**64, -(2**64), 10**5000,
    "", b"", (), ((),), ((), ()), (None,), ("",), (1,), ("a", "bc"), ("ab", "c"), ("abc",), "abc", (("a",), "bc"),
    ("a", ("bc",)), "é", "e\u0301", "\x00", "a\x00", "\ud800", (True,), (1, 2), (12,), b"\x00", b"\x00\x00",
]  # fmt: skip

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, deeply: True is not 1 here."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_lookalikes_have_different_encodings() -> None:
    for a, b in combinations(LOOKALIKES, 2):
        assert encode_salt(a) != encode_salt(b), (str(a)[:20], str(b)[:20])


@given(VALUES, VALUES)
@settings(deadline=None)
def test_encodings_are_equal_exactly_where_values_are(a: Any, b: Any) -> None:
    assert (encode_salt(a) == encode_salt(b)) == same(a, b)


@given(VALUES)
@settings(deadline=None)
def test_the_encoding_is_the_documented_one(value: Any) -> None:
    assert encode_salt(value) == reference.salt_bytes(value)


def test_the_encoding_never_changes() -> None:
    value = (None, True, -2, 300, "é", b"\x00\xff", ())
    assert encode_salt(value).hex() == (
        "740700000000000000"
        "6e"
        "6231"
        "690100000000000000fe"
        "6902000000000000002c01"
        "730200000000000000c3a9"
        "79020000000000000000ff"
        "740000000000000000"
    )


@pytest.mark.parametrize(
    "value", [1.0, [1], {"a": 1}, {1}, object(), bytearray(b"x"), np.int64(1), (1, (2.0,)), 1j, type]
)
def test_other_types_are_refused_by_name(value: Any) -> None:
    inner = value[1][0] if isinstance(value, tuple) else value
    with pytest.raises(TypeError, match=f"salt must be None, .* not {type(inner).__name__}"):
        encode_salt(value)


# --- content keys ------------------------------------------------------------------------------------------------


def test_content_is_sorted_digested_and_each_once() -> None:
    a, b = sha256(encode_salt("a")), sha256(encode_salt(b"b"))
    given_ranges = [(5, 7, "a"), (0, 3, b"b"), (5, 7, "a"), [5, 6, "a"]]
    assert normalise_content(given_ranges) == [(0, 3, b), (5, 6, a), (5, 7, a)]  # type: ignore[arg-type]
    assert normalise_content(None) == normalise_content([]) == []
    assert normalise_content(iter([(0, 1, "a")])) == [(0, 1, a)]
    assert normalise_content([(np.int64(2), np.int32(4), "a")]) == [(2, 4, a)]  # type: ignore[list-item]


def test_content_may_lie_behind_the_tokens_unless_told() -> None:
    assert normalise_content([(5, 9, 1)], length=9)
    with pytest.raises(ValueError, match=r"extra_keys\[1\]: the range \[5, 10\) ends behind the 9 tokens"):
        normalise_content([(0, 1, 1), (5, 10, 1)], length=9)


@pytest.mark.parametrize(
    ("extra_keys", "error", "message"),
    [
        ([(-1, 2, "a")], ValueError, r"extra_keys\[0\]: start must not be negative, not -1"),
        ([(0, 1, "a"), (2, 2, "a")], ValueError, r"extra_keys\[1\]: the range \[2, 2\) is empty"),
        ([(3, 2, "a")], ValueError, r"the range \[3, 2\) is empty"),
        ([(0, 2**63, "a")], ValueError, "ends behind"),
        ([(0, 1)], TypeError, r"extra_keys\[0\] must be \(start, end, key\), not \(0, 1\)"),
        ([(0, 1, "a", "b")], TypeError, "must be"),
        ([7], TypeError, "not 7"),
        (["abc"], TypeError, "not 'abc'"),
        ([(0.0, 1, "a")], TypeError, "start must be an int, not float"),
        ([(0, "1", "a")], TypeError, "end must be an int, not str"),
        ([(0, True, "a")], TypeError, "end must be an int, not bool"),
        ([(0, 1, 1.5)], TypeError, "salt must be .* not float"),
        ("abc", TypeError, "extra_keys must be a list of .* not str"),
        (7, TypeError, "not int"),
    ],
)
def test_bad_content_is_refused(extra_keys: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        normalise_content(extra_keys)


# --- whole requests ----------------------------------------------------------------------------------------------


def test_request_salts_have_their_purposes() -> None:
    assert request_salts() == []
    assert request_salts("x") == [(1, encode_salt("x"))]
    assert request_salts(None, (4, 64, 0)) == [(2, encode_salt((4, 64, 0)))]
    assert request_salts(0, (4, 64, 0)) == [(1, encode_salt(0)), (2, encode_salt((4, 64, 0)))]
    assert [int(purpose) for purpose in Purpose] == [1, 2, 3]


@pytest.mark.parametrize(
    ("kv_format", "error"),
    [
        ((4, 64), TypeError), (4, TypeError), ("464", TypeError), ((4, 64, 0.0), TypeError), ((4, True, 0), TypeError),
        ((0, 64, 0), ValueError), ((4, 0, 0), ValueError), ((4, 64, -1), ValueError),
    ],
)  # fmt: skip
def test_bad_formats_are_refused(kv_format: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="kv_format"):
        request_salts(None, kv_format)


def test_every_salt_gives_other_keys() -> None:
    tokens = [1, 2, 3, 4]
    chains = [key_chain("n", tokens, 4)]
    chains += [key_chain("n", tokens, 4, salt=salt) for salt in LOOKALIKES if salt is not None]
    chains += [key_chain("n", tokens, 4, extra_keys=[(0, 1, salt)]) for salt in LOOKALIKES]
    chains += [key_chain("n", tokens, 4, kv_format=kv_format) for kv_format in ((4, 64, 0), (8, 64, 0), (4, 64, 1))]
    chains += [key_chain("n", tokens, 4, salt=(4, 64, 0)), key_chain("m", tokens, 4)]
    assert len({chain.key(0) for chain in chains}) == len(chains)


def test_key_chain_is_the_reference() -> None:
    tokens = list(range(50))
    chain = key_chain("n", tokens, 8, salt="t", extra_keys=[(20, 30, "i"), (3, 4, 7)], kv_format=(4, 64, 5))
    content = [(20, 30, sha256(encode_salt("i"))), (3, 4, sha256(encode_salt(7)))]
    salts = [(1, encode_salt("t")), (2, encode_salt((4, 64, 5)))]
    assert chain.keys == reference.chain_hashes("n", tokens, 8, salts, content)
    again = key_chain(
        "n", [*tokens, 1, 2], 8, salt="t", extra_keys=[(3, 4, 7), (20, 30, "i")], kv_format=(4, 64, 5), previous=chain
    )
    assert again.keys == chain.keys
