"""Claim: loading is not slower than mlx-lm's own file, and everything up to the first token is several times faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from harness import Numbers, Row, Settings, interleaved, main, timed
from mlx_lm.models.cache import LRUPromptCache, load_prompt_cache, save_prompt_cache
from workload import ROW_BYTES, append_one, check_hit, filled_caches, opened, prompt, ram_for


def files(tokens: int, rounds: int, scratch: str) -> Numbers:
    """One file of mlx-lm beside our blocks of the same caches, both in the page cache."""
    directory, one_file = Path(scratch) / "blocks", str(Path(scratch) / "one.safetensors")
    stored = prompt(tokens)
    request = [*stored, 1]
    saved, flushed = _save(tokens, stored, one_file, directory)
    times: dict[str, list[float]] = {}

    def load() -> float:
        loaded: list[Any] = []

        def work() -> None:
            loaded.extend(load_prompt_cache(one_file))
            mx.eval([c.state for c in loaded])

        return _with_append("load", times, timed(work), loaded)

    def first_read() -> float:
        with opened(directory, 0) as fresh:
            return fetch("first_read", fresh)

    def fetch(name: str, cache: Any) -> float:
        hits: list[Any] = []
        seconds = timed(lambda: hits.append(cache.fetch(request)))
        check_hit(hits[0], tokens)
        return _with_append(name, times, seconds, hits[0].caches)

    with opened(directory, 0) as again:
        for warm in (load, first_read, lambda: fetch("fetch", again)):
            warm()
        seconds = interleaved({"load": load, "first_read": first_read, "fetch": lambda: fetch("fetch", again)}, rounds)
    appends = {f"{name}_append": sorted(values)[len(values) // 2] for name, values in times.items()}
    return {**seconds, **appends, "save": saved, "flush": flushed}


def _save(tokens: int, stored: list[int], one_file: str, directory: Path) -> tuple[float, float]:
    """Seconds of both ways to bring the same caches to disk. Nothing of them stays in the process."""
    caches = filled_caches(tokens)
    saved = timed(lambda: save_prompt_cache(one_file, caches))
    with opened(directory, 0) as cache:

        def store() -> None:
            report = cache.store(stored, caches)
            if report.stored_tokens != tokens:
                raise RuntimeError(f"the store kept less than asked for: {report}")
            cache.flush()

        return saved, timed(store)


def _with_append(name: str, appends: dict[str, list[float]], seconds: float, caches: list[Any]) -> float:
    """The seconds of the load; those of load and first append together go to ``appends``."""
    appends.setdefault(name, []).append(seconds + timed(lambda: append_one(caches)))
    return seconds


def in_memory(tokens: int, rounds: int, scratch: str) -> Numbers:
    """mlx-lm's server cache beside our RAM tier. Its entry is as decoding leaves it, with room for more rows."""
    stored = prompt(tokens)
    request = [*stored, 1]
    caches = filled_caches(tokens, room=256)
    theirs = LRUPromptCache()
    with opened(None, ram_for(tokens)) as ours:
        ours.store(stored, caches)
        theirs.insert_cache("model", stored, caches)

        def fetch_theirs() -> None:
            found, rest = theirs.fetch_nearest_cache("model", request)
            if len(rest) != 1:
                raise RuntimeError(f"{len(rest)} tokens are left to run, expected 1")
            append_one(found)

        def fetch_ours() -> None:
            hit = ours.fetch(request)
            check_hit(hit, tokens)
            append_one(hit.caches)

        fetch_theirs()
        fetch_ours()
        return interleaved({"theirs": lambda: timed(fetch_theirs), "ours": lambda: timed(fetch_ours)}, rounds)


def rows(settings: Settings) -> Iterator[Row]:
    for tokens in settings.tokens:
        gate = ">= 3" if tokens == 8192 else None
        for recycled in (False, True):
            where = "memory touched before" if recycled else "the allocator's defaults"
            got = settings.run(files, tokens=tokens, recycled=recycled)
            theirs = f"load_prompt_cache, {_ms(got['load'])}"
            both = f"load_prompt_cache and append, {_ms(got['load_append'])}"
            for name, what in (("fetch", "checksums compared before"), ("first_read", "first read")):
                ratio = got["load"] / got[name]
                yield Row(f"load, {what}; {where}", tokens, ratio, "x faster", ">= 1", theirs, _ms(got[name]))
                ratio = got["load_append"] / got[f"{name}_append"]
                said = _ms(got[f"{name}_append"])
                yield Row(f"load and first append, {what}; {where}", tokens, ratio, "x faster", gate, both, said)
        size = tokens * ROW_BYTES / 1e9
        said = f"save_prompt_cache, {size / got['save']:.1f} GB/s"
        yield Row("store and flush, first time", tokens, size / got["flush"], "GB/s", None, said)
        for recycled in (False, True):
            where = "memory touched before" if recycled else "the allocator's defaults"
            got = settings.run(in_memory, tokens=tokens, recycled=recycled)
            ratio = got["theirs"] / got["ours"]
            against = f"LRUPromptCache, {_ms(got['theirs'])}"
            yield Row(
                f"fetch and first append from RAM; {where}", tokens, ratio, "x faster", gate, against, _ms(got["ours"])
            )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    main(rows, [files, in_memory])
