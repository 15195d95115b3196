"""Keys of blocks: the encoding, content keys, the chain that holds tokens and keys; digests of arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import key_encoding as reference
import mlx.core as mx
import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache._core import KeyChain, Purpose, TokenBuffer, array_digest, block_key, chain_hashes, sha256

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "block_hash_v1.json").read_text(encoding="utf-8"))
LARGEST = 2**32 - 1

TOKEN = st.integers(0, LARGEST)
DIGEST = st.binary(min_size=32, max_size=32)
SALTS = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=5)), max_size=3)
RANGE = st.tuples(st.integers(0, 40), st.integers(1, 9), DIGEST).map(lambda item: (item[0], sum(item[:2]), item[2]))
CONTENT = st.lists(RANGE, max_size=5)
# Few enough that two lists of them often begin alike.
FEW_RANGES = [(0, 1, b"a" * 32), (3, 5, b"a" * 32), (3, 5, b"b" * 32), (9, 12, b"a" * 32)]
FEW = st.lists(st.sampled_from(FEW_RANGES), max_size=3)


def content_of(items: list[list[Any]]) -> list[tuple[int, int, bytes]]:
    return [(start, end, bytes.fromhex(digest)) for start, end, digest in items]


def salts_of(items: list[list[Any]]) -> list[tuple[int, bytes]]:
    return [(purpose, bytes.fromhex(value)) for purpose, value in items]


# --- the encoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["chains"], ids=lambda case: case["name"])
def test_golden_chains(case: dict[str, Any]) -> None:
    salts, content = salts_of(case["salts"]), content_of(case["content"])
    chain = KeyChain(case["namespace"], salts, case["tokens"], case["block_size"], content)
    assert chain.root.hex() == case["root"]
    assert [key.hex() for key in chain.keys] == case["keys"]
    assert chain_hashes(case["namespace"], case["tokens"], case["block_size"], salts, content) == chain.keys


@pytest.mark.parametrize("case", GOLDEN["blocks"], ids=lambda case: case["name"])
def test_golden_blocks(case: dict[str, Any]) -> None:
    key = block_key(case["namespace"], bytes.fromhex(case["parent"]), case["tokens"], content_of(case["content"]))
    assert key.hex() == case["key"]


@given(st.text(max_size=9), st.lists(TOKEN, max_size=40), st.integers(1, 12), SALTS, CONTENT)
@settings(deadline=None)
def test_chains_equal_the_reference(
    namespace: str, tokens: list[int], block_size: int, salts: list[Any], content: list[Any]
) -> None:
    expected = reference.chain_hashes(namespace, tokens, block_size, salts, content)
    assert chain_hashes(namespace, tokens, block_size, salts, content) == expected
    chain = KeyChain(namespace, salts, tokens, block_size, content)
    assert chain.keys == expected
    assert chain.root == reference.chain_root(namespace, salts)


@given(st.text(max_size=9), st.binary(max_size=40), st.lists(TOKEN, max_size=9), CONTENT)
@settings(deadline=None)
def test_blocks_equal_the_reference(namespace: str, parent: bytes, tokens: list[int], content: list[Any]) -> None:
    assert block_key(namespace, parent, tokens, content) == reference.block_key(namespace, parent, tokens, content)


@given(st.lists(TOKEN, min_size=1, max_size=30), st.lists(TOKEN, min_size=1, max_size=30), st.integers(1, 6))
@settings(deadline=None)
def test_keys_are_equal_exactly_where_prefixes_are(a: list[int], b: list[int], block_size: int) -> None:
    keys_a, keys_b = chain_hashes("n", a, block_size), chain_hashes("n", b, block_size)
    for i in range(min(len(keys_a), len(keys_b))):
        end = (i + 1) * block_size
        assert (keys_a[i] == keys_b[i]) == (a[:end] == b[:end])


def test_keys_are_equal_in_every_process(tmp_path: Path) -> None:
    code = (
        "from prefixcache._core import KeyChain\n"
        "c = KeyChain('mod\\xe8le', [(1, b'tenant')], list(range(70)), 16, [(20, 30, bytes(32))])\n"
        "print(*[k.hex() for k in c.keys], c.root.hex(), c.cut_key(len(c), 70).hex())"
    )
    import_path = os.pathsep.join(sys.path)
    outputs = set()
    for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("4242", "tr_TR.UTF-8")):
        environment = {
            **os.environ,
            "PYTHONPATH": import_path,
            "PYTHONHASHSEED": seed,
            "LC_ALL": locale,
            "LANG": locale,
            "PYTHONUTF8": "0",
        }
        folder = tmp_path / seed
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, check=True, timeout=60
        )
        outputs.add(done.stdout)
    chain = KeyChain("modèle", [(1, b"tenant")], list(range(70)), 16, [(20, 30, bytes(32))])
    here = [*(key.hex() for key in chain.keys), chain.root.hex(), chain.cut_key(len(chain), 70).hex()]
    assert [output.decode().split() for output in outputs] == [here]


# --- content keys ------------------------------------------------------------------------------------------------


def image(name: str) -> bytes:
    return sha256(name.encode())


def test_content_enters_the_first_block_it_overlaps_and_all_later_ones() -> None:
    tokens = list(range(24))
    plain = chain_hashes("n", tokens, 4)
    for start, end in ((4, 5), (7, 8), (7, 21), (4, 24), (5, 100)):
        salted = chain_hashes("n", tokens, 4, content=[(start, end, image("a"))])
        assert salted[0] == plain[0]
        assert all(one != other for one, other in zip(salted[1:], plain[1:], strict=True))


def test_position_order_and_value_of_content_matter() -> None:
    tokens = [9] * 16
    a, b = image("a"), image("b")
    cases: list[list[tuple[int, int, bytes]]] = [
        [],
        [(0, 2, a)],
        [(0, 2, b)],
        [(1, 3, a)],
        [(0, 3, a)],
        [(4, 6, a)],
        [(0, 2, a), (4, 6, b)],
        [(0, 2, b), (4, 6, a)],
        [(0, 2, a), (2, 4, b)],
        [(0, 2, b), (2, 4, a)],
    ]
    last = {chain_hashes("n", tokens, 8, content=case)[-1] for case in cases}
    assert len(last) == len(cases)


def test_the_order_of_the_list_does_not_matter() -> None:
    ranges = [(5, 6, image("a")), (0, 2, image("b")), (5, 6, image("c"))]
    assert chain_hashes("n", range(8), 4, content=ranges) == chain_hashes("n", range(8), 4, content=ranges[::-1])


def test_70000_content_keys_give_70000_keys() -> None:
    tokens = TokenBuffer(range(4))
    keys = {block_key("n", b"", tokens, [(0, 1, image(str(i)))]) for i in range(70_000)}
    assert len(keys) == 70_000


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ((-1, 2, bytes(32)), ValueError, r"\[-1, 2\)"),
        ((3, 3, bytes(32)), ValueError, r"\[3, 3\)"),
        ((0, 2, bytes(31)), ValueError, "32 bytes, not 31"),
        ((0, 2, "x"), TypeError, "incompatible"),
    ],
)
def test_bad_content_is_refused(item: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KeyChain("n", [], [1, 2, 3], 2, [item])


def test_bad_block_sizes_and_purposes_are_refused() -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"block_size must be at least 1, not {size}"):
            KeyChain("n", [], [], size)
    for purpose in (0, int(Purpose.content), 4, 300):
        with pytest.raises(ValueError, match=f"not {purpose}"):
            chain_hashes("n", [1], 1, [(purpose, b"")])


# --- KeyChain ----------------------------------------------------------------------------------------------------


@given(st.lists(TOKEN, max_size=40), st.lists(st.lists(TOKEN, max_size=9), max_size=5), st.integers(1, 6), CONTENT)
@settings(deadline=None)
def test_extend_equals_hashing_at_once(
    tokens: list[int], more: list[list[int]], block_size: int, content: list[Any]
) -> None:
    chain = KeyChain("n", [], tokens, block_size, content)
    for part in more:
        chain.extend(part)
        tokens = tokens + part
        assert chain.tokens.tolist() == tokens
        assert chain.keys == reference.chain_hashes("n", tokens, block_size, (), content)


@given(
    st.lists(st.integers(0, 1), max_size=20),
    st.lists(st.integers(0, 1), max_size=20),
    st.integers(1, 4),
    FEW,
    FEW,
    st.sampled_from([[], [(1, b"t")]]),
    st.sampled_from([[], [(1, b"t")]]),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=examples(400))
def test_a_previous_chain_never_changes_a_key(
    before: list[int],
    tokens: list[int],
    block_size: int,
    content_before: list[Any],
    content: list[Any],
    salts_before: list[Any],
    salts: list[Any],
    other_size: int,
) -> None:
    previous = KeyChain("n", salts_before, before, other_size, content_before)
    chain = KeyChain("n", salts, tokens, block_size, content, previous)
    assert chain.keys == reference.chain_hashes("n", tokens, block_size, salts, content)


def test_chains_that_share_tokens_extend_apart() -> None:
    first = KeyChain("n", [], list(range(10)), 4)
    first.extend([10])
    second = KeyChain("n", [], first.tokens, 4, previous=first)
    held = first.tokens
    first.extend([1, 2])
    second.extend([3, 4])
    assert held.tolist() == list(range(11))
    assert first.tokens.tolist() == [*range(11), 1, 2]
    assert second.tokens.tolist() == [*range(11), 3, 4]
    assert first.keys[:2] == second.keys[:2] and first.keys[2] != second.keys[2]


def test_blocks_and_tail_of_a_chain() -> None:
    content = [(2, 3, image("a")), (9, 10, image("b")), (11, 12, image("behind the tail"))]
    chain = KeyChain("n", [], range(11), 4, content[::-1])
    assert (len(chain), chain.block_size, chain.content) == (2, 4, content)
    assert [chain.block_tokens(i).tolist() for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [chain.content_of_block(i) for i in range(3)] == [content[:1], [], content[1:2]]
    assert [chain.key(0), chain.key(1)] == chain.keys
    assert chain.cut_key(2, 11) == reference.block_key("n", chain.key(1), [8, 9, 10], content[1:2])
    for call in (chain.block_tokens, chain.content_of_block):
        for i in (-1, 3):
            with pytest.raises(IndexError, match=f"block {i} of 3"):
                call(i)
    with pytest.raises(IndexError, match="block 2 of 2"):
        chain.key(2)


def test_the_tail_of_a_short_prompt_hangs_on_the_root() -> None:
    chain = KeyChain("n", [(1, b"t")], [1, 2], 4)
    assert chain.keys == []
    assert chain.cut_key(0, 2) == reference.block_key("n", chain.root, [1, 2])


@pytest.mark.parametrize("tokens", [[], [1, 2, 3, 4]])
def test_no_tail_is_an_error(tokens: list[int]) -> None:
    chain = KeyChain("n", [], tokens, 4)
    with pytest.raises(IndexError, match=f"block {len(chain)} of {len(chain)}"):
        chain.cut_key(len(chain), len(tokens))


def test_a_tail_is_not_the_whole_block_of_the_same_tokens() -> None:
    whole = KeyChain("n", [], [1, 2, 3], 3)
    tail = KeyChain("n", [], [1, 2, 3], 4)
    # The same tokens after the same parent are the same prefix, however the blocks are cut.
    assert whole.key(0) == tail.cut_key(0, 3)


def test_many_threads_read_one_chain() -> None:
    chain = KeyChain("n", [], range(5000), 16)
    expected = (chain.keys, chain.cut_key(312, 5000), chain.block_tokens(7).tolist())
    results: list[Any] = []

    def read() -> None:
        for _ in range(50):
            results.append((chain.keys, chain.cut_key(312, 5000), chain.block_tokens(7).tolist()))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200 and all(result == expected for result in results)


# --- array_digest ------------------------------------------------------------------------------------------------


def test_array_digest_sees_values_dtype_and_shape_but_not_strides() -> None:
    weights = mx.arange(6000, dtype=mx.float32).reshape(60, 100)
    digest = array_digest(weights)
    assert len(digest) == 32
    assert array_digest(mx.contiguous(weights.T).T) == digest
    assert array_digest(weights, threads=3) == digest
    others = [weights.reshape(100, 60), weights.T, weights.view(mx.int32), weights.astype(mx.float16)]
    changed = np.array(weights)
    changed.view(np.uint32)[59, 99] ^= 1
    others.append(mx.array(changed))
    assert len({digest, *map(array_digest, others)}) == 1 + len(others)


def test_array_digest_tells_the_signs_of_zero_and_nans_apart() -> None:
    bits = np.array([0, 0x80000000, 0x7FC00000, 0x7FC00001], dtype=np.uint32)
    digests = {array_digest(mx.array(bits[i : i + 1]).view(mx.float32)) for i in range(4)}
    assert len(digests) == 4
