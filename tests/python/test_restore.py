"""fetch(store(x)): every row that is handed out is the row that was stored for exactly these tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import examples, long
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    ON_CPU,
    STEP,
    ShadowStore,
    all_arrays,
    arrays_of,
    chain_files,
    check_caches,
    check_hit,
    extend,
    filled,
    open_cache,
)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
LARGEST_TOKEN = 2**32 - 1

bounded = settings(deadline=None, max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def fresh_directory() -> Iterator[Path]:
    # A fixture would be shared by all examples of a property.
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "cache"


@st.composite
def lengths(draw: Any, block_size: int, most: int = 300) -> int:
    """Around block boundaries, and now and then anything."""
    blocks = draw(st.integers(0, max(1, min(4, most // block_size))))
    edge = block_size * blocks + draw(st.sampled_from([-1, 0, 1]))
    return max(1, min(most, draw(st.sampled_from([edge, edge, edge, draw(st.integers(1, most))]))))


@st.composite
def families(draw: Any) -> tuple[int, list[list[int]]]:
    """A block size and sequences of which most begin like an earlier one and leave it anywhere."""
    block_size = draw(st.one_of(st.integers(1, 64), st.just(256)))
    token = st.one_of(st.integers(0, 3), st.integers(0, LARGEST_TOKEN))
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(2, 7))):
        length = draw(lengths(block_size))
        base = draw(st.sampled_from(sequences)) if sequences else []
        kept = base[: draw(st.integers(0, min(len(base), length)))]
        # A repeated pattern: long sequences from few draws, and equal tokens at many positions.
        pattern = draw(st.lists(token, min_size=1, max_size=5))
        rest = length - len(kept)
        sequences.append(kept + (pattern * (rest // len(pattern) + 1))[:rest])
    return block_size, sequences


def check_fetch(cache: Any, tokens: list[int], shadow: ShadowStore, kind: str, dtype: mx.Dtype = mx.float32) -> None:
    hit = cache.fetch(tokens)
    check_hit(hit, tokens, kind, dtype)
    assert (hit.cached_tokens, hit.reason, hit.diverged_at) == shadow.expected(tokens)


@pytest.mark.parametrize("kind", ["kv", "concatenate", "quantized"])
@bounded
@given(family=families(), dtype=st.sampled_from(DTYPES), ram=st.sampled_from(["64MB", "130KB", 0]))
def test_sequences_that_share_prefixes(kind: str, family: tuple[int, list[list[int]]], dtype: Any, ram: Any) -> None:
    block_size, sequences = family
    shadow = ShadowStore()
    with fresh_directory() as directory:
        with open_cache(directory, kind, block_size=block_size, ram=ram) as cache:
            for tokens in sequences:
                check_fetch(cache, tokens, shadow, kind, dtype)
                report = cache.store(tokens, filled(tokens, kind, dtype))
                assert (report.stored_tokens, report.reason) == (len(tokens), "complete")
                shadow.stored.append(tokens)
                check_fetch(cache, tokens, shadow, kind, dtype)
                check_fetch(cache, [*tokens, 1, 2], shadow, kind, dtype)
            for tokens in sequences:
                check_fetch(cache, tokens, shadow, kind, dtype)
        with open_cache(directory, kind, block_size=block_size, ram=0) as cache:
            for tokens in sequences:
                check_fetch(cache, tokens, shadow, kind, dtype)
                check_fetch(cache, [*tokens, 1, 2], shadow, kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["kv", "concatenate", "quantized"])
@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513])
def test_block_boundaries_at_the_usual_size(tmp_path: Path, kind: str, dtype: mx.Dtype, length: int) -> None:
    tokens = [7 * i % 50021 for i in range(length)]
    for ram in ("64MB", 0):
        directory = tmp_path / f"ram{ram}"
        with open_cache(directory, kind, block_size=256, ram=ram) as cache:
            cache.store(tokens, filled(tokens, kind, dtype))
            hit = cache.fetch(tokens)
            assert (hit.cached_tokens, hit.reason) == (length - 1, "complete")
            check_hit(hit, tokens, kind, dtype)
            hit = cache.fetch([*tokens, 3])
            assert (hit.cached_tokens, hit.reason) == (length, "complete")
            check_hit(hit, [*tokens, 3], kind, dtype)
        with open_cache(directory, kind, block_size=256, ram=ram) as cache:
            hit = cache.fetch(tokens)
            assert hit.cached_tokens == length - 1
            assert hit.tiers == {"ram": 0, "ssd": length - 1}
            check_hit(hit, tokens, kind, dtype)


NEW_PROCESS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support import check_hit, open_cache
request = json.load(sys.stdin)
answers = []
with open_cache(Path(request["directory"]), request["kind"], block_size=request["block_size"], ram=0) as cache:
    for tokens in request["fetch"]:
        hit = cache.fetch(tokens)
        check_hit(hit, tokens, request["kind"])
        answers.append([hit.cached_tokens, hit.reason, hit.diverged_at])
print(json.dumps(answers))
"""


