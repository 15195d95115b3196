"""A stranger's CMake project finds the installed package and uses it without Python in the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.__main__ import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp_embed"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # Away from the source tree and without its path: what is found must be the installed package.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")} | environment
    return subprocess.run([str(part) for part in command], cwd="/", env=env, capture_output=True, text=True)


def checked(*command: str | Path, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built outside of the repository against the installed package."""
    found = run(sys.executable, "-m", "prefixcache", "--cmake-dir")
    if found.returncode != 0:
        pytest.skip(f"the package is not installed: {found.stderr.strip()}")
    assert (Path(found.stdout.strip()) / "prefixcacheConfig.cmake").is_file()
    folder = tmp_path_factory.mktemp("embed")
    shutil.copytree(EXAMPLE, folder / "project", ignore=shutil.ignore_patterns("build"))
    mlx = checked(sys.executable, "-m", "mlx", "--cmake-dir")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    checked(
        tool("cmake"),
        *generator,
        "-S",
        folder / "project",
        "-B",
        folder / "build",
        f"-Dprefixcache_DIR={found.stdout.strip()}",
        f"-DMLX_ROOT={mlx}",
    )
    checked(tool("cmake"), "--build", folder / "build")
    return folder / "build" / "cpp_embed"


def test_stores_and_restores_across_runs(program: Path, tmp_path: Path) -> None:
    first = checked(program, tmp_path / "kv")
    assert "found 0 blocks" in first
    assert "restored 768 rows of 2 layers, 3 blocks from RAM, 0 from disk" in first
    second = checked(program, tmp_path / "kv")
    assert "found 4 blocks" in second
    assert "restored 768 rows of 2 layers, 0 blocks from RAM, 3 from disk" in second
    assert len(list((tmp_path / "kv" / "v1").rglob("*.safetensors"))) == 4


def test_has_no_python_in_the_process(program: Path, tmp_path: Path) -> None:
    if sys.platform == "darwin":
        loaded = checked(program, tmp_path / "kv", DYLD_PRINT_LIBRARIES="1")
        libraries = run(program, tmp_path / "kv", DYLD_PRINT_LIBRARIES="1").stderr + loaded
    else:
        libraries = checked("ldd", program)
    assert "libprefixcache" in libraries
    assert "libmlx" in libraries
    assert "libpython" not in libraries.lower()


def test_bad_directory_is_an_error_and_not_a_crash(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    done = run(program, file)
    assert done.returncode == 1
    assert "directory" in done.stderr and str(file) in done.stderr


def test_command_line_without_a_question_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--cmake-dir" in capsys.readouterr().out


def test_version_names_the_mlx_release(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert "for MLX 0." in capsys.readouterr().out
