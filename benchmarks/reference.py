"""What the machine itself can do: copies and plain file access, through the C library, by a stated number of threads.

``ctypes`` and ``os`` release the GIL inside the calls that are timed here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

GIB = 1 << 30
CAN_DROP_CACHE = hasattr(os, "posix_fadvise")
HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


class Memory:
    """Anonymous private memory. Fresh: no page of it was touched, unless ``touch``."""

    def __init__(self, size: int, *, huge: bool = False, touch: bool = True) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and HAS_HUGE_PAGES:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._view)
        if touch:
            # Not zeros: a page of zeros is where a kernel could cheat.
            ctypes.memset(self.address, 0x5A, size)

    def view(self, lo: int, hi: int) -> memoryview:
        return memoryview(self._map)[lo:hi]

    def close(self) -> None:
        self._view = None
        self._map.close()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def _share(count: int, threads: int) -> list[tuple[int, int]]:
    return [(count * i // threads, count * (i + 1) // threads) for i in range(threads)]


def _together(calls: Sequence[Callable[[], None]]) -> float:
    """Seconds until all calls, one a thread, have ended."""
    started = time.perf_counter()
    if len(calls) == 1:
        calls[0]()
    else:
        for future in [_pool(len(calls)).submit(call) for call in calls]:
            future.result()
    return time.perf_counter() - started


def copy_seconds(to: Memory, source: Memory, threads: int) -> float:
    """Seconds to fill all of ``to`` with memcpy; a shorter source is read again and again."""

    def part(lo: int, hi: int) -> None:
        while lo < hi:
            at = lo % source.size
            size = min(hi - lo, source.size - at)
            ctypes.memmove(to.address + lo, source.address + at, size)
            lo += size

    return _together([lambda lo=lo, hi=hi: part(lo, hi) for lo, hi in _share(to.size, threads)])  # type: ignore[misc]


def back_by_host(size: int) -> None:
    """Touches and frees memory, so that the machine has these pages at hand.

    In a virtual machine the host may have taken free memory back; getting it again costs many times a page fault, and
    says nothing about the program. Called before each measurement that touches fresh memory.
    """
    Memory(size, huge=True).close()


def untouched_copy_seconds(size: int, source: Memory, threads: int, *, huge: bool = True) -> float:
    """Seconds to fill fresh memory."""
    back_by_host(size)
    to = Memory(size, huge=huge, touch=False)
    seconds = copy_seconds(to, source, threads)
    to.close()
    return seconds


def read_seconds(files: Sequence[Path], to: Memory, threads: int) -> float:
    """Seconds to read files, each whole into some part of ``to``, which holds ``threads`` of them at least."""

    def part(thread: int, lo: int, hi: int) -> None:
        slot, end = _share(to.size, threads)[thread]
        for path in files[lo:hi]:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if slot + size > end:
                    slot = _share(to.size, threads)[thread][0]
                view = to.view(slot, slot + size)
                while view:
                    view = view[file.readinto(view) :]
                slot += size

    shares = enumerate(_share(len(files), threads))
    return _together([lambda t=t, lo=lo, hi=hi: part(t, lo, hi) for t, (lo, hi) in shares])  # type: ignore[misc]


def write_seconds(path: Path, view: memoryview, *, sync: bool) -> float:
    """Seconds to write all of ``view`` to one new file, from one thread."""
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    while view:
        view = view[os.write(fd, view[: 8 << 20]) :]
    if sync:
        os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - started


def write_files_seconds(folder: Path, size: int, count: int, source: Memory) -> float:
    """Seconds to write ``count`` new files of ``size`` bytes from ``source`` to the page cache, from one thread."""
    paths = [folder / f"plain-{number}" for number in range(count)]
    seconds, at = 0.0, 0
    for path in paths:
        at = at if at + size <= source.size else 0
        seconds += write_seconds(path, source.view(at, at + size), sync=False)
        at += size
    for path in paths:
        path.unlink()
    return seconds


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Makes the next read of these files come from the disk (where the system has posix_fadvise)."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def part_files(directory: Path) -> list[Path]:
    """The block files below a store's directory."""
    return sorted(directory.rglob("*.safetensors"))
