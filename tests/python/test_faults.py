"""What really happens to disks and directories: fetch and store never raise, no row is wrong, and it passes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import child_environment
from support import all_files, check_hit, filled, open_cache, part_files

from prefixcache import PrefixCache

HERE = Path(__file__).parent
TOKENS = list(range(300, 341))  # five blocks of 8 and a tail of 1
NUMBERS = itertools.count()


def store(cache: PrefixCache, tokens: list[int]) -> OSError | None:
    """Stores and waits. The error that ``flush`` reports, if one."""
    cache.store(tokens, filled(tokens))
    try:
        cache.flush()
    except OSError as error:
        return error
    return None


def fetch(cache: PrefixCache, tokens: list[int]) -> int:
    hit = cache.fetch([*tokens, 1])
    check_hit(hit, [*tokens, 1])
    return hit.cached_tokens


def works(cache: PrefixCache, directory: Path, block_size: int = 8) -> None:
    """The trouble is over: what is stored now is on disk, and nothing else is."""
    start = 1000 + 50 * next(NUMBERS)
    tokens = list(range(start, start + 41))
    # After a failure a disk rests for seconds.
    end = time.monotonic() + 60
    while (error := store(cache, tokens)) is not None and time.monotonic() < end:
        time.sleep(0.05)
    assert error is None
    assert not cache.stats()["degraded"]
    assert fetch(cache, tokens) == 41
    assert [path for path in all_files(directory) if path.name.startswith(".tmp-")] == []
    with open_cache(directory, ram=0, block_size=block_size) as other:
        assert fetch(other, tokens) == 41


def level(directory: Path, name: str) -> Path:
    """The directory itself, or one of those in it."""
    folder = part_files(directory)[0].parent
    return {"directory": directory, "version": directory / "v1", "namespace": folder.parent, "folder": folder}[name]


LEVELS = ["directory", "version", "namespace", "folder"]
RAM = [0, "64MB"]


@pytest.mark.parametrize("ram", RAM)
@pytest.mark.parametrize("name", LEVELS)
class TestWhileRunning:
    def test_removed(self, tmp_path: Path, name: str, ram: Any) -> None:
        directory = tmp_path / "cache"
        with open_cache(directory, ram=ram) as cache:
            store(cache, TOKENS)
            shutil.rmtree(level(directory, name))
            fetch(cache, TOKENS)
            other = [7, *TOKENS]
            store(cache, other)
            fetch(cache, other)
            works(cache, directory)
            cache.clear()
            works(cache, directory)

    def test_replaced_by_a_file(self, tmp_path: Path, name: str, ram: Any) -> None:
        directory = tmp_path / "cache"
        with open_cache(directory, ram=ram) as cache:
            store(cache, TOKENS)
            path = level(directory, name)
            os.rename(path, tmp_path / "aside")
            path.write_text("mine")
            for _ in range(2):
                fetch(cache, TOKENS)
                other = [7, *TOKENS]
                error = store(cache, other)
                if name != "folder":
                    assert error is not None
                    assert cache.stats()["degraded"]
                assert fetch(cache, other) == 42 or ram == 0
                with contextlib.suppress(OSError):
                    cache.clear()
            assert path.read_text() == "mine"
            path.unlink()
            works(cache, directory)

    def test_replaced_by_a_link(self, tmp_path: Path, name: str, ram: Any) -> None:
        """To the same files, to others', to nothing."""
        directory, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
        with open_cache(directory, ram=ram) as cache:
            store(cache, TOKENS)
            path = level(directory, name)
            os.rename(path, elsewhere)
            before = {file: file.read_bytes() for file in all_files(elsewhere)}
            for target in (elsewhere, tmp_path / "nowhere"):
                path.symlink_to(target)
                fetch(cache, TOKENS)
                store(cache, [7, *TOKENS])
                fetch(cache, [7, *TOKENS])
                with contextlib.suppress(OSError):
                    cache.clear()
                fetch(cache, TOKENS)
                path.unlink()
            assert not (tmp_path / "nowhere").exists()
            if name != "directory":
                # A link in the place of the directory itself is its owner's wish, one below it nobody's.
                assert {file: file.read_bytes() for file in all_files(elsewhere)} == before
            works(cache, directory)

    def test_another_cache_in_its_place(self, tmp_path: Path, name: str, ram: Any) -> None:
        """Its rows are of other tokens under other keys."""
        directory, aside = tmp_path / "cache", tmp_path / "aside"
        with open_cache(tmp_path / "other") as other:
            store(other, list(range(50, 100)))
        with open_cache(directory, ram=ram) as cache:
            store(cache, TOKENS)
            path = level(directory, name)
            os.rename(path, aside)
            os.rename(level(tmp_path / "other", name), path)
            fetch(cache, TOKENS)
            store(cache, [7, *TOKENS])
            assert fetch(cache, [7, *TOKENS]) in (42, 0)
            fetch(cache, list(range(50, 100)))
            works(cache, directory)


