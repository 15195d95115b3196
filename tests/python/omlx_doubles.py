"""Stand-ins for the oMLX surface: SSD managers that are not our own, models, and the layer dicts of a scheduler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from prefixcache.paged_cache import PagedCacheManager, compute_block_hash
from prefixcache.prefix_cache import BlockAwarePrefixCache

BLOCK = 4
MODEL = "model-a"
SAVE_KEYWORDS = {
    "block_hash",
    "cache_data",
    "token_count",
    "model_name",
    "layer_cache_types",
    "layer_meta_states",
}
Block = tuple[Any, dict[str, Any]]


class ForeignSSD:
    """Keeps in memory what `save_block` is given. It has the three methods a foreign manager must have, no other.

    `answers` are the results of the first saves; after them every save succeeds. A save that is answered with False
    keeps nothing.
    """

    def __init__(self, answers: Iterable[bool] = ()) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.saves: list[dict[str, Any]] = []
        self.loads: list[bytes] = []
        self.forgotten: list[bytes] = []
        self._answers = iter(answers)

    def save_block(self, **kwargs: Any) -> bool:
        self.saves.append(kwargs)
        if not next(self._answers, True):
            return False
        keep = ("token_count", "model_name", "layer_cache_types", "layer_meta_states")
        about = {name: copy.copy(kwargs[name]) for name in keep}
        about |= {"num_layers": len(kwargs["cache_data"]), "block_size": BLOCK, "cache_signature": ""}
        self.blocks[kwargs["block_hash"]] = (as_loaded(kwargs["cache_data"]), about)
        return True

    def load_block_with_metadata(self, block_hash: bytes) -> tuple[Any, Any]:
        self.loads.append(block_hash)
        data, about = self.blocks.get(block_hash, (None, None))
        return (None, None) if data is None else (list(data), dict(about or {}))

    def forget_block(self, block_hash: bytes) -> bool:
        self.forgotten.append(block_hash)
        return self.blocks.pop(block_hash, None) is not None


class TerseSSD(ForeignSSD):
    """One that tells no more of a block than the types and the meta states of its layers."""

    def load_block_with_metadata(self, block_hash: bytes) -> tuple[Any, Any]:
        data, about = super().load_block_with_metadata(block_hash)
        if data is None:
            return None, None
        return data, {name: about[name] for name in ("layer_cache_types", "layer_meta_states")}


def as_loaded(cache_data: Sequence[Any]) -> list[Any]:
    """What a load gives for what a save was given: the parts of a CacheList come back as a bare list."""
    return [
        list(layer[1]) if isinstance(layer, tuple) and layer[0:1] == ("__cache_list__",) else layer
        for layer in cache_data
    ]


def block(data: Sequence[Any], types: Sequence[str], metas: Sequence[Any] | None = None, **about: Any) -> Block:
    """One block as `load_block_with_metadata` gives it; `about` replaces entries of its metadata."""
    metadata = {
        "num_layers": len(data),
        "token_count": BLOCK,
        "model_name": MODEL,
        "block_size": BLOCK,
        "cache_signature": "",
        "layer_cache_types": list(types),
        "layer_meta_states": list(metas) if metas is not None else [() for _ in data],
    }
    return list(data), metadata | about


def mock_ssd(blocks: Mapping[bytes, Block] | None = None, spec: type | None = None) -> MagicMock:
    """A MagicMock manager that holds `blocks`; with `spec` it has the attributes of that class alone."""
    known = dict(blocks or {})
    ssd = MagicMock(spec=spec) if spec is not None else MagicMock()
    ssd.load_block_with_metadata.side_effect = lambda block_hash: known.get(block_hash, (None, None))
    return ssd


class Model:
    """A model as far as its caches go."""

    def __init__(self, *makers: Callable[[], Any]) -> None:
        self.makers = makers

    def make_cache(self) -> list[Any]:
        return [make() for make in self.makers]


def window() -> RotatingKVCache:
    return RotatingKVCache(max_size=BLOCK)


def arrays(size: int = 2) -> ArraysCache:
    return ArraysCache(size)


def build(
    *makers: Callable[[], Any], ssd: Any = None, max_blocks: int = 64, model_name: str = MODEL
) -> tuple[BlockAwarePrefixCache, PagedCacheManager]:
    """A prefix cache with blocks of four tokens for a model of these layers; one KVCache if none are named."""
    paged = PagedCacheManager(block_size=BLOCK, max_blocks=max_blocks, model_name=model_name)
    return BlockAwarePrefixCache(Model(*(makers or (KVCache,))), paged, ssd), paged


def seed(paged: PagedCacheManager, request_id: str, hashes: Sequence[bytes], refs: int = 1) -> Any:
    """A table of full blocks that carry these hashes, as another request would have left them."""
    table = paged.create_block_table(request_id)
    for block_hash in hashes:
        own = paged.allocate_block()
        own.block_hash, own.token_count, own.ref_count = block_hash, paged.block_size, refs
        paged.cached_block_hash_to_block.insert(block_hash, own)
        table.block_ids.append(own.block_id)
        table.num_tokens += paged.block_size
    return table


def seed_prompt(paged: PagedCacheManager, request_id: str, tokens: Sequence[int], blocks: int) -> Any:
    """A table of the first `blocks` blocks of a prompt, with the hashes that they have by right."""
    table = paged.create_block_table(request_id)
    parent: bytes | None = None
    for i in range(blocks):
        own = paged.allocate_block()
        paged.register_block_hash(own, list(tokens[i * BLOCK : (i + 1) * BLOCK]), parent)
        own.token_count = BLOCK
        parent = own.block_hash
        table.block_ids.append(own.block_id)
        table.num_tokens += BLOCK
    return table


def chain(tokens: Sequence[int], model_name: str = MODEL) -> list[bytes]:
    """The hashes of the full blocks of a prompt."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hashes[-1] if hashes else None
        hashes.append(compute_block_hash(parent, list(tokens[start : start + BLOCK]), model_name=model_name))
    return hashes


