"""The two lines of MLX, each in its own environment: one directory for both, and builds that know their MLX.

The other line's environment is made by make; without it these tests say so and skip.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mlx_lines
import pytest
from conftest import child_environment
from support import ROOT

import prefixcache
from prefixcache._build_info import MLX_VERSION

TESTS = Path(__file__).resolve().parent
ENVIRONMENTS = (".venv", ".venv-mlx031")
STORED = 45


class Line(NamedTuple):
    """A Python with its MLX, and the environment variables with which it finds the prefixcache under test."""

    python: str
    variables: dict[str, str]

    def run(self, *arguments: str, given: str = "", **variables: str) -> str:
        done = subprocess.run(
            [self.python, *arguments], input=given, env={**self.variables, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def visit(self, directory: Path, **doors: bool) -> dict[str, Any]:
        order = json.dumps({"directory": str(directory), "doors": doors})
        answer: dict[str, Any] = json.loads(self.run(str(TESTS / "line_child.py"), given=order))
        return answer


@pytest.fixture(scope="module")
def own() -> Line:
    return Line(sys.executable, child_environment(TESTS))


@pytest.fixture(scope="module")
def other() -> Line:
    """The first environment beside the one that runs the tests, with the wheel that is installed in it."""
    here = Path(sys.prefix).resolve()
    (folder,) = [ROOT / name for name in ENVIRONMENTS if (ROOT / name).resolve() != here][:1]
    python = folder / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{folder.name} is not there: make test-other makes it")
    line = Line(str(python), {**os.environ, "PYTHONPATH": str(TESTS)})
    if line.run("-c", "import importlib.util as u; print(u.find_spec('prefixcache') is not None)").strip() != "True":
        pytest.skip(f"prefixcache is not installed in {folder.name}: make test-other installs it")
    return line


def test_a_directory_of_both_lines(own: Line, other: Line, tmp_path: Path) -> None:
    """Under the fingerprint of a model each line misses what the other stored, and harms none of it; under a namespace
    that a caller gives to both they share, bit for bit, and both ways."""
    first = own.visit(tmp_path, model=True, given=True)
    second = other.visit(tmp_path, model=True, given=False, back=True)
    third = own.visit(tmp_path, model=False, given=False, back=False)
    assert first["versions"]["mlx"] != second["versions"]["mlx"]
    for visit in (first, second, third):
        versions = visit["versions"]
        assert versions["built_for"] == versions["mlx"]
        assert versions["mlx_lm"] == mlx_lines.lines()[versions["mlx"]]["mlx-lm"]
    mine, theirs, again = (visit["doors"] for visit in (first, second, third))
    assert mine["model"]["namespace"] == again["model"]["namespace"] != theirs["model"]["namespace"]
    # Each line, and each namespace, begins with nothing.
    for door in (mine["model"], mine["given"], theirs["model"], theirs["back"]):
        assert (door["before"]["n"], door["before"]["reason"]) == (0, "no_match")
        assert door["stored"] == STORED
        assert_restored(door["after"], door["donor"])
    assert_restored(theirs["given"]["before"], mine["given"]["donor"])
    assert_restored(again["back"]["before"], theirs["back"]["donor"])
    assert_restored(again["model"]["before"], mine["model"]["donor"])
    assert_restored(again["given"]["before"], mine["given"]["donor"])


def assert_restored(found: dict[str, Any], donor: list[str]) -> None:
    """What the next tokens see is what they see behind the caches that were stored."""
    assert (found["n"], found["ssd"], found["reason"]) == (STORED, STORED, "end_of_stored")
    assert len(donor) == 19
    assert found["seen"] == donor


def test_this_build_under_the_other_mlx(other: Line, tmp_path: Path) -> None:
    package = Path(prefixcache.__file__).resolve().parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "try:\n    import prefixcache\nexcept ImportError as error:\n    print(error)\nelse:\n    print('imported')"
    message = other.run("-c", code, PYTHONPATH=str(tmp_path))
    (release,) = [name for name in mlx_lines.lines() if name in message and name != MLX_VERSION]
    assert message.startswith(f"this prefixcache was built for MLX {MLX_VERSION}, but MLX {release} is installed: ")


REQUIRES = "import importlib.metadata as m, json; print(json.dumps(m.requires('prefixcache')))"


def test_a_wheel_asks_for_the_mlx_that_it_was_built_with(other: Line) -> None:
    release = other.run("-c", "from prefixcache._build_info import MLX_VERSION as v; print(v)").strip()
    requires = [one for one in json.loads(other.run("-c", REQUIRES)) if one.startswith("mlx")]
    assert requires == [
        f'mlx[cpu]=={release}; sys_platform == "linux"',
        f'mlx=={release}; sys_platform == "darwin"',
        f'mlx-lm=={mlx_lines.lines()[release]["mlx-lm"]}; extra == "mlx-lm"',
    ]


class TestTheReleaseOfABuild:
    """scripts/mlx_lines.py, from which a build takes its requirements."""

    @pytest.fixture(autouse=True)
    def nothing_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PREFIXCACHE_MLX", raising=False)

    @pytest.fixture
    def empty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in the environment that pip makes for a build."""

        def missing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", missing)

    def test_it_is_the_one_installed(self) -> None:
        assert mlx_lines.chosen_release() == MLX_VERSION
        assert mlx_lines.dynamic_metadata({}, {})["dependencies"][1] == f"mlx=={MLX_VERSION}; sys_platform == 'darwin'"
        assert importlib.metadata.version("nanobind") == mlx_lines.lines()[MLX_VERSION]["nanobind"]

    @pytest.mark.usefixtures("empty")
    def test_it_is_the_newest_line_where_none_is_installed(self) -> None:
        nanobind, mlx = mlx_lines.get_requires_for_dynamic_metadata({})
        assert (nanobind, mlx.split("==")[1]) == ("nanobind==3.1.0", "0.32.4")

    @pytest.mark.usefixtures("empty")
    def test_it_can_be_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PREFIXCACHE_MLX", "0.31.2")
        nanobind, mlx = mlx_lines.get_requires_for_dynamic_metadata({})
        assert (nanobind, mlx.split("==")[1]) == ("nanobind==2.12.0", "0.31.2")
        extras = {"mlx-lm": ["mlx-lm==0.31.3"], "cli": ["rich>=13"]}
        assert mlx_lines.dynamic_metadata({}, {})["optional-dependencies"] == extras

    def test_another_one_than_asked_for_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PREFIXCACHE_MLX", "0.30.0")
        with pytest.raises(RuntimeError, match=rf"asks for MLX 0\.30\.0, but MLX {MLX_VERSION} is installed"):
            mlx_lines.chosen_release()

    @pytest.mark.usefixtures("empty")
    def test_one_without_a_known_nanobind_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PREFIXCACHE_MLX", "0.30.0")
        with pytest.raises(RuntimeError, match=r"MLX 0\.30\.0 is not in mlx-lines\.json: add it with the nanobind"):
            mlx_lines.chosen_release()

    def test_as_a_program_it_prints_what_to_install(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert mlx_lines.main(["0.31"]) == 0
        printed = capsys.readouterr().out.split()
        assert printed[0].startswith("mlx") and printed[0].endswith("==0.31.2")
        assert printed[1:] == ["nanobind==2.12.0", "mlx-lm==0.31.3"]
        assert mlx_lines.main(["0.3"]) == mlx_lines.main([]) == 2
