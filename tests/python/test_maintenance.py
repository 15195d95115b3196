"""The functions behind the command: what is listed, what counts as damage, what goes first and what never goes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import child_environment
from directories import CHAIN, chain_of, left, real_cache, set_age, tree
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from support import chain_files, check_hit, extend, filled, open_cache, part_files
from test_damage import DAMAGES, data_bit, header_bit

from prefixcache import maintenance
from prefixcache.maintenance import Refused, clear, gc, scan, summary, verify

HOUR = 3600.0
NOBODY = 65534


class TestScan:
    def test_it_lists_what_the_names_say(self, tmp_path: Path) -> None:
        files = real_cache(tmp_path / "c")
        contents = scan(tmp_path / "c")
        assert [tmp_path / "c" / part.path for part in contents.parts] == files
        assert sorted(part.depth for part in contents.parts) == [8, 16, 24, 32, 40, 41]
        for part, path in zip(contents.parts, files, strict=True):
            info = path.stat()
            assert (part.namespace, part.part, part.name) == ("test", "kv", path.name)
            assert (part.bytes, part.modified) == (info.st_size, info.st_mtime)
            assert path.name.startswith(f"{part.key.hex()}-{part.parent_prefix:016x}-{part.depth}.")
        assert (contents.leftovers, contents.odd, contents.other_files) == ([], [], 0)

    def test_progress_comes_to_its_end(self, tmp_path: Path) -> None:
        real_cache(tmp_path / "c")
        seen: list[tuple[int, int]] = []
        scan(tmp_path / "c", progress=lambda done, total: seen.append((done, total)))
        assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
        assert seen

    @pytest.mark.parametrize(
        "name",
        [
            b"notes.txt",
            b"\xff\xfe.kv.safetensors",
            b"\x1b[2J.safetensors",
            b"a\nb",
            b"00" * 32 + b"-" + b"00" * 8 + b"-8.kv.safetensors",  # of another folder
            b"aB" * 32 + b"-" + b"00" * 8 + b"-8.kv.safetensors",
            b"ab" * 32 + b"-" + b"00" * 8 + b"-08.kv.safetensors",
            b"ab" * 32 + b"-" + b"00" * 8 + b"-0.kv.safetensors",
            b"ab" * 32 + b"-" + b"00" * 8 + b"-9223372036854775808.kv.safetensors",
            b"ab" * 32 + b"-" + b"00" * 8 + b"-8.xx.safetensors",
            b"ab" * 32 + b"-" + b"00" * 8 + b"-8.kv.safetensors~",
        ],
    )
    def test_other_names_are_nobodys(self, tmp_path: Path, name: bytes) -> None:
        real_cache(tmp_path / "c")
        if sys.platform == "darwin" and b"\xff" in name:
            pytest.skip("this file system takes names in UTF-8 only")
        folder = tmp_path / "c" / "v1" / "test" / "ab"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = os.path.join(os.fsencode(folder), name)
        with open(path, "wb") as file:
            file.write(b"12345")
        contents = scan(tmp_path / "c")
        assert (len(contents.parts), contents.other_files, contents.other_bytes) == (6, 1, 5)
        assert verify(tmp_path / "c").sound
        assert len(clear(tmp_path / "c").parts) == 6
        assert os.path.exists(path)

    def test_folders_of_other_names_are_nobodys(self, tmp_path: Path) -> None:
        real_cache(tmp_path / "c")
        (node,) = chain_of([1])
        strays = [
            node.make(tmp_path / "c", namespace=".hidden"),
            node.make(tmp_path / "c", namespace="a b"),
            node.make(tmp_path / "c", namespace="x" * 129),
        ]
        zz = tmp_path / "c" / "v1" / "test" / "zz"
        zz.mkdir(mode=0o700)
        strays.append(zz / node.name)
        strays[-1].write_bytes(b"x")
        contents = scan(tmp_path / "c")
        assert contents.namespaces == ["test"]
        assert len(clear(tmp_path / "c").parts) == 6
        assert all(stray.exists() for stray in strays)


class TestRefusal:
    @pytest.mark.parametrize("folder", ["", "v1", "v1/test", "v1/test/key"])
    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
    def test_what_others_can_write_to(self, tmp_path: Path, folder: str, mode: int) -> None:
        files = real_cache(tmp_path / "c")
        path = files[0].parent if folder.endswith("key") else tmp_path / "c" / folder
        path.chmod(mode)
        for function in (scan, summary, verify, gc, clear):
            with pytest.raises(Refused, match="chmod go-w"):
                function(tmp_path / "c")
        assert part_files(tmp_path / "c") == files

    def test_another_users(self, tmp_path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        files = real_cache(tmp_path / "c")
        for path in (tmp_path / "c", tmp_path / "c" / "v1", files[0].parent.parent, files[0].parent):
            os.chown(path, NOBODY, -1)
            with pytest.raises(Refused, match=f"belongs to user {NOBODY}"):
                clear(tmp_path / "c")
            os.chown(path, 0, -1)
        assert part_files(tmp_path / "c") == files

    def test_no_prefixcache_directory(self, tmp_path: Path) -> None:
        with pytest.raises(Refused, match="does not exist"):
            scan(tmp_path / "none")
        with pytest.raises(Refused, match="directory is ''"):
            scan("")
        (tmp_path / "file").write_text("x")
        with pytest.raises(Refused, match="is not a directory"):
            scan(tmp_path / "file")
        (tmp_path / "project").mkdir()
        with pytest.raises(Refused, match="has no folder v1"):
            scan(tmp_path / "project")
        # Somebody's own v1, with a folder that a namespace could be named like.
        (tmp_path / "project" / "v1" / "src").mkdir(parents=True)
        (tmp_path / "project" / "v1" / "src" / "main.py").write_text("x")
        with pytest.raises(Refused, match="holds something else"):
            scan(tmp_path / "project")
        real_cache(tmp_path / "c")
        with pytest.raises(Refused, match=r"meant .*/c\?"):
            scan(tmp_path / "c" / "v1")

    def test_a_store_without_parts_is_one(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "c"):
            pass
        assert scan(tmp_path / "c").namespaces == ["test"]
        assert verify(tmp_path / "c").checked == 0

    @pytest.mark.parametrize("namespace", ["other", "", "..", "te", "test/../test", "\0"])
    def test_an_unknown_namespace(self, tmp_path: Path, namespace: str) -> None:
        files = real_cache(tmp_path / "c")
        for function in (scan, summary, verify, gc, clear):
            with pytest.raises(Refused, match=r"no namespace .*there are: test"):
                function(tmp_path / "c", namespace=namespace)
        assert part_files(tmp_path / "c") == files

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        files = real_cache(tmp_path / "c")
        real_cache(tmp_path / "away")
        elsewhere = part_files(tmp_path / "away")
        # In the place of a part, of a folder of keys, of a namespace and of the whole format.
        target = files[0].rename(tmp_path / "target")
        files[0].symlink_to(target)
        away = tmp_path / "away" / "v1"
        (tmp_path / "c" / "v1" / "linked").symlink_to(away / "test")
        moved = files[1].parent.rename(tmp_path / "moved")
        files[1].parent.symlink_to(moved)
        contents = scan(tmp_path / "c")
        assert contents.namespaces == ["test"]
        assert contents.odd == [str(files[0].relative_to(tmp_path / "c"))]
        assert len(contents.parts) == 4
        found = verify(tmp_path / "c", remove_damaged=True)
        assert [(damage.kind, damage.removed) for damage in found.damage] == [("not_a_file", False)]
        assert len(clear(tmp_path / "c").parts) == 4
        assert target.exists() and files[0].is_symlink() and (moved / files[1].name).exists()
        assert part_files(tmp_path / "away") == elsewhere
        (tmp_path / "d").mkdir(mode=0o700)
        (tmp_path / "d" / "v1").symlink_to(away)
        with pytest.raises(Refused, match="is a link"):
            clear(tmp_path / "d")
        # The directory itself may be reached by a link, as `open` allows.
        (tmp_path / "short").symlink_to(tmp_path / "away")
        assert len(scan(tmp_path / "short").parts) == len(elsewhere)


class TestSummary:
    def test_groups_and_ages(self, tmp_path: Path) -> None:
        for number, part in enumerate(("kv", "win", "state"), 1):
            for node in chain_of([1, 5 * HOUR, 80 * HOUR, 999 * HOUR], number, size=100, part=part):
                node.make(tmp_path, namespace="b")
        chain_of([200 * HOUR], 4, size=7)[0].make(tmp_path, namespace="a")
        found = summary(tmp_path)
        assert [(group.namespace, group.tier, group.part) for group in found.groups] == [
            ("a", "disk", "kv"), ("b", "disk", "kv"), ("b", "disk", "win"), ("b", "disk", "state"),
        ]  # fmt: skip
        assert (found.files, found.bytes, found.namespaces) == (13, 1207, ["a", "b"])
        assert found.groups[0].bytes_by_age == {"1h": 0, "1d": 0, "7d": 0, "30d": 7, "older": 0}
        for group in found.groups[1:]:
            assert (group.files, group.bytes) == (4, 400)
            assert group.bytes_by_age == {"1h": 100, "1d": 100, "7d": 100, "30d": 0, "older": 100}
            assert 1 <= group.newest < 60
            assert 999 * HOUR <= group.oldest < 1000 * HOUR
        assert [group.namespace for group in summary(tmp_path, namespace="a").groups] == ["a"]
        assert found.write_amplification is None and found.tensor_bytes is None

    def test_headers_tell_the_write_amplification(self, tmp_path: Path) -> None:
        files = real_cache(tmp_path / "c")
        found = summary(tmp_path / "c", headers=True)
        # 41 rows of 2 layers, keys and values: 2 heads of 32 float32 each.
        assert found.tensor_bytes == 41 * 2 * 2 * 2 * 32 * 4
        assert found.write_amplification == sum(path.stat().st_size for path in files) / found.tensor_bytes
        assert found.unsound == 0
        header_bit(files[0])
        sound = summary(tmp_path / "c", headers=True)
        assert sound.unsound == 1
        assert sound.sound_bytes == found.sound_bytes - files[0].stat().st_size

    def test_a_file_of_the_future_is_new(self, tmp_path: Path) -> None:
        chain_of([-5 * HOUR])[0].make(tmp_path)
        (group,) = summary(tmp_path).groups
        assert (group.newest, group.oldest, group.bytes_by_age["1h"]) == (0, 0, 1000)
        assert gc(tmp_path, older_than=0).parts == []


class TestVerify:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damage_is_named_and_left(self, tmp_path: Path, damage: Callable[[Path], None]) -> None:
        real_cache(tmp_path / "c")
        files = chain_files(tmp_path / "c")
        damage(files[2])
        before = {path: path.read_bytes() for path in files}
        found = verify(tmp_path / "c")
        assert (found.sound, found.files, found.checked, found.gone) == (False, 6, 6, 0)
        (wrong,) = found.damage
        assert (tmp_path / "c" / wrong.path, wrong.kind, wrong.removed) == (files[2], "damaged", False)
        assert wrong.reason
        assert {path: path.read_bytes() for path in part_files(tmp_path / "c")} == before
        # Only what is damaged goes, and only when asked.
        assert [one.removed for one in verify(tmp_path / "c", remove_damaged=True).damage] == [True]
        assert sorted(part_files(tmp_path / "c")) == sorted({*files} - {files[2]})
        assert verify(tmp_path / "c").sound

    def test_every_damaged_byte_is_found(self, tmp_path: Path) -> None:
        path = real_cache(tmp_path / "c", [5, 6, 7])[0]
        sound = path.read_bytes()
        for position in [*range(0, len(sound), 41), len(sound) - 1]:
            bad = bytearray(sound)
            bad[position] ^= 1 << position % 8
            path.write_bytes(bad)
            assert not verify(tmp_path / "c").sound, position
        path.write_bytes(sound)
        assert verify(tmp_path / "c").sound

    def test_windows_and_states(self, tmp_path: Path) -> None:
        """Their files are named after other keys than those of the blocks."""
        caches = [KVCache(), RotatingKVCache(max_size=16), ArraysCache(1)]
        prototypes = [KVCache(), RotatingKVCache(max_size=16), ArraysCache(1)]
        with open_cache(tmp_path / "c", caches=prototypes) as cache:
            extend(caches[:2], CHAIN)
            caches[2][0] = mx.arange(64).reshape(1, 64)
            assert cache.store(CHAIN, caches).stored_tokens == 41
        found = summary(tmp_path / "c", headers=True)
        assert [group.part for group in found.groups] == ["kv", "win", "state"]
        assert found.unsound == 0
        files = part_files(tmp_path / "c")
        assert verify(tmp_path / "c").checked == len(files) == found.files
        for part in ("kv", "win", "state"):
            path = next(path for path in files if f".{part}." in path.name)
            data_bit(path)
            assert [tmp_path / "c" / one.path for one in verify(tmp_path / "c").damage] == [path]
            data_bit(path)
        assert len(clear(tmp_path / "c").parts) == found.files

    def test_headers_only(self, tmp_path: Path) -> None:
        real_cache(tmp_path / "c")
        files = chain_files(tmp_path / "c")
        data_bit(files[1])
        assert verify(tmp_path / "c", data=False).sound
        header_bit(files[4])
        assert [tmp_path / "c" / one.path for one in verify(tmp_path / "c", data=False).damage] == [files[4]]
        assert len(verify(tmp_path / "c").damage) == 2

    def test_a_file_under_another_name(self, tmp_path: Path) -> None:
        real_cache(tmp_path / "c")
        files = chain_files(tmp_path / "c")
        shutil.copyfile(files[1], files[2])
        assert [tmp_path / "c" / one.path for one in verify(tmp_path / "c").damage] == [files[2]]

    def test_samples(self, tmp_path: Path) -> None:
        real_cache(tmp_path / "c")
        paths: list[set[int]] = []
        for seed in (1, 1, 2, 3):
            found = verify(tmp_path / "c", sample=2, seed=seed)
            assert (found.files, found.checked) == (6, 2)
            paths.append({found.checked_bytes})
        assert paths[0] == paths[1]
        for sample, count in [(1, 1), (100, 6), (0.5, 3), (0.01, 1), (1.0, 6)]:
            assert verify(tmp_path / "c", sample=sample).checked == count
        for bad in (0, -1, 0.0, 1.5, float("nan"), True):
            with pytest.raises(ValueError, match="sample is"):
                verify(tmp_path / "c", sample=bad)
        # Each file is chosen by some seed, so that repeated samples find all damage.
        data_bit(part_files(tmp_path / "c")[0])
        assert any(not verify(tmp_path / "c", sample=2, seed=seed).sound for seed in range(20))

    def test_what_goes_or_is_written_meanwhile(self, tmp_path: Path) -> None:
        """As beside a server, at the worst moment: between the listing and the reading."""
        files = real_cache(tmp_path / "c")

        def others(done: int, total: int) -> None:
            if files[0].exists() and not files[1].is_symlink():
                files[2].unlink(missing_ok=True)
                sound = files[3].read_bytes()
                data_bit(files[3])
                replacement = files[3].with_name(".tmp-1")
                replacement.write_bytes(sound)
                replacement.replace(files[3])
                target = files[4].rename(tmp_path / "target")
                files[4].symlink_to(target)
                files[0].unlink()

        found = verify(tmp_path / "c", remove_damaged=True, progress=others)
        assert (found.files, found.checked, found.gone) == (6, 5, 1)
        assert [(tmp_path / "c" / one.path, one.kind, one.removed) for one in found.damage] == [
            (files[4], "unreadable", False)
        ]
        assert files[4].is_symlink()

    def test_progress_is_in_bytes(self, tmp_path: Path) -> None:
        files = real_cache(tmp_path / "c")
        seen: list[tuple[int, int]] = []
        verify(tmp_path / "c", progress=lambda done, total: seen.append((done, total)))
        total = sum(path.stat().st_size for path in files)
        assert len(seen) == 6
        assert seen[-1] == (total, total)


class TestGc:
    def test_deepest_of_the_oldest_chain_first(self, tmp_path: Path) -> None:
        # Chain 1 was written first, and its last block used last. Chain 2 is older than that.
        one = chain_of([9 * HOUR, 8 * HOUR, 1 * HOUR], 1)
        two = chain_of([7 * HOUR, 6 * HOUR, 5 * HOUR], 2)
        windows = chain_of([4 * HOUR, 8 * HOUR], 3, part="win")
        states = chain_of([2 * HOUR], 4, part="state")
        for node in [*one, *two, *windows, *states]:
            node.make(tmp_path)
        expected = [windows[1], two[2], two[1], two[0], windows[0], states[0], one[2], one[1], one[0]]
        plan = gc(tmp_path, max_bytes=0, dry_run=True)
        assert [part.name for part in plan.parts] == [node.name for node in expected]
        for count in range(10):
            result = gc(tmp_path, max_bytes=9000 - 1000 * count)
            assert len(result.parts) == (1 if count else 0)
            assert left(tmp_path) == {node.name for node in expected[count:]}
            assert (result.kept_files, result.kept_bytes) == (9 - count, 9000 - 1000 * count)

    @pytest.mark.parametrize("seed", range(10))
    def test_what_stays_are_prefixes_and_no_more_goes_than_must(self, tmp_path: Path, seed: int) -> None:
        chance = random.Random(seed)
        nodes = tree(seed, 60)
        for node in nodes:
            node.make(tmp_path)
        known = {node.key for node in nodes}
        stay = known
        while len(stay) > 5:
            bound = chance.randrange(sum(node.bytes for node in nodes if node.key in stay))
            result = gc(tmp_path, max_bytes=bound)
            names = left(tmp_path)
            stay = {node.key for node in nodes if node.name in names}
            assert all(node.parent in stay for node in nodes if node.key in stay and node.parent in known)
            assert result.kept_bytes == sum(node.bytes for node in nodes if node.key in stay) <= bound
            assert result.kept_bytes + result.parts[-1].bytes > bound

    @pytest.mark.parametrize("seed", range(5))
    def test_older_than_counts_the_latest_block_of_a_chain(self, tmp_path: Path, seed: int) -> None:
        nodes = tree(seed, 60)
        for node in nodes:
            node.make(tmp_path)

        def used(node: Any) -> float:
            return min([node.age, *(used(child) for child in nodes if child.parent == node.key)])

        gc(tmp_path, older_than=400_000.0)
        assert left(tmp_path) == {node.name for node in nodes if used(node) < 400_000}

    def test_both_bounds(self, tmp_path: Path) -> None:
        for node in chain_of([9 * HOUR, 5 * HOUR, HOUR], 1) + chain_of([8 * HOUR, 7 * HOUR], 2):
            node.make(tmp_path)
        assert len(gc(tmp_path, max_bytes=4000, older_than=6 * HOUR, dry_run=True).parts) == 2
        assert len(gc(tmp_path, max_bytes=1500, older_than=6 * HOUR, dry_run=True).parts) == 4
        assert gc(tmp_path, max_bytes=5000, older_than=10 * HOUR).parts == []

    def test_a_namespace_alone(self, tmp_path: Path) -> None:
        for name, age in (("a", HOUR), ("b", 9 * HOUR)):
            for node in chain_of([age, age], 1):
                node.make(tmp_path, namespace=name)
        result = gc(tmp_path, max_bytes=1000, namespace="a")
        assert [(part.namespace, part.depth) for part in result.parts] == [("a", 16)]
        assert (result.kept_files, result.kept_bytes) == (1, 1000)
        assert len(list((tmp_path / "v1" / "b").rglob("*.safetensors"))) == 2
        clear(tmp_path, namespace="a")
        assert [part.namespace for part in scan(tmp_path).parts] == ["b", "b"]

    def test_temporary_files_go_when_they_are_old(self, tmp_path: Path) -> None:
        files = real_cache(tmp_path / "c")
        folder = files[0].parent
        young, old, link, outside = (folder / f".tmp-{name}" for name in ("young", "old", "link", "x/outside"))
        for path, age in ((young, maintenance.TEMP_GRACE_SECONDS - 60), (old, maintenance.TEMP_GRACE_SECONDS + 60)):
            path.write_bytes(b"x" * 10)
            set_age(path, age)
        link.symlink_to(files[0])
        set_age(link, 9e9)
        outside.parent.mkdir()
        outside.write_text("mine")
        # What a store tried its folder with, and what a wrong clock dated.
        probe, future = tmp_path / "c" / "v1" / "test" / ".tmp-probe", folder / ".tmp-future"
        stray = tmp_path / "c" / "v1" / ".tmp-stray"
        for path, age in ((probe, 1e6), (future, -1e6), (stray, 1e6)):
            path.write_text("m")
            set_age(path, age)
        names = [one.path.rpartition("/")[2] for one in gc(tmp_path / "c", dry_run=True).leftovers]
        assert sorted(names) == [".tmp-future", ".tmp-old", ".tmp-probe"]
        assert old.exists() and probe.exists() and future.exists()
        result = gc(tmp_path / "c")
        assert (result.parts, len(result.leftovers), result.leftover_bytes, result.kept_files) == ([], 3, 12, 6)
        clear(tmp_path / "c")
        assert not old.exists() and not probe.exists() and not future.exists()
        assert young.exists() and link.is_symlink() and outside.exists() and stray.exists()
        assert part_files(tmp_path / "c") == []

    def test_a_real_cache_stays_usable(self, tmp_path: Path) -> None:
        other = [1, *CHAIN]
        real_cache(tmp_path / "c", CHAIN, other)
        for path in chain_files(tmp_path / "c"):
            set_age(path, 10 * HOUR)
        total = sum(path.stat().st_size for path in part_files(tmp_path / "c"))
        lengths = []
        with open_cache(tmp_path / "c", ram=0) as server:
            for bound in range(total, -1, -total // 8):
                gc(tmp_path / "c", max_bytes=bound)
                with open_cache(tmp_path / "c", ram=0) as fresh:
                    for tokens in (CHAIN, other):
                        # What a server has open it may serve on.
                        for cache in (server, fresh):
                            hit = cache.fetch([*tokens, 1])
                            check_hit(hit, [*tokens, 1])
                        lengths.append(hit.cached_tokens)
            assert server.stats()["corrupt_parts"] == 0
        assert lengths[:2] == [41, 42]
        assert lengths[-2:] == [0, 0]
        assert all(lengths[i] >= lengths[i + 2] for i in range(len(lengths) - 2))
        # What went is stored anew.
        with open_cache(tmp_path / "c", ram=0) as cache:
            cache.store(CHAIN, filled(CHAIN))
            cache.flush()
            assert cache.fetch([*CHAIN, 1]).cached_tokens == 41
        assert verify(tmp_path / "c").checked == 6

    @pytest.mark.parametrize("dry", [gc, clear])
    def test_a_dry_run_changes_nothing(self, tmp_path: Path, dry: Callable[..., maintenance.Removal]) -> None:
        files = real_cache(tmp_path / "c")
        before = [(path, path.stat()) for path in files]
        options = {"max_bytes": 0} if dry is gc else {}
        result = dry(tmp_path / "c", dry_run=True, **options)
        assert result.dry_run
        assert (len(result.parts), result.kept_files, result.kept_bytes) == (6, 0, 0)
        assert [(path, path.stat()) for path in files] == before

    @pytest.mark.parametrize("options", [{"max_bytes": -1}, {"older_than": -0.5}, {"older_than": float("nan")}])
    def test_bad_bounds(self, tmp_path: Path, options: dict[str, Any]) -> None:
        real_cache(tmp_path / "c")
        with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
            gc(tmp_path / "c", **options)

    def test_what_is_used_meanwhile_stays_with_what_it_follows(self, tmp_path: Path) -> None:
        nodes = chain_of([9 * HOUR] * 6)
        paths = [node.make(tmp_path) for node in nodes]

        def others(done: int, total: int) -> None:
            if done == 1:
                paths[4].unlink()
                set_age(paths[2], 0)

        result = clear(tmp_path, progress=others)
        assert [part.depth for part in result.parts] == [48, 32]
        assert (result.gone, result.in_use, result.kept_files, result.kept_bytes) == (1, 3, 3, 3000)
        assert left(tmp_path) == {node.name for node in nodes[:3]}

    def test_a_file_that_cannot_be_removed(self) -> None:
        # Where user nobody can reach it too: root may remove everything.
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name) / "c"
            nodes = chain_of([3, 2, 1])
            paths = [node.make(directory) for node in nodes]
            stuck = paths[1].parent
            stuck.chmod(0o500)
            if os.geteuid() == 0:
                for path in (Path(name), *Path(name).rglob("*")):
                    os.chown(path, NOBODY, -1)
                os.seteuid(NOBODY)
            try:
                result = clear(directory)
            finally:
                if os.getuid() == 0:
                    os.seteuid(0)
                stuck.chmod(0o700)
            # All three lie in the same folder.
            assert [(reason, "/" in path) for path, reason in result.failed] == [("Permission denied", True)]
            assert (result.parts, result.in_use, result.kept_files) == ([], 2, 3)


WRITER = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support import check_hit, filled, open_cache
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
stored = 0
with open_cache(Path(sys.argv[2]), ram=0, verify="always") as cache:
    print("open", flush=True)
    while not stop.is_set():
        for first in range(5):
            tokens = [first, *range(400, 440 + stored % 40)]
            cache.store(tokens, filled(tokens))
            hit = cache.fetch([*tokens, 1])
            check_hit(hit, [*tokens, 1])
            stored += 1
        cache.flush()
    stats = cache.stats()
print(stored, stats["corrupt_parts"], stats["write_errors"], stats["degraded"])
"""


def test_beside_a_server_that_writes_and_reads(tmp_path: Path) -> None:
    """Everything at once in another process: no damage is seen, no row is wrong, no write fails."""
    directory = tmp_path / "c"
    server = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(),
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.readline() == "open\n"
    removed = checked = rounds = 0
    until = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < until:
        found = verify(directory, remove_damaged=True)
        assert found.damage == []
        checked += found.checked
        summary(directory, headers=True)
        total = sum(part.bytes for part in scan(directory).parts)
        result = clear(directory) if rounds % 5 == 4 else gc(directory, max_bytes=total // 2)
        assert result.failed == []
        removed += len(result.parts)
        rounds += 1
        if removed > 40 and checked > 40 and rounds > 5:
            break
    out, err = server.communicate("")
    assert server.returncode == 0, err[-3000:]
    stored, *trouble = out.split()
    assert trouble == ["0", "0", "False"]
    assert int(stored) > 0
    assert removed > 40 and checked > 40 and rounds > 5
    assert verify(directory).sound
