"""Recorder: blocks are stored while a request runs, so that nothing is lost when it ends early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from support import check_hit, extend, filled, make_caches, open_cache, part_files

from prefixcache import PrefixCache

BLOCK = 8
PROMPT = list(range(100, 137))  # four blocks of 8 and 5 tokens


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with open_cache(tmp_path / "cache", block_size=BLOCK) as cache:
        yield cache


def prefill(cache: PrefixCache, recorder: Any, caches: list[Any], start: int, stop: int) -> list[int]:
    """Runs the prompt in the chunks that the recorder asks for; returns where they ended."""
    ends = []
    n = start
    while n < stop:
        end = min(recorder.next_cut(n), stop)
        extend(caches, PROMPT[n:end])
        recorder.advance(end)
        n = end
        ends.append(n)
    return ends


class Subclass(KVCache):  # type: ignore[misc]
    """A class that may do anything."""


class TestAdvance:
    def test_each_block_is_there_when_its_chunk_is_done(self, cache: PrefixCache) -> None:
        hit = cache.fetch(PROMPT)
        recorder = cache.record(PROMPT, hit)
        for end in (8, 16, 24, 32, 37):
            extend(hit.caches, PROMPT[hit.caches[0].offset : end])
            report = recorder.advance(end)
            whole = end // BLOCK * BLOCK
            assert (report.stored_tokens, report.reason) == (whole, "complete")
            assert (report.new_blocks, report.bytes > 0) == ((1, True) if end < 37 else (0, False))
            found = cache.fetch(PROMPT)
            assert found.cached_tokens == whole
            check_hit(found, PROMPT)

    def test_one_chunk_of_several_blocks(self, cache: PrefixCache) -> None:
        caches = make_caches()
        recorder = cache.record(PROMPT, caches)
        extend(caches, PROMPT[:30])
        report = recorder.advance(30)
        assert (report.stored_tokens, report.new_blocks) == (24, 3)
        assert cache.fetch(PROMPT).cached_tokens == 24

    def test_a_cancelled_prefill_keeps_its_progress(self, tmp_path: Path, cache: PrefixCache) -> None:
        hit = cache.fetch(PROMPT)
        recorder = cache.record(PROMPT, hit)
        prefill(cache, recorder, hit.caches, 0, 20)
        del recorder, hit
        cache.close()
        with open_cache(tmp_path / "cache", block_size=BLOCK) as again:
            hit = again.fetch(PROMPT)
            assert (hit.cached_tokens, hit.reason) == (16, "end_of_stored")
            check_hit(hit, PROMPT)
            # Prefilling goes on where it ended.
            recorder = again.record(PROMPT, hit)
            assert prefill(again, recorder, hit.caches, 16, len(PROMPT)) == [24, 32, 37]
            assert recorder.finish().stored_tokens == 37
            check_hit(again.fetch([*PROMPT, 1]), [*PROMPT, 1])
            assert again.fetch([*PROMPT, 1]).cached_tokens == 37

    def test_nothing_that_the_hit_came_from_is_stored_again(self, tmp_path: Path, cache: PrefixCache) -> None:
        cache.store(PROMPT, filled(PROMPT))
        cache.flush()
        before = {path: path.stat().st_mtime_ns for path in part_files(tmp_path / "cache")}
        hit = cache.fetch(PROMPT)
        recorder = cache.record(PROMPT, hit)
        extend(hit.caches, hit.remaining)
        assert recorder.advance(37).bytes == 0
        assert recorder.finish().bytes == 0
        cache.flush()
        assert {path: path.stat().st_mtime_ns for path in part_files(tmp_path / "cache")} == before

    def test_a_hit_inside_a_block(self, cache: PrefixCache) -> None:
        """The block that the new prompt leaves is stored again as far as it is another one."""
        cache.store(PROMPT, filled(PROMPT))
        tokens = [*PROMPT[:20], *range(500, 517)]
        hit = cache.fetch(tokens)
        assert hit.cached_tokens == 20
        recorder = cache.record(tokens, hit)
        extend(hit.caches, tokens[20:])
        assert recorder.advance(37).new_blocks == 2
        recorder.finish()
        for asked in (tokens, PROMPT):
            found = cache.fetch([*asked, 1])
            assert found.cached_tokens == 37
            check_hit(found, [*asked, 1])

    def test_next_cut_is_the_end_of_the_block(self, cache: PrefixCache) -> None:
        recorder = cache.record(PROMPT, make_caches())
        assert [recorder.next_cut(n) for n in (0, 1, 7, 8, 9, 15, 16, 36)] == [8, 8, 8, 16, 16, 16, 24, 40]

    def test_salts_are_those_of_the_fetch(self, cache: PrefixCache) -> None:
        salts: dict[str, Any] = {"salt": "tenant", "extra_keys": [(3, 5, "image")]}
        hit = cache.fetch(PROMPT, **salts)
        recorder = cache.record(PROMPT, hit, **salts)
        extend(hit.caches, PROMPT)
        recorder.advance(len(PROMPT))
        recorder.finish()
        assert cache.fetch([*PROMPT, 1], **salts).cached_tokens == 37
        assert cache.fetch(PROMPT).cached_tokens == 0
        assert cache.fetch(PROMPT, salt="tenant").cached_tokens == 3


class TestDecoding:
    @pytest.mark.parametrize("convert", [list, tuple, np.array, mx.array])
    def test_decoded_tokens_become_blocks_and_a_tail(self, cache: PrefixCache, convert: Any) -> None:
        caches = filled(PROMPT)
        recorder = cache.record(PROMPT, caches)
        recorder.advance(len(PROMPT))
        tokens = list(PROMPT)
        for token in range(900, 920):
            extend(caches, [token])
            tokens.append(token)
            report = recorder.advance(len(tokens), tokens=convert([token]))
            assert report.stored_tokens == len(tokens) // BLOCK * BLOCK
        assert cache.fetch([*tokens, 1]).cached_tokens == 56
        report = recorder.finish()
        assert (report.stored_tokens, report.new_blocks) == (57, 1)
        hit = cache.fetch([*tokens, 1])
        assert hit.cached_tokens == 57
        check_hit(hit, [*tokens, 1])

    def test_several_tokens_at_once(self, cache: PrefixCache) -> None:
        caches = filled(PROMPT)
        recorder = cache.record(PROMPT, caches)
        answer = list(range(900, 930))
        extend(caches, answer)
        assert recorder.advance(67, tokens=answer).new_blocks == 8
        assert recorder.finish().stored_tokens == 67

    def test_an_answer_that_the_next_prompt_leaves_out(self, cache: PrefixCache) -> None:
        """The thinking of a turn is cut from the next prompt: what is before it must still be found."""
        caches = filled(PROMPT)
        recorder = cache.record(PROMPT, caches)
        recorder.advance(len(PROMPT))
        thinking, answer = list(range(600, 620)), list(range(700, 705))
        extend(caches, [*thinking, *answer])
        recorder.advance(62, tokens=[*thinking, *answer])
        recorder.finish()
        following = [*PROMPT, *answer, 1, 2]
        hit = cache.fetch(following)
        assert (hit.cached_tokens, hit.reason, hit.diverged_at) == (37, "diverged", 37)
        check_hit(hit, following)

    def test_finish_earlier_than_what_is_known(self, cache: PrefixCache) -> None:
        """The last sampled token was never run: the caches stand at one token less."""
        caches = filled(PROMPT)
        recorder = cache.record(PROMPT, caches)
        recorder.advance(37, tokens=[900])
        with pytest.raises(ValueError, match="38 tokens were given, but the caches stand at 37"):
            recorder.finish()
        assert recorder.finish(37).stored_tokens == 37
        assert cache.fetch([*PROMPT, 900]).cached_tokens == 37

    def test_finish_twice_stores_once(self, cache: PrefixCache) -> None:
        recorder = cache.record(PROMPT, filled(PROMPT))
        assert recorder.finish().new_blocks == 5
        again = recorder.finish()
        assert (again.stored_tokens, again.new_blocks, again.bytes) == (37, 0, 0)

    def test_two_recorders_of_one_prompt_decode_differently(self, cache: PrefixCache) -> None:
        """Requests share the hashing of their prompt; what one decodes must not reach the other."""
        branches = []
        for start in (600, 700):
            caches = filled(PROMPT)
            branches.append((cache.record(PROMPT, caches), caches, list(range(start, start + 20))))
        for i in range(20):
            for recorder, caches, answer in branches:
                extend(caches, [answer[i]])
                recorder.advance(38 + i, tokens=[answer[i]])
        for recorder, _, _ in branches:
            assert recorder.finish().stored_tokens == 57
        for _, _, answer in branches:
            tokens = [*PROMPT, *answer, 1]
            hit = cache.fetch(tokens)
            assert hit.cached_tokens == 57
            check_hit(hit, tokens)
        assert cache.fetch([*PROMPT, 1]).cached_tokens == 37


class TestMisuse:
    def test_beyond_the_tokens_known(self, cache: PrefixCache) -> None:
        recorder = cache.record(PROMPT, filled([*PROMPT, 1, 2, 3]))
        with pytest.raises(ValueError, match="n is 38, but only 37 tokens are known"):
            recorder.advance(38)
        with pytest.raises(ValueError, match="n is 40, but only 38 tokens are known"):
            recorder.advance(40, tokens=[1])
        assert not cache.fetch(PROMPT)
        # What was refused has added nothing.
        assert recorder.advance(40, tokens=[1, 2, 3]).stored_tokens == 40
        assert cache.fetch([*PROMPT, 1, 2, 3, 4]).cached_tokens == 40

    def test_beyond_what_the_caches_hold(self, cache: PrefixCache) -> None:
        recorder = cache.record(PROMPT, filled(PROMPT[:20]))
        with pytest.raises(ValueError, match="37 tokens were given, but the caches stand at 20"):
            recorder.advance(37)
        assert not cache.fetch(PROMPT)
        assert recorder.advance(20).stored_tokens == 16

    @pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], "1", [None]])
    def test_bad_decoded_tokens(self, cache: PrefixCache, tokens: Any) -> None:
        recorder = cache.record(PROMPT, filled([*PROMPT, 1]))
        with pytest.raises((ValueError, TypeError)):
            recorder.advance(38, tokens=tokens)
        assert recorder.finish(37).stored_tokens == 37

    def test_a_class_without_a_handler_is_a_report(self, cache: PrefixCache) -> None:
        recorder = cache.record(PROMPT, [Subclass()])
        report = recorder.advance(16)
        assert (report.reason, report.stored_tokens) == ("unsupported_type", 0)
        assert recorder.finish().reason == "unsupported_type"

    def test_a_closed_cache_is_a_report(self, cache: PrefixCache) -> None:
        recorder = cache.record(PROMPT, filled(PROMPT))
        cache.close()
        assert recorder.advance(37).reason == "closed"
        assert recorder.finish().reason == "closed"


def test_a_chain_that_a_recorder_extends_is_lent_to_nobody() -> None:
    """It grows without the GIL, so no other thread's fetch may read it."""
    with open_cache(None, write="ram_only") as cache:
        recorder = cache.record(PROMPT, filled(PROMPT))
        assert all(chain is not recorder._chain for chain in cache._chains)


def test_a_recorder_refuses_a_hit_of_other_tokens(tmp_path: Path) -> None:
    """The hit's rows would be stored under tokens that they do not belong to."""
    other = [1, *PROMPT]
    with open_cache(tmp_path / "cache") as cache:
        cache.store(PROMPT, filled(PROMPT))
        hit = cache.fetch(PROMPT)
        with pytest.raises(ValueError, match="token"):
            cache.record(other, hit)


def test_a_recorder_under_another_salt_stores_from_the_start(tmp_path: Path) -> None:
    """What the hit had is not stored under the new salt."""
    with open_cache(tmp_path / "cache") as cache:
        cache.store(PROMPT, filled(PROMPT))
        hit = cache.fetch([*PROMPT, 1])
        recorder = cache.record(PROMPT, hit, salt="tenant")
        assert recorder.finish().stored_tokens == 37
        assert cache.fetch([*PROMPT, 1], salt="tenant").cached_tokens == 37
