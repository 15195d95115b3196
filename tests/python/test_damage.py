"""Damaged, foreign and vanished files: a shorter hit, a counter, never a wrong row and never a crash."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import chain_files, check_hit, filled, open_cache, part_files

from prefixcache import HIT_REASONS, Hit, PrefixCache

TOKENS = list(range(300, 341))  # five blocks of 8 and a tail of 1
SMALL = [5, 6, 7]


def stored(directory: Path, tokens: list[int] = TOKENS, **options: Any) -> list[Path]:
    with open_cache(directory, **options) as cache:
        cache.store(tokens, filled(tokens))
    return chain_files(directory)


def fetch_whole(cache: PrefixCache) -> Hit:
    hit = cache.fetch([*TOKENS, 1])
    check_hit(hit, [*TOKENS, 1])
    return hit


def flip(path: Path, position: int, mask: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 64)


def text(path: Path) -> None:
    path.write_text("not a block at all\n" * 50)


def long_header(path: Path) -> None:
    path.write_bytes((2**63).to_bytes(8, "little") + path.read_bytes()[8:])


def other_safetensors(path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)


def data_bit(path: Path) -> None:
    flip(path, path.stat().st_size - 3, 0x10)


def header_bit(path: Path) -> None:
    flip(path, 40, 0x01)


DAMAGES = [truncate, empty, grow, text, long_header, other_safetensors, data_bit, header_bit]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("block", [0, 2, 4, 5])
def test_a_damaged_file_shortens_the_hit(tmp_path: Path, damage: Callable[[Path], None], block: int) -> None:
    files = stored(tmp_path / "cache")
    damage(files[block])
    with open_cache(tmp_path / "cache", ram=0) as cache:
        hit = fetch_whole(cache)
        assert hit.cached_tokens == 8 * block
        assert hit.reason in HIT_REASONS - {"complete", "diverged"}
        stats = cache.stats()
        assert stats["corrupt_parts"] == 1
        assert stats["last_error"]
        assert not files[block].exists()
        # The next request has no trouble with it, and a store heals the chain.
        assert fetch_whole(cache).cached_tokens == 8 * block
        assert cache.stats()["corrupt_parts"] == 1
        assert cache.store(TOKENS, filled(TOKENS)).new_blocks == 1
        cache.flush()
        assert fetch_whole(cache).cached_tokens == 41


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_while_the_cache_is_open(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    files = stored(tmp_path / "cache")
    with open_cache(tmp_path / "cache", ram=0) as cache:
        damage(files[3])
        assert fetch_whole(cache).cached_tokens == 24
        assert cache.stats()["corrupt_parts"] == 1


@pytest.mark.parametrize("damage", [truncate, empty, data_bit])
def test_damage_after_a_file_was_served(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """``always`` compares every read: a disk may go bad under an open mapping."""
    files = stored(tmp_path / "cache")
    with open_cache(tmp_path / "cache", ram=0, verify="always") as cache:
        assert fetch_whole(cache).cached_tokens == 41
        damage(files[2])
        hit = fetch_whole(cache)
        assert (hit.cached_tokens, hit.diverged_at) == (16, None)
        assert hit.reason in {"damaged", "io_error", "lost"}
        assert cache.stats()["corrupt_parts"] == 1
        assert fetch_whole(cache).cached_tokens == 16


def test_every_byte_of_a_small_file_matters(tmp_path: Path) -> None:
    """One flipped bit anywhere in the header, the padding or the data is never served."""
    path = stored(tmp_path / "cache", SMALL)[0]
    sound = path.read_bytes()
    size = len(sound)
    positions = [*range(64), *range(64, size, 23), *range(size - 16, size)]
    survived = []
    for position in positions:
        bad = bytearray(sound)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        path.chmod(0o600)
        with open_cache(tmp_path / "cache", ram=0, threads=1) as cache:
            hit = cache.fetch([*SMALL, 1])
            check_hit(hit, [*SMALL, 1])
            if hit:
                survived.append(position)
            else:
                assert cache.stats()["corrupt_parts"] == 1
                assert not path.exists()
    # Only a byte that no reader looks at may go unnoticed: there is none.
    assert survived == []


def test_a_block_under_another_blocks_name(tmp_path: Path) -> None:
    files = stored(tmp_path / "cache")
    shutil.copyfile(files[1], files[2])
    with open_cache(tmp_path / "cache", ram=0) as cache:
        assert fetch_whole(cache).cached_tokens == 16
        assert cache.stats()["corrupt_parts"] == 1


def test_a_block_of_another_namespace(tmp_path: Path) -> None:
    """A folder renamed by hand: the names fit, so the headers must tell."""
    stored(tmp_path / "cache", namespace="other")
    os.rename(tmp_path / "cache" / "v1" / "other", tmp_path / "cache" / "v1" / "test")
    with open_cache(tmp_path / "cache", ram=0) as cache:
        assert not fetch_whole(cache)


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    files = stored(tmp_path / "cache")
    outside = tmp_path / "outside.safetensors"
    os.rename(files[2], outside)
    files[2].symlink_to(outside)
    with open_cache(tmp_path / "cache", ram=0) as cache:
        assert fetch_whole(cache).cached_tokens == 16
    assert outside.exists()


@pytest.mark.parametrize("name", ["notes.txt", "v1/readme", "v1/test/ab/x.safetensors", "v1/test/stray", ".DS_Store"])
def test_foreign_files_are_left_alone(tmp_path: Path, name: str) -> None:
    stored(tmp_path / "cache")
    path = tmp_path / "cache" / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text("mine")
    with open_cache(tmp_path / "cache", ram=0) as cache:
        assert fetch_whole(cache).cached_tokens == 41
    assert path.read_text() == "mine"


class TestVanished:
    def test_files_gone_before_they_are_read(self, tmp_path: Path) -> None:
        files = stored(tmp_path / "cache")
        with open_cache(tmp_path / "cache", ram=0) as cache:
            files[3].unlink()
            hit = fetch_whole(cache)
            assert (hit.cached_tokens, hit.reason) == (24, "lost")
            assert cache.stats()["lost_parts"] == 1
            assert fetch_whole(cache).cached_tokens == 24

    @pytest.mark.parametrize("ram", [0, "64MB"])
    def test_the_directory_is_removed_under_a_running_cache(self, tmp_path: Path, ram: Any) -> None:
        with open_cache(tmp_path / "cache", ram=ram) as cache:
            for _ in range(3):
                cache.store(TOKENS, filled(TOKENS))
                cache.flush()
                assert fetch_whole(cache).cached_tokens == 41
                shutil.rmtree(tmp_path / "cache")
                # From RAM or from a file that is still open, or not at all.
                assert fetch_whole(cache).cached_tokens in (0, 8, 16, 24, 32, 40, 41)
                other = [9, *TOKENS]
                assert cache.store(other, filled(other)).stored_tokens == 42
                cache.flush()
                assert len(part_files(tmp_path / "cache")) >= 6
                assert cache.fetch([*other, 1]).cached_tokens == 42
                assert not cache.stats()["degraded"]
                cache.clear()
        stored(tmp_path / "cache")
        with open_cache(tmp_path / "cache", ram=0) as cache:
            assert fetch_whole(cache).cached_tokens == 41

    def test_a_mapped_file_shrinks_between_two_reads(self, tmp_path: Path) -> None:
        tokens = list(range(600))
        files = stored(tmp_path / "cache", tokens, block_size=64)
        for verify in ("first", "always", "never"):
            shutil.copytree(tmp_path / "cache", tmp_path / verify)
            files = chain_files(tmp_path / verify)
            with open_cache(tmp_path / verify, ram=0, block_size=64, verify=verify) as cache:
                assert cache.fetch(tokens).cached_tokens == 599
                # Whole pages are gone: touching them kills a process that has no guard.
                os.truncate(files[4], 4096)
                hit = cache.fetch(tokens)
                assert hit.cached_tokens == 256
                check_hit(hit, tokens)
                assert cache.stats()["corrupt_parts"] + cache.stats()["lost_parts"] == 1


SHRINKING = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support import chain_files, check_hit, filled, open_cache
directory = Path(sys.argv[2])
tokens = list(range(1, 1100))
caches = filled(tokens)
shorter = 0
with open_cache(directory, ram=0, block_size=128, verify="always") as cache:
    for round in range(30):
        # A block behind a missing one is not looked at until the chain is whole again: that may take a second store.
        for _ in range(2):
            cache.store(tokens, caches)
            cache.flush()
            hit = cache.fetch(tokens)
            check_hit(hit, tokens)
        assert hit.cached_tokens == 1098
        files = chain_files(directory)
        begin = threading.Event()
        def shrink():
            begin.wait()
            for path in reversed(files):
                try:
                    os.truncate(path, 0 if round % 2 else 8192)
                except FileNotFoundError:
                    pass
        thread = threading.Thread(target=shrink)
        thread.start()
        begin.set()
        while thread.is_alive():
            hit = cache.fetch(tokens)
            check_hit(hit, tokens)
        thread.join()
        hit = cache.fetch(tokens)
        check_hit(hit, tokens)
        shorter += hit.cached_tokens < 1098
print("shorter", shorter)
"""


