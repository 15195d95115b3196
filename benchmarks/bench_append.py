"""Claim: the first token after a restore copies no prefix."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from harness import Numbers, Row, Settings, main, timed
from workload import append_one, check_hit, fill_directory, filled_caches, opened, prompt, ram_for


def after_restore(tokens: int, tier: str, rounds: int, scratch: str) -> Numbers:
    on_disk = tier == "ssd"
    stored = fill_directory(Path(scratch), tokens) if on_disk else prompt(tokens)
    first, second = [], []
    with opened(Path(scratch) if on_disk else None, 0 if on_disk else ram_for(tokens)) as cache:
        if not on_disk:
            cache.store(stored, filled_caches(tokens))
        for _ in range(rounds):
            hit = cache.fetch([*stored, 1])
            check_hit(hit, tokens)
            first.append(timed(lambda h=hit: append_one(h.caches)))  # type: ignore[misc]
            second.append(timed(lambda h=hit: append_one(h.caches)))  # type: ignore[misc]
    return {"first": statistics.median(first) * 1e3, "second": statistics.median(second) * 1e3}


def rows(settings: Settings) -> Iterator[Row]:
    for tokens in settings.tokens:
        for tier, where in (("ram", "RAM"), ("ssd", "page cache")):
            got = settings.run(after_restore, tokens=tokens, tier=tier)
            # At most 2 ms, or three times the second one: whichever is larger.
            limit = max(2.0, 3 * got["second"])
            yield Row(
                f"first 1-token append, all layers, after a restore from {where}",
                tokens,
                got["first"],
                "ms",
                f"<= {limit:.1f}",
                f"second append, {got['second']:.2f} ms",
            )


if __name__ == "__main__":
    main(rows, [after_restore])
