"""oMLX's prefix cache over a stand-in that loses and refuses blocks, in random order: whatever it restores is exact."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from omlx_doubles import (
    BLOCK,
    ForeignSSD,
    arrays,
    build,
    check_pair,
    check_same,
    check_table,
    finish,
    layer_dict,
    slots,
    window,
)
from support import coded_rows

TURNS = 120


def rows_of(tokens: list[int], start: int, layer: int) -> tuple[mx.array, mx.array]:
    """Rows of the tokens from `start` on: none is equal to that of another token, position or layer."""
    keys, values = (coded_rows(layer, is_value, tokens[start:], start) for is_value in (False, True))
    return keys, values


def recurrent(tokens: list[int]) -> list[mx.array]:
    """A state that no other prompt has, nor a shorter part of this one."""
    numbers = [sum((place + 1) * (token + step) for place, token in enumerate(tokens)) for step in (1, 7)]
    return [mx.full((1, 2, 3), number, dtype=mx.float32) for number in [len(tokens), *numbers]][:2]


def layers_of(kinds: str, tokens: list[int], only_states: bool = False) -> list[dict[str, Any]]:
    """The layer dicts of a model after these tokens; of a snapshot: without plain rows."""
    found = []
    for number, kind in enumerate(kinds):
        if kind == "k":
            state = () if only_states else rows_of(tokens, 0, number)
            found.append(layer_dict("KVCache", state, () if only_states else (str(len(tokens)),)))
        elif kind == "a":
            found.append(layer_dict("ArraysCache", recurrent(tokens)))
        else:
            start = max(0, len(tokens) - BLOCK)
            meta = ("0", str(BLOCK), str(len(tokens)), str(len(tokens) - start))
            found.append(layer_dict("RotatingKVCache", rows_of(tokens, start, number), meta))
    return found


def check_restored(kinds: str, caches: list[Any], tokens: list[int]) -> None:
    assert len(caches) == len(kinds)
    for number, (kind, cache) in enumerate(zip(kinds, caches, strict=True)):
        if kind == "a":
            for found, expected in zip(slots(cache), recurrent(tokens), strict=True):
                check_same(found, expected)
            assert cache.size() == len(tokens)
            continue
        start = 0 if kind == "k" else max(0, len(tokens) - BLOCK)
        held = len(tokens) - start
        assert cache.offset == len(tokens)
        check_pair((cache.keys[..., :held, :], cache.values[..., :held, :]), rows_of(tokens, start, number))


class Losing(ForeignSSD):
    """Loses and refuses blocks now and then."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance

    def save_block(self, **kwargs: Any) -> bool:
        return self.chance.random() > 0.1 and super().save_block(**kwargs)

    def lose(self) -> None:
        if self.blocks and self.chance.random() < 0.2:
            del self.blocks[self.chance.choice(sorted(self.blocks))]


def steps(chance: random.Random) -> list[int]:
    return [chance.choice((1, 2)) for _ in range(7)]


def spread(choice: list[int], length: int) -> list[int]:
    """A prompt that takes one of two ways at every sixth token."""
    return [place // 6 * 10 + choice[place // 6] for place in range(length)]


@pytest.mark.parametrize("kinds", ["kk", "ka", "ak", "kw", "wka", "a"])
@pytest.mark.parametrize("start", [1, 2])
def test_what_is_restored_is_exact(kinds: str, start: int) -> None:
    chance = random.Random(f"{kinds}-{start}")
    ssd = Losing(chance)
    makers = {"k": KVCache, "a": arrays, "w": window}
    cache, paged = build(*(makers[kind] for kind in kinds), ssd=ssd, max_blocks=24)
    restored = 0
    for turn in range(TURNS):
        request_id = f"r{turn % 17}"
        tokens = spread(steps(chance), chance.randrange(1, 40))
        table, remaining = cache.fetch_cache(request_id, tokens)
        cached = table.num_tokens if table else 0
        assert list(remaining) == tokens[cached:]
        if table:
            check_table(paged, table, tokens, cached // BLOCK)
            caches = cache.reconstruct_cache(table)
            check_table(paged, table, tokens, table.num_tokens // BLOCK)
            if caches is None:
                paged.delete_block_table(request_id)
            else:
                restored += 1
                check_restored(kinds, caches, tokens[: table.num_tokens])
        if chance.random() < 0.15:
            cache.release_cache(request_id)
            continue
        # A pure recurrent model does not tell how long its state is: its callers store at boundaries.
        stored = tokens if kinds != "a" else tokens[: len(tokens) // BLOCK * BLOCK]
        counts = [count for count in range(BLOCK, len(stored) + 1, BLOCK) if chance.random() < 0.5]
        snapshots = {count: layers_of(kinds, stored[:count], only_states=True) for count in counts}
        held = cache.store_cache(request_id, stored, layers_of(kinds, stored), boundary_snapshots=snapshots)
        if held is not None:
            check_table(paged, held, stored, len(held.block_ids))
            finish(cache, paged, request_id, held)
        else:
            cache.release_cache(request_id)
        ssd.lose()
    assert restored > 5
    assert {own.ref_count for own in paged.allocated_blocks.values() if not own.is_null} <= {0}
    assert len(cache) == 0
