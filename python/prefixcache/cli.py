"""The ``prefixcache`` command: what a cache directory holds, whether it is sound, and making room in it.

Exit status: 0, 1 where something is wrong (damage found, a file that cannot be removed), 2 for a question that makes no
sense or a directory that is refused. The functions behind it are in ``prefixcache.maintenance``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import prefixcache.maintenance as maintenance
from prefixcache._build_info import MLX_VERSION, VERSION
from prefixcache._directory import OnProgress, Refused
from prefixcache._sizes import format_size, parse_age, parse_size

JSON_SCHEMA = 1
"""Of every answer to ``--json``; raised when a field changes its meaning or goes."""

_RICH_IS_MISSING = "tables need the package rich: pip install 'prefixcache[cli]', or ask for --json"


class _Usage(ValueError):
    """A question that cannot be answered as it was put."""


def cmake_dir() -> Path:
    """The folder with ``prefixcacheConfig.cmake``. FileNotFoundError where the package was not installed with it."""
    folder = Path(__file__).resolve().parent / "share" / "cmake" / "prefixcache"
    if not (folder / "prefixcacheConfig.cmake").is_file():
        raise FileNotFoundError(f"no prefixcacheConfig.cmake in {folder}: pip install the package to build against it")
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        if chosen.cmake_dir:
            print(cmake_dir())
            return 0
        if chosen.command is None:
            parser.print_help()
            return 2
        if not chosen.json and not _has_rich():
            raise _Usage(_RICH_IS_MISSING)
        answer: int = chosen.answer(chosen)
        return answer
    except BrokenPipeError:
        # Whoever read has seen enough. Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except FileNotFoundError as error:
        return _complain(str(error), 1 if chosen.cmake_dir else 2)
    except (Refused, _Usage, OSError) as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return _complain("stopped", 130)


def _complain(text: str, status: int) -> int:
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    print(f"prefixcache: {printable}", file=sys.stderr)
    return status


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefixcache", description="A prompt cache for MLX: its directories.")
    parser.add_argument("--version", action="version", version=f"prefixcache {VERSION} for MLX {MLX_VERSION}")
    parser.add_argument("--cmake-dir", action="store_true", help="print the folder to give to CMake as prefixcache_DIR")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")

    stat = _command(commands, "stat", _stat, "what is stored, by namespace, tier, part and age")
    stat.add_argument("--headers", action="store_true", help="read each file's header, to know the write amplification")

    ls = _command(commands, "ls", _ls, "list parts")
    ls.add_argument("--part", choices=maintenance.PARTS, help="of this kind only")
    ls.add_argument("--sort", choices=sorted(_ORDERS), default="path", help="default: path")
    ls.add_argument("--limit", type=_typed(_count), default=None, metavar="N", help="show so many (default: 100)")

    verify = _command(commands, "verify", _verify, "compare checksums; exit status 1 if anything is wrong")
    verify.add_argument("--sample", type=_typed(_sample), metavar="N|P%", help="so many files, or that share of them")
    verify.add_argument("--seed", type=int, help="which files a sample takes; default: others each time")
    verify.add_argument("--headers-only", action="store_true", help="check headers, do not read the data")
    verify.add_argument("--remove-damaged", action="store_true", help="remove files that are damaged")

    gc = _command(commands, "gc", _gc, "make room, as the store does: oldest chains first, deepest blocks first")
    size, age = _typed(lambda text: parse_size(text, "SIZE")), _typed(lambda text: parse_age(text, "AGE"))
    gc.add_argument("--max-bytes", type=size, metavar="SIZE", help="leave at most this: bytes, or such as 50GB")
    gc.add_argument("--older-than", type=age, metavar="AGE", help="remove what was not used for this long: 12h, 7d")
    gc.add_argument("--dry-run", action="store_true", help="remove nothing, say what would go")

    clear = _command(commands, "clear", _clear, "remove everything, of one namespace or of all")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.add_argument("--dry-run", action="store_true", help="remove nothing, say what would go")
    return parser


def _command(
    commands: Any, name: str, answer: Callable[[argparse.Namespace], int], what: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
    parser.add_argument("directory", help="what was given to PrefixCache.open")
    parser.add_argument("--namespace", help="of this namespace only")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(answer=answer)
    return parser


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse_argument(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise ValueError(f"{text!r} is not a number of parts")
    return int(text)


def _sample(text: str) -> int | float:
    whole, percent = text.removesuffix("%"), text.endswith("%")
    try:
        value = float(whole) / 100 if percent else int(whole)
    except ValueError:
        value = 0
    if not value > 0 or (percent and value > 1):
        raise ValueError(f"{text!r} is neither a number of files nor a share such as 5%")
    return value


def _progress(what: str, chosen: argparse.Namespace) -> AbstractContextManager[OnProgress | None]:
    if chosen.json or not _has_rich():
        return nullcontext()
    from prefixcache._tables import progress_bar

    return progress_bar(what)


def _print_json(chosen: argparse.Namespace, directory: Path, fields: dict[str, Any]) -> None:
    head = {"schema": JSON_SCHEMA, "command": chosen.command, "directory": str(directory)}
    json.dump({**head, "namespace": chosen.namespace, **fields}, sys.stdout, indent=1)
    print(flush=True)


def _stat(chosen: argparse.Namespace) -> int:
    with _progress("reading", chosen) as progress:
        found = maintenance.summary(
            chosen.directory, namespace=chosen.namespace, headers=chosen.headers, progress=progress
        )
    if not chosen.json:
        from prefixcache._tables import show_summary

        show_summary(found)
        return 0
    amplification = None
    if found.tensor_bytes is not None:
        amplification = {
            "file_bytes": found.sound_bytes,
            "tensor_bytes": found.tensor_bytes,
            "ratio": found.write_amplification,
            "unsound_headers": found.unsound,
        }
    fields = {
        "namespaces": found.namespaces,
        "files": found.files,
        "bytes": found.bytes,
        "groups": [asdict(group) for group in found.groups],
        "temporary": {"files": found.leftover_files, "bytes": found.leftover_bytes},
        "other": {"files": found.other_files, "bytes": found.other_bytes},
        "write_amplification": amplification,
    }
    _print_json(chosen, found.directory, fields)
    return 0


_ORDERS: dict[str, Callable[[maintenance.StoredPart], Any]] = {
    "path": lambda part: part.path,
    "age": lambda part: -part.modified,
    "depth": lambda part: part.depth,
    "size": lambda part: -part.bytes,
}


def _ls(chosen: argparse.Namespace) -> int:
    with _progress("listing", chosen) as progress:
        contents = maintenance.scan(chosen.directory, chosen.namespace, progress)
    parts = [part for part in contents.parts if chosen.part in (None, part.part)]
    parts.sort(key=_ORDERS[chosen.sort])
    if not chosen.json:
        from prefixcache._tables import show_parts

        show_parts(parts, 100 if chosen.limit is None else chosen.limit)
        return 0
    shown = parts if chosen.limit is None else parts[: chosen.limit]
    fields = {"files": len(parts), "parts": [_part_fields(part) for part in shown]}
    _print_json(chosen, contents.directory, fields)
    return 0


def _part_fields(part: maintenance.StoredPart) -> dict[str, Any]:
    return {
        "namespace": part.namespace,
        "tier": maintenance.TIER,
        "path": part.path,
        "key": part.key.hex(),
        "part": part.part,
        "depth": part.depth,
        "bytes": part.bytes,
        "modified": part.modified,
        "age": max(time.time() - part.modified, 0.0),
    }


def _verify(chosen: argparse.Namespace) -> int:
    with _progress("verifying", chosen) as progress:
        found = maintenance.verify(
            chosen.directory,
            namespace=chosen.namespace,
            sample=chosen.sample,
            seed=chosen.seed,
            data=not chosen.headers_only,
            remove_damaged=chosen.remove_damaged,
            progress=progress,
        )
    if chosen.json:
        fields = {name: getattr(found, name) for name in ("files", "checked", "checked_bytes", "gone", "sound")}
        _print_json(chosen, found.directory, {**fields, "damage": [asdict(damage) for damage in found.damage]})
    else:
        from prefixcache._tables import show_verification

        show_verification(found)
    return 0 if found.sound else 1


def _gc(chosen: argparse.Namespace) -> int:
    with _progress("removing", chosen) as progress:
        result = maintenance.gc(
            chosen.directory,
            max_bytes=chosen.max_bytes,
            older_than=chosen.older_than,
            namespace=chosen.namespace,
            dry_run=chosen.dry_run,
            progress=progress,
        )
    return _show_removal(chosen, result)


def _clear(chosen: argparse.Namespace) -> int:
    if not chosen.yes and not chosen.dry_run:
        if chosen.json or not sys.stdin.isatty():
            raise _Usage("clear removes everything: say --yes where nobody can be asked")
        plan = maintenance.clear(chosen.directory, namespace=chosen.namespace, dry_run=True)
        where = "" if chosen.namespace is None else f" of namespace {chosen.namespace}"
        question = f"Remove {len(plan.parts)} parts ({format_size(plan.bytes)}){where}? [y/N] "
        if not _asked(question):
            return _complain("nothing was removed", 1)
    with _progress("removing", chosen) as progress:
        result = maintenance.clear(
            chosen.directory, namespace=chosen.namespace, dry_run=chosen.dry_run, progress=progress
        )
    return _show_removal(chosen, result)


def _asked(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _show_removal(chosen: argparse.Namespace, result: maintenance.Removal) -> int:
    if chosen.json:
        fields = {
            "dry_run": result.dry_run,
            "removed": {"files": len(result.parts), "bytes": result.bytes},
            "temporary": {"files": len(result.leftovers), "bytes": result.leftover_bytes},
            "kept": {"files": result.kept_files, "bytes": result.kept_bytes},
            "gone": result.gone,
            "in_use": result.in_use,
            "failed": [{"path": path, "reason": reason} for path, reason in result.failed],
            "parts": [_part_fields(part) for part in result.parts],
        }
        _print_json(chosen, result.directory, fields)
    else:
        from prefixcache._tables import show_removal

        show_removal(result)
    return 1 if result.failed else 0
