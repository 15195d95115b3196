"""Every architecture of mlx-lm, as a tiny model: what is restored gives the logits of a run without a prefix cache.

All comparisons are bit for bit. What is restored is compared with a deep copy of the donor's caches at the same number
of tokens, and with an uncached run that has the same chunk boundaries. One thing is mlx-lm's: a ring and the same rows
in temporal order differ in the last bits when one token is decoded next; there the copy is put in temporal order first.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from architectures import caches as looks
from architectures import harness
from architectures.runs import (
    BLOCK,
    PROMPT,
    PROMPT2,
    PROMPT3,
    TOKENS,
    TURN,
    TURN2,
    TURN3,
    Architecture,
    chunks,
    difference,
    feed,
    forked,
    same,
)

from prefixcache import Hit, PrefixCache

NAMES = [name for name in sorted(harness.configs()) if importlib.util.find_spec(f"mlx_lm.models.{name}")]
INTERVAL = 2 * BLOCK
WHOLE = (PROMPT - 1) // BLOCK * BLOCK
LATEST = (0, 32, 2)

# One module for each kinds of caches that come together, and a few that are special in another way: these have every
# test in the short form, the others those of one recorded turn asked for again.
REPRESENTATIVES = {
    "qwen2": "KVCache",
    "llama": "KVCache, RotatingKVCache",
    "afm7": "KVCache",  # fewer caches than layers
    "deepseek_v3": "KVCache",  # latent rows
    "nemotron-nas": "KVCache",  # layers without rows
    "gpt_oss": "KVCache, RotatingKVCache",
    "gemma3n": "KVCache, RotatingKVCache",  # layers that share rows
    "qwen3_next": "ArraysCache, KVCache",
    "jamba": "ArraysCache, KVCache",
    "mamba": "ArraysCache",
    "rwkv7": "ArraysCache",
    "gear": "ArraysCache, KVCache, RotatingKVCache",
    "recurrent_gemma": "ArraysCache, RotatingKVCache",
    "deepseek_v41": "LayerCache",
    "llama4": "ChunkedKVCache, KVCache",
    "deepseek_v32": "[KVCache, KVCache]",
    "falcon_h1": "[ArraysCache, KVCache]",
    "baichuan_m1": "[ArraysCache, KVCache], [ArraysCache, RotatingKVCache]",
    "longcat_flash_ngram": "ArraysCache, [KVCache, KVCache]",
    "minimax_m3_vl": "[KVCache, KVCache], [KVCache]",
}
OTHERS_AT_LENGTH = pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name in REPRESENTATIVES else pytest.mark.long) for name in NAMES],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module", autouse=True)
def no_compiler() -> Iterator[None]:
    """On a CPU, MLX calls the system's compiler for each function that a model wants to be compiled: seconds each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module", params=NAMES)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return Architecture(request.param)


def open_cache(architecture: Architecture, directory: Path) -> PrefixCache:
    sizes: dict[str, Any] = {"block_size": BLOCK, "state_interval": INTERVAL, "ram": "64MB", "disk": "1GB"}
    return PrefixCache.open(directory, namespace="arch", caches=architecture.make_caches(), threads=1, **sizes)


class Turn:
    """Runs one request with a prefix cache as a server does, and records it."""

    def __init__(self, architecture: Architecture, cache: PrefixCache, prompt: int, end: int, watch: bool = False):
        self.hit = cache.fetch(TOKENS[:prompt])
        self.logits: dict[tuple[int, int], mx.array] = {}
        self.disturbed: list[str] = []
        recorder = cache.record(TOKENS[:prompt], self.hit)
        caches = self.hit.caches
        for start, stop in chunks(self.hit.cached_tokens, prompt, end, recorder.next_cut):
            self.logits[start, stop] = feed(architecture.model, caches, TOKENS, start, stop)
            before = looks.frozen(caches) if watch else None
            recorder.advance(stop, tokens=TOKENS[start:stop] if start >= prompt else None)
            if watch and looks.frozen(caches) != before:
                self.disturbed.append(f"advance({stop})")
        before = looks.frozen(caches)
        self.report = recorder.finish(end)
        if looks.frozen(caches) != before:
            self.disturbed.append(f"finish({end})")


class Recorded(NamedTuple):
    """A cache that has recorded the first turn."""

    cache: PrefixCache
    turn: Turn