def finish(cache: BlockAwarePrefixCache, paged: PagedCacheManager, request_id: str, table: Any) -> None:
    """What a scheduler does when a request is over and stored: its blocks stay to be hit again."""
    paged.release_for_eviction(table.block_ids)
    cache.clear_request_entry(request_id)


def rows(start: int, stop: int, code: int = 0, heads: int = 2, dim: int = 4, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Rows ``[1, heads, stop - start, dim]``: no two positions, heads or columns are equal, nor those of two codes."""
    places = np.arange(start, stop)[:, None] * dim + np.arange(dim)
    numbers = places + 1000 * code + 200 * np.arange(heads)[:, None, None]
    return mx.array(numbers[None].astype(np.float32)).astype(dtype)


def pair(start: int, stop: int, layer: int = 0, **shape: Any) -> tuple[mx.array, mx.array]:
    """Keys and values of the tokens from `start` to `stop` in one layer."""
    return rows(start, stop, 2 * layer, **shape), rows(start, stop, 2 * layer + 1, **shape)


def state_at(tokens: int, size: int = 2, layer: int = 0) -> list[mx.array]:
    """The state of a recurrent layer after so many tokens: an array of another shape per slot."""
    return [mx.full((1, 3 + slot, 5), tokens * 100 + layer * 10 + slot, dtype=mx.float32) for slot in range(size)]


def placeholder() -> tuple[mx.array, mx.array]:
    return mx.zeros((1,)), mx.zeros((1,))


def layer_dict(class_name: str, state: Any, meta_state: Any = ()) -> dict[str, Any]:
    return {"state": state, "meta_state": meta_state, "class_name": class_name, "cache_type": class_name}


def kv_layer(start: int, stop: int, layer: int = 0, **shape: Any) -> dict[str, Any]:
    return layer_dict("KVCache", pair(start, stop, layer, **shape), (str(stop),))


def arrays_layer(tokens: int, size: int = 2, layer: int = 0) -> dict[str, Any]:
    return layer_dict("ArraysCache", state_at(tokens, size, layer))


def window_layer(tokens: int, layer: int = 0, size: int = BLOCK) -> dict[str, Any]:
    """A rotating layer in temporal order after `tokens` tokens."""
    held = min(size, tokens)
    meta = ("0", str(size), str(tokens), str(held))
    return layer_dict("RotatingKVCache", pair(tokens - held, tokens, layer), meta)


def check_same(found: Any, expected: mx.array) -> None:
    """Bit for bit: type, shape, bytes."""
    assert isinstance(found, mx.array)
    assert found.dtype == expected.dtype
    assert tuple(found.shape) == tuple(expected.shape)
    left, right = (np.array(mx.contiguous(array).view(mx.uint8)).tobytes() for array in (found, expected))
    assert left == right


def check_pair(found: Any, expected: tuple[mx.array, mx.array]) -> None:
    assert isinstance(found, tuple)
    assert len(found) == 2
    for one, other in zip(found, expected, strict=True):
        check_same(one, other)


def check_kv(cache: Any, tokens: int, layer: int = 0, **shape: Any) -> None:
    """A live KVCache that holds the rows of the first `tokens` tokens of one layer."""
    assert type(cache).__name__ == "KVCache"
    assert cache.offset == tokens
    check_pair((cache.keys[..., :tokens, :], cache.values[..., :tokens, :]), pair(0, tokens, layer, **shape))


def slots(cache: Any) -> list[Any]:
    """The arrays of a recurrent cache, on either line of mlx-lm."""
    inner = getattr(cache, "_inner", cache)
    return list(inner.cache)


def check_slots(cache: Any, tokens: int, size: int = 2, layer: int = 0) -> None:
    found = slots(cache)
    assert len(found) == size
    for one, other in zip(found, state_at(tokens, size, layer), strict=True):
        check_same(one, other)


def refs(paged: PagedCacheManager, ids: Sequence[int]) -> list[int]:
    return [paged.allocated_blocks[block_id].ref_count for block_id in ids]


def check_table(paged: PagedCacheManager, table: Any, tokens: Sequence[int], blocks: int) -> None:
    """The table names blocks of this prompt, from its first one on, and no other."""
    found = [paged.allocated_blocks[block_id] for block_id in table.block_ids]
    assert [own.block_hash for own in found] == chain(tokens)[:blocks]
    assert [own.token_count for own in found] == [BLOCK] * blocks
    assert table.num_tokens == blocks * BLOCK
