"""Recurrent states serve only the n they were captured at: where they are kept, what is dropped, what a hit can use."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache
from sessions import MODELS, STATES, check, feed, open_for, serve
from support import common_prefix, part_files

from prefixcache import SNAPSHOT_REASONS, STORE_REASONS, PrefixCache

PROMPT = [3 * i % 97 for i in range(75)]  # nine blocks of 8 and 3 tokens
ANSWER = list(range(200, 230))


def states_at(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Where a hit of these tokens can stand, deepest first, as fetches see it."""
    found, limit = [], len(tokens)
    while (hit := cache.fetch([*tokens, 1], limit=limit)).cached_tokens:
        check(hit.caches, tokens[: hit.cached_tokens])
        found.append(hit.cached_tokens)
        limit = hit.cached_tokens - 1
    return found


@pytest.fixture(params=sorted(STATES))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestWhereStatesAreKept:
    def test_the_ends_of_prompt_and_answer(self, tmp_path: Path, model: str) -> None:
        with open_for(model, tmp_path / "cache") as cache:
            serve(cache, PROMPT, ANSWER)
            assert states_at(cache, [*PROMPT, *ANSWER]) == [105, 74]
        with open_for(model, tmp_path / "cache") as cache:
            assert states_at(cache, [*PROMPT, *ANSWER]) == [105, 74]

    def test_every_interval(self, tmp_path: Path, model: str) -> None:
        with open_for(model, tmp_path / "cache", state_interval=20) as cache:  # rounded up to 24
            serve(cache, PROMPT, ANSWER, most=64)
            assert states_at(cache, [*PROMPT, *ANSWER]) == [105, 96, 74, 72, 48, 24]

    def test_an_identical_prompt_runs_one_token(self, tmp_path: Path, model: str) -> None:
        for length in (2, 8, 9, 16, 17, 75):
            with open_for(model, tmp_path / str(length)) as cache:
                serve(cache, PROMPT[:length])
                assert cache.fetch(PROMPT[:length]).cached_tokens == length - 1

    @pytest.mark.parametrize("ends", [[75], [16, 75], [16, 40, 75], [8, 16, 24, 32, 40, 48, 56, 64, 72, 75]])
    def test_chunks_that_end_anywhere(self, tmp_path: Path, model: str, ends: list[int]) -> None:
        """The last state within the prompt stays: one behind it does not serve an identical prompt."""
        with open_for(model, tmp_path / "cache") as cache:
            hit = cache.fetch(PROMPT)
            recorder, n = cache.record(PROMPT, hit), 0
            for end in ends:
                feed(hit.caches, PROMPT[n:end], n)
                recorder.advance(end)
                n = end
            kept = max([end for end in ends if end < 75], default=0)
            assert cache.fetch(PROMPT).cached_tokens == kept
            recorder.finish(75)
            assert states_at(cache, PROMPT) == [75, *([kept] if kept else [])]

    def test_a_cancelled_prefill_keeps_what_it_computed(self, tmp_path: Path, model: str) -> None:
        with open_for(model, tmp_path / "cache") as cache:
            serve(cache, PROMPT, stop_at=37)
            hit = cache.fetch(PROMPT)
            assert hit.cached_tokens == 37
            check(hit.caches, PROMPT[:37])

    def test_the_newest_ends_of_a_growing_conversation(self, tmp_path: Path, model: str) -> None:
        """Each turn adds its own bytes; the states of earlier turns go."""
        turn = PROMPT
        per_turn = []
        with open_for(model, tmp_path / "cache", state_interval=10_000) as cache:
            for number in range(12):
                before = cache.stats()
                serve(cache, turn, ANSWER)
                after = cache.stats()
                per_turn.append(after["stored_bytes"] - before["stored_bytes"])
                assert len(states_at(cache, [*turn, *ANSWER])) == 2
                turn = [*turn, *ANSWER, *range(300 + number, 308 + number)]
            cache.flush()
            assert after["stored_states"] - after["dropped_states"] == 2
        assert max(per_turn[7:]) <= max(per_turn[1:7])
        assert sum(path.name.endswith(".state.safetensors") for path in part_files(tmp_path / "cache")) == 2


