"""Sliding windows are rows: a model that has them is restored at any token, whatever its windows and blocks are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from conftest import examples, long
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache
from sessions import MODELS, STATES, check, feed, open_for, serve
from support import ShadowStore, part_files

from prefixcache import PrefixCache

ROWS_ONLY = sorted(MODELS.keys() - STATES)
PROMPT = [3 * i % 97 for i in range(75)]  # nine blocks of 8 and 3 tokens
# Each start and each step once in the short form.
DIAGONAL = ((60, 2), (64, 5), (71, 3))
STARTS_AND_STEPS = [pair if pair in DIAGONAL else long(*pair) for pair in itertools.product((60, 64, 71), (2, 3, 5))]
LEAVES = [(7, 8, 9, 40, 80), long((1, 7, 8, 9, 12, 13, 40, 71, 80))]


@pytest.mark.parametrize("model", ROWS_ONLY)
class TestAnyToken:
    @pytest.mark.parametrize("most", [None, long(20), 64])
    def test_after_a_recorded_prefill(self, tmp_path: Path, model: str, most: int | None) -> None:
        with open_for(model, tmp_path / "cache") as cache:
            serve(cache, PROMPT, most=most)
        with open_for(model, tmp_path / "cache") as cache:
            for n in range(1, len(PROMPT)):
                for asked in ([*PROMPT[:n], 99, 98], [*PROMPT[:n], PROMPT[n]]):
                    hit = cache.fetch(asked)
                    assert (hit.cached_tokens, hit.checkpoint) == (n, None)
                    check(hit.caches, asked[:n])

    def test_decoded_tokens_too(self, tmp_path: Path, model: str) -> None:
        """Windows smaller than a block lose its first rows while tokens are decoded one by one."""
        answer = list(range(200, 240))
        whole = [*PROMPT, *answer]
        with open_for(model, tmp_path / "cache") as cache:
            serve(cache, PROMPT, answer)
            for n in range(len(PROMPT), len(whole)):
                hit = cache.fetch([*whole[:n], 99])
                assert hit.cached_tokens == n
                check(hit.caches, whole[:n])

    @pytest.mark.parametrize(("start", "step"), STARTS_AND_STEPS)
    def test_decoded_tokens_told_several_at_a_time(self, tmp_path: Path, model: str, start: int, step: int) -> None:
        """As often as is asked for: every min(block, smallest window) tokens."""
        with open_for(model, tmp_path / "cache") as cache:
            hit = cache.fetch(PROMPT[:start])
            recorder, n = cache.record(PROMPT[:start], hit), 0
            while n < start:
                cut = min(recorder.next_cut(n), start)
                feed(hit.caches, PROMPT[n:cut], n)
                recorder.advance(n := cut)
            whole = [*PROMPT[:start], *range(200, 240)]
            while n < len(whole):
                new = whole[n : n + step]
                for position, token in enumerate(new, n):
                    feed(hit.caches, [token], position)
                n += len(new)
                recorder.advance(n, tokens=new)
            recorder.finish()
            for n in range(1, len(whole) + 1):
                found = cache.fetch([*whole[:n], 5])
                assert found.cached_tokens == n
                check(found.caches, whole[:n])

    @pytest.mark.parametrize("leaves", LEAVES, ids=len)
    def test_a_second_turn_that_leaves_the_first_inside_a_block(
        self, tmp_path: Path, model: str, leaves: tuple[int, ...]
    ) -> None:
        with open_for(model, tmp_path / "cache") as cache:
            serve(cache, PROMPT, range(200, 230))
            for n in leaves:
                turn = [*PROMPT, *range(200, 230)][:n] + [99] * 30
                hit = serve(cache, turn, [98] * 20)
                assert hit.cached_tokens == n
                whole = [*turn, *[98] * 20]
                for again in range(1, len(whole) + 1):
                    found = cache.fetch([*whole[:again], 5])
                    assert found.cached_tokens == again
                    check(found.caches, whole[:again])

    def test_going_on_after_a_restore_gives_the_rows_of_a_plain_run(self, tmp_path: Path, model: str) -> None:
        with open_for(model, tmp_path / "cache") as cache:
            serve(cache, PROMPT)
            for n, step in itertools.product((4, 11, 12, 13, 24, 50), (1, 2, 7, 30)):
                hit = cache.fetch([*PROMPT[:n], 99])
                plain = MODELS[model]()
                feed(plain, PROMPT[:n], 0)
                for caches in (hit.caches, plain):
                    feed(caches, list(range(step)), n)
                feed(hit.caches, [7, 8], n + step)
                feed(plain, [7, 8], n + step)
                for own, other in zip(hit.caches, plain, strict=True):
                    if isinstance(own, RotatingKVCache):
                        # After two tokens at once both are in temporal order.
                        assert own.offset == other.offset
                        kept = min(own.max_size, own.offset)
                        same = own.keys[..., -kept + own.keep :, :] == other.keys[..., -kept + own.keep :, :]
                        assert same.all().item()

    def test_ram_alone_and_disk_alone(self, tmp_path: Path, model: str) -> None:
        for number, options in enumerate(({"ram": 0}, {"write": "ram_only"})):
            with open_for(model, tmp_path / str(number), **options) as cache:
                serve(cache, PROMPT)
                cache.flush()
                hit = cache.fetch([*PROMPT, 5])
                assert hit.cached_tokens == len(PROMPT)
                assert hit.tiers == ({"ram": 0, "ssd": 75} if number == 0 else {"ram": 75, "ssd": 0})
                check(hit.caches, PROMPT)


@pytest.mark.parametrize("model", ROWS_ONLY)
def test_without_a_recorder_the_end_can_be_had(tmp_path: Path, model: str) -> None:
    """The ring holds the last rows only: enough to stand at the end, and where rows reach back far enough."""
    with open_for(model, tmp_path / "cache") as cache:
        serve(cache, PROMPT, range(200, 230), record=False)
        whole = [*PROMPT, *range(200, 230)]
        hit = cache.fetch([*whole, 5])
        assert hit.cached_tokens == len(whole)
        check(hit.caches, whole)
        for n in range(1, len(whole)):
            hit = cache.fetch([*whole[:n], 99])
            check(hit.caches, whole[: hit.cached_tokens])
            assert hit.cached_tokens in (0, n) or hit.reason == "window_gone"


@pytest.mark.parametrize("phase", [0, 1, 11])
@pytest.mark.parametrize("keep", [0, 4])
def test_a_ring_at_every_phase(tmp_path: Path, phase: int, keep: int) -> None:
    """Stored at the end of single-token decoding, with the oldest row at, before and behind the seam."""
    tokens = [5 * i % 89 for i in range(48 + phase)]
    with PrefixCache.open(
        tmp_path / "cache", namespace="a", caches=[KVCache(), RotatingKVCache(12, keep)], block_size=8
    ) as cache:
        caches = [KVCache(), RotatingKVCache(12, keep)]
        feed(caches, tokens[:5], 0)
        for position in range(5, len(tokens)):
            feed(caches, [tokens[position]], position)
        report = cache.store(tokens, caches)
        assert report.reason == "rows_gone"
        assert "blocks, the first at token 0, have not all rows of their windows" in report.detail
        hit = cache.fetch([*tokens, 1])
        assert hit.cached_tokens == len(tokens)
        check(hit.caches, tokens)


def test_a_fuller_part_makes_a_shorter_reach_whole(tmp_path: Path) -> None:
    with open_for("window", tmp_path / "cache") as cache:
        serve(cache, PROMPT, record=False)
        assert cache.fetch([*PROMPT[:40], 99]).cached_tokens < 40
        caches = MODELS["window"]()
        recorder = cache.record(PROMPT, caches)
        for start in range(0, 75, 8):
            feed(caches, PROMPT[start : start + 8], start)
            recorder.advance(min(start + 8, 75))
        assert cache.fetch([*PROMPT[:40], 99]).cached_tokens == 40
        # What the ring has lost is there now.
        assert cache.store(PROMPT, caches).reason == "complete"


def test_a_window_that_is_gone_says_so(tmp_path: Path) -> None:
    with open_for("window", tmp_path / "cache") as cache:
        serve(cache, PROMPT)
    for path in part_files(tmp_path / "cache"):
        if path.name.endswith(".win.safetensors") and "-64." in path.name:
            path.write_bytes(path.read_bytes()[:50])
    with open_for("window", tmp_path / "cache") as cache:
        hit = cache.fetch([*PROMPT, 1])
        assert (hit.cached_tokens, hit.reason) == (56, "window_gone")
        check(hit.caches, PROMPT[:56])
        # What is missing is stored again, and nothing else.
        before = cache.stats()["put_parts"]
        serve(cache, PROMPT)
        assert 1 <= cache.stats()["put_parts"] - before <= 3
        assert cache.fetch([*PROMPT, 1]).cached_tokens == 75


def test_rows_are_stored_once(tmp_path: Path) -> None:
    """Bytes stored for a turn are those of its new rows."""
    turn = [*PROMPT[:64]]
    with open_for("windows", tmp_path / "cache") as cache:
        serve(cache, turn)
        for number in range(6):
            before = cache.stats()["stored_bytes"]
            turn = [*turn, *range(300 + 16 * number, 316 + 16 * number)]
            serve(cache, turn)
            row = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, size, float32
            assert cache.stats()["stored_bytes"] - before == 16 * row


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_whatever_was_served_before(data: st.DataObject) -> None:
    """Requests that share and leave one another anywhere: as long a hit as from rows alone, and never a wrong row."""
    model = data.draw(st.sampled_from(ROWS_ONLY))
    block_size = data.draw(st.sampled_from([1, 3, 8, 16]))
    shadow = ShadowStore()
    with open_for(model, None, write="ram_only", block_size=block_size) as cache:
        for _ in range(data.draw(st.integers(2, 5))):
            base = data.draw(st.sampled_from([[], *shadow.stored]))
            shared = base[: data.draw(st.integers(0, len(base)))]
            prompt = shared + data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=40))
            answer = data.draw(st.lists(st.integers(0, 2), max_size=25))
            hit = serve(cache, prompt, answer, most=data.draw(st.sampled_from([None, 7, 30])))
            assert (hit.cached_tokens, hit.reason, hit.diverged_at) == shadow.expected(prompt)
            shadow.stored.append([*prompt, *answer])


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("pages", [12, long(17), long(28), 36])
def test_hits_never_shrink_where_memory_is_too_small(model: str, pages: int) -> None:
    """What a conversation needs to be taken up stays where its next blocks find no room: hits stop growing, no more."""
    turn, hits = PROMPT[:20], []
    with open_for(model, None, write="ram_only", ram=pages << 16) as cache:
        for number in range(16):
            answer = [200 + number] * 11
            hits.append(serve(cache, turn, answer, most=16).cached_tokens)
            turn = [*turn, *answer, 300 + number, 301 + number]
        stats = cache.stats()
    assert hits[0] == 0
    assert hits[1] > 0
    assert hits == sorted(hits)
    # Where there is no room, each block is tried, not each token.
    assert stats["store_reasons"].get("queue_full", 0) <= 16 * (len(turn) // 8)
