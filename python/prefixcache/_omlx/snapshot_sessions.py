"""The folders that hold boundary snapshots: one for each store, private to its user, removed when its process is gone.

``<base>/_boundary_snapshots/<process id>-<32 hex digits>``. A store locks its folder while it lives, so that a process
id that was given out again, or one of another container, does not decide alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import uuid
import weakref
from errno import EPERM
from pathlib import Path

ROOT_NAME = "_boundary_snapshots"

_SESSION = re.compile(r"([1-9][0-9]{0,9})-[0-9a-f]{32}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

logger = logging.getLogger(__name__)

# Names of this process's sessions. Only added to.
_own: set[str] = set()


class Session:
    """A new folder, mode 0700, locked until this object is gone. OSError if it cannot be made."""

    def __init__(self, base: str | os.PathLike[str]) -> None:
        root = root_of(base)
        _make_private(root)
        name = f"{os.getpid()}-{uuid.uuid4().hex}"
        _own.add(name)
        self.path = root / name
        os.mkdir(self.path, 0o700)
        handle = os.open(self.path, _FOLDER)
        weakref.finalize(self, os.close, handle)
        _lock(handle)


def root_of(base: str | os.PathLike[str]) -> Path:
    """Where all sessions of ``base`` lie."""
    return Path(os.path.abspath(os.fspath(base))) / ROOT_NAME


def remove_abandoned(base: str | os.PathLike[str]) -> None:
    """Removes the sessions whose process is gone. Those of living ones, and whatever else lies there, stay."""
    for entry in _entries(root_of(base)):
        named = _SESSION.fullmatch(entry.name)
        if named and entry.is_dir(follow_symlinks=False) and _is_abandoned(entry, int(named[1])):
            _remove(entry)


def remove_all(base: str | os.PathLike[str]) -> None:
    """Removes every session but those that another living process holds."""
    root = root_of(base)
    for entry in _entries(root):
        held = entry.name not in _own and entry.is_dir(follow_symlinks=False) and _is_locked(entry.path)
        if not held:
            _remove(entry)
    try:
        os.rmdir(root)
    except OSError as error:
        logger.debug("%s stays: %s", root, error)


def _make_private(root: Path) -> None:
    os.makedirs(root.parent, 0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(root, 0o700)
    # A link is not followed: it could lead anywhere.
    handle = os.open(root, _FOLDER)
    try:
        info = os.fstat(handle)
        if info.st_uid != os.geteuid():
            raise PermissionError(EPERM, f"belongs to user {info.st_uid}, not to this one ({os.geteuid()})", str(root))
        if stat.S_IMODE(info.st_mode) & 0o077:
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)


def _is_abandoned(entry: os.DirEntry[str], process: int) -> bool:
    if entry.name in _own:
        return False
    if process != os.getpid() and _is_running(process):
        return False
    return not _is_locked(entry.path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's, or a number that nobody can ask about
    return True


def _lock(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        logger.debug("no lock on a session's folder, its process id must do: %s", error)


def _is_locked(path: str) -> bool:
    try:
        handle = os.open(path, _FOLDER)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(handle)
    return False


def _entries(root: Path) -> list[os.DirEntry[str]]:
    try:
        handle = os.open(root, _FOLDER)
    except OSError:
        return []  # none yet, or a link
    os.close(handle)
    try:
        with os.scandir(root) as found:
            return list(found)
    except OSError as error:
        logger.debug("cannot list %s: %s", root, error)
        return []


def _remove(entry: os.DirEntry[str]) -> None:
    try:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    except OSError as error:
        logger.debug("cannot remove %s: %s", entry.path, error)
