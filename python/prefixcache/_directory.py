"""What lies in a cache directory, from names alone: no file is opened and no store need be open.

A server may write, evict and read there meanwhile: what is gone when it is asked for is left out.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prefixcache._core import parse_part_name

VERSION_FOLDER = "v1"
TEMP_PREFIX = ".tmp-"
TEMP_GRACE_SECONDS = 600.0
"""Temporary files may belong to a write that is under way until they are this old."""

_NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_KEY_FOLDER = re.compile(r"[0-9a-f]{2}")

OnProgress = Callable[[int, int], None]
"""Told how much is done, and of how much."""


class Refused(ValueError):
    """A directory that is not a prefixcache directory or that is not this user's alone, or an unknown namespace."""


@dataclass(frozen=True)
class StoredPart:
    """One part file. ``depth``: tokens up to and including its block; ``modified``: seconds since the epoch.

    ``path`` is relative to the cache directory; ``parent_prefix``: the first 8 bytes of the parent's key, as a number.
    ``identity`` tells whether the file is still the same one.
    """

    namespace: str
    path: str
    key: bytes
    parent_prefix: int
    depth: int
    part: str
    bytes: int
    modified: float
    identity: tuple[int, int, int] = field(repr=False)

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Leftover:
    """A temporary file: of a write under way or, if it is old, of one that was killed."""

    namespace: str
    path: str
    bytes: int
    modified: float
    identity: tuple[int, int, int] = field(repr=False)


@dataclass
class Contents:
    """Everything below a cache directory. ``odd``: paths with the name of a part or of a write under way
    that are no files (links, folders)."""

    directory: Path
    namespaces: list[str] = field(default_factory=list)
    parts: list[StoredPart] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    other_files: int = 0
    other_bytes: int = 0


def identity_of(info: os.stat_result) -> tuple[int, int, int]:
    """Two equal ones are the same file with the same bytes: a store never changes a file in place."""
    return info.st_ino, info.st_mtime_ns, info.st_size


def scan(
    directory: str | os.PathLike[str], namespace: str | None = None, progress: OnProgress | None = None
) -> Contents:
    """Lists what is stored, of one namespace or of all.

    ``Refused`` unless this is a prefixcache directory that only this user can write to, and for a namespace that is
    not there; OSError for a folder that cannot be listed.
    """
    if not os.fspath(directory):
        raise Refused("directory is '', expected a path")
    root = Path(os.path.abspath(os.path.expanduser(directory)))
    folder = _checked(root)
    contents = Contents(root)
    spaces = [entry for entry in _entries(folder) if _is_folder(entry) and _NAMESPACE.fullmatch(entry.name)]
    contents.namespaces = [entry.name for entry in spaces]
    if namespace is not None and namespace not in contents.namespaces:
        known = ", ".join(contents.namespaces[:20]) or "none"
        raise Refused(f"no namespace {namespace!r} in {root} (there are: {known})")
    work = []
    for entry in spaces:
        if namespace in (None, entry.name):
            _check_private(entry.path)
            work += [(entry.name, below) for below in _entries(entry.path)]
    for done, (name, below) in enumerate(work):
        if _is_folder(below) and _KEY_FOLDER.fullmatch(below.name):
            _check_private(below.path)
            for entry in _entries(below.path):
                _add(contents, name, below.name, entry)
        elif below.name.startswith(TEMP_PREFIX):
            # A store tries there whether it can write.
            _add(contents, name, "", below)
        else:
            _add_other(contents, below)
        if progress is not None:
            progress(done + 1, len(work))
    return contents


def _checked(root: Path) -> str:
    """The folder of this format's files, after checking that they are a store's and nobody else's."""
    folder = root / VERSION_FOLDER
    if not root.is_dir():
        raise Refused(f"{root} is not a directory" if root.exists() else f"{root} does not exist")
    if not folder.is_dir():
        hint = f" (meant {root.parent}?)" if root.name == VERSION_FOLDER else ""
        raise Refused(f"{root} is not a prefixcache directory: it has no folder {VERSION_FOLDER}{hint}")
    if folder.is_symlink():
        raise Refused(f"{folder} is a link, not a directory")
    _check_private(str(root))
    _check_private(str(folder))
    entries = _entries(str(folder))
    spaces = [entry for entry in entries if _is_folder(entry)]
    # Somebody's own v1: neither what a store makes nor empty.
    if not any(map(_is_namespace, spaces)) and any(not entry.name.startswith(".") for entry in entries):
        raise Refused(f"{root} is not a prefixcache directory: {folder} holds something else")
    return str(folder)


def _is_namespace(entry: os.DirEntry[str]) -> bool:
    if not _NAMESPACE.fullmatch(entry.name):
        return False
    below = _entries(entry.path)
    return not below or any(_KEY_FOLDER.fullmatch(one.name) and _is_folder(one) for one in below)


def _check_private(path: str) -> None:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return  # removed meanwhile: nothing is listed below it
    if info.st_uid != os.geteuid():
        raise Refused(f"{path} belongs to user {info.st_uid}, not to this one ({os.geteuid()})")
    if info.st_mode & 0o022:
        raise Refused(f"{path} may be written by its group or by others: chmod go-w it")


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _add(contents: Contents, namespace: str, folder: str, entry: os.DirEntry[str]) -> None:
    # A store's names are ASCII; others may not even be UTF-8.
    said = parse_part_name(entry.name) if entry.name.isascii() and entry.name.startswith(folder) else None
    if said is None and not entry.name.startswith(TEMP_PREFIX):
        _add_other(contents, entry)
        return
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    path = "/".join(filter(None, (VERSION_FOLDER, namespace, folder, entry.name)))
    file = (info.st_size, info.st_mtime, identity_of(info))
    if not stat.S_ISREG(info.st_mode):
        contents.odd.append(path)
    elif said is None:
        contents.leftovers.append(Leftover(namespace, path, *file))
    else:
        key, parent, depth, part = said
        contents.parts.append(StoredPart(namespace, path, key, parent, depth, part.name, *file))


def _add_other(contents: Contents, entry: os.DirEntry[str]) -> None:
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISREG(info.st_mode):
        contents.other_files += 1
        contents.other_bytes += info.st_size
