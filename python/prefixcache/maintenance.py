"""Looking after a cache directory: what is stored, whether it is sound, and making room. The command's own functions.

All of this may run beside servers that use the directory: a file removed under a server is a miss for it, and what it
writes meanwhile stays. Files are removed deepest block first, chains that were not used for longest before others, as
a store evicts: wherever it stops, what stays are prefixes. Nothing but part files and temporary files older than
``TEMP_GRACE_SECONDS`` is ever removed.

Every function raises ``Refused`` (a ``ValueError``) for a directory that is not a prefixcache directory or that others
can write to and for a namespace that is not there, and ``OSError`` where a folder cannot be listed. ``progress`` is
told how much is done, and of how much.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefixcache._core import Part, StatusCode, check_part, eviction_order
from prefixcache._directory import (
    TEMP_GRACE_SECONDS,
    Contents,
    Leftover,
    OnProgress,
    Refused,
    StoredPart,
    identity_of,
    scan,
)

__all__ = [
    "AGE_BOUNDS",
    "PARTS",
    "TEMP_GRACE_SECONDS",
    "TIER",
    "Contents",
    "Damage",
    "Group",
    "Leftover",
    "Refused",
    "Removal",
    "StoredPart",
    "Summary",
    "Verification",
    "clear",
    "gc",
    "scan",
    "summary",
    "verify",
]

PARTS = tuple(part.name for part in Part)

TIER = "disk"
"""The tier that a directory is. What a cache holds in RAM only that cache knows."""

# Of one file, while others put new ones in its place.
_MOST_READS = 5

AGE_BOUNDS = {"1h": 3600.0, "1d": 86400.0, "7d": 7 * 86400.0, "30d": 30 * 86400.0}
"""How ``Group.bytes_by_age`` is divided: each up to its bound, and ``"older"``."""


@dataclass
class Group:
    """The files of one namespace, tier and part. Ages in seconds, since a file was last written or used."""

    namespace: str
    tier: str
    part: str
    files: int = 0
    bytes: int = 0
    newest: float = float("inf")
    oldest: float = 0.0
    bytes_by_age: dict[str, int] = field(default_factory=lambda: {**dict.fromkeys(AGE_BOUNDS, 0), "older": 0})

    def add(self, size: int, age: float) -> None:
        """Counts one more file."""
        self.files += 1
        self.bytes += size
        self.newest = min(self.newest, age)
        self.oldest = max(self.oldest, age)
        self.bytes_by_age[next((name for name, bound in AGE_BOUNDS.items() if age <= bound), "older")] += size


@dataclass
class Summary:
    """What ``summary`` found. ``tensor_bytes`` and ``unsound`` (headers that could not be read) are None unless the
    headers were read.
    """

    directory: Path
    namespaces: list[str]
    groups: list[Group]
    leftover_files: int
    leftover_bytes: int
    other_files: int
    other_bytes: int
    tensor_bytes: int | None = None
    sound_bytes: int = 0
    unsound: int | None = None

    @property
    def files(self) -> int:
        """Part files."""
        return sum(group.files for group in self.groups)

    @property
    def bytes(self) -> int:
        """Bytes of part files."""
        return sum(group.bytes for group in self.groups)

    @property
    def write_amplification(self) -> float | None:
        """Bytes of files over bytes of tensors in them: what headers and padding added. None where it is not known.

        No more than that can be known from a directory: what was written and has gone again leaves no trace. A running
        cache counts it: ``written_bytes`` and ``put_bytes`` of its ``stats()``.
        """
        return self.sound_bytes / self.tensor_bytes if self.tensor_bytes else None


def summary(
    directory: str | os.PathLike[str],
    *,
    namespace: str | None = None,
    headers: bool = False,
    progress: OnProgress | None = None,
) -> Summary:
    """What is stored, by namespace, part and age, from names alone; ``headers`` reads each file's header too."""
    contents = scan(directory, namespace, None if headers else progress)
    now = time.time()
    groups: dict[tuple[str, str], Group] = {}
    for part in contents.parts:
        group = groups.setdefault((part.namespace, part.part), Group(part.namespace, TIER, part.part))
        group.add(part.bytes, max(now - part.modified, 0.0))
    result = Summary(
        directory=contents.directory,
        namespaces=contents.namespaces,
        groups=[groups[key] for key in sorted(groups, key=lambda key: (key[0], PARTS.index(key[1])))],
        leftover_files=len(contents.leftovers),
        leftover_bytes=sum(leftover.bytes for leftover in contents.leftovers),
        other_files=contents.other_files,
        other_bytes=contents.other_bytes,
    )
    if headers:
        result.tensor_bytes = result.unsound = 0
        for done, part in enumerate(contents.parts):
            status, said = check_part(os.fsencode(contents.directory / part.path), data=False)
            if status:
                result.tensor_bytes += said.tensor_bytes
                result.sound_bytes += part.bytes
            elif status.code != StatusCode.NOT_FOUND:
                result.unsound += 1
            if progress is not None:
                progress(done + 1, len(contents.parts))
    return result