@pytest.fixture(scope="module")
def recorded(architecture: Architecture, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    with open_cache(architecture, tmp_path_factory.mktemp("arch")) as cache:
        yield Recorded(cache, Turn(architecture, cache, PROMPT, TURN, watch=True))


def check_reuse(architecture: Architecture, hit: Hit, rows: int, state: int) -> int:
    """Without a state exactly ``rows`` tokens are reused, with one at least ``state``."""
    n = hit.cached_tokens
    if architecture.state:
        assert n >= state, f"{architecture.name}: {n} tokens reused, {state} expected: {hit.reason}"
    else:
        assert n == rows, f"{architecture.name}: {n} tokens reused, {rows} expected: {hit.reason}"
    return n


def test_every_module_is_tested() -> None:
    found, known = set(harness.discovered()), harness.configs().keys() | harness.left_out().keys()
    assert not harness.configs().keys() & harness.left_out().keys()
    assert found - known == set(), "modules of mlx_lm.models with a Model but without a configuration"
    if harness.MLX_LM == LATEST:
        assert known - found == set(), "configurations without a module"
    elif known - found:
        warnings.warn(f"not in mlx-lm {'.'.join(map(str, harness.MLX_LM))}: {sorted(known - found)}", stacklevel=1)
    assert len(harness.left_out()) <= 6
    for name, reason in harness.left_out().items():
        warnings.warn(f"{name} is left out: {reason}", stacklevel=1)


def test_its_kinds_of_caches_are_represented(architecture: Architecture) -> None:
    kinds = looks.kinds(architecture.make_caches())
    assert kinds in REPRESENTATIVES.values()
    assert kinds == REPRESENTATIVES.get(architecture.name, kinds)


def test_a_store_disturbs_nothing(architecture: Architecture, recorded: Recorded) -> None:
    assert recorded.turn.hit.cached_tokens == 0
    assert recorded.turn.disturbed == []
    assert recorded.turn.report.stored_tokens == TURN, recorded.turn.report
    for (start, stop), logits in recorded.turn.logits.items():
        architecture.check_chunk(logits, start, stop)


def test_the_same_request_again(architecture: Architecture, recorded: Recorded) -> None:
    first, second = (recorded.cache.fetch(TOKENS[:PROMPT]) for _ in range(2))
    n = check_reuse(architecture, first, PROMPT - 1, WHOLE)
    architecture.check_run(first.caches, n, PROMPT + 2)
    # The first result has changed: the second and a third are none the wiser.
    third = recorded.cache.fetch(TOKENS[:PROMPT])
    assert [second.cached_tokens, third.cached_tokens] == [n, n]
    architecture.check_copy(second.caches, n, TOKENS, (5, 1))
    architecture.check_copy(third.caches, n, TOKENS, (1, 1))


@OTHERS_AT_LENGTH
def test_prompts_that_end_at_a_block(architecture: Architecture, recorded: Recorded) -> None:
    for length, state, sizes in ((64, 32, (1, 1)), (65, 64, (6, 1))):
        hit = recorded.cache.fetch(TOKENS[:length])
        n = check_reuse(architecture, hit, length - 1, state)
        architecture.check_copy(hit.caches, n, TOKENS, sizes)


@OTHERS_AT_LENGTH
def test_prompts_that_diverge(architecture: Architecture, recorded: Recorded) -> None:
    for leaves, sizes in ((48, (5, 1)), (53, (1, 1)), (53, (5, 1))):
        tokens = forked(leaves, PROMPT)
        hit = recorded.cache.fetch(tokens)
        n = check_reuse(architecture, hit, leaves, INTERVAL)
        architecture.check_copy(hit.caches, n, tokens, sizes)


@pytest.mark.long
def test_a_point_of_divergence_is_kept(architecture: Architecture, recorded: Recorded) -> None:
    """A prompt leaves the stored one inside a block; when it is recorded, a third that leaves both there is restored
    right there, with a state as well."""
    tokens = forked(53, 80)
    hit = recorded.cache.fetch(tokens)
    recorder = recorded.cache.record(tokens, hit)
    donor = architecture.copy_at(hit.cached_tokens)
    donors = {hit.cached_tokens: looks.cut(donor, hit.cached_tokens)} if hit.cached_tokens == 53 else {}
    for start, stop in chunks(hit.cached_tokens, len(tokens), len(tokens), recorder.next_cut):
        logits, expected = (feed(architecture.model, caches, tokens, start, stop) for caches in (hit.caches, donor))
        assert same(logits, expected), f"{architecture.name}: fork, [{start}, {stop}): {difference(logits, expected)}"
        recorder.advance(stop)
        looks.evaluate(donor)
        donors[stop] = copy.deepcopy(donor)
    recorder.finish()
    other = forked(53, 80, way=2)
    hit = recorded.cache.fetch(other)
    assert hit.cached_tokens == 53, f"{architecture.name}: {hit.cached_tokens} tokens reused: {hit.reason}"
    found, expected = (architecture.go_on(caches, other[53:], (5, 1)) for caches in (hit.caches, donors[53]))
    for pair in zip(found, expected, strict=True):
        assert same(*pair), f"{architecture.name}: third prompt: {difference(*pair)}"


@OTHERS_AT_LENGTH
def test_one_store_at_the_end(architecture: Architecture, tmp_path: Path) -> None:
    """Nothing was recorded. Where rows or states are no longer there, less is reused, and still the right thing."""
    caches = architecture.copy_at(TURN)
    before = looks.frozen(caches)
    with open_cache(architecture, tmp_path) as cache:
        report = cache.store(TOKENS[:TURN], caches, covers=TURN)
        assert looks.frozen(caches) == before
        assert report.stored_tokens == TURN, report
        hit = cache.fetch(TOKENS[:PROMPT2])
        assert hit.cached_tokens == TURN, f"{architecture.name}: {hit.reason}"
        architecture.check_run(hit.caches, TURN, PROMPT2 - 1)
        for tokens in (TOKENS, forked(40, len(TOKENS))):
            hit = cache.fetch(tokens[:PROMPT])
            architecture.check_copy(hit.caches, hit.cached_tokens, tokens, (3, 1))


@OTHERS_AT_LENGTH
def test_one_store_with_snapshots(architecture: Architecture, tmp_path: Path) -> None:
    """A caller that cannot record hands copies over that it made at the ends of blocks."""
    snapshots = {n: architecture.copy_at(n) for n in range(BLOCK, TURN, BLOCK)}
    with open_cache(architecture, tmp_path) as cache:
        cache.store(TOKENS[:TURN], architecture.copy_at(TURN), covers=TURN, snapshots=snapshots)
        hit = cache.fetch(TOKENS[:PROMPT])
        n = check_reuse(architecture, hit, PROMPT - 1, WHOLE)
        architecture.check_run(hit.caches, n, PROMPT + 2)
        tokens = forked(48, PROMPT)
        hit = cache.fetch(tokens)
        n = check_reuse(architecture, hit, 48, INTERVAL)
        architecture.check_copy(hit.caches, n, tokens, (5, 1))


@pytest.mark.long
def test_turns_and_restarts(architecture: Architecture, tmp_path: Path) -> None:
    with open_cache(architecture, tmp_path) as cache:
        Turn(architecture, cache, PROMPT, TURN)
    with open_cache(architecture, tmp_path) as cache:
        hit = cache.fetch(TOKENS[:PROMPT])
        n = check_reuse(architecture, hit, PROMPT - 1, WHOLE)
        architecture.check_run(hit.caches, n, PROMPT + 2)
        second = Turn(architecture, cache, PROMPT2, TURN2)
        assert second.disturbed == []
        assert second.hit.cached_tokens == TURN, second.hit.reason
        for (start, stop), logits in second.logits.items():
            architecture.check_chunk(logits, start, stop)
    with open_cache(architecture, tmp_path) as cache:
        first, second = (cache.fetch(TOKENS[:PROMPT3]) for _ in range(2))
        assert [first.cached_tokens, second.cached_tokens] == [TURN2, TURN2], first.reason
        architecture.check_run(first.caches, TURN2, TURN3)
        architecture.check_copy(second.caches, TURN2, TOKENS, (1, 1))
        hit = cache.fetch(TOKENS[:PROMPT])
        n = check_reuse(architecture, hit, PROMPT - 1, 2 * INTERVAL)
        architecture.check_run(hit.caches, n, PROMPT + 2)
