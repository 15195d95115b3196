"""BlockStore as Python sees it: arrays in, rows out, misuse refused, the GIL left free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ON_CPU, part_files

from prefixcache._core import BlockStore, Part, Slots, StatusCode, TokenBuffer

ROOT = bytes(32)
DTYPES = ["float32", "float16", "bfloat16", "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "bool_"]


def key(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


def open_store(directory: Path | None = None, **options: Any) -> BlockStore:
    settings: dict[str, Any] = {
        "directory": str(directory or ""),
        "namespace": "a",
        "ram_bytes": 1 << 26,
        "disk_bytes": 1 << 30,
        "queue_bytes": 1 << 26,
        "write": "through" if directory else "ram_only",
        "threads": 2,
    }
    return BlockStore.open(**{**settings, **options})


@pytest.fixture
def mapped_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RAM tier that gives back the bytes of each part; an arena gives back whole slabs. To be asked for first."""
    monkeypatch.setenv("PREFIXCACHE_GATHER", "cpu")


@pytest.fixture(params=["ram", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    store = open_store() if request.param == "ram" else open_store(tmp_path / "cache", ram_bytes=0)
    yield store
    store.close()


def numbered(shape: tuple[int, ...], dtype: str = "float32") -> mx.array:
    return (mx.arange(int(np.prod(shape))).reshape(shape) % 251).astype(getattr(mx, dtype))


def put(store: BlockStore, items: list[Any], lo: int, hi: int, number: int = 1, parent: bytes = ROOT) -> Any:
    return store.put(key(number), parent, hi, TokenBuffer(range(lo, hi)), Slots(items), lo, hi)


def same(left: mx.array, right: mx.array) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool(mx.array_equal(left, right))


class TestRoundTrip:
    @settings(deadline=None, max_examples=examples(80))
    @given(data=st.data())
    def test_any_rows_of_any_array(self, data: st.DataObject) -> None:
        """Blocks of any size, any dtype, rank and axis; any row range of them; from RAM as from nothing but bytes."""
        slots, wholes = [], {}
        cuts = sorted({0, *data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))})
        total = cuts[-1]
        for number in range(data.draw(st.integers(1, 4))):
            shape = data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
            axis = data.draw(st.integers(0, len(shape)))
            shape.insert(axis, total)
            array = numbered(tuple(shape), data.draw(st.sampled_from(DTYPES)))
            if len(shape) > 1 and data.draw(st.booleans()):
                array = mx.swapaxes(mx.contiguous(mx.swapaxes(array, 0, -1)), 0, -1)  # the same, other strides
            slots.append((f"{number}/x", array, axis, 0))
            wholes[f"{number}/x"] = (array, axis)
        store = open_store()
        keys = []
        for number, (lo, hi) in enumerate(zip(cuts, cuts[1:], strict=False), 1):
            status, added = put(store, slots, lo, hi, number, keys[-1] if keys else ROOT)
            assert status
            assert added == sum(array.nbytes // total * (hi - lo) for array, _ in wholes.values())
            keys.append(key(number))
        lo = data.draw(st.integers(0, cuts[1] - 1))
        hi = data.draw(st.integers(max(lo, cuts[-2]) + 1, total))
        capacity = hi - lo + data.draw(st.integers(0, 9))
        gathered = store.gather(keys, lo, hi, capacity)
        assert gathered.status
        assert gathered.good == len(keys)
        found = gathered.take_slots()
        assert found.keys() == wholes.keys()
        for name, (array, axis) in wholes.items():
            rows, spare = mx.split(found[name], [hi - lo], axis=axis)
            assert same(rows, mx.split(array, [lo, hi], axis=axis)[1])
            assert spare.shape[axis] == capacity - (hi - lo)
            assert not mx.any(spare != 0) if spare.size else True
        assert gathered.take_slots() == {}

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype_through_a_file(self, tmp_path: Path, dtype: str) -> None:
        array, whole = numbered((2, 12, 3), dtype), numbered((5,), dtype)
        with_scalar = [("k", array, 1, 0), ("whole", whole, None, 0), ("scalar", numbered((), dtype), None, 0)]
        store = open_store(tmp_path / "cache")
        assert put(store, with_scalar, 0, 12)[0]
        store.close()
        store = open_store(tmp_path / "cache", ram_bytes=0)
        gathered = store.gather([key(1)], 3, 9, 8)
        found = gathered.take_slots()
        assert same(found["k"][:, :6], array[:, 3:9])
        assert not mx.any(found["k"][:, 6:] != 0)
        assert same(found["whole"], whole)
        assert same(found["scalar"], numbered((), dtype))
        assert (gathered.disk_blocks, gathered.ram_blocks, gathered.ram_bytes) == (1, 0, 0)

    def test_an_array_that_starts_later(self, store: BlockStore) -> None:
        """Row 0 of a slot may be any position: a window holds only the last rows."""
        array = numbered((1, 8, 2))
        assert store.put(key(1), ROOT, 30, TokenBuffer(range(10)), Slots([("k", array, 1, 22)]), 24, 30)[0]
        assert same(store.load(key(1)).take_slots()["k"], array[:, 2:8])

    def test_chosen_slots_only(self, store: BlockStore) -> None:
        put(store, [("a", numbered((4, 2)), 0, 0), ("b", numbered((4, 3)), 0, 0)], 0, 4)
        assert list(store.gather([key(1)], 0, 4, 4, slots=["b"]).take_slots()) == ["b"]

    def test_meta_comes_back(self, store: BlockStore) -> None:
        meta = '{"x":"é\\u0000"}'
        store.put(key(1), ROOT, 4, TokenBuffer(range(4)), Slots([("a", numbered((4,)), 0, 0)]), 0, 4, meta)
        assert store.load(key(1)).meta == meta
        assert store.gather([key(1)], 0, 2, 2).meta == meta

    def test_a_returned_array_is_no_alias(self, store: BlockStore) -> None:
        array = numbered((1, 8, 4))
        put(store, [("k", array, 1, 0)], 0, 8)
        found = store.load(key(1)).take_slots()["k"]
        found[:] = -1
        array[:] = -2
        mx.eval(found, array)
        assert same(store.load(key(1)).take_slots()["k"], numbered((1, 8, 4)))


class TestIndex:
    def test_presence_children_and_prefixes(self, store: BlockStore) -> None:
        array = numbered((12, 2))
        for number, (lo, hi) in enumerate([(0, 4), (4, 8), (8, 10)], 1):
            put(store, [("k", array, 0, 0)], lo, hi, number, key(number - 1) if number > 1 else ROOT)
        store.flush()
        found = store.presence([key(1), key(3), key(9)])
        assert [list(parts) for parts in found] == [["kv"], ["kv"], []]
        assert found[0]["kv"][2:] == (0, 4)
        assert found[1]["kv"][2:] == (8, 10)
        assert store.longest_prefix([key(1), key(2), key(3), key(4)], ROOT, 4) == 2
        assert store.longest_prefix([key(9), key(2)], ROOT, 4) == 0
        assert store.longest_prefix([], ROOT, 4) == 0
        assert store.children(key(2)) == [(key(3), 10, [8, 9])]
        assert store.children(key(3)) == []
        assert store.longest_child(key(2), 8, TokenBuffer([8, 1]), []) == (key(3), 10, 1, 2)
        assert store.longest_child(key(2), 8, TokenBuffer([7]), []) == (key(3), 10, 0, 2)
        assert store.longest_child(key(3), 10, TokenBuffer([7]), []) is None

    def test_erase_and_clear(self, store: BlockStore) -> None:
        array = numbered((8, 2))
        put(store, [("k", array, 0, 0)], 0, 4)
        put(store, [("k", array, 0, 0)], 4, 8, 2, key(1))
        assert store.erase([key(1), key(7)], [Part.kv, Part.state])
        assert store.presence([key(1), key(2)])[0] == {}
        assert store.load(key(1)).status.code == StatusCode.NOT_FOUND
        assert same(store.load(key(2)).take_slots()["k"], array[4:8])
        assert store.clear()
        assert store.stats()["parts"] == 0
        assert store.load(key(2)).status.code == StatusCode.NOT_FOUND
        assert put(store, [("k", array, 0, 0)], 0, 4)[1] == 32
        assert same(store.load(key(1)).take_slots()["k"], array[:4])

    def test_the_same_part_twice(self, store: BlockStore) -> None:
        array = numbered((8, 2))
        assert put(store, [("k", array, 0, 0)], 0, 8)[1] == 64
        assert put(store, [("k", array + 1, 0, 0)], 0, 8)[1] == 0
        assert same(store.load(key(1)).take_slots()["k"], array)

    def test_parts_of_a_block_are_apart(self, store: BlockStore) -> None:
        tokens = TokenBuffer(range(4))
        for part, value in ((Part.kv, 1.0), (Part.win, 2.0), (Part.state, 3.0)):
            slots = Slots([("k", mx.full((4, 2), value), 0, 0)])
            assert store.put(key(1), ROOT, 4, tokens, slots, 0, 4, part=part)[1] == 32
        assert sorted(store.presence([key(1)])[0]) == ["kv", "state", "win"]
        assert store.load(key(1), Part.state).take_slots()["k"][0, 0].item() == 3.0
        store.erase([key(1)], [Part.win])
        assert sorted(store.presence([key(1)])[0]) == ["kv", "state"]

    def test_trim_ram_gives_memory_back(self, mapped_memory: None, store: BlockStore) -> None:
        array = numbered((8, 2))
        put(store, [("k", array, 0, 0)], 0, 4)
        put(store, [("k", array, 0, 0)], 4, 8, 2, key(1))
        assert store.flush()
        held = store.stats()["ram_bytes"]
        assert isinstance(held, int)
        # What the queue keeps for its next part goes in any case; without a RAM tier that is all.
        assert (store.trim_ram(held) > 0) == (held == 0)
        assert store.trim_ram(held) == 0
        assert store.trim_ram(0, [key(1), key(2)]) == 0
        assert store.trim_ram(0, protected=[key(1)]) == held // 2
        assert same(store.load(key(1)).take_slots()["k"], array[:4])
        assert store.trim_ram(0) == held // 2
        assert store.stats()["ram_bytes"] == 0
        on_disk = store.presence([key(1), key(2)]) != [{}, {}]
        assert on_disk == (held == 0)


class TestDevice:
    """On a GPU the kernel itself gathers: what it refused the CPU would have copied to the same bytes."""

    # Rows that move in units of 16, 4 and 1 bytes.
    @pytest.mark.parametrize(("dtype", "width"), [("float16", 64), ("bfloat16", 6), ("float32", 5), ("uint8", 3)])
    def test_the_kernel_runs(self, dtype: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PREFIXCACHE_GATHER", raising=False)
        array = numbered((2, 48, width), dtype)
        # Several slabs, each of a few parts.
        with closing(open_store(ram_bytes=1 << 20)) as store:
            for i in range(3):
                slots = [(name, array, 1, 0) for name in ("k", "v")]
                assert put(store, slots, 16 * i, 16 * (i + 1), i + 1, key(i) if i else ROOT)[0]
            for lo, hi, capacity in ((0, 48, 48), (5, 43, 300)):
                hit = store.gather([key(1), key(2), key(3)], lo, hi, capacity)
                found = hit.take_slots()
                assert sorted(found) == ["k", "v"]
                for rows in found.values():
                    assert same(rows[:, : hi - lo], array[:, lo:hi])
                    assert not rows[:, hi - lo :].any().item()
            stats = store.stats()
            assert stats["device_refusals"] == 0, stats["last_error"]
            assert stats["gathered_ram_bytes"] == 2 * 2 * (48 + 38) * width * array.itemsize
            assert stats["gathered_device_bytes"] == (0 if ON_CPU else stats["gathered_ram_bytes"])


class TestMisuse:
    @pytest.mark.parametrize("option", ["put_wait_seconds", "disk_wait_seconds", "flush_wait_seconds"])
    @pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e10])
    def test_bad_waits(self, tmp_path: Path, option: str, seconds: float) -> None:
        with pytest.raises(ValueError, match=f"{option} is .*, expected seconds"):
            open_store(tmp_path / "cache", **{option: seconds})
        assert not (tmp_path / "cache").exists()

    def test_bad_slots(self) -> None:
        for items in ([("a", mx.zeros((4,)), 0)], [("a", mx.zeros((4,)), 0, 0, 0)]):
            with pytest.raises(ValueError, match="a slot is"):
                Slots(items)
        for items in ([5], [("a", [1.0], 0, 0)], [(1, mx.zeros((4,)), 0, 0)], [("a", mx.zeros((4,)), "0", 0)]):
            with pytest.raises((TypeError, RuntimeError)):
                Slots(items)

    @pytest.mark.parametrize(
        ("lo", "hi", "depth", "tokens", "slot", "words"),
        [
            (0, 9, 9, 9, ("k", mx.zeros((8, 2)), 0, 0), "slot 'k' has rows 0..8, asked for 0..9"),
            (0, 8, 8, 8, ("k", mx.zeros((8, 2)), 0, 1), "slot 'k' has rows 1..9"),
            (0, 8, 8, 8, ("k", mx.zeros((8, 2)), 2, 0), "seq_axis 2 and rank 2"),
            (0, 8, 8, 8, ("k", mx.zeros((8, 2)), -2, 0), "seq_axis -2 and rank 2"),
            (5, 4, 8, 8, ("k", mx.zeros((8, 2)), 0, 0), "rows 5..4"),
            (-1, 4, 8, 8, ("k", mx.zeros((8, 2)), 0, 0), "rows -1..4"),
            (0, 8, 8, 0, ("k", mx.zeros((8, 2)), 0, 0), "tokens"),
            (0, 4, 4, 8, ("k", mx.zeros((8, 2)), 0, 0), "depth 4.* 8 tokens"),
            (0, 8, 8, 8, ("k", mx.zeros((8, 2), mx.complex64), 0, 0), "dtype"),
        ],
    )
    def test_bad_puts(
        self, store: BlockStore, lo: int, hi: int, depth: int, tokens: int, slot: Any, words: str
    ) -> None:
        with pytest.raises(ValueError, match=words):
            store.put(key(1), ROOT, depth, TokenBuffer(range(tokens)), Slots([slot]), lo, hi)
        assert store.stats()["put_parts"] == 0

    @pytest.mark.parametrize("bad", [b"", b"short", bytes(31), bytes(33)])
    def test_keys_are_32_bytes(self, store: BlockStore, bad: bytes) -> None:
        slots = Slots([("k", mx.zeros((4,)), 0, 0)])
        for call in (
            lambda: store.put(bad, ROOT, 4, TokenBuffer(range(4)), slots, 0, 4),
            lambda: store.put(key(1), bad, 4, TokenBuffer(range(4)), slots, 0, 4),
            lambda: store.gather([bad], 0, 4, 4),
            lambda: store.presence([bad]),
            lambda: store.longest_prefix([], bad, 4),
            lambda: store.children(bad),
            lambda: store.load(bad),
        ):
            with pytest.raises(ValueError, match="32"):
                call()

    def test_bad_gathers(self, store: BlockStore) -> None:
        put(store, [("k", numbered((8, 2)), 0, 0)], 0, 8)
        for keys, lo, hi, capacity in (
            ([], 0, 4, 4),
            ([key(1)], -1, 4, 9),
            ([key(1)], 5, 4, 9),
            ([key(1)], 0, 4, 3),
            ([key(1)], 0, 4, 2**31),
        ):
            with pytest.raises(ValueError, match="gather"):
                store.gather(keys, lo, hi, capacity)
        with pytest.raises((ValueError, TypeError)):
            store.gather([key(1)], 0, 4, 2**70)

    def test_rows_that_are_not_there(self, store: BlockStore) -> None:
        """Not misuse: what is stored may be less than what a caller hopes for."""
        put(store, [("k", numbered((8, 2)), 0, 0)], 0, 8)
        for keys, hi in (([key(5)], 4), ([key(1), key(5)], 12)):
            gathered = store.gather(keys, 0, hi, hi)
            assert gathered.status.code == StatusCode.NOT_FOUND
            assert gathered.good == len(keys) - 1
            assert gathered.take_slots() == {}
            assert gathered.status.message
            assert not gathered.status

    def test_everything_after_close(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "cache")
        put(store, [("k", numbered((8, 2)), 0, 0)], 0, 8)
        assert store.close()
        assert store.close()
        assert put(store, [("k", numbered((8, 2)), 0, 0)], 0, 8)[0].code == StatusCode.CLOSED
        assert store.gather([key(1)], 0, 4, 4).status.code == StatusCode.CLOSED
        assert store.load(key(1)).status.code == StatusCode.CLOSED
        assert store.longest_prefix([key(1)], ROOT, 8) == 0
        assert store.children(ROOT) == []
        assert store.trim_ram(0) == 0
        assert store.stats()["parts"] == 0
        assert store.stats()["ram_bytes"] == 0
        assert len(part_files(tmp_path / "cache")) == 1


