"""Claim: loading is not slower than mlx-lm's own file, and everything up to the first token is several times faster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import Numbers, Row, Settings, main, timed
from mlx_lm.models.cache import LRUPromptCache, load_prompt_cache, save_prompt_cache
from workload import ROW_BYTES, append_one, check_hit, filled_caches, opened, prompt, ram_for

Way = Callable[[], list[Any]]


def save(tokens: int, folder: str, rounds: int, scratch: str) -> Numbers:
    """Both ways to bring the same caches to disk; the files stay for `load`."""
    caches = filled_caches(tokens)
    saved = timed(lambda: save_prompt_cache(f"{folder}/one.safetensors", caches))
    with opened(Path(folder) / "blocks", 0) as cache:

        def store() -> None:
            report = cache.store(prompt(tokens), caches)
            if report.stored_tokens != tokens:
                raise RuntimeError(f"the store kept less than asked for: {report}")
            cache.flush()

        return {"save": saved, "store": timed(store)}


def load(tokens: int, way: str, append: bool, folder: str, rounds: int, scratch: str) -> Numbers:
    """One way alone in its process: the allocator remembers what went before. Files are in the page cache."""
    request = [*prompt(tokens), 1]
    blocks = Path(folder) / "blocks"

    def theirs() -> list[Any]:
        caches = load_prompt_cache(f"{folder}/one.safetensors")
        mx.eval([cache.state for cache in caches])
        return list(caches)

    def first_read() -> list[Any]:
        with opened(blocks, 0) as fresh:
            return _fetched(fresh, request)

    with opened(blocks, 0) as again:
        ways: dict[str, Way] = {"theirs": theirs, "first_read": first_read, "again": lambda: _fetched(again, request)}
        return {"seconds": _median_seconds(ways[way], append, rounds)}


def in_memory(tokens: int, way: str, rounds: int, scratch: str) -> Numbers:
    """mlx-lm's server cache or our RAM tier. The entry is as decoding leaves it, with room for more rows."""
    stored = prompt(tokens)
    request = [*stored, 1]
    caches = filled_caches(tokens, room=256)
    theirs = LRUPromptCache()

    def fetch_theirs() -> list[Any]:
        found, rest = theirs.fetch_nearest_cache("model", request)
        if len(rest) != 1:
            raise RuntimeError(f"{len(rest)} tokens are left to run, expected 1")
        return list(found)

    with opened(None, ram_for(tokens)) as ours:
        if way == "theirs":
            theirs.insert_cache("model", stored, caches)
            return {"seconds": _median_seconds(fetch_theirs, True, rounds)}
        ours.store(stored, caches)
        del caches
        return {"seconds": _median_seconds(lambda: _fetched(ours, request), True, rounds)}


def _fetched(cache: Any, request: list[int]) -> list[Any]:
    hit = cache.fetch(request)
    check_hit(hit, len(request) - 1)
    return list(hit.caches)


def _median_seconds(way: Way, append: bool, rounds: int) -> float:
    """Of the way, and of a first append to every layer behind it."""

    def work() -> None:
        caches = way()
        if append:
            append_one(caches)

    work()
    return statistics.median(timed(work) for _ in range(rounds))


def rows(settings: Settings) -> Iterator[Row]:
    for tokens in settings.tokens:
        folder = settings.scratch / f"saved-{tokens}"
        folder.mkdir()
        got = settings.run(save, tokens=tokens, folder=str(folder))
        size = tokens * ROW_BYTES / 1e9
        said = f"save_prompt_cache, {size / got['save']:.1f} GB/s"
        yield Row("store and flush", tokens, size / got["store"], "GB/s", None, said)
        for recycled in (False, True):
            yield from _load_rows(settings, tokens, str(folder), recycled)
        for recycled in (False, True):
            yield _memory_row(settings, tokens, recycled)


def _where(recycled: bool) -> str:
    return "memory touched before" if recycled else "the allocator's defaults"


def _load_rows(settings: Settings, tokens: int, folder: str, recycled: bool) -> Iterator[Row]:
    for append, what in ((False, "load"), (True, "load and first append")):
        got = {
            way: settings.run(load, recycled=recycled, tokens=tokens, way=way, append=append, folder=folder)["seconds"]
            for way in ("theirs", "again", "first_read")
        }
        against = f"load_prompt_cache{' and append' if append else ''}, {_ms(got['theirs'])}"
        gate = (">= 3" if tokens == 8192 else None) if append else ">= 1"
        for way, how in (("again", "checksums compared before"), ("first_read", "first read")):
            ratio = got["theirs"] / got[way]
            name = f"{what}, {how}; {_where(recycled)}"
            yield Row(name, tokens, ratio, "x faster", gate, against, _ms(got[way]))


def _memory_row(settings: Settings, tokens: int, recycled: bool) -> Row:
    theirs, ours = (
        settings.run(in_memory, recycled=recycled, tokens=tokens, way=way)["seconds"] for way in ("theirs", "ours")
    )
    # What a server's user meets is the allocator as it is.
    gate = ">= 3" if tokens == 8192 and not recycled else None
    name = f"fetch and first append from RAM; {_where(recycled)}"
    return Row(name, tokens, theirs / ours, "x faster", gate, f"LRUPromptCache, {_ms(theirs)}", _ms(ours))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    main(rows, [save, load, in_memory])
