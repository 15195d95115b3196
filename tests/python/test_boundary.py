"""How far a stored prefix reaches, and every reason why it reaches no further."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from support import ShadowStore, chain_files, check_hit, filled, make_caches, open_cache

from prefixcache import HIT_REASONS
from prefixcache._boundary import Boundary, deepest_boundary
from prefixcache._core import BlockStore, KeyChain, Part, Slots
from prefixcache._keys import key_chain
from prefixcache._parts import Needs

ROWS = Needs(rows=True, windows=(), state=False)
TOKENS = list(range(700, 741))  # five blocks of 8 and 1 token


class Unknown(KVCache):  # type: ignore[misc]
    """A class that may do anything."""


def memory_store() -> BlockStore:
    return BlockStore.open(
        directory="", namespace="a", ram_bytes=1 << 26, disk_bytes=0, queue_bytes=0, write="ram_only", threads=1
    )


def put(store: BlockStore, chain: KeyChain, blocks: Sequence[int], upto: int | None = None) -> None:
    """Stores the given blocks of a chain, each with one number a token."""
    total = len(chain.tokens) if upto is None else upto
    slots = Slots([("0/keys", mx.zeros((1, len(chain.tokens))), 1, 0)])
    for i in blocks:
        lo, hi = i * chain.block_size, min((i + 1) * chain.block_size, total)
        parent = chain.key(i - 1) if i else chain.root
        content = [item for item in chain.content_of_block(i) if item[0] < hi]
        key = chain.cut_key(i, hi)
        status, _ = store.put(key, parent, hi, chain.tokens.slice(lo, hi), slots, lo, hi, content=content)
        assert status


def boundary(store: BlockStore, tokens: Sequence[int], limit: int | None = None, **keys: Any) -> Boundary:
    chain = key_chain("a", tokens, 8, **keys)
    return deepest_boundary(store, chain, ROWS, len(tokens) - 1 if limit is None else limit)


class TestDeepest:
    @settings(deadline=None, max_examples=examples(60))
    @given(data=st.data())
    def test_is_the_longest_common_prefix(self, data: st.DataObject) -> None:
        block_size = data.draw(st.integers(1, 9))
        sequences = st.lists(st.integers(0, 1), min_size=1, max_size=40)
        store, shadow = memory_store(), ShadowStore()
        for tokens in data.draw(st.lists(sequences, max_size=6)):
            chain = key_chain("a", tokens, block_size)
            put(store, chain, range(-(-len(tokens) // block_size)))
            shadow.stored.append(tokens)
        for tokens in data.draw(st.lists(sequences.filter(lambda one: len(one) > 1), max_size=6)):
            chain = key_chain("a", tokens, block_size)
            found = deepest_boundary(store, chain, ROWS, len(tokens) - 1)
            assert (found.n, found.reason, found.diverged_at) == shadow.expected(tokens)
            assert len(found.keys) == -(-found.n // block_size)
            # All but the last are the request's own blocks; the last holds the rows up to n.
            assert found.keys[:-1] == chain.keys[: max(0, len(found.keys) - 1)]
            if found.keys:
                assert store.presence(found.keys[-1:])[0]["kv"][3] >= found.n

    def test_an_empty_store(self) -> None:
        assert boundary(memory_store(), TOKENS) == Boundary(0, [], "no_match", None)

    @pytest.mark.parametrize("limit", [1, 7, 8, 9, 15, 16, 39, 40])
    def test_never_beyond_the_limit(self, limit: int) -> None:
        store = memory_store()
        chain = key_chain("a", TOKENS, 8)
        put(store, chain, range(6))
        found = boundary(store, TOKENS, limit)
        assert (found.n, found.reason, found.diverged_at) == (limit, "complete", None)
        assert found.keys == chain.keys[: -(-limit // 8)]

    def test_a_gap_ends_it(self) -> None:
        store = memory_store()
        chain = key_chain("a", TOKENS, 8)
        put(store, chain, [0, 1, 3, 4, 5])
        assert boundary(store, TOKENS) == Boundary(16, chain.keys[:2], "end_of_stored", None, 16)
        store.erase([chain.key(0)], [Part.kv])
        assert boundary(store, TOKENS) == Boundary(0, [], "no_match", None)

    def test_the_longest_of_many_children(self) -> None:
        store = memory_store()
        for same in range(1, 8):
            tokens = [*TOKENS[: 8 + same], *[9] * 4]
            put(store, key_chain("a", tokens, 8), range(-(-len(tokens) // 8)))
        found = boundary(store, TOKENS)
        assert (found.n, found.reason, found.diverged_at) == (15, "diverged", 15)

    def test_another_image_in_the_next_block(self) -> None:
        store = memory_store()
        put(store, key_chain("a", TOKENS, 8, extra_keys=[(19, 22, "A")]), range(6))
        assert boundary(store, TOKENS, extra_keys=[(19, 22, "A")]).n == 40
        for keys in ([(19, 22, "B")], [(19, 23, "A")], []):
            found = boundary(store, TOKENS, extra_keys=keys)
            assert (found.n, found.reason, found.diverged_at) == (19, "diverged", 19)
        assert boundary(store, TOKENS, extra_keys=[(18, 22, "A")]).n == 18


class TestReasons:
    """Each word of HIT_REASONS, on a whole fetch."""

    def expect(self, cache: Any, tokens: list[int], reason: str, n: int, diverged_at: int | None = None) -> None:
        assert reason in HIT_REASONS
        hit = cache.fetch(tokens)
        assert (hit.reason, hit.cached_tokens, hit.diverged_at) == (reason, n, diverged_at)
        check_hit(hit, tokens)
        assert cache.stats()["hit_reasons"][reason] >= 1

    def test_what_the_index_knows(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            self.expect(cache, TOKENS, "no_match", 0)
            cache.store(TOKENS, filled(TOKENS))
            self.expect(cache, TOKENS, "complete", 40)
            self.expect(cache, [*TOKENS, 1], "complete", 41)
            self.expect(cache, [*TOKENS, 1, 2], "end_of_stored", 41)
            self.expect(cache, [*TOKENS[:20], 1, 2], "diverged", 20, 20)
            self.expect(cache, [*TOKENS[:24], 1, 2], "diverged", 24, 24)
            self.expect(cache, [1, 2, 3], "no_match", 0, 0)
            self.expect(cache, [], "too_short", 0)
            self.expect(cache, TOKENS[:1], "too_short", 0)

    def test_what_the_files_tell(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            cache.store(TOKENS, filled(TOKENS))
        files = chain_files(tmp_path / "cache")
        with open_cache(tmp_path / "cache", ram=0, verify="always") as cache:
            files[4].unlink()
            self.expect(cache, TOKENS, "lost", 32)
            files[3].write_bytes(files[3].read_bytes()[:-1] + b"\x55")
            self.expect(cache, TOKENS, "damaged", 24)
        with open_cache(tmp_path / "cache", ram=0) as cache:
            # A link that leads nowhere cannot be opened, whoever asks.
            files[2].unlink()
            files[2].symlink_to(files[2])
            self.expect(cache, TOKENS, "io_error", 16)
            self.expect(cache, TOKENS, "end_of_stored", 16)

    def test_what_the_model_says(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            cache.store(TOKENS, filled(TOKENS))
            keys = cache._key_space
        with open_cache(tmp_path / "cache", caches=make_caches(layers=5)) as cache:
            assert cache.fetch(TOKENS).reason == "no_match"
            cache._key_space = keys  # as if a release had changed what a class is stored as
            assert cache.fetch(TOKENS).reason == "structure_mismatch"
            assert cache.fetch(TOKENS).reason == "no_match"  # it stands in nobody's way any more
        with open_cache(tmp_path / "cache", caches=[Unknown()]) as cache:
            assert cache.fetch(TOKENS).reason == "unsupported_type"

    def test_closed(self, tmp_path: Path) -> None:
        cache = open_cache(tmp_path / "cache")
        cache.store(TOKENS, filled(TOKENS))
        cache.close()
        self.expect(cache, TOKENS, "closed", 0)
