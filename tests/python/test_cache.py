"""The front door: opening, isolation between requests, counters, bad input."""

from __future__ import annotations

import array
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from support import ShadowStore, check_hit, extend, filled, make_caches, open_cache, part_files

from prefixcache import HIT_REASONS, STORE_REASONS, PrefixCache
from prefixcache._core import TokenBuffer

TOKENS = list(range(200, 250))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with open_cache(tmp_path / "cache") as cache:
        cache.store(TOKENS, filled(TOKENS))
        yield cache


def still_intact(cache: PrefixCache) -> None:
    hit = cache.fetch(TOKENS)
    assert hit.cached_tokens == len(TOKENS) - 1
    check_hit(hit, TOKENS)


class TestOpen:
    @pytest.mark.parametrize("block_size", [0, -1, True, False, 2.0, "8", None])
    def test_bad_block_sizes(self, tmp_path: Path, block_size: Any) -> None:
        with pytest.raises(ValueError, match=f"block_size is {block_size!r}"):
            open_cache(tmp_path / "cache", block_size=block_size)
        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize("option", ["ram", "disk", "queue"])
    @pytest.mark.parametrize("size", ["", "much", -1, "-1GB", "4 XB", True, 2**61, "1e30TB", "nan", "GB"])
    def test_bad_sizes_name_the_option(self, tmp_path: Path, option: str, size: Any) -> None:
        with pytest.raises(ValueError, match=f"{option} is"):
            open_cache(tmp_path / "cache", **{option: size})

    @pytest.mark.parametrize("option", ["write", "verify"])
    @pytest.mark.parametrize("word", ["", "Through", "sometimes"])
    def test_unknown_policies_name_the_choices(self, tmp_path: Path, option: str, word: str) -> None:
        with pytest.raises(ValueError, match=f"{option} is '{word}', expected"):
            open_cache(tmp_path / "cache", **{option: word})

    @pytest.mark.parametrize("option", ["disk_wait_seconds", "flush_wait_seconds"])
    @pytest.mark.parametrize("seconds", [-1, -0.5, math.nan, math.inf, 1e10, 10**400, "2", None, True, [1]])
    def test_bad_waits_name_the_option(self, tmp_path: Path, option: str, seconds: Any) -> None:
        with pytest.raises(ValueError, match=f"{option} is {re.escape(repr(seconds))}, expected seconds"):
            open_cache(tmp_path / "cache", **{option: seconds})
        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize("name", ["gpu", "CPU", "metal,cuda"])
    def test_unknown_gathers_name_the_variable(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
    ) -> None:
        monkeypatch.setenv("PREFIXCACHE_GATHER", name)
        with pytest.raises(ValueError, match=f"PREFIXCACHE_GATHER is '{name}', expected cpu, metal or cuda"):
            open_cache(tmp_path / "cache")
        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize("threads", [-1, 257, 10**6])
    def test_bad_thread_counts(self, tmp_path: Path, threads: int) -> None:
        with pytest.raises(ValueError, match=f"threads is {threads}"):
            open_cache(tmp_path / "cache", threads=threads)

    @pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../up", "a b", "a\0b", "é", "x" * 129, "a\n"])
    def test_bad_namespaces(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match="name"):
            open_cache(tmp_path / "cache", namespace=name)
        assert list(tmp_path.rglob("*")) == []

    @pytest.mark.parametrize("name", ["a", "x" * 128, "Model-4.bit_v2", "0"])
    def test_good_namespaces(self, tmp_path: Path, name: str) -> None:
        with open_cache(tmp_path / "cache", namespace=name) as cache:
            assert cache.namespace == name
            assert cache.store(TOKENS, filled(TOKENS))
            cache.flush()
        assert (tmp_path / "cache" / "v1" / name).is_dir()

    def test_needs_a_model_or_what_replaces_it(self, tmp_path: Path) -> None:
        for options in ({}, {"namespace": "a"}, {"caches": make_caches()}):
            with pytest.raises(ValueError, match="a model, or a namespace and prototype caches"):
                PrefixCache.open(tmp_path / "cache", **options)

    def test_prototypes_must_be_empty_caches(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="must be empty, but they hold 50 tokens"):
            open_cache(tmp_path / "cache", caches=filled(TOKENS))
        with pytest.raises(TypeError, match="layer 0"):
            open_cache(tmp_path / "cache", caches=["no cache"])
        with pytest.raises(ValueError, match="one cache per layer"):
            PrefixCache.open(tmp_path / "cache", namespace="a", caches=[])

    def test_a_directory_with_a_zero_byte(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="directory"):
            open_cache(f"{tmp_path}/cache\0/elsewhere")  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []

    def test_no_directory_only_in_ram(self) -> None:
        with pytest.raises(ValueError, match="directory"):
            open_cache(None)
        with open_cache(None, write="ram_only") as cache:
            cache.store(TOKENS, filled(TOKENS))
            still_intact(cache)

    def test_a_model_gives_namespace_and_classes(self, tmp_path: Path, tiny_llama: Callable[..., Any]) -> None:
        model = tiny_llama(layers=2)
        with PrefixCache.open(tmp_path / "cache", model, block_size=16, ram="16MB") as cache:
            assert len(cache.namespace) == 64
            assert cache.block_size == 16
            miss = cache.fetch(TOKENS)
            assert [type(layer) for layer in miss.caches] == [KVCache, KVCache]
            model(mx.array([TOKENS]), cache=miss.caches)
            assert cache.store(TOKENS, miss.caches).stored_tokens == 50
            assert cache.fetch(TOKENS).cached_tokens == 49
        with PrefixCache.open(tmp_path / "cache", tiny_llama(layers=2, seed=8), block_size=16) as other:
            assert other.fetch(TOKENS).reason == "no_match"

    def test_everything_made_is_private(self, tmp_path: Path, cache: PrefixCache) -> None:
        cache.flush()
        for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720, 0o702])
    @pytest.mark.parametrize("below", ["", "v1", "v1/test"])
    def test_a_directory_that_others_can_write_to(self, tmp_path: Path, mode: int, below: str) -> None:
        directory = tmp_path / "cache"
        (directory / "v1" / "test").mkdir(mode=0o700, parents=True)
        for path in (directory, directory / "v1"):
            path.chmod(0o700)
        (directory / below).chmod(mode)
        with pytest.raises(ValueError, match="only this user can write to"):
            open_cache(directory)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    def test_a_directory_of_another_user(self, tmp_path: Path) -> None:
        directory = tmp_path / "cache"
        directory.mkdir(mode=0o700)
        os.chown(directory, 12345, -1)
        with pytest.raises(ValueError, match="only this user can write to"):
            open_cache(directory)

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        """Bad luck, not misuse: the cache works from RAM and says so."""
        (tmp_path / "cache").write_text("a file")
        try:
            cache = open_cache(tmp_path / "cache")
        except ValueError as error:
            assert "directory" in str(error)
            return
        with cache:
            assert cache.stats()["degraded"]
            cache.store(TOKENS, filled(TOKENS))
            still_intact(cache)
        assert (tmp_path / "cache").read_text() == "a file"

    def test_close_twice_and_afterwards(self, tmp_path: Path) -> None:
        cache = open_cache(tmp_path / "cache")
        cache.store(TOKENS, filled(TOKENS))
        cache.close()
        cache.close()
        hit = cache.fetch(TOKENS)
        assert not hit
        assert hit.reason in HIT_REASONS
        report = cache.store(TOKENS, filled(TOKENS))
        assert (report.reason, report.stored_tokens, bool(report)) == ("closed", 0, False)
        with open_cache(tmp_path / "cache") as again:
            still_intact(again)

    def test_clear_forgets_this_namespace_only(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as one, open_cache(tmp_path / "cache", namespace="other") as other:
            for cache in (one, other):
                cache.store(TOKENS, filled(TOKENS))
                cache.flush()
            one.clear()
            assert one.fetch(TOKENS).reason == "no_match"
            still_intact(other)
            assert {path.parts[-3] for path in part_files(tmp_path / "cache")} == {"other"}
            one.store(TOKENS, filled(TOKENS))
            still_intact(one)


class TestTokens:
    @pytest.mark.parametrize(
        "convert",
        [list, tuple, mx.array, np.array, lambda t: array.array("I", t), lambda t: np.array(t, np.uint16), TokenBuffer],
        ids=["list", "tuple", "mlx", "numpy", "array", "uint16", "buffer"],
    )
    def test_any_form_of_equal_tokens_is_the_same_prompt(
        self, cache: PrefixCache, convert: Callable[[list[int]], Any]
    ) -> None:
        hit = cache.fetch(convert([*TOKENS, 5]))
        assert hit.cached_tokens == len(TOKENS)
        assert type(hit.remaining) is type(convert([5]))
        assert [int(token) for token in hit.remaining] == [5]
        assert cache.store(convert(TOKENS), filled(TOKENS)).bytes == 0

    @pytest.mark.parametrize("tokens", [[], [7], np.array([], np.int32), mx.array([], mx.int32)])
    def test_nothing_to_share(self, cache: PrefixCache, tokens: Any) -> None:
        hit = cache.fetch(tokens)
        assert (hit.cached_tokens, hit.reason, hit.diverged_at, bool(hit)) == (0, "too_short", None, False)
        assert len(hit.remaining) == len(tokens)
        assert [layer.offset for layer in hit.caches] == [0, 0]

    def test_an_empty_prompt_stores_nothing(self, cache: PrefixCache) -> None:
        for caches in (make_caches(), filled(TOKENS)):
            report = cache.store([], caches)
            assert (report.stored_tokens, report.reason, bool(report)) == (0, "too_short", False)
            assert report.detail

    @pytest.mark.parametrize("length", [1, 2, 7])
    def test_fewer_tokens_than_a_block(self, cache: PrefixCache, length: int) -> None:
        tokens = [900 + i for i in range(length)]
        report = cache.store(tokens, filled(tokens))
        assert (report.stored_tokens, report.new_blocks, report.reason) == (length, 1, "complete")
        hit = cache.fetch([*tokens, 1])
        assert hit.cached_tokens == length
        check_hit(hit, [*tokens, 1])

    @pytest.mark.parametrize(
        ("tokens", "error", "words"),
        [
            ([1, -1], ValueError, "-1"),
            ([1, 2**32], ValueError, str(2**32)),
            ([1, 10**30], ValueError, "1"),
            ([1.0, 2.0], TypeError, "float"),
            (np.array([1.0, 2.0]), TypeError, "float|format|integer"),
            (mx.array([1.0, 2.0]), TypeError, "integers"),
            (np.array([[1, 2]]), (TypeError, ValueError), "dimension"),
            (mx.array([[1, 2]]), (TypeError, ValueError), "dimension"),
            (mx.array([-1, 2]), ValueError, "-1"),
            ("12", TypeError, "str"),
            (5, TypeError, "int"),
            (None, TypeError, "None"),
            ([1, None], TypeError, "None"),
            ([1, [2]], TypeError, "list"),
        ],
    )
    def test_bad_tokens(self, cache: PrefixCache, tokens: Any, error: Any, words: str) -> None:
        before = cache.stats()
        for call in (cache.fetch, lambda t: cache.store(t, filled(TOKENS)), lambda t: cache.record(t, filled(TOKENS))):
            with pytest.raises(error, match=words):
                call(tokens)
        assert cache.stats()["put_parts"] == before["put_parts"]
        still_intact(cache)

    def test_the_largest_and_the_smallest_token(self, cache: PrefixCache) -> None:
        tokens = [2**32 - 1, 0, 2**31, 2**31 - 1] * 5
        cache.store(tokens, filled(tokens))
        hit = cache.fetch(tokens)
        assert hit.cached_tokens == 19
        check_hit(hit, tokens)

    @pytest.mark.parametrize("salt", [1.5, [1], {"a": 1}, object(), b"x".join, (1, [2])])
    def test_bad_salts(self, cache: PrefixCache, salt: Any) -> None:
        for call in (cache.fetch, lambda t, **k: cache.store(t, filled(TOKENS), **k)):
            with pytest.raises(TypeError, match="salt"):
                call(TOKENS, salt=salt)

    @pytest.mark.parametrize(
        "ranges", [[(3, 3, "a")], [(-1, 3, "a")], [(5, 3, "a")], [(0, 3)], "ab", 5, [(0, 2.0, "a")], [(0, 3, 1.5)]]
    )
    def test_bad_content_keys(self, cache: PrefixCache, ranges: Any) -> None:
        with pytest.raises((ValueError, TypeError)):
            cache.fetch(TOKENS, extra_keys=ranges)

    @pytest.mark.parametrize("form", [(0, 64, 0), (4, 0, 0), (4, 64, -1), (4, 64), 4, "q4", (4.0, 64, 0)])
    def test_bad_kv_formats(self, cache: PrefixCache, form: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="kv_format"):
            cache.fetch(TOKENS, kv_format=form)


def batch(tokens: list[int], size: int) -> list[Any]:
    caches = filled(tokens)
    for layer in caches:
        layer.keys = mx.concatenate([layer.keys] * size)
        layer.values = mx.concatenate([layer.values] * size)
    return caches


def with_layer(position: int, layer: Any) -> list[Any]:
    caches = filled(TOKENS, layers=3)
    caches[position] = layer
    return caches


def changed(name: str, value: Any) -> list[Any]:
    caches = filled(TOKENS, layers=3)
    setattr(caches[1], name, value)
    return caches


class Subclass(KVCache):
    pass


class Ring(RotatingKVCache):  # type: ignore[misc]
    """A class that may do anything."""


def rotating() -> list[Any]:
    caches = [Ring(max_size=16), Ring(max_size=16)]
    extend(caches, TOKENS)
    return caches


def batched() -> list[Any]:
    caches = [BatchKVCache([0]), BatchKVCache([0])]
    for layer in caches:
        layer.update_and_fetch(mx.zeros((1, 2, 50, 32)), mx.zeros((1, 2, 50, 32)))
    return caches


class TestBadCaches:
    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda: filled(TOKENS[:20]), ValueError, "50 tokens were given, but the caches stand at 20"),
            (make_caches, ValueError, "50 tokens were given, but the caches stand at 0"),
            (lambda: with_layer(1, filled(TOKENS[:20])[0]), ValueError, "layer 0.* 50, layer 1.* 20"),
            (
                lambda: [filled(TOKENS)[0], RotatingKVCache(16)],
                ValueError,
                "layer 1 is a RotatingKVCache.* is a KVCache",
            ),
            (lambda: [filled(TOKENS)[0], ArraysCache(2)], ValueError, "layer 1 is a ArraysCache.* is a KVCache"),
            (lambda: [filled(TOKENS)[0], CacheList(KVCache())], ValueError, "layer 1 is a CacheList.* is a KVCache"),
            (lambda: [filled(TOKENS)[0], ChunkedKVCache(256)], ValueError, "ChunkedKVCache.* is a KVCache"),
            (lambda: batch(TOKENS, 2), ValueError, "layer 0.*2 sequences"),
            (lambda: with_layer(1, None), TypeError, "layer 1.*None"),
            (lambda: with_layer(1, "text"), TypeError, "layer 1.*str"),
            (lambda: with_layer(1, mx.zeros((1, 2, 50, 32))), TypeError, "layer 1.*array"),
            (lambda: with_layer(1, KVCache), TypeError, "layer 1"),
            (lambda: with_layer(1, {"keys": 1}), TypeError, "layer 1.*dict"),
            (lambda: changed("offset", -1), ValueError, "layer 1.*-1"),
            (lambda: changed("offset", 50.0), TypeError, "layer 1.*50.0"),
            (lambda: changed("offset", 5000), ValueError, "layer 1.*5000"),
            (lambda: changed("keys", None), ValueError, "layer 1.*keys"),
            (lambda: changed("keys", mx.zeros((2, 50))), ValueError, "layer 1.*rank"),
            (lambda: changed("values", mx.zeros((1, 2, 49, 32))), ValueError, "layer 1.*49"),
            (lambda: changed("values", [[1.0]]), TypeError, "layer 1.*list"),
            (lambda: filled(TOKENS)[0], TypeError, "list with one cache per layer"),
            (lambda: None, TypeError, "list with one cache per layer"),
            (list, ValueError, "empty"),
        ],
    )
    def test_misuse_names_the_layer_and_the_values(
        self, cache: PrefixCache, make: Callable[[], Any], error: Any, words: str
    ) -> None:
        before = cache.stats()
        with pytest.raises(error, match=words):
            cache.store(TOKENS, make())
        assert cache.stats()["put_parts"] == before["put_parts"]
        assert set(cache.stats()["store_reasons"]) <= {"complete", "contradictory"}
        still_intact(cache)

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (rotating, "layer 0.*Ring"),
            (batched, "layer 0.*BatchKVCache.*extract"),
            (lambda: with_layer(1, Subclass()), "layer 1.*Subclass"),
        ],
    )
    def test_a_class_without_a_handler(self, cache: PrefixCache, make: Callable[[], Any], words: str) -> None:
        before = cache.stats()
        report = cache.store(TOKENS, make())
        assert (report.reason, report.stored_tokens, bool(report)) == ("unsupported_type", 0, False)
        assert re.search(words, report.detail)
        assert cache.stats()["put_parts"] == before["put_parts"]
        assert cache.stats()["store_reasons"]["unsupported_type"] == 1
        still_intact(cache)

    def test_an_attribute_that_nobody_knows(self, cache: PrefixCache) -> None:
        report = cache.store(TOKENS, changed("rope_scale", 2.0))
        assert (report.reason, report.stored_tokens) == ("unknown_field", 0)
        assert "layer 1" in report.detail
        assert "rope_scale" in report.detail
        still_intact(cache)

    def test_a_model_whose_class_has_no_handler_always_misses(self, tmp_path: Path) -> None:
        prototypes = [Ring(max_size=16), Ring(max_size=16)]
        with open_cache(tmp_path / "cache", caches=prototypes) as cache:
            for _ in range(2):
                hit = cache.fetch(TOKENS)
                assert (hit.cached_tokens, hit.reason) == (0, "unsupported_type")
                assert [(type(layer), layer.max_size) for layer in hit.caches] == [(Ring, 16)] * 2
                assert cache.store(TOKENS, rotating()).reason == "unsupported_type"
        assert part_files(tmp_path / "cache") == []


