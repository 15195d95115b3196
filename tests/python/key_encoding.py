"""The encoding behind the keys once more, with hashlib alone: what the tests compare the library with."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

Range = tuple[int, int, bytes]


def _sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def namespace_id(text: str) -> bytes:
    return _sha(b"prefixcache.n.v1" + _sized(text.encode()))


def chain_root(namespace: str, salts: Sequence[tuple[int, bytes]] = ()) -> bytes:
    encoded = b"".join(bytes([purpose]) + _sized(value) for purpose, value in salts)
    return _sha(b"prefixcache.r.v1" + namespace_id(namespace) + struct.pack("<I", len(salts)) + encoded)


def block_key(namespace: str, parent: bytes, tokens: Sequence[int], content: Iterable[Range] = ()) -> bytes:
    ranges = sorted(set(content))
    return _sha(
        b"prefixcache.b.v1"
        + namespace_id(namespace)
        + bytes(16)
        + _sized(parent)
        + struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
        + struct.pack("<I", len(ranges))
        + b"".join(struct.pack("<qq", start, end) + digest for start, end, digest in ranges)
    )


def chain_hashes(
    namespace: str,
    tokens: Sequence[int],
    block_size: int,
    salts: Sequence[tuple[int, bytes]] = (),
    content: Sequence[Range] = (),
) -> list[bytes]:
    keys: list[bytes] = []
    parent = chain_root(namespace, salts)
    for lo in range(0, len(tokens) - block_size + 1, block_size):
        here = [item for item in content if lo <= item[0] < lo + block_size]
        parent = block_key(namespace, parent, tokens[lo : lo + block_size], here)
        keys.append(parent)
    return keys


def salt_bytes(value: Any) -> bytes:
    """The tagged encoding of one salt."""
    kinds = {bool: b"b", int: b"i", str: b"s", bytes: b"y"}
    if value is None:
        return b"n"
    if type(value) is tuple:
        return b"t" + struct.pack("<Q", len(value)) + b"".join(map(salt_bytes, value))
    tag = kinds[type(value)]
    if type(value) is bool:
        return tag + str(int(value)).encode()
    if type(value) is int:
        value = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if type(value) is str:
        value = value.encode()
    return tag + struct.pack("<Q", len(value)) + value
