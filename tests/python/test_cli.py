"""The ``prefixcache`` command as people and programs see it: exit status, tables, JSON, questions."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import child_environment
from directories import CHAIN, chain_of, left, real_cache, set_age
from support import ROOT, chain_files, part_files
from test_damage import data_bit

from prefixcache._build_info import VERSION
from prefixcache.cli import main

HOUR = 3600.0


def run(*arguments: str | Path, program: tuple[str, ...] = ("-m", "prefixcache")) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=child_environment(),
    )  # fmt: skip


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process: (exit status, what it printed); JSON is read."""

    def answer(*arguments: str | Path) -> tuple[int, Any]:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        if status == 2:
            assert out == ""
            return status, err
        return status, json.loads(out) if "--json" in arguments else out

    return answer


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two namespaces, one with a chain that is 9 hours old."""
    real_cache(tmp_path / "c")
    real_cache(tmp_path / "c", CHAIN[:20], namespace="other")
    for path in (tmp_path / "c" / "v1" / "other").rglob("*.safetensors"):
        set_age(path, 9 * HOUR)
    return tmp_path / "c"


class TestJson:
    """These names and types are for programs: add to them, do not change them."""

    HEAD = {"schema": int, "command": str, "directory": str, "namespace": str | None}
    COUNT = {"files": int, "bytes": int}
    PART = {
        "namespace": str, "tier": str, "path": str, "key": str, "part": str, "depth": int, "bytes": int,
        "modified": float, "age": float,
    }  # fmt: skip

    def matches(self, value: Any, schema: Any) -> bool:
        if isinstance(schema, dict):
            return value.keys() == schema.keys() and all(self.matches(value[name], schema[name]) for name in schema)
        if isinstance(schema, list):
            return len(value) > 0 and all(self.matches(one, schema[0]) for one in value)
        return isinstance(value, schema) and not (isinstance(value, bool) and schema is int)

    def test_stat(self, ask: Any, cache: Path) -> None:
        status, found = ask("stat", cache, "--json", "--headers")
        ages = dict.fromkeys(("1h", "1d", "7d", "30d", "older"), int)
        group = {"namespace": str, "tier": str, "part": str, **self.COUNT, "newest": float, "oldest": float}
        amplification = {"file_bytes": int, "tensor_bytes": int, "ratio": float, "unsound_headers": int}
        schema = {
            **self.HEAD, **self.COUNT, "namespaces": [str], "groups": [{**group, "bytes_by_age": ages}],
            "temporary": self.COUNT, "other": self.COUNT, "write_amplification": amplification,
        }  # fmt: skip
        assert self.matches(found, schema)
        assert (status, found["schema"], found["command"], found["namespace"]) == (0, 1, "stat", None)
        assert found["directory"] == str(cache)
        assert found["namespaces"] == ["other", "test"]
        assert [(one["namespace"], one["tier"], one["part"], one["files"]) for one in found["groups"]] == [
            ("other", "disk", "kv", 3), ("test", "disk", "kv", 6),
        ]  # fmt: skip
        assert found["bytes"] == sum(path.stat().st_size for path in part_files(cache))
        assert found["write_amplification"]["file_bytes"] == found["bytes"]
        assert ask("stat", cache, "--json")[1]["write_amplification"] is None
        assert len(ask("stat", cache, "--json", "--namespace", "test")[1]["groups"]) == 1

    def test_ls(self, ask: Any, cache: Path) -> None:
        status, found = ask("ls", cache, "--json")
        assert self.matches(found, {**self.HEAD, "files": int, "parts": [self.PART]})
        assert (status, found["files"]) == (0, 9)
        assert [cache / part["path"] for part in found["parts"]] == part_files(cache)
        for part in found["parts"]:
            assert Path(part["path"]).name.startswith(part["key"])
        for order, key in (("age", "age"), ("depth", "depth"), ("size", "bytes")):
            sorted_parts = ask("ls", cache, "--json", "--sort", order)[1]["parts"]
            values = [part[key] if order == "depth" else -part[key] for part in sorted_parts]
            if order == "age":
                values = [part["modified"] for part in sorted_parts][::-1]
            assert values == sorted(values)
        assert len(ask("ls", cache, "--json", "--limit", "4")[1]["parts"]) == 4
        assert ask("ls", cache, "--json", "--part", "state")[1]["parts"] == []

    def test_verify(self, ask: Any, cache: Path) -> None:
        data_bit(part_files(cache)[0])
        status, found = ask("verify", cache, "--json")
        damage = {"namespace": str, "path": str, "kind": str, "reason": str, "removed": bool}
        numbers = dict.fromkeys(("files", "checked", "checked_bytes", "gone"), int)
        assert self.matches(found, {**self.HEAD, **numbers, "sound": bool, "damage": [damage]})
        assert (status, found["sound"], found["damage"][0]["kind"]) == (1, False, "damaged")

    @pytest.mark.parametrize("command", [("gc", "--max-bytes", "0"), ("clear", "--yes")])
    def test_gc_and_clear(self, ask: Any, cache: Path, command: tuple[str, ...]) -> None:
        failed = {"path": str, "reason": str}
        schema = {
            **self.HEAD, "dry_run": bool, "removed": self.COUNT, "temporary": self.COUNT, "kept": self.COUNT,
            "gone": int, "in_use": int, "failed": [failed], "parts": [self.PART],
        }  # fmt: skip
        for dry in (["--dry-run"], []):
            status, found = ask(*command, cache, "--json", *dry)
            assert found.pop("failed") == []
            assert self.matches(found, {name: schema[name] for name in schema if name != "failed"})
            assert (status, found["dry_run"], found["removed"]["files"]) == (0, bool(dry), 9)
            assert found["kept"] == {"files": 0, "bytes": 0}
            # The older namespace first, and the deepest first in each.
            assert [part["depth"] for part in found["parts"]] == [20, 16, 8, 41, 40, 32, 24, 16, 8]
            assert len(part_files(cache)) == (9 if dry else 0)


class TestExitStatus:
    def test_sound_and_damaged(self, ask: Any, cache: Path) -> None:
        assert ask("verify", cache)[0] == 0
        damaged = chain_files(cache)[4]
        data_bit(damaged)
        before = left(cache)
        status, shown = ask("verify", cache)
        assert status == 1
        assert "damaged" in shown and damaged.name[:20] in shown and "1 wrong, 1 of them still there" in shown
        assert ask("verify", cache, "--headers-only")[0] == 0
        assert left(cache) == before
        status, shown = ask("verify", cache, "--remove-damaged")
        assert (status, left(cache)) == (1, before - {damaged.name})
        assert "damaged, removed" in shown and "0 of them still there" in shown
        assert ask("verify", cache)[0] == 0

    @pytest.mark.parametrize("command", ["stat", "ls", "verify", "gc", "clear"])
    def test_refused(self, ask: Any, cache: Path, tmp_path: Path, command: str) -> None:
        yes = ["--yes"] if command == "clear" else []
        for json_or_not in ([], ["--json"]):
            assert ask(command, tmp_path, *yes, *json_or_not)[0] == 2
            status, error = ask(command, cache, "--namespace", "nobody", *yes, *json_or_not)
            assert (status, "no namespace 'nobody'" in error) == (2, True)
        (cache / "v1").chmod(0o722)
        status, error = ask(command, cache, *yes)
        assert (status, "chmod go-w" in error) == (2, True)
        assert len(part_files(cache)) == 9

    @pytest.mark.parametrize(
        "arguments",
        [
            *(["gc", f"--max-bytes={text}"] for text in ("-1", "x", "", "4XB", "nan", "1e30")),
            *(["gc", f"--older-than={text}"] for text in ("7", "-1d", "x", "", "d", "nand", "infd", "1y", "99999999w")),
            *(["verify", f"--sample={text}"] for text in ("0", "-1", "x", "", "%", "0%", "101%", "1.5", "nan%")),
            *(["ls", f"--limit={text}"] for text in ("-1", "x", "", "1.5", "9" * 5000)),
            ["ls", "--sort", "name"],
            ["ls", "--part", "kv2"],
            ["erase"],
        ],
    )
    def test_bad_questions(self, ask: Any, cache: Path, arguments: list[str]) -> None:
        status, error = ask(*arguments, cache)
        assert (status, "error:" in error) == (2, True)
        assert len(part_files(cache)) == 9

    def test_no_question_at_all(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        assert re.findall(r"^    (stat|ls|verify|gc|clear) ", capsys.readouterr().out, re.M) == [
            "stat", "ls", "verify", "gc", "clear",
        ]  # fmt: skip

    def test_a_reader_that_has_seen_enough(self, tmp_path: Path) -> None:
        for number in range(4):
            for node in chain_of([1] * 100, number, size=1):
                node.make(tmp_path / "c")
        command = [sys.executable, "-m", "prefixcache", "ls", "--json", str(tmp_path / "c")]
        listing = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment()
        )
        assert listing.stdout is not None and listing.stderr is not None
        assert listing.stdout.read(1) == "{"
        listing.stdout.close()
        assert listing.stderr.read() == ""
        listing.stderr.close()
        assert listing.wait() == 141


class TestTables:
    def test_stat(self, ask: Any, cache: Path) -> None:
        status, shown = ask("stat", cache)
        rows = [line.split() for line in shown.splitlines()]
        (row,) = (row for row in rows if row[:1] == ["other"])
        size = sum(path.stat().st_size for path in (cache / "v1" / "other").rglob("*.safetensors")) / 1024
        assert row == ["other", "disk", "kv", "3", f"{size:.1f}", "KB", "-", f"{size:.1f}", "KB", "-", "-", "-",
                       "9.0", "h", "9.0", "h"]  # fmt: skip
        assert (status, "9 parts" in shown, "2 namespaces" in shown) == (0, True, True)
        assert "--headers" in shown
        assert re.search(r"write amplification 1\.\d{3}", ask("stat", cache, "--headers")[1])

    def test_ls(self, ask: Any, cache: Path) -> None:
        first = part_files(cache)[0]
        shown = ask("ls", cache, "--limit", "2")[1]
        assert first.name[:16] in shown
        assert "9 parts" in shown and "7 more" in shown
        assert "more" not in ask("ls", cache)[1]

    def test_gc(self, ask: Any, cache: Path) -> None:
        dry = ask("gc", cache, "--older-than", "8h", "--dry-run")[1]
        assert "3 parts would be removed" in dry and "6 parts left" in dry
        assert len(part_files(cache)) == 9
        assert "3 parts removed" in ask("gc", cache, "--older-than", "8h")[1]
        assert len(part_files(cache)) == 6
        assert "0 parts removed" in ask("gc", cache, "--max-bytes", "1GB")[1]

    def test_names_cannot_reach_the_terminal_as_they_are(self, tmp_path: Path) -> None:
        odd = b"\x1b[31m[bold]c" if sys.platform == "darwin" else b"\x1b[31m\xff[bold]c"  # UTF-8 only there
        directory = os.fsencode(tmp_path) + b"/" + odd
        real_cache(tmp_path / "plain")
        os.rename(tmp_path / "plain", directory)
        for command in ("stat", "verify", "ls"):
            done = subprocess.run(
                [sys.executable, "-m", "prefixcache", command, directory],
                capture_output=True, check=False, env={**child_environment(), "PYTHONIOENCODING": "ascii"},
            )  # fmt: skip
            assert (done.returncode, b"\x1b" in done.stdout + done.stderr) == (0, False), done.stderr
        data_bit(Path(os.fsdecode(directory)) / part_files(Path(os.fsdecode(directory)))[0])
        done = subprocess.run(
            [sys.executable, "-m", "prefixcache", "verify", directory],
            capture_output=True, check=False, env=child_environment(),
        )  # fmt: skip
        assert (done.returncode, b"\x1b" in done.stdout) == (1, False), done.stderr
        assert b"[bold]" in done.stdout

    def test_without_rich(self, cache: Path) -> None:
        code = "import sys; sys.modules['rich'] = None; from prefixcache.cli import main; sys.exit(main(sys.argv[1:]))"
        for command in (["stat"], ["ls"], ["verify"], ["gc", "--max-bytes=0"], ["clear", "--yes"]):
            done = run(*command, cache, program=("-c", code))
            assert (done.returncode, "pip install 'prefixcache[cli]'" in done.stderr) == (2, True)
        # It says so before anything is removed; programs do not need it.
        assert len(part_files(cache)) == 9
        done = run("clear", "--yes", "--json", cache, program=("-c", code))
        assert (done.returncode, json.loads(done.stdout)["removed"]["files"]) == (0, 9)


def on_terminal(columns: int, typed: bytes, *arguments: str | Path) -> tuple[int, str]:
    """The command on a terminal of that width: exit status and everything it showed."""
    ours, theirs = pty.openpty()
    environment = {**child_environment(), "COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "prefixcache", *map(str, arguments)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True,
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, typed)
    shown = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(), shown.decode()


class TestTerminal:
    def test_clear_asks(self, cache: Path) -> None:
        status, shown = on_terminal(100, b"n\n", "clear", cache)
        assert (status, "Remove 9 parts" in shown, "nothing was removed" in shown) == (1, True, True)
        status, shown = on_terminal(100, b"\n", "clear", cache)
        assert (status, len(part_files(cache))) == (1, 9)
        status, shown = on_terminal(100, b"y\n", "clear", cache, "--namespace", "other")
        assert (status, "Remove 3 parts" in shown, "of namespace other" in shown) == (0, True, True)
        assert len(part_files(cache)) == 6

    @pytest.mark.parametrize("arguments", [["clear"], ["clear", "--json"]])
    def test_clear_where_nobody_can_be_asked(self, cache: Path, arguments: list[str]) -> None:
        done = run(*arguments, cache)
        assert (done.returncode, "--yes" in done.stderr) == (2, True)
        assert len(part_files(cache)) == 9

    def test_long_work_shows_a_bar(self, cache: Path) -> None:
        status, shown = on_terminal(100, b"", "verify", cache)
        assert (status, "verifying" in shown, "nothing is wrong" in shown) == (0, True, True)

    def test_a_narrow_terminal(self, tmp_path: Path) -> None:
        name = "0123456789abcdef" * 4
        real_cache(tmp_path / "c", namespace=name)
        status, shown = on_terminal(80, b"", "stat", tmp_path / "c")
        assert status == 0
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
        assert max(map(len, plain.splitlines())) <= 80
        # Nothing is cut off, so that the name can be copied.
        assert "".join(re.findall(r"^ ([0-9a-f]+)(?= )", plain, re.M)) == name
        assert "oldest" in plain and "<= 1h" not in plain


def test_the_entry_point_is_the_command() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^\[project\.scripts\]\nprefixcache = "prefixcache\.cli:main"$', text, re.M)
    done = run("--version")
    assert (done.returncode, done.stdout.startswith(f"prefixcache {VERSION} for MLX ")) == (0, True)