class TestIsolation:
    """What must be equal to share: every difference is a miss, or ends the match before it matters."""

    KEYS = [None, True, False, 0, 1, -1, "", "1", "None", "x", b"", b"x", (), ("x",), ("a", "bc"), ("ab", "c"), (1,)]

    def test_every_salt_is_a_tenant_of_its_own(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            for number, salt in enumerate(self.KEYS):
                tokens = [*TOKENS, number]
                assert cache.fetch(TOKENS, salt=salt).reason == "no_match"
                assert cache.store(tokens, filled(tokens), salt=salt).new_blocks == 7
            for number, salt in enumerate(self.KEYS):
                assert cache.fetch([*TOKENS, number, 1], salt=salt).cached_tokens == 51
                hit = cache.fetch([*TOKENS, number + 1, 1], salt=salt)
                assert (hit.cached_tokens, hit.diverged_at) == (50, 50)
            assert cache.fetch(TOKENS, salt="nobody").reason == "no_match"

    def test_content_keys_of_different_values_never_meet(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            for number, key in enumerate(self.KEYS):
                tokens = [*TOKENS, number]
                cache.store(tokens, filled(tokens), extra_keys=[(10, 20, key)])
            for number, key in enumerate(self.KEYS):
                assert cache.fetch([*TOKENS, number, 1], extra_keys=[(10, 20, key)]).cached_tokens == 51
            assert cache.fetch(TOKENS, extra_keys=[(10, 20, "nobody")]).cached_tokens == 10
            assert cache.fetch(TOKENS).cached_tokens == 10
            # A tenant of the same name is another thing.
            assert cache.fetch(TOKENS, salt="x").reason == "no_match"

    @pytest.mark.parametrize("reopened", [False, True])
    @pytest.mark.parametrize(
        ("asked", "most"),
        [
            ([(10, 30, "A")], 49),
            ([(10, 30, "B")], 10),  # other pixels
            ([], 10),  # text only
            ([(11, 31, "A")], 10),  # the same image elsewhere
            ([(9, 30, "A")], 9),
            ([(10, 29, "A")], 10),
            ([(10, 30, "A"), (40, 45, "B")], 40),  # one more image
            ([(10, 30, "A"), (10, 30, "A")], 49),  # named twice
            ([(0, 50, "A")], 0),
            ([(49, 50, "B"), (10, 30, "A")], 49),  # behind what is asked for
        ],
    )
    def test_an_image_ends_the_match_where_it_begins(
        self, tmp_path: Path, asked: list[Any], most: int, reopened: bool
    ) -> None:
        """Same token ids, other pixels: rows from the image on belong to another picture."""
        with open_cache(tmp_path / "cache") as cache:
            cache.store(TOKENS, filled(TOKENS), extra_keys=[(10, 30, "A")])
            if not reopened:
                self.fetch_with(cache, asked, most)
        if reopened:
            with open_cache(tmp_path / "cache", ram=0) as cache:
                self.fetch_with(cache, asked, most)

    def fetch_with(self, cache: PrefixCache, asked: list[Any], most: int) -> None:
        hit = cache.fetch(TOKENS, extra_keys=asked)
        assert hit.cached_tokens == most
        check_hit(hit, TOKENS)
        assert hit.reason == ("complete" if most == 49 else "diverged" if most else "no_match")

    @pytest.mark.parametrize("first", [2, 8, 11, 16])
    @pytest.mark.parametrize("second", [24, 28, 40])
    def test_two_images_swapped(self, tmp_path: Path, first: int, second: int) -> None:
        def images(one: str, two: str) -> list[tuple[int, int, str]]:
            return [(first, first + 6, one), (second, second + 6, two)]

        with open_cache(tmp_path / "cache") as cache:
            cache.store(TOKENS, filled(TOKENS), extra_keys=images("A", "B"))
            assert cache.fetch(TOKENS, extra_keys=images("A", "B")).cached_tokens == 49
            assert cache.fetch(TOKENS, extra_keys=images("A", "B")[::-1]).cached_tokens == 49
            assert cache.fetch(TOKENS, extra_keys=images("B", "A")).cached_tokens == first
            assert cache.fetch(TOKENS, extra_keys=images("A", "C")).cached_tokens == second
            assert cache.fetch(TOKENS, extra_keys=images("B", "B")).cached_tokens == first
            # What is stored under the second key must not be taken for the first.
            other = [*TOKENS[:30], *range(600, 620)]
            cache.store(other, filled(other), extra_keys=images("B", "A"))
            assert cache.fetch([*other, 1], extra_keys=images("B", "A")).cached_tokens == 50
            assert cache.fetch([*other, 1], extra_keys=images("A", "B")).cached_tokens == 30

    def test_many_images_over_the_same_tokens(self, tmp_path: Path) -> None:
        """A digest folded to 16 bits meets its like within some hundred images."""
        names = [f"image {number}" for number in range(700)]
        with open_cache(None, caches=make_caches("kv", 1), block_size=2, write="ram_only") as cache:
            for name in names:
                assert cache.fetch([1, 2, 3], extra_keys=[(0, 2, name)]).reason == "no_match"
                assert cache.store([1, 2], filled([1, 2], layers=1), extra_keys=[(0, 2, name)]).new_blocks == 1

    @pytest.mark.parametrize("form", [(4, 64, 0), (8, 64, 0), (4, 32, 0)])
    def test_kv_formats_do_not_mix(self, cache: PrefixCache, form: tuple[int, int, int]) -> None:
        assert cache.fetch(TOKENS, kv_format=form).reason == "no_match"
        cache.store(TOKENS[:20], filled(TOKENS[:20]), kv_format=form)
        assert cache.fetch(TOKENS, kv_format=form).cached_tokens == 20
        assert cache.fetch(TOKENS).cached_tokens == 49
        for other in ((5, 64, 0), (form[0], form[1] + 32, form[2]), (*form[:2], form[2] + 1)):
            assert not cache.fetch(TOKENS, kv_format=other)

    def test_rows_before_the_start_of_quantisation_are_not_stored_as_quantised(self, cache: PrefixCache) -> None:
        """A loop that records with one kv_format throughout: what is still plain waits for its conversion."""
        form = (8, 32, 24)
        recorder = cache.record(TOKENS, caches := make_caches(), kv_format=form)
        extend(caches, TOKENS[:16])
        report = recorder.advance(16)
        assert (report.reason, report.stored_tokens) == ("not_converted", 0)
        assert "layer 0 is not quantised yet; before token 24" in report.detail
        assert cache.stats()["store_reasons"]["not_converted"] == 1
        extend(caches, TOKENS[16:40])
        caches[:] = [layer.to_quantized(group_size=32, bits=8) for layer in caches]
        assert recorder.advance(40).stored_tokens == 40
        for _ in range(2):
            hit = cache.fetch(TOKENS[:41], kv_format=form)
            assert (hit.cached_tokens, hit.reason) == (40, "complete")
            check_hit(hit, TOKENS[:41], "quantized")
        assert cache.stats()["corrupt_parts"] == 0

    def test_one_request_in_both_forms(self, tmp_path: Path) -> None:
        """The plain rows and the quantised ones of one prompt live side by side, each under its format."""
        tokens = TOKENS
        form = (8, 32, 0)
        with open_cache(tmp_path / "cache") as cache:
            cache.store(tokens, filled(tokens))
            cache.store(tokens, filled(tokens, "quantized"), kv_format=form)
            check_hit(cache.fetch(tokens), tokens)
            hit = cache.fetch(tokens, kv_format=form)
            assert hit.cached_tokens == 49
            assert [type(layer) for layer in hit.caches] == [QuantizedKVCache, QuantizedKVCache]
            check_hit(hit, tokens, "quantized")

    def test_namespaces_share_a_directory_and_nothing_else(self, tmp_path: Path) -> None:
        rng = random.Random(1)
        kinds = {"kv": ShadowStore(), "quantized": ShadowStore()}
        caches = {kind: open_cache(tmp_path / "cache", kind, namespace=kind) for kind in kinds}
        for _ in range(150):
            kind = rng.choice(list(kinds))
            tokens = [*TOKENS[: rng.randrange(1, 30)], *(rng.randrange(3) for _ in range(rng.randrange(1, 30)))]
            hit = caches[kind].fetch(tokens)
            assert (hit.cached_tokens, hit.reason, hit.diverged_at) == kinds[kind].expected(tokens)
            check_hit(hit, tokens, kind)
            caches[kind].store(tokens, filled(tokens, kind))
            kinds[kind].stored.append(tokens)
        for cache in caches.values():
            cache.close()

    def test_one_namespace_for_two_structures_is_a_miss_not_wrong_rows(self, tmp_path: Path) -> None:
        """The caller promised that both models are exchangeable; their layers say that they are not."""
        for prototypes in (make_caches("concatenate"), make_caches("kv", 3), make_caches("kv", 1)):
            with open_cache(tmp_path / "cache", "kv") as cache:
                cache.store(TOKENS, filled(TOKENS))
            with open_cache(tmp_path / "cache", caches=prototypes) as cache:
                hit = cache.fetch(TOKENS)
                assert (hit.cached_tokens, hit.reason) == (0, "no_match")
                assert [layer.offset for layer in hit.caches] == [0] * len(prototypes)
                assert [type(layer) for layer in hit.caches] == [type(layer) for layer in prototypes]
            with open_cache(tmp_path / "cache", "kv") as cache:
                assert cache.fetch(TOKENS).cached_tokens == len(TOKENS) - 1

    def test_quantised_rows_need_their_format(self, cache: PrefixCache) -> None:
        """Without one, a plain request would be served rows that lost precision."""
        with pytest.raises(ValueError, match="layer 0 is a QuantizedKVCache .*kv_format"):
            cache.store(TOKENS, filled(TOKENS, "quantized"))
        with pytest.raises(ValueError, match=r"layer 0 has bits and group_size .*\(3, 64\)"):
            cache.store(TOKENS, filled(TOKENS, "quantized"), kv_format=(3, 64, 0))

    def test_rows_of_another_dtype_heal(self, tmp_path: Path) -> None:
        """One namespace for two dtypes is the caller's mistake; it must not break the prompt for ever."""
        longer = [*TOKENS, *range(40)]
        with open_cache(tmp_path / "cache") as cache:
            cache.store(TOKENS, filled(TOKENS))
            half = filled(longer)
            for layer in half:
                layer.keys, layer.values = layer.keys.astype(mx.float16), layer.values.astype(mx.float16)
            cache.store(longer, half)
            first = cache.fetch(longer)
            assert first.reason in ("damaged", "end_of_stored")
            check_hit(first, longer)
            cache.store(longer, filled(longer))
            hit = cache.fetch(longer)
            assert hit.cached_tokens == len(longer) - 1
            check_hit(hit, longer)


class TestStats:
    def test_sums_reconcile_over_many_requests(self, tmp_path: Path) -> None:
        rng = random.Random(4)
        asked = 0
        served = {"ram": 0, "ssd": 0}
        with open_cache(tmp_path / "cache", ram="400KB") as cache:
            stored_bytes = copied = 0
            for number in range(300):
                start = rng.choice([0, 100])
                end = [rng.randrange(2) for _ in range(rng.randrange(9))]
                tokens = [*range(start, start + rng.randrange(30)), *end]
                hit = cache.fetch(tokens)
                assert hit.reason in HIT_REASONS
                asked += len(tokens)
                copied += hit.bytes
                for tier, count in hit.tiers.items():
                    served[tier] += count
                if number % 3 == 0:
                    report = cache.store(tokens, filled(tokens))
                    assert report.reason in STORE_REASONS
                    stored_bytes += report.bytes
            cache.flush()
            stats = cache.stats()
        assert stats["fetches"] == sum(stats["hit_reasons"].values()) == 300
        assert stats["stores"] == sum(stats["store_reasons"].values()) == 100
        assert set(stats["hit_reasons"]) <= HIT_REASONS
        assert set(stats["store_reasons"]) <= STORE_REASONS
        assert stats["requested_tokens"] == asked
        assert (stats["cached_tokens_ram"], stats["cached_tokens_ssd"]) == (served["ram"], served["ssd"])
        assert stats["cached_tokens"] == sum(served.values()) > 0
        assert min(served.values()) > 0
        assert stats["put_bytes"] == stats["stored_bytes"] == stored_bytes
        # A tail that grew before its turn came is never written.
        assert len(part_files(tmp_path / "cache")) <= stats["written_parts"] <= stats["put_parts"]
        assert stats["gathered_ram_bytes"] + stats["gathered_disk_bytes"] == copied
        assert stats["ram_bytes"] <= stats["ram_peak_bytes"] <= 400 << 10
        assert stats["evicted_ram_parts"] > 0
        files = part_files(tmp_path / "cache")
        assert stats["parts"] == len(files)
        assert stats["disk_bytes"] == sum(path.stat().st_size for path in files)
        assert (stats["queued_bytes"], stats["write_errors"]) == (0, 0)
        assert (stats["degraded"], stats["last_error"]) == (False, "")

    def test_a_fresh_cache_has_all_counters(self, tmp_path: Path) -> None:
        with open_cache(tmp_path / "cache") as cache:
            names = {"fetches", "hits", "requested_tokens", "cached_tokens", "stores", "stored_bytes"}
            assert cache.stats()["fetches"] == 0
            assert names <= cache.stats().keys()


@pytest.mark.parametrize("option", ["ram", "disk", "queue"])
def test_a_float_is_no_size(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is 1.5"):
        open_cache(tmp_path / "cache", **{option: 1.5})


def test_block_sizes_may_change_between_opens(tmp_path: Path) -> None:
    """A block of 8 tokens of an earlier run must not pass for the blocks of 1, 4 or 7 that are stored now."""
    with open_cache(tmp_path / "cache", block_size=8) as cache:
        cache.store(TOKENS, filled(TOKENS))
    for size in (1, 4, 7, 9, 16, 50, 256):
        with open_cache(tmp_path / "cache", block_size=size) as cache:
            check_hit(cache.fetch(TOKENS), TOKENS)
            report = cache.store(TOKENS, filled(TOKENS))
            hit = cache.fetch([*TOKENS, 1])
            assert hit.cached_tokens == report.stored_tokens == 50
            check_hit(hit, [*TOKENS, 1])


@pytest.mark.parametrize("spare", [-1, -1000, 1.5, True, "a", 2**31, 2**70])
def test_bad_room_is_named_hit_or_miss(tmp_path: Path, spare: object) -> None:
    with open_cache(tmp_path / "cache") as cache:
        for tokens in (TOKENS, [1, 2, 3]):
            cache.store(TOKENS, filled(TOKENS))
            with pytest.raises((ValueError, TypeError), match="spare"):
                cache.fetch(tokens, spare=spare)  # type: ignore[arg-type]
