"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache._sizes import parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (1, 1),
        (2**60, 2**60),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("4GB", 4 << 30),
        ("4 GB", 4 << 30),
        (" 4gb ", 4 << 30),
        ("512MB", 512 << 20),
        ("64KB", 64 << 10),
        ("1.5 GB", 3 << 29),
        ("0.5kb", 512),
        ("2TB", 2 << 40),
        ("1e3", 1000),
    ],
)
def test_good_sizes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GB", "B", "-1", "-4GB", "4XB", "4 G B", "GB4", "4GBB", "four", "nan", "inf", "1e30", "0x10"),
        *("99999999TB", "4BG", "4KMB", "1,5GB", "4GB please"),
        *(-1, 2**60 + 1, True, False, None, [4], b"4GB", float("nan"), float("inf")),
    ],
)
def test_bad_sizes_are_named(text: Any) -> None:
    with pytest.raises(ValueError, match="^disk is") as error:
        parse_size(text, "disk")
    assert repr(text) in str(error.value)


@given(st.integers(0, 2**60))
def test_whole_numbers_are_exact(number: int) -> None:
    assert parse_size(number) == number


@given(st.integers(0, 1023), st.sampled_from(["B", "KB", "MB", "GB", "TB"]), st.booleans(), st.sampled_from(["", " "]))
def test_units_are_binary(number: int, unit: str, lower: bool, gap: str) -> None:
    text = f"{number}{gap}{unit.lower() if lower else unit}"
    assert parse_size(text) == number * 1024 ** ["B", "KB", "MB", "GB", "TB"].index(unit)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        assert 0 <= parse_size(text) <= 2**60
    except ValueError as error:
        assert repr(text) in str(error)