@dataclass
class Damage:
    """A file that is not what a store wrote. ``kind``: ``"damaged"``, ``"unreadable"`` (the file system refused) or
    ``"not_a_file"`` (a link, say). Only what is damaged may have been ``removed``.
    """

    namespace: str
    path: str
    kind: str
    reason: str
    removed: bool = False


@dataclass
class Verification:
    """What ``verify`` found. ``gone``: removed by others before they were read."""

    directory: Path
    files: int = 0
    checked: int = 0
    checked_bytes: int = 0
    gone: int = 0
    damage: list[Damage] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Nothing is wrong with what was checked."""
        return not self.damage


def verify(
    directory: str | os.PathLike[str],
    *,
    namespace: str | None = None,
    sample: int | float | None = None,
    seed: int | None = None,
    data: bool = True,
    remove_damaged: bool = False,
    progress: OnProgress | None = None,
) -> Verification:
    """Reads files and compares all checksums; of each file the header only where ``data`` is false.

    ``sample``: that many files (an int) or that share of them (a float up to 1), chosen at random by ``seed``; None:
    all. ``remove_damaged`` removes what is damaged; without it nothing is changed. OnProgress is in bytes.
    """
    contents = scan(directory, namespace)
    chosen = _sampled(contents.parts, sample, seed)
    result = Verification(contents.directory, files=len(contents.parts))
    for path in contents.odd:
        result.damage.append(Damage(path.split("/")[1], path, "not_a_file", "a link or a folder, not a file"))
    total = sum(part.bytes for part in chosen)
    done = 0
    for part in chosen:
        _verify_one(contents.directory, part, data, remove_damaged, result)
        done += part.bytes
        if progress is not None:
            progress(done, total)
    return result


def _sampled(parts: Sequence[StoredPart], sample: int | float | None, seed: int | None) -> list[StoredPart]:
    if sample is None:
        return list(parts)
    if isinstance(sample, bool) or not sample > 0 or (isinstance(sample, float) and sample > 1):
        raise ValueError(f"sample is {sample!r}, expected a number of files (1 or more) or a share up to 1.0")
    count = min(sample, len(parts)) if isinstance(sample, int) else math.ceil(sample * len(parts))
    chosen = set(random.Random(seed).sample(range(len(parts)), count))
    return [part for place, part in enumerate(parts) if place in chosen]


def _verify_one(directory: Path, part: StoredPart, data: bool, remove: bool, result: Verification) -> None:
    path = directory / part.path
    identity: tuple[int, int, int] | None = part.identity
    for _ in range(_MOST_READS):
        status, _ = check_part(os.fsencode(path), data)
        found = _identity(path)
        # Another file has this name by now: a fuller part took its place.
        if status or status.code == StatusCode.NOT_FOUND or found == identity:
            break
        identity = found
    if status.code == StatusCode.NOT_FOUND or identity is None:
        result.gone += 1
        return
    result.checked += 1
    result.checked_bytes += part.bytes
    if not status:
        kind = "damaged" if status.code == StatusCode.CORRUPT else "unreadable"
        damage = Damage(part.namespace, part.path, kind, status.message)
        if remove and kind == "damaged":
            try:
                damage.removed = _remove(path, identity) == "removed"
            except OSError as error:
                damage.reason += f"; cannot be removed: {error.strerror}"
        result.damage.append(damage)


@dataclass
class Removal:
    """What ``gc`` and ``clear`` removed, or would remove (``dry_run``), first removed first.

    ``kept_files`` and ``kept_bytes``: parts that stay, of the namespaces that were looked at. ``gone``: removed by
    others meanwhile; ``in_use``: written or used anew meanwhile, or followed by such a block, so they stay;
    ``failed``: paths and why.
    """

    directory: Path
    dry_run: bool
    parts: list[StoredPart] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    kept_files: int = 0
    kept_bytes: int = 0
    gone: int = 0
    in_use: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of the parts that were removed."""
        return sum(part.bytes for part in self.parts)

    @property
    def leftover_bytes(self) -> int:
        """Bytes of the temporary files that were removed."""
        return sum(leftover.bytes for leftover in self.leftovers)