CHILD = """
import os, resource, signal, sys, time
sys.path.insert(0, sys.argv[1])
from contextlib import suppress
from pathlib import Path
from test_faults import fetch, store, works, TOKENS
from support import all_files, filled, open_cache, part_files
directory = Path(sys.argv[2])
for ram in (0, "64MB"):
    with open_cache(directory, ram=ram) as cache:
"""

FILE_SIZE = """
        store(cache, TOKENS)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        for start in (0, 100):
            other = list(range(start, start + 40))
            error = store(cache, other)
            assert error is not None and error.errno == 27, error
            assert cache.stats()["degraded"]
            assert fetch(cache, TOKENS) == 41
            assert fetch(cache, other) == (40 if ram else 0)
        # Written by nobody, since the disk rests: what RAM has no room for is lost then, and flush says so.
        errors = cache.stats()["write_errors"]
        assert errors > 0
        other = list(range(200, 240))
        assert cache.store(other, filled(other)).stored_tokens == 40
        while cache.stats()["queued_bytes"] != 0:
            time.sleep(0.01)
        # With RAM none, unless the rest has just ended and it was tried again.
        assert errors + (0 if ram else 5) <= cache.stats()["write_errors"] <= errors + 5
        try:
            cache.flush()
        except OSError as error:
            assert error.errno == 27, error
        else:
            raise AssertionError("flush has nothing to say")
        assert fetch(cache, other) == (40 if ram else 0)
        assert all(path.suffix == ".safetensors" for path in all_files(directory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        works(cache, directory)
        cache.clear()
print("done")
"""

READ_ONLY = """
        store(cache, TOKENS)
        if os.geteuid() == 0:
            # Root may write anywhere.
            for path in [directory, *directory.rglob("*")]:
                os.chown(path, 65534, 65534)
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
        for mode in (0o500, 0o000):
            for path in reversed(folders):
                path.chmod(mode)
            other = list(range(mode, mode + 40))
            error = store(cache, other)
            assert error is not None, "the write was reported as done"
            assert cache.stats()["degraded"]
            assert fetch(cache, TOKENS) in (41, 0)
            assert fetch(cache, other) == (40 if ram else 0)
            with suppress(PermissionError):
                cache.clear()
            with open_cache(directory, ram=ram) as second:
                assert fetch(second, TOKENS) in (41, 0)
                store(second, other)
            for path in folders:
                path.chmod(0o700)
            works(cache, directory)
    break
print("done")
"""


FORKED = """
        store(cache, TOKENS)
        other = list(range(40))
        rows = filled(other)
        child = os.fork()
        if child == 0:
            # It has none of the cache's threads, and ends as every process does.
            signal.alarm(60)
            miss = cache.fetch([*TOKENS, 1])
            assert (miss.cached_tokens, cache.store(other, rows).reason) == (0, "closed")
            assert cache.stats()["degraded"]
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert fetch(cache, TOKENS) == 41
        works(cache, directory)
        cache.clear()
print("done")
"""


