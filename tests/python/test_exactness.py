"""A restored cache continues bit for bit as the one it was stored from, and as a run that never used a cache.

Every check compares the logits of the tokens that follow, single steps and one chunk, with two references: a deep
copy of the donor's live cache trimmed to the same n, and a fresh run in chunks of the same shapes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import EXAMPLES, child_environment, long
from runs import assert_same_logits, digest_of, following_logits, prefill, rows_of, same_bits, trimmed_copy
from support import ON_CPU

from prefixcache import Hit, PrefixCache

STEPS, CHUNK = 8, 5


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens below 500 that do not repeat with a short period."""
    return [(7919 * (i + 1) * (i + 3 + seed) + 31 * seed) % 499 for i in range(length)]


def block_ends(n: int, size: int) -> list[int]:
    return [*range(size, n, size), n]


def check(model: Any, hit: Hit, donor: list[Any], donor_tokens: list[int], donor_ends: list[int], what: str) -> None:
    """`hit` continues as the donor trimmed to the same n, and as a run of the donor's chunks from nothing."""
    n = hit.cached_tokens
    following = [*hit.remaining, *text(STEPS + CHUNK, seed=5)][: STEPS + CHUNK]
    ours = following_logits(model, hit.caches, following, STEPS, CHUNK)
    assert_same_logits(ours, following_logits(model, trimmed_copy(donor, n), following, STEPS, CHUNK), f"{what}: donor")
    cover = next(end for end in donor_ends if end >= n)
    fresh = trimmed_copy(prefill(model, donor_tokens, [end for end in donor_ends if end <= cover]), n)
    assert_same_logits(ours, following_logits(model, fresh, following, STEPS, CHUNK), f"{what}: fresh run")


