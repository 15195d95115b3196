"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache._sizes import format_age, format_size, parse_age, parse_size


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [(0, 0), (1.5, 1.5), ("0s", 0), ("90s", 90), ("1.5m", 90), (" 12H ", 43200), ("7d", 604800), ("2w", 1209600)],
)
def test_good_ages(text: float | str, expected: float) -> None:
    assert parse_age(text) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "7", "d", "-1d", "x", "1y", "nand", "infw", "1e30s", "1,5h", -1, True, None, [7], float("nan")]
)
def test_bad_ages_are_named(text: Any) -> None:
    with pytest.raises(ValueError, match="^--older-than is") as error:
        parse_age(text, "--older-than")
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (4 << 20, "4.0 MB"), (3 << 29, "1.5 GB"), (1 << 60, "1048576.0 TB")],
)
def test_sizes_are_shown(size: int, expected: str) -> None:
    assert format_size(size) == expected


@given(st.integers(1000, 1 << 60))
def test_a_shown_size_is_nearly_the_size(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size / 18


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-5, "0 s"), (0, "0 s"), (42.4, "42 s"), (300, "5 min"), (11520, "3.2 h"), (2 * 86400, "2.0 d"), (8e6, "92.6 d")],
)
def test_ages_are_shown(seconds: float, expected: str) -> None:
    assert format_age(seconds) == expected
