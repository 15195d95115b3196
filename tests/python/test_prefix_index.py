"""The index of prefixes: what it answers, and what it costs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache._omlx.prefix_index import ChainedIds, PrefixEntry, add, best


def names(*numbers: int) -> list[bytes]:
    """Chained hashes of a prompt: equal beginnings have equal ones."""
    return [bytes(numbers[: i + 1]) for i in range(len(numbers))]


def nodes() -> int:
    gc.collect()
    return sum(type(item) is ChainedIds for item in gc.get_objects())


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 100)), max_size=20))
def test_it_knows_the_latest_ids_of_every_prefix(prompts: list[tuple[list[int], int]]) -> None:
    index: dict[bytes, PrefixEntry] = {}
    expected: dict[bytes, list[int]] = {}
    for prompt, first in prompts:
        ids = [first + i for i in range(len(prompt))]
        add(index, names(*prompt), ids, 4, 1000)
        expected |= {value: ids[: i + 1] for i, value in enumerate(names(*prompt))}
        ids.clear()
    assert index.keys() == expected.keys()
    for value, ids in expected.items():
        tokens, found, count = index[value]
        assert (tokens, list(found), len(found), count) == (4 * len(ids), ids, len(ids), len(ids))
        assert found == ids
        assert found == tuple(ids)
        assert found[-1] == ids[-1]
        assert list(found[:2]) == ids[:2]


def test_the_longest_known_prefix_is_found() -> None:
    index: dict[bytes, PrefixEntry] = {}
    add(index, names(1, 2, 3), [7, 8, 9], 4, 100)
    assert best(index, names(1, 2, 3, 4)) == (12, [7, 8, 9], 3)
    assert best(index, names(1, 2, 5)) == (8, [7, 8], 2)
    assert best(index, names(2)) is None
    assert best(index, []) is None


@pytest.mark.parametrize("tails", [50, 100])
def test_many_prompts_with_one_beginning_cost_one_node_a_block(tails: int) -> None:
    index: dict[bytes, Any] = {}
    before = nodes()
    beginning = [b"%d" % i for i in range(200)]
    for tail in range(tails):
        add(index, [*beginning, b"tail %d" % tail], [*range(200), 1000 + tail], 4, 10_000)
    assert nodes() - before == 200 + tails
    assert list(index[b"tail 0"][1]) == [*range(200), 1000]


def test_the_oldest_entries_go_first() -> None:
    index: dict[bytes, PrefixEntry] = {}
    for number in range(5):
        add(index, [b"%d" % number], [number], 4, 3)
    assert list(index) == [b"2", b"3", b"4"]
    add(index, [b"2"], [9], 4, 3)
    add(index, [b"5"], [5], 4, 3)
    assert list(index) == [b"4", b"2", b"5"]
