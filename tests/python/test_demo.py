"""The programs in examples/ run as a stranger would run them, and the demo notices a wrong answer."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import demo
import pytest
from conftest import EXAMPLES, child_environment
from rich.console import Console

from prefixcache import Hit, PrefixCache


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)


def ignore(_: int) -> None:
    pass


class Kept(NamedTuple):
    """A run of the demo that left its directory behind."""

    directory: Path
    done: subprocess.CompletedProcess[str]

    @property
    def turns(self) -> list[dict[str, Any]]:
        assert self.done.returncode == 0, self.done.stderr
        turns: list[dict[str, Any]] = json.loads(self.done.stdout)["turns"]
        return turns


def run_demo(directory: Path, turns: int) -> Kept:
    sizes = ["--rooms", "2", "--turns", str(turns), "--max-tokens", "4"]
    return Kept(directory, run("demo.py", "--json", *sizes, "--cache-dir", str(directory)))


@pytest.fixture(scope="module")
def kept(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return run_demo(tmp_path_factory.mktemp("demo"), 2)


def test_the_demo_reuses_what_it_says_and_checks_it(kept: Kept) -> None:
    assert [turn["same"] for turn in kept.turns] == [True] * 4
    assert "4 of 4 answers equal" in kept.done.stderr
    assert [turn["number"] for turn in kept.turns] == [1, 2, 1, 2]
    first, second, *restarted = kept.turns
    assert first["reused"] == 0
    assert second["tiers"]["ram"] == second["reused"] >= first["prompt_tokens"]
    for turn in restarted:
        assert turn["reused"] == turn["prompt_tokens"] - 1 == turn["tiers"]["ssd"]
        assert turn["restored_bytes"] > 0
        assert turn["first_token_with"] > 0


@pytest.mark.long
def test_the_demo_again_in_the_same_directory(kept: Kept) -> None:
    """Now even the first turn is answered from the SSD, and is still checked."""
    turns = run_demo(kept.directory, 1).turns
    assert [turn["reused"] for turn in turns] == [kept.turns[0]["prompt_tokens"] - 1] * 2


def test_the_demo_notices_restored_rows_that_are_wrong(
    tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_llama("float32"), [(i * i + 3) % 251 for i in range(40)]
    honest = PrefixCache.fetch

    def damaged(cache: PrefixCache, *arguments: Any, **options: Any) -> Hit:
        hit = honest(cache, *arguments, **options)
        if hit:
            hit.caches[1].values[0, 1, 17, 3] += 0.5
        return hit

    with PrefixCache.open(tmp_path, model, block_size=16) as cache:

        def agrees() -> bool:
            turn = demo.Turn("first", 1, prompt)
            ends = demo.run_cached(model, tiny_tokenizer, cache, turn, 4, ignore)
            watch = demo.Reference(model, tiny_tokenizer, 16).answer(turn, ends, 4, ignore)
            return turn.agrees_with(watch.tokens, watch.digest())

        assert agrees()
        assert agrees()
        monkeypatch.setattr(PrefixCache, "fetch", damaged)
        assert not agrees()


@pytest.mark.parametrize(("same", "status"), [(True, 0), (False, 1)])
def test_the_status_says_whether_all_answers_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same: bool, status: int
) -> None:
    turns = [demo.Turn("first", 1, [1], same=True), demo.Turn("new", 1, [1], same=same)]
    for turn in turns:
        turn.first_token_with = turn.first_token_without = 1.0
    monkeypatch.setattr(demo.Demo, "run", lambda *_: turns)
    assert demo.main([]) == status
    assert ("2 of 2" if same else "1 of 2") in capsys.readouterr().out


def test_the_table_fits_a_narrow_terminal() -> None:
    turn = demo.Turn(
        "new", 3, [0] * 12345, 12344, {"ram": 0, "ssd": 12344}, 123_400_000, 0.0123, 0.41, 28.44, same=True
    )
    out = io.StringIO()
    Console(file=out, width=80).print(demo.table_of([turn]))
    row = next(line for line in out.getvalue().splitlines() if "12,345" in line)
    assert row.split() == ["3", "12,345", "12,344", "28.44", "0.41", "69", "x", "123.4", "10.0", "SSD", "yes"]


@pytest.mark.parametrize("arguments", [["--turns", "0"], ["--turns", "9"], ["--max-tokens", "0"], ["--rooms", "-1"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(SystemExit, match=f"demo: {tmp_path} exists and is no complete SmolLM2 folder"):
        demo.main(["--model-dir", str(tmp_path)])


def test_the_quickstart_runs(smollm2_folder: Path, tmp_path: Path) -> None:
    done = run("quickstart.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, answer, second, same_answer, other = done.stdout.splitlines()
    assert first.startswith("0 tokens reused, 37 to run")
    assert second.startswith("36 tokens reused, 1 to run")
    assert answer == same_answer == "The capital of France is Paris."
    assert other.startswith("The capital of Italy is")
