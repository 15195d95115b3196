"""A restored window counts the rows that it has, and so merges into a batch without rows of another."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache
from omlx_layers import check_same_layers, rows, window
from parts import same

from prefixcache._omlx.layer_dicts import ready, undressed
from prefixcache._rotating_subclass import PrefillReadyRotatingKVCache


def short_of_its_offset(held: int, offset: int) -> PrefillReadyRotatingKVCache:
    """A window of 8 at ``offset`` whose buffer has ``held`` rows only."""
    cache = PrefillReadyRotatingKVCache(8)
    cache.keys, cache.values, cache.offset, cache._idx = rows(held), -rows(held), offset, held
    return cache


def test_it_is_mlx_lms_class() -> None:
    cache = PrefillReadyRotatingKVCache(8, keep=2)
    assert isinstance(cache, RotatingKVCache)
    assert (cache.max_size, cache.keep) == (8, 2)
    for start in range(0, 20, 5):
        cache.update_and_fetch(rows(5, start), -rows(5, start))
    check_same_layers([undressed(cache)], [undressed(ready(_of_mlx_lm(20, 5)))])


def _of_mlx_lm(count: int, step: int) -> RotatingKVCache:
    cache = RotatingKVCache(8, keep=2)
    for start in range(0, count, step):
        cache.update_and_fetch(rows(step, start), -rows(step, start))
    return cache


@pytest.mark.parametrize(("held", "offset", "size"), [(8, 30, 8), (5, 30, 5), (5, 5, 5), (1, 8, 1), (12, 12, 8)])
def test_size_is_what_is_there(held: int, offset: int, size: int) -> None:
    assert short_of_its_offset(held, offset).size() == size


def test_nothing_there() -> None:
    assert PrefillReadyRotatingKVCache(8).size() == 0
    cache = short_of_its_offset(0, 30)
    assert cache.size() == 0


def test_a_short_buffer_merges_at_its_right_end() -> None:
    short, full = short_of_its_offset(5, 30), ready(window(30))
    batch = BatchRotatingKVCache.merge([short, full])
    mx.eval(batch.keys, batch.offset, batch.left_padding)
    assert batch.left_padding.tolist() == [3, 0]
    assert batch.offset.tolist() == [30, 30]
    assert same(mx.contiguous(batch.keys[0:1, :, 3:]), rows(5))
    assert same(mx.contiguous(batch.keys[1:2]), rows(8, 22))
