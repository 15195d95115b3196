"""The extension's stub is what its generator writes now, and the package type-checks."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx_lines
import pytest
from support import ROOT

import prefixcache
from prefixcache._build_info import MLX_VERSION

PACKAGE = Path(prefixcache.__file__).resolve().parent


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=cwd
    )  # fmt: skip


def test_the_stub_is_current(tmp_path: Path) -> None:
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind is not installed: the stub is not compared")
    # The generator belongs to one nanobind; the wrong one writes other text.
    wanted, found = mlx_lines.lines()[MLX_VERSION]["nanobind"], importlib.metadata.version("nanobind")
    if found != wanted:
        pytest.skip(f"nanobind {found} is installed, the stub of MLX {MLX_VERSION} is written by {wanted}")
    fresh = tmp_path / "_core.pyi"
    done = run("-m", "nanobind.stubgen", "-q", "-m", "prefixcache._core", "-o", str(fresh), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stub = (PACKAGE / "_core.pyi").read_text(encoding="utf-8").splitlines()
    # Python 3.12 shows the buffer protocol as methods, older ones do not.
    text = re.sub(
        r'    def __(release_)?buffer__\(.*?\n        """\n.*?\n        """\n\n', "", fresh.read_text(encoding="utf-8")
    )
    difference = difflib.unified_diff(stub, text.splitlines(), "committed", "fresh")
    assert "\n".join(difference) == ""


def test_the_package_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (PACKAGE / "py.typed").exists()
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: types are not checked")
    if "site-packages" not in PACKAGE.parts:
        # An installed package is found without help, and mypy refuses to be helped there.
        monkeypatch.setenv("MYPYPATH", str(PACKAGE.parent))
    settings = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
    done = run("-m", "mypy", *settings, "-p", "prefixcache", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
