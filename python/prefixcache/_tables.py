"""What the command shows on a terminal. The only module that needs rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from prefixcache._directory import OnProgress
from prefixcache._sizes import format_age, format_size
from prefixcache.maintenance import AGE_BOUNDS, PARTS, Removal, StoredPart, Summary, Verification

_WIDTH_IN_A_PIPE = 160
_WIDTH_WITH_AGES = 120
_MOST_ROWS = 1000


def printable(text: str) -> str:
    """Text for a terminal: control characters and bytes that are no text are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH_IN_A_PIPE, highlight=False)


def show(*items: Table | str) -> None:
    """Prints tables and lines. In a pipe lines are wide and without colours."""
    console = _console()
    with console.capture() as captured:
        for item in items:
            console.print(Text(printable(item)) if isinstance(item, str) else item)
    sys.stdout.write(captured.get())
    sys.stdout.flush()


@contextmanager
def progress_bar(what: str) -> Iterator[OnProgress | None]:
    """A bar on standard error while the work goes on; none where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# Cells of these may be broken into lines where the terminal is narrow.
_LONG = ("namespace", "file", "why")


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in _LONG)
    return table


def _add(table: Table, *cells: str) -> None:
    # Text, so that nothing in a name is taken for markup.
    table.add_row(*(Text(printable(cell)) for cell in cells))


def show_summary(found: Summary) -> None:
    """``stat``: files and bytes by namespace, tier, part and age."""
    # Where there is room.
    ages = [*AGE_BOUNDS, "older"] if _console().width >= _WIDTH_WITH_AGES else []
    titles = [name if name == "older" else f"<= {name}" for name in ages]
    right = ["files", "size", *titles, "newest", "oldest"]
    table = _table("namespace", "tier", "part", *right, right=right)
    for group in found.groups:
        sizes = [format_size(group.bytes_by_age[age]) if group.bytes_by_age[age] else "-" for age in ages]
        row = (group.namespace, group.tier, group.part, str(group.files), format_size(group.bytes))
        _add(table, *row, *sizes, format_age(group.newest), format_age(group.oldest))
    lines = [f"{found.files} parts, {format_size(found.bytes)}, {_count(len(found.namespaces), 'namespace')}"]
    if found.leftover_files:
        lines.append(
            f"{found.leftover_files} temporary files, {format_size(found.leftover_bytes)}: writes under way or killed"
        )
    if found.other_files:
        lines.append(f"{found.other_files} other files, {format_size(found.other_bytes)}: not a store's, left alone")
    if found.unsound:
        lines.append(f"{_count(found.unsound, 'header')} cannot be read: see prefixcache verify")
    show(*([table] if found.groups else []), *lines, _amplification(found))


def _amplification(found: Summary) -> str:
    if found.write_amplification is not None:
        return f"write amplification {found.write_amplification:.3f}: bytes of files over bytes of tensors in them"
    if found.tensor_bytes is None:
        return "write amplification: --headers reads what the files can tell; a running cache counts it in stats()"
    return "write amplification: not known, no tensors are stored"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def show_parts(parts: Sequence[StoredPart], limit: int | None) -> None:
    """``ls``: one line for each part."""
    table = _table("namespace", "key", "part", "depth", "size", "age", right=("depth", "size", "age"))
    now = time.time()
    shown = parts[:limit]
    for part in shown:
        sizes = (str(part.depth), format_size(part.bytes), format_age(now - part.modified))
        _add(table, part.namespace, part.key.hex()[:16], part.part, *sizes)
    more = len(parts) - len(shown)
    lines = [f"{more} more: --limit {len(parts)} shows all, --json has whole keys"] if more else []
    show(*([table] if shown else []), _count(len(parts), "part"), *lines)


def show_verification(found: Verification) -> None:
    """``verify``: what is wrong, and how much was looked at."""
    table = _table("what", "file", "why")
    for damage in found.damage[:_MOST_ROWS]:
        _add(table, damage.kind + (", removed" if damage.removed else ""), damage.path, damage.reason)
    lines = [f"{found.checked} of {_count(found.files, 'part')} checked, {format_size(found.checked_bytes)}"]
    if found.gone:
        lines.append(f"{found.gone} went while this ran")
    if found.sound:
        lines.append("nothing is wrong")
    else:
        kept = sum(not damage.removed for damage in found.damage)
        lines.append(f"{len(found.damage)} wrong, {kept} of them still there")
    if len(found.damage) > _MOST_ROWS:
        lines.append(f"the first {_MOST_ROWS} are shown, --json has all")
    show(*([table] if found.damage else []), *lines)


def show_removal(result: Removal) -> None:
    """``gc`` and ``clear``: what went and what stays."""
    verb = "would be removed" if result.dry_run else "removed"
    table = _table("namespace", "part", "files", "size", right=("files", "size"))
    for namespace in sorted({part.namespace for part in result.parts}):
        for kind in PARTS:
            mine = [part.bytes for part in result.parts if (part.namespace, part.part) == (namespace, kind)]
            if mine:
                _add(table, namespace, kind, str(len(mine)), format_size(sum(mine)))
    lines = [f"{_count(len(result.parts), 'part')} {verb}, {format_size(result.bytes)}"]
    if result.leftovers:
        lines.append(f"{len(result.leftovers)} old temporary files {verb}, {format_size(result.leftover_bytes)}")
    if result.gone or result.in_use:
        lines.append(f"{result.gone} went by themselves meanwhile, {result.in_use} are in use again and stay")
    lines.append(f"{_count(result.kept_files, 'part')} left, {format_size(result.kept_bytes)}")
    lines += [f"cannot remove {path}: {why}" for path, why in result.failed]
    show(*([table] if result.parts else []), *lines)