class TestWherePromptsDiverge:
    def test_the_next_prefill_cuts_there(self, tmp_path: Path) -> None:
        """Rows reach deeper than any state: one state at the fork serves every prompt that leaves there."""
        with open_for("state and rows", tmp_path / "cache") as cache:
            serve(cache, PROMPT, ANSWER)
            first = serve(cache, [*PROMPT[:50], 99, 98, 97], [96] * 10)
            assert (first.cached_tokens, first.reason, first.checkpoint) == (0, "no_checkpoint", 50)
            second = serve(cache, [*PROMPT[:50], 89, 88, 87], [86] * 10)
            assert (second.cached_tokens, second.checkpoint) == (50, None)
            # The branch that was there first has lost nothing, nor has the second.
            assert states_at(cache, [*PROMPT, *ANSWER])[:2] == [105, 74]
            assert states_at(cache, [*PROMPT[:50], 99, 98, 97, *[96] * 10])[:2] == [63, 52]

    def test_at_any_distance_from_a_block(self, tmp_path: Path, model: str) -> None:
        for at in (1, 7, 8, 9, 31, 32, 33):
            with open_for(model, tmp_path / str(at)) as cache:
                serve(cache, PROMPT, ANSWER)
                serve(cache, [*PROMPT[:at], 99, 98, 97])
                hit = cache.fetch([*PROMPT[:at], 95, 94])
                assert hit.cached_tokens == at
                check(hit.caches, PROMPT[:at])

    def test_states_before_a_fork_stay(self, tmp_path: Path) -> None:
        """They may be the newest that another branch has."""
        with open_for("state and rows", tmp_path / "cache", state_interval=10_000) as cache:
            serve(cache, PROMPT, ANSWER)  # 74 and 105
            turn = [*PROMPT, *ANSWER[:10], 99]
            for number in range(5):
                serve(cache, turn, [98] * 9)
                turn = [*turn, *[98] * 9, *range(400 + number, 410 + number)]
            assert states_at(cache, [*PROMPT, *ANSWER]) == [105, 85, 74]
            assert cache.fetch(PROMPT).cached_tokens == 74