def gc(
    directory: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
    older_than: float | None = None,
    namespace: str | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
) -> Removal:
    """Makes room: removes parts not used for ``older_than`` seconds, then others until at most ``max_bytes`` are left.

    A block counts as used when the latest block after it was. ``namespace`` limits both to one namespace: the bytes
    that are counted, too. Without bounds only what killed writes left behind goes, which goes in any case. ``dry_run``
    removes nothing. ValueError for a negative bound.
    """
    for name, value in (("max_bytes", max_bytes), ("older_than", older_than)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} is {value!r}, expected 0 or more")
    contents = scan(directory, namespace)
    now = time.time()
    order = eviction_order([(part.name, part.modified) for part in contents.parts])
    left = sum(part.bytes for part in contents.parts)
    doomed: list[StoredPart] = []
    for place, used in order:
        too_old = older_than is not None and now - used > older_than
        too_many = max_bytes is not None and left > max_bytes
        if not too_old and not too_many:
            break
        doomed.append(contents.parts[place])
        left -= contents.parts[place].bytes
    return _carry_out(contents, doomed, now, dry_run, progress)


def clear(
    directory: str | os.PathLike[str],
    *,
    namespace: str | None = None,
    dry_run: bool = False,
    progress: OnProgress | None = None,
) -> Removal:
    """Removes every part, of one namespace or of all, and what killed writes left behind. Folders stay."""
    contents = scan(directory, namespace)
    order = eviction_order([(part.name, part.modified) for part in contents.parts])
    doomed = [contents.parts[place] for place, _ in order]
    return _carry_out(contents, doomed, time.time(), dry_run, progress)


def _carry_out(
    contents: Contents, doomed: Sequence[StoredPart], now: float, dry_run: bool, progress: OnProgress | None
) -> Removal:
    result = Removal(contents.directory, dry_run)
    # One of the far future says as little of a write under way: a clock was wrong.
    old = [leftover for leftover in contents.leftovers if abs(now - leftover.modified) > TEMP_GRACE_SECONDS]
    total = len(old) + len(doomed)
    for done, leftover in enumerate(old):
        if _outcome(result, leftover) == "removed":
            result.leftovers.append(leftover)
        if progress is not None:
            progress(done + 1, total)
    away = set()
    needed: set[int] = set()  # first bytes of keys that a block that stays follows
    for done, part in enumerate(doomed, len(old)):
        if part.part == "kv" and int.from_bytes(part.key[:8], "big") in needed:
            outcome = "in_use"
            result.in_use += 1
        else:
            outcome = _outcome(result, part)
        if outcome == "removed":
            result.parts.append(part)
        if outcome in ("removed", "gone"):
            away.add(part.path)
        elif part.part == "kv":
            needed.add(part.parent_prefix)
        if progress is not None:
            progress(done + 1, total)
    kept = [part for part in contents.parts if part.path not in away]
    result.kept_files = len(kept)
    result.kept_bytes = sum(part.bytes for part in kept)
    return result


def _outcome(result: Removal, file: StoredPart | Leftover) -> str:
    """Removes one file unless this is a rehearsal, and counts what came between."""
    if result.dry_run:
        return "removed"
    try:
        outcome = _remove(result.directory / file.path, file.identity)
    except OSError as error:
        result.failed.append((file.path, error.strerror or str(error)))
        return "failed"
    result.gone += outcome == "gone"
    result.in_use += outcome == "in_use"
    return outcome


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        return identity_of(os.lstat(path))
    except FileNotFoundError:
        return None


def _remove(path: Path, identity: tuple[int, int, int] | None) -> str:
    """Removes a file if it is still the one that was looked at: ``"removed"``, ``"gone"`` or ``"in_use"``."""
    found = _identity(path)
    if found is None:
        return "gone"
    if found != identity:
        return "in_use"
    try:
        os.unlink(path)
    except FileNotFoundError:
        return "gone"
    return "removed"