@pytest.fixture
def public_directory(tmp_path: Path) -> Iterator[Path]:
    """One that a child without privileges can reach."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    yield tmp_path / "cache"


@pytest.mark.parametrize("body", [FILE_SIZE, READ_ONLY, FORKED], ids=["file size", "read-only", "forked"])
def test_in_a_child(public_directory: Path, body: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD + body, str(HERE), str(public_directory)],
        capture_output=True, text=True, check=False, env=child_environment(HERE),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir(mode=0o700)
    options = f"size={megabytes}m,mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let a test mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None or sys.platform != "linux", reason="needs tmpfs")
@pytest.mark.parametrize("ram", RAM)
def test_a_full_disk(tmp_path: Path, ram: Any) -> None:
    """64 MB of disk and a cap of 1 GB: the disk is full long before the cap is reached."""
    with (
        small_disk(tmp_path / "disk", 64) as disk,
        open_cache(disk / "cache", ram=ram, disk="1GB", block_size=512) as cache,
    ):
        prompts = [list(range(start, start + 8192)) for start in range(0, 100_000, 10_000)]
        errors = [store(cache, prompt) for prompt in prompts]
        assert errors[0] is None
        failed = [error for error in errors if error is not None]
        assert failed
        assert {error.errno for error in failed} == {errno.ENOSPC}
        assert cache.stats()["degraded"]
        assert cache.stats()["write_errors"] > 0
        assert fetch(cache, prompts[0]) == 8192
        for prompt in prompts:
            fetch(cache, prompt)
        assert [path for path in all_files(disk) if path.name.startswith(".tmp-")] == []
        cache.clear()
        works(cache, disk / "cache", 512)


def test_a_directory_that_comes_late(tmp_path: Path) -> None:
    """The disk is not there at open: the cache works in RAM, and on disk once it has come."""
    directory = tmp_path / "disk" / "cache"
    (tmp_path / "disk").symlink_to(tmp_path / "unplugged")
    with open_cache(directory) as cache:
        assert cache.stats()["degraded"]
        store(cache, TOKENS)
        assert fetch(cache, TOKENS) == 41
        (tmp_path / "unplugged").mkdir(mode=0o700)
        works(cache, directory)


@pytest.mark.parametrize("damage", [lambda path: path.chmod(0), lambda path: path.unlink()], ids=["closed", "gone"])
def test_single_files(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    directory = tmp_path / "cache"
    with open_cache(directory) as cache:
        store(cache, TOKENS)
    for number in range(5):
        with open_cache(directory, ram=0) as cache:
            damage(sorted(part_files(directory))[number])
            fetch(cache, TOKENS)
            assert store(cache, TOKENS) is None
            assert fetch(cache, TOKENS) == 41


@contextlib.contextmanager
def held_account(directory: Path) -> Iterator[None]:
    """Somebody else has locked the directory's account: each write waits for two seconds."""
    with (directory / "v1" / ".usage").open("r+b") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        yield


class TestADiskThatHangs:
    OTHER = list(range(100, 141))

    def test_flush_says_so_and_what_waits_still_does(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache", flush_wait_seconds=1) as cache:
            assert store(cache, TOKENS) is None
            with held_account(tmp_path / "cache"):
                assert isinstance(store(cache, self.OTHER), TimeoutError)
                assert fetch(cache, self.OTHER) == 41
                assert len(part_files(tmp_path / "cache")) == 6
        assert len(part_files(tmp_path / "cache")) == 12

    def test_close_loses_what_waits_and_says_how_much(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        cache = open_cache(tmp_path / "cache", flush_wait_seconds=1)
        assert store(cache, TOKENS) is None
        with held_account(tmp_path / "cache"):
            cache.store(self.OTHER, filled(self.OTHER))
            cache.close()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "6 parts were not written" in caplog.text
        assert cache.stats()["write_errors"] == 6
        with open_cache(tmp_path / "cache", ram=0) as later:
            assert fetch(later, TOKENS) == 41
            assert fetch(later, self.OTHER) == 0

    def test_close_is_silent_where_all_is_written(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        cache = open_cache(tmp_path / "cache", flush_wait_seconds=60)
        cache.store(TOKENS, filled(TOKENS))
        cache.close()
        assert caplog.records == []
        assert len(part_files(tmp_path / "cache")) == 6


def test_a_part_above_the_cap_is_left_out_and_no_error(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache", disk=512) as cache:
        assert store(cache, TOKENS) is None
        stats = cache.stats()
        assert (stats["left_out_parts"], stats["write_errors"], stats["degraded"]) == (6, 0, False)
        assert fetch(cache, TOKENS) == 41, "it stays in RAM"
    assert part_files(tmp_path / "cache") == []