def test_files_shrink_in_the_middle_of_a_gather(tmp_path: Path) -> None:
    """In a process of its own: without a guard it dies of SIGBUS."""
    done = subprocess.run(
        [sys.executable, "-c", SHRINKING, str(Path(__file__).parent), str(tmp_path / "cache")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.startswith("shorter")
    assert int(done.stdout.split()[1]) > 0


class TestSeveralCaches:
    def test_two_on_one_directory_in_one_process(self, tmp_path: Path) -> None:
        whole = TOKENS[:40]
        with open_cache(tmp_path / "cache") as one, open_cache(tmp_path / "cache") as other:
            assert not other.fetch(TOKENS)
            one.store(whole, filled(whole))
            one.flush()
            # Found without reopening: whole blocks have a known name.
            assert fetch_whole(other).cached_tokens == 40
            assert other.store(whole, filled(whole)).bytes == 0
            longer = [*whole, *range(8)]
            other.store(longer, filled(longer))
            other.flush()
            hit = one.fetch([*longer, 1])
            assert hit.cached_tokens == 48
            check_hit(hit, [*longer, 1])
            one.clear()
            check_hit(other.fetch([*longer, 1]), [*longer, 1])

    def test_a_cache_in_another_process_adds_blocks(self, tmp_path: Path) -> None:
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
            "from support import filled, open_cache\n"
            "with open_cache(Path(sys.argv[2])) as cache: cache.store(list(range(40)), filled(list(range(40))))\n"
        )
        with open_cache(tmp_path / "cache") as cache:
            tokens = list(range(41))
            assert not cache.fetch(tokens)
            arguments = [str(Path(__file__).parent), str(tmp_path / "cache")]
            subprocess.run([sys.executable, "-c", code, *arguments], check=True)
            hit = cache.fetch(tokens)
            assert (hit.cached_tokens, hit.tiers["ssd"]) == (40, 40)
            check_hit(hit, tokens)
            files = {path: path.stat().st_mtime_ns for path in part_files(tmp_path / "cache")}
            assert cache.store(list(range(40)), filled(list(range(40)))).bytes == 0
            cache.flush()
            assert {path: path.stat().st_mtime_ns for path in part_files(tmp_path / "cache")} == files


def test_a_removed_directory_is_filled_again_by_one_store(tmp_path: Path) -> None:
    """All lost blocks of a fetch are forgotten: the next store must not take the later ones for stored."""
    with open_cache(tmp_path / "cache") as cache:
        cache.store(TOKENS, filled(TOKENS))
    with open_cache(tmp_path / "cache", ram=0) as cache:
        shutil.rmtree(tmp_path / "cache")
        assert not cache.fetch([*TOKENS, 1])
        assert cache.store(TOKENS, filled(TOKENS)).stored_tokens == 41
        cache.flush()
        assert cache.fetch([*TOKENS, 1]).cached_tokens == 41


@pytest.mark.parametrize("length", [1, 2, 3])
def test_names_that_make_a_circle(tmp_path: Path, length: int) -> None:
    """A block that is its own ancestor by name must hang neither open nor fetch."""
    folder = stored(tmp_path / "cache")[0].parent.parent
    keys = [f"{number:02x}" * 32 for number in range(1, length + 1)]
    for number, key in enumerate(keys):
        (folder / key[:2]).mkdir(mode=0o700, exist_ok=True)
        (folder / key[:2] / f"{key}-{keys[number - 1][:16]}-8.kv.safetensors").write_bytes(b"x" * 100)
    with open_cache(tmp_path / "cache") as cache:
        assert fetch_whole(cache).cached_tokens == 41
        cache.store([*TOKENS, 1, 2], filled([*TOKENS, 1, 2]))


@pytest.mark.parametrize("depth", [1, 2])
def test_links_below_the_directory_are_refused(tmp_path: Path, depth: int) -> None:
    folder = stored(tmp_path / "cache")[0].parent.parent
    path = folder.parent if depth == 1 else folder
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="link"):
        open_cache(tmp_path / "cache")


