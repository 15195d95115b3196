"""What belongs to each MLX release that prefixcache is built for; mlx-lines.json has the table, newest line first.

A build is for the MLX that it finds. Build front ends start in an empty environment: there PREFIXCACHE_MLX names the
release, and the first of the table is taken without it. pyproject.toml names this file as the provider of the
dependencies, so that a wheel asks for the release it was built with. As a program it prints what to install.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "mlx-lines.json"


def lines() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def mlx_requirement(release: str) -> str:
    # On Linux the extra brings libmlx and the headers; the macOS wheel has them.
    return f"mlx[cpu]=={release}" if sys.platform == "linux" else f"mlx=={release}"


def chosen_release() -> str:
    """The release to build for. RuntimeError if it is not in the table, or another one than was asked for."""
    wanted = os.environ.get("PREFIXCACHE_MLX")
    try:
        found = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        found = None
    release = found or wanted or next(iter(lines()))
    if wanted and wanted != release:
        raise RuntimeError(f"PREFIXCACHE_MLX asks for MLX {wanted}, but MLX {found} is installed here")
    if release not in lines():
        raise RuntimeError(f"MLX {release} is not in {TABLE.name}: add it with the nanobind that it was built with")
    return release


def get_requires_for_dynamic_metadata(_settings: Mapping[str, Any]) -> list[str]:
    release = chosen_release()
    return [f"nanobind=={lines()[release]['nanobind']}", mlx_requirement(release)]


def dynamic_metadata(_settings: Mapping[str, Any], _project: Mapping[str, Any]) -> dict[str, Any]:
    release = chosen_release()
    return {
        "dependencies": [
            f"mlx[cpu]=={release}; sys_platform == 'linux'",
            f"mlx=={release}; sys_platform == 'darwin'",
        ],
        "optional-dependencies": {
            "mlx-lm": [f"mlx-lm=={lines()[release]['mlx-lm']}"],
            "cli": ["rich>=13"],  # tables of the prefixcache command
        },
    }


def dynamic_wheel(_settings: Mapping[str, Any]) -> dict[str, bool]:
    """One source archive makes wheels for every line."""
    return {"dependencies": True, "optional-dependencies": True}


def main(arguments: list[str]) -> int:
    chosen = [release for release in lines() if arguments and release.startswith(arguments[0])]
    if len(arguments) != 1 or len(chosen) != 1:
        print(f"usage: mlx_lines.py RELEASE (or how one of {', '.join(lines())} begins)", file=sys.stderr)
        return 2
    (release,) = chosen
    packages = lines()[release]
    print(mlx_requirement(release), *(f"{name}=={version}" for name, version in packages.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