class TestStoreAtTheEnd:
    def test_a_model_without_counters_must_be_told(self, tmp_path: Path) -> None:
        with open_for("state", tmp_path / "cache") as cache:
            caches = MODELS["state"]()
            feed(caches, PROMPT, 0)
            report = cache.store(PROMPT, caches)
            assert (report.reason, report.stored_tokens, report.state_at) == ("unknown_count", 0, None)
            assert "covers" in report.detail
            assert cache.stats()["store_reasons"] == {"unknown_count": 1}
            refused = cache.store(PROMPT, caches, snapshots={8: caches})
            assert refused.snapshots == {8: "rows_missing"}
            assert cache.stats()["snapshot_reasons"] == {"rows_missing": 1}
            assert part_files(tmp_path / "cache") == []
            report = cache.store(PROMPT, MODELS["state"](), covers=75, snapshots={8: MODELS["state"]()})
            assert (report.reason, report.detail) == ("state_elsewhere", "the layers hold no state")
            assert report.snapshots == {8: "no_state"}
            report = cache.store(PROMPT, caches, covers=75)
            assert (report.reason, report.state_at) == ("complete", 75)
            assert cache.fetch([*PROMPT, 1]).cached_tokens == 75

    @pytest.mark.parametrize("name", ["state and rows", "everything"])
    def test_the_live_state_is_never_stored_for_fewer_tokens(self, tmp_path: Path, name: str) -> None:
        """Seven tokens were run; a boundary at four has another state (the peer's A4)."""
        with open_for(name, tmp_path / "cache", block_size=4) as cache:
            caches = MODELS[name]()
            feed(caches, PROMPT[:7], 0)
            report = cache.store(PROMPT[:4], caches)
            assert (report.reason, report.stored_tokens, report.state_at) == ("state_elsewhere", 4, None)
            assert "7 tokens, not of 4" in report.detail
            assert cache.fetch([*PROMPT[:4], 9]).cached_tokens == 0

    def test_a_recorder_that_lags_keeps_no_state(self, tmp_path: Path) -> None:
        with open_for("state and rows", tmp_path / "cache") as cache:
            caches = MODELS["state and rows"]()
            recorder = cache.record(PROMPT, caches)
            feed(caches, PROMPT[:20], 0)
            report = recorder.advance(16)
            assert (report.reason, report.stored_tokens, report.state_at) == ("state_elsewhere", 16, None)
            assert cache.fetch(PROMPT).cached_tokens == 0

    def test_counters_that_disagree_are_refused(self, tmp_path: Path) -> None:
        """Rejected draft tokens, a layer that was skipped: no n is right for all."""
        with open_for("everything", tmp_path / "cache") as cache:
            caches = MODELS["everything"]()
            feed(caches, PROMPT, 0)
            caches[0].trim(3)
            with pytest.raises(ValueError, match="layer 0 .*72, layer 2/0 .*75"):
                cache.store(PROMPT, caches)
            assert part_files(tmp_path / "cache") == []

    def test_a_state_of_a_running_batch(self, tmp_path: Path) -> None:
        with open_for("state and rows", tmp_path / "cache") as cache:
            caches = MODELS["state and rows"]()
            feed(caches, PROMPT, 0)
            caches[0].lengths = mx.array([3])
            assert cache.store(PROMPT, caches).reason == "running_request"
            assert cache.stats()["store_reasons"] == {"running_request": 1}

    def test_states_that_come_late_upgrade_what_is_there(self, tmp_path: Path) -> None:
        """Rows were stored without a state; one that is known now makes them usable (the peer's A6)."""
        with open_for("state and rows", tmp_path / "cache") as cache:
            caches = MODELS["state and rows"]()
            feed(caches, PROMPT, 0)
            assert cache.store(PROMPT[:72], caches).reason == "state_elsewhere"
            assert cache.fetch(PROMPT).cached_tokens == 0
            caches = MODELS["state and rows"]()
            feed(caches, PROMPT[:72], 0)
            report = cache.store(PROMPT[:72], caches)
            assert (report.reason, report.state_at, report.new_blocks) == ("complete", 72, 0)
            assert cache.fetch(PROMPT).cached_tokens == 72


class Lazy(Mapping[int, Any]):
    """Snapshots that are made when they are asked for; some turn out to be missing."""

    def __init__(self, made: dict[int, Any]) -> None:
        self._made = made
        self.asked: list[int] = []

    def __getitem__(self, n: int) -> Any:
        self.asked.append(n)
        return self._made[n]

    def __iter__(self) -> Iterator[int]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class TestSnapshots:
    def run(self, model: str, *at: int) -> tuple[list[Any], dict[int, Any]]:
        """Caches at the end of the prompt, and copies of them at the given counts on the way."""
        caches, taken, n = MODELS[model](), {}, 0
        for cut in sorted({*at, len(PROMPT)}):
            feed(caches, PROMPT[n:cut], n)
            n = cut
            taken[cut] = copy.deepcopy(caches)
        return caches, {cut: taken[cut] for cut in at}

    @pytest.mark.parametrize("name", sorted(MODELS))
    def test_each_can_be_returned_to(self, tmp_path: Path, name: str) -> None:
        caches, snapshots = self.run(name, 8, 24, 37, 64)
        with open_for(name, tmp_path / "cache", state_interval=8) as cache:
            report = cache.store(PROMPT, caches, covers=75, snapshots=Lazy(snapshots))
            assert report.snapshots == {8: "kept", 24: "kept", 37: "kept", 64: "kept"}
            assert report.reason in ("complete", "rows_gone")
            for n in (8, 24, 37, 64, 75):
                hit = cache.fetch([*PROMPT[:n], 99])
                check(hit.caches, PROMPT[: hit.cached_tokens])
                assert hit.cached_tokens == n
            assert cache.fetch([*PROMPT, 99]).cached_tokens == 75

    def test_what_is_wrong_with_one_is_said_and_harms_no_other(self, tmp_path: Path) -> None:
        caches, snapshots = self.run("state and rows", 16, 24, 32, 40, 48, 56)
        snapshots[24] = None
        snapshots[32] = snapshots[40]
        snapshots[48] = snapshots[48][:2]
        snapshots[56][0].lengths = mx.array([1])
        snapshots[0] = snapshots[900] = snapshots[40]
        snapshots[64] = [ArraysCache(2), type("Other", (KVCache,), {})(), ArraysCache(1)]
        with open_for("state and rows", tmp_path / "cache") as cache:
            report = cache.store(PROMPT, caches, snapshots=snapshots)
            expected = {
                0: "beyond_tokens",
                16: "kept",
                24: "missing",
                32: "other_count",
                40: "kept",
                48: "contradictory",
                56: "running_request",
                64: "unsupported_type",
                900: "beyond_tokens",
            }
            assert report.snapshots == expected
            assert set(expected.values()) - {"kept"} <= SNAPSHOT_REASONS
            counted = {word: list(expected.values()).count(word) for word in expected.values()}
            assert cache.stats()["snapshot_reasons"] == counted
            assert (report.reason, report.stored_tokens, report.state_at) == ("complete", 75, 75)
            assert report.reason in STORE_REASONS
            assert states_at(cache, PROMPT) == [75, 40, 16]

    @pytest.mark.parametrize("snapshots", [[(8, [])], {"8": []}, {True: []}, {8.0: []}])
    def test_what_is_no_mapping_of_counts(self, tmp_path: Path, snapshots: Any) -> None:
        with open_for("state", tmp_path / "cache") as cache, pytest.raises(TypeError, match="snapshots must map"):
            cache.store(PROMPT, MODELS["state"](), covers=75, snapshots=snapshots)


