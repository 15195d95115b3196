"""Claim: keys cost a few nanoseconds a token, and are computed once a request."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from harness import Numbers, Row, Settings, interleaved, main, timed
from workload import BLOCK, empty_caches, opened, prompt

from prefixcache._core import KeyChain, TokenBuffer

TOKENS = 131_072


def chains(rounds: int, scratch: str) -> Numbers:
    as_list = prompt(TOKENS)
    as_int32 = array("i", as_list)
    converted = TokenBuffer(as_list)
    seconds = interleaved(
        {
            "list": lambda: timed(lambda: KeyChain("bench", [], as_list, BLOCK)),
            "int32": lambda: timed(lambda: KeyChain("bench", [], as_int32, BLOCK)),
            "convert": lambda: timed(lambda: TokenBuffer(as_list)),
            "hash": lambda: timed(lambda: KeyChain("bench", [], converted, BLOCK)),
        },
        3 * rounds,
    )
    return {name: value / TOKENS * 1e9 for name, value in seconds.items()}


def requests(rounds: int, scratch: str) -> Numbers:
    """The calls of one request on an empty cache: all of their time is keys."""
    with opened(None, ram=1 << 20) as cache:
        prompts = [prompt(TOKENS, seed) for seed in range(3 * rounds)]
        coming = iter(prompts)
        current = prompts[0]

        def fetch() -> float:
            nonlocal current
            current = next(coming)
            return timed(lambda: cache.fetch(current))

        seconds = interleaved(
            {
                "fetch": fetch,
                "convert": lambda: timed(lambda: TokenBuffer(current)),
                "record": lambda: timed(lambda: cache.record(current, empty_caches())),
            },
            len(prompts),
        )
    return {name: value / TOKENS * 1e9 for name, value in seconds.items()}


def rows(settings: Settings) -> Iterator[Row]:
    cost = settings.run(chains)
    yield Row("keys of a Python list", TOKENS, cost["list"], "ns a token", "<= 8")
    yield Row("keys of an int32 buffer", TOKENS, cost["int32"], "ns a token", "<= 5")
    yield Row("of it: list to integers", TOKENS, cost["convert"], "ns a token")
    yield Row("of it: hashing", TOKENS, cost["hash"], "ns a token")
    calls = settings.run(requests)
    yield Row("fetch of an unknown list, whole call", TOKENS, calls["fetch"], "ns a token")
    yield Row("record of the same list after it", TOKENS, calls["record"], "ns a token")
    yield Row(
        "hashing left in record after fetch",
        TOKENS,
        max(0.0, calls["record"] - calls["convert"]) / cost["hash"],
        "x a hashing",
        "<= 0.5",
        note="record's time less one list conversion: the tokens are compared, not hashed",
    )


if __name__ == "__main__":
    main(rows, [chains, requests])
