"""``python -m prefixcache``: where the C++ package lies, and which version this is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prefixcache._build_info import MLX_VERSION, VERSION


def cmake_dir() -> Path:
    """The folder with ``prefixcacheConfig.cmake``. FileNotFoundError where the package was not installed with it."""
    folder = Path(__file__).resolve().parent / "share" / "cmake" / "prefixcache"
    if not (folder / "prefixcacheConfig.cmake").is_file():
        raise FileNotFoundError(f"no prefixcacheConfig.cmake in {folder}: pip install the package to build against it")
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m prefixcache", description="A prompt cache for MLX.")
    parser.add_argument("--version", action="version", version=f"prefixcache {VERSION} for MLX {MLX_VERSION}")
    parser.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder to give to CMake as prefixcache_DIR",
    )
    chosen = parser.parse_args(arguments)
    if not chosen.cmake_dir:
        parser.print_help()
        return 2
    try:
        print(cmake_dir())
    except FileNotFoundError as error:
        print(f"prefixcache: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