def test_walks_back_to_the_deepest_real_state(tmp_path: Path) -> None:
    """12 blocks, states at blocks 3 and 9 only (cases B33)."""
    tokens = list(range(96))
    with open_for("state and rows", tmp_path / "cache", state_interval=24) as cache:
        caches = MODELS["state and rows"]()
        snapshots = {}
        for n in range(8, 97, 8):
            feed(caches, tokens[n - 8 : n], n - 8)
            if n in (24, 72):
                snapshots[n] = copy.deepcopy(caches)
        report = cache.store([*tokens[:95]], caches, snapshots=snapshots)
        assert report.reason == "state_elsewhere"
        for matched, expected in ((88, 72), (80, 72), (64, 24), (24, 24), (16, 0)):
            hit = cache.fetch([*tokens[:matched], 500])
            assert hit.cached_tokens == expected
            check(hit.caches, tokens[:expected])


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_whatever_was_served_before(data: st.DataObject) -> None:
    """Never a wrong state; and what was just served is served again from one token before its end."""
    model = data.draw(st.sampled_from(sorted(STATES)))
    options = {"block_size": data.draw(st.sampled_from([1, 3, 8])), "state_interval": data.draw(st.integers(1, 40))}
    stored: list[list[int]] = []
    with open_for(model, None, write="ram_only", **options) as cache:
        for _ in range(data.draw(st.integers(2, 5))):
            base = data.draw(st.sampled_from([[], *stored]))
            prompt = base[: data.draw(st.integers(0, len(base)))]
            prompt = prompt + data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=40))
            answer = data.draw(st.lists(st.integers(0, 2), max_size=20))
            hit = serve(cache, prompt, answer, most=data.draw(st.sampled_from([None, 7, 30])))
            reach = max((common_prefix(one, prompt[:-1]) for one in stored), default=0)
            assert hit.cached_tokens <= reach
            assert hit.checkpoint in (None, reach)
            stored.append([*prompt, *answer])
            again = cache.fetch(prompt)
            assert again.cached_tokens == len(prompt) - 1
            check(again.caches, prompt[:-1])
            assert cache.fetch([*prompt, *answer, 9]).cached_tokens == len(prompt) + len(answer)
            ends = [one for one in stored if not any(common_prefix(one, two) == len(one) < len(two) for two in stored)]
            for other in ends:
                found = cache.fetch([*other, 9])
                check(found.caches, other[: found.cached_tokens])
                assert found.cached_tokens == len(other), "the end of a branch was dropped"