class TestThreads:
    def test_lazy_arrays_of_many_threads(self, tmp_path: Path) -> None:
        """Each thread evaluates its own arrays; the writer only ever sees bytes."""
        store = open_store(tmp_path / "cache")
        failures: list[str] = []

        def work(thread: int) -> None:
            with mx.stream(mx.new_stream(mx.default_device())):
                for i in range(12):
                    number = 1 + thread * 100 + i
                    lazy = (mx.arange(64).reshape(8, 8) + number).astype(mx.bfloat16).view(mx.uint16)
                    if not put(store, [("k", lazy, 0, 0)], 0, 8, number, key(1000 + number))[0]:
                        failures.append(f"put {number}")
                    expected = (mx.arange(64).reshape(8, 8) + number).astype(mx.bfloat16).view(mx.uint16)
                    found = store.load(key(number)).take_slots().get("k")
                    if found is None or not same(found, expected):
                        failures.append(f"load {number}")

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.flush()
        assert store.stats()["written_parts"] == 48
        store.close()

    def test_put_gather_and_erase_of_the_same_keys(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "cache", ram_bytes=1 << 18)
        arrays = [numbered((8, 512)) + number for number in range(9)]
        mx.eval(arrays)
        sums = [np.array(array[2:7]).sum() for array in arrays]
        wrong: list[int] = []
        counts = {"hits": 0, "misses": 0}

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(150):
                number = int(rng.integers(1, 9))
                action = rng.integers(0, 5)
                if action == 0:
                    store.erase([key(number)], [Part.kv])
                elif action == 1:
                    put(store, [("k", arrays[number], 0, 0)], 0, 8, number, key(1000 + number))
                else:
                    found = store.gather([key(number)], 2, 7, 6).take_slots()
                    # Reading the bytes of a finished array needs no stream of this thread.
                    counts["hits" if found else "misses"] += 1
                    if found and np.array(found["k"])[:5].sum() != sums[number]:
                        wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert min(counts.values()) > 0
        store.close()
