"""What a store keeps, what it says about it, and that nothing is written twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import chain_files, check_hit, filled, open_cache, part_files

from prefixcache import STORE_REASONS
from prefixcache._core import BlockStore
from prefixcache._keys import key_chain
from prefixcache._layer_state import LayerState, Slot, window_of
from prefixcache._record import record
from prefixcache._registry import describe_layers

TOKENS = list(range(400, 450))  # six blocks of 8 and 2 tokens
ROW = 2 * 2 * 2 * 32 * 4  # bytes of one token: layers, keys and values, heads, size, float32


def file_times(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in part_files(directory)}


class TestReport:
    @pytest.mark.parametrize(("length", "blocks"), [(1, 1), (7, 1), (8, 1), (9, 2), (15, 2), (16, 2), (50, 7)])
    def test_counts(self, tmp_path: Path, length: int, blocks: int) -> None:
        with open_cache(tmp_path / "cache") as cache:
            report = cache.store(TOKENS[:length], filled(TOKENS))
            assert report
            assert (report.stored_tokens, report.new_blocks, report.bytes) == (length, blocks, length * ROW)
            assert (report.reason, report.detail) == ("complete", "")
            cache.flush()
            assert len(part_files(tmp_path / "cache")) == blocks

    def test_only_what_is_new_counts(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            cache.store(TOKENS[:20], filled(TOKENS))
            report = cache.store(TOKENS, filled(TOKENS))
            # The short block of 4 tokens is stored again as part of a whole one.
            assert (report.stored_tokens, report.new_blocks, report.bytes) == (50, 5, 34 * ROW)

    def test_a_full_queue_stops_at_a_prefix(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache", ram=0, queue="64KB") as cache:
            tokens = list(range(3000))
            report = cache.store(tokens, filled(tokens))
            assert report.reason in STORE_REASONS
            hit = cache.fetch([*tokens, 1])
            assert hit.cached_tokens == report.stored_tokens
            check_hit(hit, [*tokens, 1])

    def test_a_block_larger_than_the_queue(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache", ram=0, queue="64KB", block_size=256) as cache:
            tokens = list(range(600))
            report = cache.store(tokens, filled(tokens))
            assert (report.reason, report.stored_tokens, report.new_blocks, bool(report)) == ("queue_full", 0, 0, False)
            assert report.detail
            assert cache.stats()["put_full"] == 1
            assert cache.stats()["store_reasons"] == {"queue_full": 1}
            assert not cache.fetch(tokens)

    def test_ram_only_evicts_the_oldest(self) -> None:
        with open_cache(None, write="ram_only", ram="1MB") as cache:
            for start in range(0, 2000, 50):
                tokens = list(range(start, start + 50))
                assert cache.store(tokens, filled(tokens)).stored_tokens == 50
            stats = cache.stats()
            assert stats["ram_bytes"] <= 1 << 20
            assert stats["evicted_ram_parts"] > 0
            newest = list(range(1950, 2000))
            check_hit(cache.fetch(newest), newest)
            assert cache.fetch(newest).cached_tokens == 49
            assert not cache.fetch(list(range(50)))

    def test_a_block_larger_than_the_ram_tier_evicts_nothing(self) -> None:
        with open_cache(None, write="ram_only", ram="200KB", block_size=64) as cache:
            cache.store(TOKENS, filled(TOKENS))
            tokens = list(range(5000, 5600))
            with open_cache(None, write="ram_only", ram="200KB", block_size=512) as other:
                report = other.store(tokens, filled(tokens))
                assert (report.reason, report.stored_tokens) == ("queue_full", 0)
            assert cache.fetch(TOKENS).cached_tokens == 49


class TestNothingTwice:
    @pytest.mark.parametrize("ram", ["64MB", 0])
    def test_the_same_store_again(self, tmp_path: Path, ram: Any) -> None:
        with open_cache(tmp_path / "cache", ram=ram) as cache:
            cache.store(TOKENS, filled(TOKENS))
            cache.flush()
            before, stats = file_times(tmp_path / "cache"), cache.stats()
            for length in (50, 50, 48, 20, 3):
                report = cache.store(TOKENS[:length], filled(TOKENS))
                assert (report.stored_tokens, report.new_blocks, report.bytes) == (length, 0, 0)
                assert report.reason == "complete"
            cache.flush()
            assert file_times(tmp_path / "cache") == before
            after = cache.stats()
            for name in ("put_parts", "put_bytes", "written_parts", "written_bytes", "disk_bytes", "parts"):
                assert after[name] == stats[name], name
            assert after["put_existing"] > stats["put_existing"]

    def test_after_a_restart(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            cache.store(TOKENS, filled(TOKENS))
        before = file_times(tmp_path / "cache")
        with open_cache(tmp_path / "cache") as cache:
            report = cache.store(TOKENS, filled(TOKENS))
            assert (report.stored_tokens, report.new_blocks, report.bytes) == (50, 0, 0)
        assert file_times(tmp_path / "cache") == before

    def test_a_conversation_writes_each_row_about_once(self, tmp_path: Path) -> None:
        """Append-only turns: whole blocks are written once; only the short block at the end is written again."""
        tokens: list[int] = []
        with open_cache(tmp_path / "cache", block_size=16) as cache:
            for turn in range(12):
                tokens += range(turn * 100, turn * 100 + 83)
                assert cache.fetch(tokens).cached_tokens == max(0, len(tokens) - 83)
                cache.store(tokens, filled(tokens))
                cache.flush()
            assert cache.stats()["put_bytes"] <= (len(tokens) + 12 * 15) * ROW
        # Each short block gave way to the whole one that contains it.
        assert len(chain_files(tmp_path / "cache")) == -(-len(tokens) // 16)

    def test_a_longer_tail_takes_the_place_of_a_shorter_one(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            for length in (41, 43, 47, 48, 50):
                cache.store(TOKENS[:length], filled(TOKENS))
                cache.flush()
                assert len(part_files(tmp_path / "cache")) == -(-length // 8)
            other = [*TOKENS[:44], 7]
            cache.store(other, filled(other))
            cache.flush()
            assert len(part_files(tmp_path / "cache")) == 8
            for asked in (TOKENS, other):
                hit = cache.fetch([*asked, 1])
                assert hit.cached_tokens == len(asked)
                check_hit(hit, [*asked, 1])


class TestRecord:
    """The function below the front door."""

    @pytest.fixture
    def store(self) -> BlockStore:
        return BlockStore.open(
            directory="", namespace="a", ram_bytes=1 << 24, disk_bytes=0, queue_bytes=0, write="ram_only"
        )

    def test_from_a_block_on_and_without_the_tail(self, store: BlockStore) -> None:
        chain = key_chain("a", TOKENS, 8)
        states = describe_layers(filled(TOKENS))
        report = record(store, chain, states, 30, 50, 0, tail=False)
        assert (report.stored_tokens, report.new_blocks) == (24, 3)
        report = record(store, chain, states, 50, 50, 3)
        assert (report.stored_tokens, report.new_blocks) == (50, 4)
        assert store.longest_prefix(chain.keys, chain.root, 8) == 6
        # Nothing to do: what lies before the first block counts as stored.
        assert record(store, chain, states, 24, 50, 3).stored_tokens == 24

    def test_kept_rows_must_be_there(self, store: BlockStore) -> None:
        """Batching loses them; what follows in the buffer must not be taken for them."""
        slot = Slot("keys", mx.zeros((1, 2, 16, 4)), 2, window_of(16, 4), first_row=34)
        with pytest.raises(ValueError, match="0/keys begins at row 34, but its first 4 rows are missing"):
            record(store, key_chain("a", TOKENS, 8), [LayerState("Other", (slot,), offset=50)], 50, 50)

    @pytest.mark.parametrize("shape", [(1, 1, 50, 80), (1, 8, 50, 192), (1, 2, 50, 1), (3, 50, 64)])
    @pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
    def test_any_head_size_and_rank(self, tmp_path: Path, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Keys and values may differ in head size, and a cache may have three dimensions."""
        caches = filled(TOKENS)
        for number, layer in enumerate(caches):
            layer.keys = mx.random.normal(shape, key=mx.random.key(number)).astype(dtype)
            layer.values = mx.random.normal((*shape[:-1], 48), key=mx.random.key(9 + number)).astype(dtype)
        with open_cache(tmp_path / "cache", ram=0) as cache:
            assert cache.store(TOKENS, caches).stored_tokens == 50
            hit = cache.fetch([*TOKENS[:43], 1])
            assert hit.cached_tokens == 43
            for found, donor in zip(hit.caches, caches, strict=True):
                for name in ("keys", "values"):
                    rows, whole = getattr(found, name), getattr(donor, name)
                    assert rows.dtype == dtype
                    assert mx.array_equal(rows[..., :43, :], whole[..., :43, :])

    def test_views_and_lazy_arrays(self, tmp_path: Path) -> None:
        """What a caller hands over need be neither evaluated nor contiguous."""
        caches = filled(TOKENS)
        for layer in caches:
            layer.keys = mx.swapaxes(mx.swapaxes(layer.keys, 1, 2) + 0, 1, 2)
            layer.values = mx.concatenate([layer.values, layer.values], axis=-1)[..., 32:]
        with open_cache(tmp_path / "cache") as cache:
            assert cache.store(TOKENS, caches).stored_tokens == 50
            check_hit(cache.fetch(TOKENS), TOKENS)