@pytest.mark.parametrize("kind", [long("kv"), "quantized"])
def test_a_new_process_finds_everything(tmp_path: Path, kind: str) -> None:
    shadow = ShadowStore()
    system = [3 * i for i in range(70)]
    stored = [[*system, 5, 6, 7], [*system[:40], 1, 2, 3], [*system, *range(30)], [9] * 33]
    with open_cache(tmp_path / "cache", kind, block_size=16) as cache:
        for tokens in stored:
            cache.store(tokens, filled(tokens, kind))
            shadow.stored.append(tokens)
    asked = [*stored, [*system, 5, 6, 8, 8], system[:50], [9] * 34, [8, 9], [*system[:40], 1, 2, 4]]
    request = {"directory": str(tmp_path / "cache"), "kind": kind, "block_size": 16, "fetch": asked}
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, str(Path(__file__).parent)],
        input=json.dumps(request), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [tuple(answer) for answer in json.loads(done.stdout)] == [shadow.expected(tokens) for tokens in asked]


@pytest.mark.parametrize("kind", ["kv", "quantized"])
@pytest.mark.parametrize("cached", [1, 7, 255, 256, 257, 700])
@pytest.mark.parametrize("rest", [1, 2, 300, 2048, 2500])
def test_nothing_is_reallocated_by_the_next_chunk(kind: str, cached: int, rest: int) -> None:
    tokens = [i % 1000 for i in range(cached + rest)]
    with open_cache(None, kind, block_size=64, write="ram_only") as cache:
        cache.store(tokens[:cached], filled(tokens[:cached], kind))
        hit = cache.fetch(tokens)
        assert hit.cached_tokens == cached
        shapes = [array.shape for array in all_arrays(hit.caches)]
        chunk = min(rest, 2048)
        extend(hit.caches, tokens[cached : cached + chunk])
        extend(hit.caches, [1])
        assert [array.shape for array in all_arrays(hit.caches)] == shapes
        assert hit.caches[0].offset == cached + chunk + 1
        hit = cache.fetch(tokens)
        check_hit(hit, tokens, kind)
        waste = arrays_of(hit.caches[0])[0].shape[2] - cached
        assert waste <= min(len(tokens), 2048) + 2 * STEP


@pytest.mark.parametrize("ram", ["64MB", 0])
def test_the_next_token_copies_no_prefix(tmp_path: Path, ram: Any) -> None:
    """An append writes in place only into a buffer that nobody else holds; and a restore needs no second buffer."""
    tokens = [i % 1000 for i in range(8000)]
    with open_cache(tmp_path / "cache", ram=ram, block_size=256) as cache:
        cache.store(tokens, filled(tokens))
        cache.flush()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        hit = cache.fetch([*tokens, 1])
        result = sum(array.nbytes for array in all_arrays(hit.caches))
        assert result <= mx.get_peak_memory() - before <= 1.05 * result
        layer_bytes = hit.caches[0].keys.nbytes

        def append() -> int:
            # A GPU's queue holds on to what it has read until it is done.
            mx.synchronize()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            extend(hit.caches, [1])
            return mx.get_peak_memory() - before

        assert append() < layer_bytes // 100
        # The measure notices a copy: a view that is kept makes the next append one.
        view = hit.caches[0].keys[..., :10, :]
        mx.eval(view)
        assert append() >= layer_bytes


@pytest.mark.parametrize("kind", ["kv", "quantized", "concatenate"])
def test_rows_for_a_batch_have_no_room(kind: str) -> None:
    tokens = list(range(40))
    with open_cache(None, kind, write="ram_only") as cache:
        cache.store(tokens, filled(tokens, kind))
        hit = cache.fetch([*tokens, 1], spare=0)
        assert {array.shape[2] for array in all_arrays(hit.caches)} == {40}
        check_hit(hit, [*tokens, 1], kind)


@pytest.mark.parametrize("cut", [10, 16, 23, 39])
def test_a_concatenating_cache_goes_on_where_the_prefix_ends(cut: int) -> None:
    """Its append keeps every row it finds, so room behind the prefix would become tokens."""
    tokens = list(range(40))
    with open_cache(None, "concatenate", write="ram_only") as cache:
        cache.store(tokens, filled(tokens, "concatenate"))
        hit = cache.fetch([*tokens[:cut], 77])
        extend(hit.caches, [77])
        check_caches(hit.caches, [*tokens[:cut], 77], "concatenate")


