"""Files that somebody made, with checksums that match, in a cache's directory: fetch and store never raise for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import long
from part_reader import header_text, write_sealed
from sessions import MODELS, check, feed, open_for, serve
from support import part_files
from xxh3 import xxh3_64

from prefixcache import HIT_REASONS, STORE_REASONS

PROMPT = list(range(40, 80))


def run_of(model: str, tokens: list[int]) -> list[Any]:
    """Caches after a run of all tokens at once."""
    caches = MODELS[model]()
    feed(caches, tokens, 0)
    return caches


def forge(path: Path, edit: Callable[[dict[str, Any], bytes], bytes]) -> None:
    """Rewrites a part: ``edit`` changes its header and returns its data; the rest is made to fit."""
    text, data = header_text(path)
    header = json.loads(text)
    data = edit(header, data)
    write_sealed(path, json.dumps(header, separators=(",", ":"), ensure_ascii=False), data)


def with_meta(meta: Callable[[str], str]) -> Callable[[dict[str, Any], bytes], bytes]:
    def edit(header: dict[str, Any], data: bytes) -> bytes:
        header["__metadata__"]["meta"] = meta(header["__metadata__"]["meta"])
        return data

    return edit


def layers(change: Callable[[Any], Any]) -> Callable[[dict[str, Any], bytes], bytes]:
    """Changes the structure that the meta text holds, and writes it as we do."""

    def meta(text: str) -> str:
        value = json.loads(text)
        change(value)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    return with_meta(meta)


def each(key: str, value: Any) -> Callable[[Any], None]:
    def change(states: Any) -> None:
        for state in states:
            state[key] = value

    return change


def slots(key: str, value: Any) -> Callable[[Any], None]:
    def change(states: Any) -> None:
        for state in states:
            for slot in state["slots"]:
                slot[key] = value

    return change


def no_tensors(header: dict[str, Any], _: bytes) -> bytes:
    metadata = header.pop("__metadata__")
    header.clear()
    header["__metadata__"] = {**metadata, "tensors": ""}
    return b""


def one_item_each(header: dict[str, Any], _: bytes) -> bytes:
    """Every tensor becomes one byte without axes."""
    metadata = header["__metadata__"]
    names = [name for name in header if name != "__metadata__"]
    for place, name in enumerate(names):
        header[name] = {"dtype": "U8", "shape": [], "data_offsets": [place, place + 1]}
    digest = f"{xxh3_64(b'x'):016x}"
    metadata["tensors"] = ",".join(f"-1:{digest}:{len(name)}:{name}" for name in names)
    return b"x" * len(names)


def another_dtype(header: dict[str, Any], data: bytes) -> bytes:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["dtype"] = {"F32": "I32", "U32": "F32", "F16": "BF16"}.get(entry["dtype"], entry["dtype"])
    return data


def other_names(header: dict[str, Any], data: bytes) -> bytes:
    metadata = header["__metadata__"]
    for name in [name for name in header if name != "__metadata__"]:
        header[name.replace("keys", "kays").replace("/0", "/9")] = header.pop(name)
    metadata["tensors"] = metadata["tensors"].replace("keys", "kays").replace("/0", "/9")
    return data


def as_another_part(header: dict[str, Any], data: bytes) -> bytes:
    part = header["__metadata__"]["part"]
    header["__metadata__"]["part"] = {"kv": "state", "win": "kv", "state": "win"}[part]
    return data


FORGERIES = {
    "empty text": with_meta(lambda text: ""),
    "no json": with_meta(lambda text: "{"),
    "null": with_meta(lambda text: "null"),
    "a number": with_meta(lambda text: "1"),
    "no layers": with_meta(lambda text: "[]"),
    "numbers": with_meta(lambda text: "[1,2]"),
    "deep": with_meta(lambda text: "[" * 100_000 + "]" * 100_000),
    "deep layers": with_meta(lambda text: text[:-2] + ',"children":' + "[" * 5000 + "]" * 5000 + "}]"),
    "spaces": with_meta(lambda text: text + " "),
    "huge number": with_meta(lambda text: text.replace("2", "9" * 5000)),
    "a type nobody knows": layers(each("type", "NoSuchCache")),
    "a type with an odd name": layers(each("type", "../../etc/passwd")),
    "another type": layers(each("type", "ArraysCache")),
    "a list": layers(each("type", "CacheList")),
    "odd meta": layers(each("meta", {"bits": 3, "max_size": -1, "keep": 99, "group_size": 0})),
    "counts turned": layers(each("counts", False)),
    "children": layers(lambda states: states[0].update(children=[dict(states[0])])),
    "one layer more": layers(lambda states: states.append(dict(states[0]))),
    "one layer less": layers(lambda states: states.pop()),
    "another axis": layers(slots("seq_axis", 0)),
    "a far axis": layers(slots("seq_axis", 15)),
    "no axis": layers(slots("seq_axis", None)),
    "another reach": layers(slots("reach", ["window", 3, 1])),
    "names twice": layers(slots("name", "keys")),
    "no slots": layers(each("slots", [])),
    "no tensors": no_tensors,
    "one item each": one_item_each,
    "another dtype": another_dtype,
    "other names": other_names,
    "as another part": as_another_part,
}


# Every forgery on the model that has most, and on every third of the others in turn; the rest where there is more time.
GRID = [
    (name, model) if model == "everything" or (row + column) % 3 == 0 else long(name, model)
    for row, name in enumerate(sorted(FORGERIES))
    for column, model in enumerate(sorted(MODELS))
]


@pytest.mark.parametrize(("name", "model"), GRID)
def test_a_forged_part_is_no_exception(tmp_path: Path, name: str, model: str) -> None:
    with open_for(model, tmp_path) as cache:
        serve(cache, PROMPT)
    for path in part_files(tmp_path):
        forge(path, FORGERIES[name])
    with open_for(model, tmp_path, ram=0) as cache:
        for length in (41, 33, 20):
            hit = cache.fetch([*PROMPT, 1][:length])
            assert hit.reason in HIT_REASONS
            assert 0 <= hit.cached_tokens < length
            assert cache.store(PROMPT, run_of(model, PROMPT)).reason in STORE_REASONS
            cache.flush()
        # What is forged well enough is served: permissions stop a forger, checksums do not.
        cache.clear()
        serve(cache, PROMPT)
        hit = cache.fetch([*PROMPT, 1])
        check(hit.caches, PROMPT[: hit.cached_tokens])
        assert hit.cached_tokens == len(PROMPT)