@pytest.fixture(params=["ram", "ssd"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def opened(directory: Path, model: Any, size: int, tier: str) -> PrefixCache:
    return PrefixCache.open(directory, model, block_size=size, ram="1GB" if tier == "ram" else 0)


def assert_tier(hit: Hit, tier: str) -> None:
    assert hit.tiers.get(tier) == hit.cached_tokens
    assert sum(hit.tiers.values()) == hit.cached_tokens


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rest", [0, 1, 15])
def test_an_identical_prompt_stands_one_token_before_its_end(
    tiny_llama: Callable[..., Any], tmp_path: Path, tier: str, dtype: str, rest: int
) -> None:
    model, size = tiny_llama(dtype), 16
    tokens = text(3 * size + rest)
    ends = block_ends(len(tokens), size)
    donor = prefill(model, tokens, ends)
    with opened(tmp_path, model, size, tier) as cache:
        assert cache.store(tokens, donor).stored_tokens == len(tokens)
        cache.flush()
        hit = cache.fetch(tokens)
        assert hit.cached_tokens == len(tokens) - 1
        assert list(hit.remaining) == tokens[-1:]
        assert hit.reason == "complete"
        assert_tier(hit, tier)
        check(model, hit, donor, tokens, ends, f"{dtype}, {len(tokens)} tokens, {tier}")


@pytest.mark.parametrize(("shared", "why"), [(48, "on a boundary"), (37, "inside a block"), (49, "inside the tail")])
def test_a_prompt_that_leaves_the_stored_one(
    tiny_llama: Callable[..., Any], tmp_path: Path, tier: str, shared: int, why: str
) -> None:
    model, size = tiny_llama("float32"), 16
    tokens = text(3 * size + 5)
    ends = block_ends(len(tokens), size)
    donor = prefill(model, tokens, ends)
    prompt = tokens[:shared] + [500, *text(20, seed=3)]
    with opened(tmp_path, model, size, tier) as cache:
        cache.store(tokens, donor)
        cache.flush()
        hit = cache.fetch(prompt)
        assert hit.cached_tokens == shared
        assert (hit.reason, hit.diverged_at) == ("diverged", shared)
        assert_tier(hit, tier)
        check(model, hit, donor, tokens, ends, why)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_longer_prompt_takes_up_where_the_stored_one_ends(
    tiny_llama: Callable[..., Any], tmp_path: Path, tier: str, dtype: str
) -> None:
    """Then the longer one is recorded too, in chunks and in single steps, and serves a third."""
    model, size = tiny_llama(dtype), 16
    first, longer = text(53), [*text(53), *text(40, seed=9)]
    with opened(tmp_path, model, size, tier) as cache:
        donor = prefill(model, first, block_ends(53, size))
        cache.store(first, donor)
        hit = cache.fetch(longer)
        assert (hit.cached_tokens, hit.reason) == (53, "end_of_stored")
        recorder = cache.record(longer, hit)
        ends = [64, 80, *range(81, len(longer) + 1)]
        n = hit.cached_tokens
        for end in ends:
            prefill(model, longer, [end], hit.caches, n)
            recorder.advance(end)
            n = end
        recorder.finish()
        cache.flush()
        again = cache.fetch(longer)
        assert again.cached_tokens == len(longer) - 1
        check(model, again, hit.caches, longer, [*block_ends(53, size), *ends], dtype)


def test_decoded_tokens_are_restored_as_they_were_computed(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Single steps across two block boundaries, with tokens the prompt did not have."""
    model, size = tiny_llama("float32"), 16
    prompt, decoded = text(20), text(30, seed=2)
    whole = prompt + decoded
    with opened(tmp_path, model, size, "ram") as cache:
        hit = cache.fetch(prompt)
        recorder = cache.record(prompt, hit)
        prefill(model, prompt, [16, 20], hit.caches)
        recorder.advance(20)
        for n, token in enumerate(decoded, len(prompt) + 1):
            prefill(model, whole, [n], hit.caches, n - 1)
            recorder.advance(n, tokens=[token])
        recorder.finish()
        again = cache.fetch([*whole, 1])
        assert again.cached_tokens == len(whole)
        check(model, again, hit.caches, whole, [16, *range(20, len(whole) + 1)], "decoded")


@pytest.mark.parametrize("size", [1, 7, 16])
def test_other_block_sizes(tiny_llama: Callable[..., Any], tmp_path: Path, tier: str, size: int) -> None:
    model, tokens = tiny_llama("float32", layers=2), text(40)
    ends = [11, 40]
    donor = prefill(model, tokens, ends)
    with opened(tmp_path, model, size, tier) as cache:
        cache.store(tokens, donor)
        cache.flush()
        for shared in (1, size, 12, 39):
            hit = cache.fetch([*tokens[:shared], 500, 501])
            assert hit.cached_tokens == shared
            check(model, hit, donor, tokens, ends, f"block {size}, shared {shared}")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rest", [0, 1, 15])
def test_quantised_caches(tiny_llama: Callable[..., Any], tmp_path: Path, tier: str, bits: int, rest: int) -> None:
    model, size, form = tiny_llama("float32"), 16, (bits, 32, 0)
    tokens = text(3 * size + rest)
    donor = prefill(model, tokens, block_ends(len(tokens), size), kv_format=form)
    with opened(tmp_path, model, size, tier) as cache:
        cache.store(tokens, donor, kv_format=form)
        cache.flush()
        assert not cache.fetch(tokens)
        for prompt, n in ((tokens, len(tokens) - 1), ([*tokens[:37], 500, 501], 37)):
            hit = cache.fetch(prompt, kv_format=form)
            assert hit.cached_tokens == n
            assert_tier(hit, tier)
            following = text(STEPS + CHUNK, seed=5)
            ours = following_logits(model, hit.caches, following, STEPS, CHUNK)
            twin = trimmed_copy(donor, n)
            assert_same_logits(ours, following_logits(model, twin, following, STEPS, CHUNK), f"{bits} bits")


def test_restored_rows_are_the_stored_rows(tiny_llama: Callable[..., Any], tmp_path: Path, tier: str) -> None:
    model, tokens = tiny_llama("bfloat16"), text(45)
    donor = prefill(model, tokens, [45])
    with opened(tmp_path, model, 16, tier) as cache:
        cache.store(tokens, donor)
        cache.flush()
        hit = cache.fetch(tokens)
        for ours, theirs in zip(hit.caches, donor, strict=True):
            for name in ("keys", "values"):
                assert same_bits(getattr(ours, name)[..., :44, :], getattr(theirs, name)[..., :44, :])


def test_a_hit_and_the_store_are_independent(tiny_llama: Callable[..., Any], tmp_path: Path, tier: str) -> None:
    """Running on from one hit, or from the donor, changes nothing for the next hit."""
    model, tokens = tiny_llama("float32"), text(48)
    donor = prefill(model, tokens, [48])
    with opened(tmp_path, model, 16, tier) as cache:
        cache.store(tokens, donor)
        cache.flush()
        reference = trimmed_copy(donor, 47)
        following_logits(model, donor, text(9, seed=4), 4, 5)
        first, second = cache.fetch(tokens), cache.fetch(tokens)
        for hit in (first, second):
            check(model, hit, reference, tokens, [48], "after the donor moved on")


RESTARTED = """
import json, sys
from prefixcache import PrefixCache
from runs import digest_of, following_logits, rows_of

order = json.load(sys.stdin)
if order["folder"]:
    import smollm2
    model, _ = smollm2.load(order["folder"])
else:
    from conftest import make_tiny_llama
    model = make_tiny_llama("float16")
answers = []
with PrefixCache.open(sys.argv[1], model, block_size=order["block_size"], ram=order["ram"]) as cache:
    for prompt, salt, following in order["requests"]:
        hit = cache.fetch(prompt, salt=salt)
        rows = digest_of(rows_of(hit.caches, hit.cached_tokens))
        logits = digest_of(following_logits(model, hit.caches, following, *order["shape"]))
        answers.append([hit.cached_tokens, hit.tiers.get("ssd", 0), rows, logits])
print(json.dumps(answers))
"""


def after_restart(directory: Path, order: dict[str, Any]) -> list[list[Any]]:
    """What a new process answers to each request: reused tokens, those from the SSD, digests of rows and of logits."""
    done = subprocess.run(
        [sys.executable, "-c", RESTARTED, str(directory)],
        env=child_environment(Path(__file__).resolve().parent, EXAMPLES),
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[Any]] = json.loads(done.stdout)
    return answers


# The short form has a real model without RAM.
@pytest.mark.parametrize("ram", [long(0), "1GB"])
def test_hits_after_a_restart(tiny_llama: Callable[..., Any], tmp_path: Path, ram: int | str) -> None:
    model, size = tiny_llama("float16"), 16
    tokens = text(3 * size + 15)
    donor = prefill(model, tokens, block_ends(len(tokens), size))
    with opened(tmp_path, model, size, "ram") as cache:
        cache.store(tokens, donor)
    following = text(STEPS + CHUNK, seed=5)
    prompts = {62: tokens, 48: [*tokens[:48], 500, 501], 21: [*tokens[:21], 500, 501]}
    order = {
        "folder": None,
        "block_size": size,
        "ram": ram,
        "shape": [STEPS, CHUNK],
        "requests": [[prompt, None, following] for prompt in prompts.values()],
    }
    answers = after_restart(tmp_path, order)
    for (n, _), (cached, from_ssd, rows, logits) in zip(prompts.items(), answers, strict=True):
        assert cached == n
        assert from_ssd == n or ram != 0
        assert rows == digest_of(rows_of(donor, n))
        assert logits == digest_of(following_logits(model, trimmed_copy(donor, n), following, STEPS, CHUNK))
    assert answers[0][1] == 62


class RealRun(NamedTuple):
    """SmolLM2 after a prompt of 3 blocks less one token: the live caches, and those of a second run of equal chunks."""

    model: Any
    folder: Path
    size: int
    tokens: list[int]
    donor: list[Any]
    fresh: list[Any]
    directory: Path
    cache: PrefixCache

    def requests(self) -> dict[str, tuple[int, list[int], int]]:
        """By name: how many tokens of the prompt are stored, the prompt that is fetched, and the n to expect."""
        size, tokens = self.size, self.tokens
        other = [17, *tokens[40:60]]
        return {
            "k blocks": (2 * size, tokens[: 2 * size], 2 * size - 1),
            "k blocks and 1": (2 * size + 1, tokens[: 2 * size + 1], 2 * size),
            "k blocks and all but 1": (3 * size - 1, tokens, 3 * size - 2),
            "leaves on a boundary": (3 * size - 1, [*tokens[: 2 * size], *other], 2 * size),
            "leaves inside a block": (3 * size - 1, [*tokens[: size + size // 3], *other], size + size // 3),
            "leaves inside the tail": (3 * size - 1, [*tokens[: 3 * size - 9], *other], 3 * size - 9),
        }


@pytest.fixture(scope="module", params=[128, long(256)])
def real(request: pytest.FixtureRequest, smollm2: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """Each stored length under its own salt, so that none is served from a longer one."""
    size = request.param if smollm2.fast else request.param // 8
    sentence = "The {}th ship of the fleet left harbour {} in the spring, and its crew of {} saw {} whales. "
    story = "".join(sentence.format(i, i * 7 % 11, i * 5 + 3, i * i % 23) for i in range(2, 40))
    tokens = smollm2.tokenizer.encode(story)[: 3 * size - 1]
    assert len(tokens) == 3 * size - 1
    ends = [size, 2 * size, 2 * size + 1, 3 * size - 1]
    donor, fresh = (prefill(smollm2.model, tokens, ends) for _ in range(2))
    directory = tmp_path_factory.mktemp("real")
    directory.chmod(0o700)
    with opened(directory, smollm2.model, size, "ram") as cache:
        run = RealRun(smollm2.model, smollm2.folder, size, tokens, donor, fresh, directory, cache)
        for length in {stored for stored, _, _ in run.requests().values()}:
            assert cache.store(tokens[:length], donor, salt=length).stored_tokens == length
        cache.flush()
        yield run


REQUESTS = [
    "k blocks",
    long("k blocks and 1"),
    "k blocks and all but 1",
    long("leaves on a boundary"),
    "leaves inside a block",
    long("leaves inside the tail"),
]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_real_model_continues_bit_for_bit(real: RealRun, name: str) -> None:
    """From RAM and from the SSD, for full and for partial hits.

    On a GPU two runs without a prefix cache may give different logits: there rows alone are compared.
    """
    following = real.tokens[5 : 5 + 3 + CHUNK]
    stored, prompt, n = real.requests()[name]
    theirs = following_logits(real.model, trimmed_copy(real.donor, n), following, 3, CHUNK)
    if ON_CPU:
        uncached = following_logits(real.model, trimmed_copy(real.fresh, n), following, 3, CHUNK)
        assert_same_logits(uncached, theirs, "two live runs")
    with opened(real.directory, real.model, real.size, "ssd") as without_ram:
        for tier, source in (("ram", real.cache), ("ssd", without_ram)):
            hit = source.fetch(prompt, salt=stored)
            assert hit.cached_tokens == n
            assert len(hit.remaining) >= 1
            assert_tier(hit, tier)
            assert all(map(same_bits, rows_of(hit.caches, n), rows_of(real.donor, n))), tier
            logits = following_logits(real.model, hit.caches, following, 3, CHUNK)
            if ON_CPU:
                assert_same_logits(logits, theirs, tier)


def test_a_real_model_in_a_new_process(real: RealRun) -> None:
    following = real.tokens[5 : 5 + 2 + CHUNK]
    requests = [real.requests()[name] for name in ("k blocks", "leaves inside a block")]
    order = {
        "folder": str(real.folder),
        "block_size": real.size,
        "ram": 0,
        "shape": [2, CHUNK],
        "requests": [[prompt, stored, following] for stored, prompt, _ in requests],
    }
    for (_, _, n), answer in zip(requests, after_restart(real.directory, order), strict=True):
        logits = following_logits(real.model, trimmed_copy(real.donor, n), following, 2, CHUNK)
        assert answer[:3] == [n, n, digest_of(rows_of(real.donor, n))]
        assert answer[3] == digest_of(logits) or not ON_CPU