def test_rows_behind_the_offset_are_never_stored(tmp_path: Path) -> None:
    """A grown buffer has hundreds of rows of padding, and a trimmed cache has rows of tokens that were taken back."""
    tokens = list(range(40))
    caches = filled(tokens)
    for donor in caches:
        donor.trim(13)
        assert donor.keys.shape[2] == STEP
    with open_cache(tmp_path / "cache") as cache:
        assert cache.store(tokens[:27], caches).stored_tokens == 27
        assert cache.fetch(tokens).cached_tokens == 27
        with pytest.raises(ValueError, match="40 tokens were given, but the caches stand at 27"):
            cache.store(tokens, caches)
        extend(caches, [500, 501])
        assert cache.store([*tokens[:27], 500, 501], caches).stored_tokens == 29
        for asked in (tokens, [*tokens[:27], 500, 501, 502]):
            check_hit(cache.fetch(asked), asked)
    rows = 2 * 2 * 2 * 32 * 4
    files = sum(path.stat().st_size for path in chain_files(tmp_path / "cache"))
    assert 29 * rows < files < 40 * rows + 20_000


def test_the_caches_may_stand_at_more_tokens_than_are_stored() -> None:
    tokens = list(range(40))
    with open_cache(None, write="ram_only") as cache:
        assert cache.store(tokens[:21], filled(tokens)).stored_tokens == 21
        hit = cache.fetch(tokens)
        assert (hit.cached_tokens, hit.reason) == (21, "end_of_stored")
        check_hit(hit, tokens)
        assert cache.store(tokens[:30], filled(tokens), covers=35).stored_tokens == 30
        with pytest.raises(ValueError, match="39.*35"):
            cache.store(tokens[:39], filled(tokens), covers=35)
        with pytest.raises(ValueError, match="41.*40"):
            cache.store(tokens, filled(tokens), covers=41)


class TestAliasing:
    """Nothing that a caller does to a returned or a donated cache reaches what is stored."""

    tokens = list(range(50))

    @pytest.fixture(params=["64MB", 0])
    def cache(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
        with open_cache(tmp_path / "cache", ram=request.param) as cache:
            cache.store(self.tokens, filled(self.tokens))
            cache.flush()
            yield cache

    def test_a_hit_is_overwritten(self, cache: Any) -> None:
        hit = cache.fetch(self.tokens)
        for layer in hit.caches:
            layer.keys[:] = -1.0
            layer.values[..., :20, :] = -1.0
        mx.eval(all_arrays(hit.caches))
        check_hit(cache.fetch(self.tokens), self.tokens)

    def test_a_hit_goes_on(self, cache: Any) -> None:
        hit = cache.fetch([*self.tokens, 1])
        extend(hit.caches, [60, 61, 62])
        check_caches(hit.caches, [*self.tokens, 60, 61, 62])
        check_hit(cache.fetch([*self.tokens, 60, 61, 62]), [*self.tokens, 60, 61, 62])
        assert cache.fetch([*self.tokens, 60, 61, 62]).cached_tokens == 50

    def test_two_hits_fork(self, cache: Any) -> None:
        one, other = cache.fetch([*self.tokens, 1]), cache.fetch([*self.tokens, 2])
        extend(one.caches, [70])
        extend(other.caches, [80, 81])
        extend(one.caches, [71, 72])
        check_caches(one.caches, [*self.tokens, 70, 71, 72])
        check_caches(other.caches, [*self.tokens, 80, 81])
        for branch, hit in (([70, 71, 72], one), ([80, 81], other)):
            assert cache.store([*self.tokens, *branch], hit.caches).stored_tokens == 50 + len(branch)
        for branch in ([70, 71, 72], [80, 81]):
            hit = cache.fetch([*self.tokens, *branch, 5])
            assert hit.cached_tokens == 50 + len(branch)
            check_hit(hit, [*self.tokens, *branch, 5])

    def test_the_donor_goes_on(self, cache: Any) -> None:
        tokens = [*range(100, 130)]
        donor = filled(tokens)
        cache.store(tokens, donor)
        for layer in donor:
            layer.trim(10)
        extend(donor, [7] * 12)
        for layer in donor:
            layer.keys[:] = 0.0
        mx.eval(all_arrays(donor))
        check_hit(cache.fetch(tokens), tokens)
        assert cache.fetch(tokens).cached_tokens == 29

    def test_misses_do_not_share_their_fresh_caches(self, cache: Any) -> None:
        one, other = cache.fetch([900, 901]), cache.fetch([900, 901])
        extend(one.caches, [900])
        assert [layer.offset for layer in other.caches] == [0, 0]
        assert [layer.offset for layer in cache.fetch([900, 901]).caches] == [0, 0]


SUPPORT = str(Path(sys.modules["support"].__file__ or "").parent)

NO_MEMORY = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support import check_hit, filled, open_cache
tokens = list(range(41))
with open_cache(Path(sys.argv[2])) as cache:
    cache.store(tokens, filled(tokens))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    hit = cache.fetch(tokens, spare=30_000_000)
    assert (hit.cached_tokens, hit.reason) == (0, "no_memory"), hit
    check_hit(hit, tokens)
    hit = cache.fetch(tokens)
    assert hit.cached_tokens == 40, hit
    check_hit(hit, tokens)
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to limit a process's memory")
@pytest.mark.skipif(not ON_CPU, reason="a GPU's memory has no such limit")
def test_no_memory_is_a_miss(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY, SUPPORT, str(tmp_path / "cache")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