def test_two_caches_write_the_same_blocks(tmp_path: Path) -> None:
    """Their temporary files have names of their own."""
    with open_cache(tmp_path / "cache") as one, open_cache(tmp_path / "cache") as two:
        for start in range(0, 400, 40):
            tokens = list(range(start, start + 40))
            one.store(tokens, filled(tokens))
            two.store(tokens, filled(tokens))
        one.flush()
        two.flush()
        assert one.stats()["write_errors"] == two.stats()["write_errors"] == 0


def test_what_another_namespace_loses_leaves_prefixes(tmp_path: Path) -> None:
    tokens = list(range(80))
    with open_cache(tmp_path / "cache", namespace="a") as cache:
        cache.store(tokens, filled(tokens))
    size = sum(path.stat().st_size for path in part_files(tmp_path / "cache"))
    with open_cache(tmp_path / "cache", namespace="b", disk=size + size // 20) as cache:
        cache.store(TOKENS[:16], filled(TOKENS[:16]))
    left = len([path for path in part_files(tmp_path / "cache") if "/a/" in str(path)])
    assert 0 < left < 10
    with open_cache(tmp_path / "cache", namespace="a") as cache:
        hit = cache.fetch(tokens)
        check_hit(hit, tokens)
        assert hit.cached_tokens == left * 8
