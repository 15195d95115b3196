"""Requests that differ in salts, images or KV format, all in one store, against a model that knows no hashes."""

from __future__ import annotations

import random
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from conftest import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import ShadowStore, all_arrays, check_hit, coded_rows, filled, make_caches, open_cache

from prefixcache import PrefixCache
from prefixcache._core import TokenBuffer, array_digest

SALTS = [None, "a", "b", b"a", ("a", 1)]
FORMATS = [None, (8, 64, 0), (8, 32, 0)]
Image = tuple[int, int, str]


@st.composite
def requests(draw: Any) -> tuple[list[int], list[Image], Any, Any]:
    """Few tokens, few images, few salts: most requests begin like an earlier one in all but one respect."""
    tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=40))
    images = set()
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        start = draw(st.sampled_from([0, 2, 3, 4, 7, 8, 9, 20]))
        images.add((start, start + draw(st.sampled_from([1, 2, 9])), draw(st.sampled_from(["A", "B"]))))
    return tokens, sorted(images), draw(st.sampled_from(SALTS)), draw(st.sampled_from(FORMATS))


def seen(tokens: list[int], images: list[Image]) -> list[Any]:
    """What a row at each position has seen beside the tokens before it: equal here means exchangeable."""
    return [(token, frozenset(image for image in images if image[0] <= at)) for at, token in enumerate(tokens)]


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(history=st.lists(requests(), min_size=2, max_size=12), block_size=st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_only_what_has_seen_the_same_is_shared(history: list[Any], block_size: int) -> None:
    shadows: dict[Any, ShadowStore] = defaultdict(ShadowStore)

    def ask(cache: PrefixCache, request: Any) -> None:
        tokens, images, salt, form = request
        hit = cache.fetch(tokens, salt=salt, extra_keys=images, kv_format=form)
        check_hit(hit, tokens)
        expected = shadows[salt, form].expected(seen(tokens, images))
        assert (hit.cached_tokens, hit.reason, hit.diverged_at) == expected

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "cache"
        with open_cache(directory, block_size=block_size) as cache:
            for request in history:
                ask(cache, request)
                tokens, images, salt, form = request
                report = cache.store(tokens, filled(tokens), salt=salt, extra_keys=images, kv_format=form)
                assert report.stored_tokens == len(tokens)
                shadows[salt, form].stored.append(seen(tokens, images))
                ask(cache, request)
            for request in history:
                ask(cache, request)
        with open_cache(directory, block_size=block_size, ram=0) as cache:
            for request in history:
                ask(cache, request)


def test_many_threads_on_one_cache(tmp_path: Path) -> None:
    """Fetches and stores side by side, with eviction: every row that any of them sees is of its own tokens."""
    rng = random.Random(5)
    prompts = []
    for _ in range(24):
        length = rng.randrange(20, 90)
        prompts.append([*range(rng.randrange(10, 80)), *(rng.randrange(3) for _ in range(90))][:length])
    donors = [filled(tokens) for tokens in prompts]
    # Worked out here: threads must not start computations on this thread's stream.
    kinds = [(layer, is_value) for layer in (0, 1) for is_value in (False, True)]
    rows = [np.array(coded_rows(*kind, tokens, 0)) for tokens in prompts for kind in kinds]
    mx.eval([all_arrays(donor) for donor in donors])
    failures: list[str] = []
    reused = [0] * 4

    def work(cache: PrefixCache, thread: int) -> None:
        choose = random.Random(thread)
        for _ in range(150):
            number = choose.randrange(len(prompts))
            tokens = prompts[number]
            if choose.random() < 0.4:
                report = cache.store(tokens, donors[number])
                # The RAM tier has seven places: all may be in use by the other threads at this moment.
                if report.stored_tokens != len(tokens) and report.reason != "queue_full":
                    failures.append(f"{number}: {report}")
                continue
            hit = cache.fetch(tokens)
            reused[thread] += hit.cached_tokens
            n = hit.cached_tokens
            for i, array in enumerate(all_arrays(hit.caches)):
                if not np.array_equal(np.array(array)[:, :, :n], rows[4 * number + i][:, :, :n]):
                    failures.append(f"{number}: other rows, array {i} of {hit}")

    with open_cache(tmp_path / "cache", ram="500KB") as one, open_cache(tmp_path / "cache", ram=0) as other:
        threads = [threading.Thread(target=work, args=((one, other)[i % 2], i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert min(reused) > 0
        for cache in (one, other):
            stats = cache.stats()
            assert (stats["corrupt_parts"], stats["write_errors"]) == (0, 0)


def at_once(work: Callable[[int], Any], threads: int = 4) -> list[Any]:
    barrier = threading.Barrier(threads)

    def wait_and_work(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(wait_and_work, range(threads)))


def test_many_threads_store_one_donor() -> None:
    """The CPU looks at these arrays for the first time in all threads at once."""
    with ExitStack() as stack:
        caches = [stack.enter_context(open_cache(None, write="ram_only")) for _ in range(4)]
        for number in range(examples(60)):
            tokens = [number, *range(70)]
            donor = filled(tokens)
            mx.eval(all_arrays(donor))
            reports = at_once(lambda i, tokens=tokens, donor=donor: caches[i].store(tokens, donor))
            assert [report.stored_tokens for report in reports] == [71] * 4
            for cache in caches:
                hit = cache.fetch([*tokens, 1])
                assert hit.cached_tokens == 71
                check_hit(hit, [*tokens, 1])


def test_many_threads_read_one_array_of_tokens() -> None:
    for number in range(examples(60)):
        tokens = mx.arange(number, number + 300) * 3
        mx.eval(tokens)
        expected = list(range(3 * number, 3 * (number + 300), 3))
        assert [found.tolist() for found in at_once(lambda _, tokens=tokens: TokenBuffer(tokens))] == [expected] * 4


def test_many_threads_digest_one_image() -> None:
    for number in range(examples(60)):
        image, twin = (mx.arange(4096) + number for _ in range(2))
        mx.eval(image, twin)
        expected = [array_digest(twin), list(range(number, number + 4096))] * 2
        asks = [array_digest, lambda array: TokenBuffer(array).tolist()] * 2
        assert at_once(lambda i, image=image, asks=asks: asks[i](image)) == expected


def test_prototypes_are_never_handed_out(tmp_path: Path) -> None:
    prototypes = make_caches()
    with open_cache(tmp_path / "cache", caches=prototypes) as cache:
        for tokens in ([1, 2], [1, 2, 3]):
            hit = cache.fetch(tokens)
            assert not {id(layer) for layer in hit.caches} & {id(layer) for layer in prototypes}
            cache.store([1, 2], filled([1, 2]))
