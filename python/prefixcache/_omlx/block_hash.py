"""Chained block hashes under oMLX's names, over the same keys as everything else here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NewType

import mlx.core as mx

from prefixcache._core import KeyChain, TokenBuffer, array_digest, block_key, sha256
from prefixcache._keys import encode_salt

BlockHash = NewType("BlockHash", bytes)
ExtraKeys = tuple[Any, ...]
ExtraKeyRanges = Sequence[tuple[int, ExtraKeys]]


def compute_block_hash(
    parent_hash: bytes | None,
    token_ids: Any,
    extra_keys: ExtraKeys | None = None,
    model_name: str | None = None,
) -> BlockHash:
    """The 32-byte hash of one block: equal hashes mean equal model name, tokens, salts and parent.

    ``parent_hash``: any bytes; None and ``b""`` mean that the block is the first. ``token_ids``: a list, tuple, numpy
    or MLX array of integers, which may be equal whatever holds them. ``extra_keys``: the salt of this block, nothing
    if falsy. ``model_name``: None is ``""``. Any thread. ValueError or TypeError for tokens that are none.
    """
    namespace = model_name or ""
    return BlockHash(block_key(namespace, parent_hash or _root(namespace), token_ids, _content(extra_keys)))


def resolve_block_extra_keys(
    block_end: int,
    extra_keys: ExtraKeys | None = None,
    extra_key_token_start: int | None = None,
    extra_key_ranges: ExtraKeyRanges | None = None,
) -> ExtraKeys | None:
    """The salt of the block that ends before token ``block_end``.

    Ranges win: of the ``(start, keys)`` pairs, ascending by start, the last that starts before ``block_end``. Without
    ranges it is ``extra_keys``, from the block on that reaches behind ``extra_key_token_start``. AssertionError for
    ranges out of order.
    """
    if extra_key_ranges:
        _check_ascending(extra_key_ranges)
        found = None
        for start, keys in extra_key_ranges:
            if start >= block_end:
                break
            found = keys
        return found
    if extra_key_token_start is not None and block_end <= extra_key_token_start:
        return None
    return extra_keys


def block_hashes(
    tokens: Any,
    block_size: int,
    model_name: str | None = None,
    extra_keys: ExtraKeys | None = None,
    extra_key_token_start: int | None = None,
    extra_key_ranges: ExtraKeyRanges | None = None,
) -> list[bytes]:
    """The hashes of all whole blocks of ``tokens``, as ``compute_block_hash`` chains them, each hashed once.

    ValueError for a block size below 1; ValueError or TypeError for tokens that are none.
    """
    namespace = model_name or ""
    buffer = tokens if isinstance(tokens, TokenBuffer) else TokenBuffer(tokens)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    count = len(buffer) // block_size
    salts = _block_salts(count, block_size, extra_keys, extra_key_token_start, extra_key_ranges)
    plain = next((number for number, salt in enumerate(salts) if salt), count)
    keys = KeyChain(namespace, [], buffer.slice(0, plain * block_size), block_size).keys
    parent = keys[-1] if keys else _root(namespace)
    salt: ExtraKeys | None = None
    content: list[tuple[int, int, bytes]] = []
    for number in range(plain, count):
        if salts[number] is not salt:
            salt = salts[number]
            content = _content(salt)
        block = buffer.slice(number * block_size, (number + 1) * block_size)
        parent = block_key(namespace, parent, block, content)
        keys.append(parent)
    return keys


def block_digests(
    count: int,
    block_size: int,
    extra_keys: ExtraKeys | None = None,
    extra_key_token_start: int | None = None,
    extra_key_ranges: ExtraKeyRanges | None = None,
) -> list[bytes | None]:
    """A 32-byte digest of the salt of each of ``count`` blocks, None for a block without one; [] if none has one."""
    if not extra_keys and not extra_key_ranges:
        return []
    salts = _block_salts(count, block_size, extra_keys, extra_key_token_start, extra_key_ranges)
    return [sha256(_encoded(salt)) if salt else None for salt in salts]


def _block_salts(
    count: int,
    block_size: int,
    extra_keys: ExtraKeys | None,
    token_start: int | None,
    ranges: ExtraKeyRanges | None,
) -> list[ExtraKeys | None]:
    """``resolve_block_extra_keys`` for every block, in one walk over the ranges."""
    if not ranges:
        plain = 0 if token_start is None else min(count, max(0, token_start // block_size))
        return [None] * plain + [extra_keys] * (count - plain)
    _check_ascending(ranges)
    salts: list[ExtraKeys | None] = []
    current, following = None, 0
    for number in range(1, count + 1):
        while following < len(ranges) and ranges[following][0] < number * block_size:
            current = ranges[following][1]
            following += 1
        salts.append(current)
    return salts


def _check_ascending(ranges: ExtraKeyRanges) -> None:
    starts = [start for start, _ in ranges]
    if starts != sorted(starts):
        raise AssertionError(f"extra_key_ranges must ascend by their start, not {starts}")


@lru_cache(maxsize=64)
def _root(namespace: str) -> bytes:
    return KeyChain(namespace, [], [], 1).root


def _content(extra_keys: ExtraKeys | None) -> list[tuple[int, int, bytes]]:
    return [(0, 1, sha256(_encoded(extra_keys)))] if extra_keys else []


def _encoded(value: Any) -> bytes:
    """A salt as bytes. Callers of oMLX hand in what they like, so nothing is refused."""
    try:
        return encode_salt(value)
    except (TypeError, ValueError):
        pass
    if isinstance(value, (tuple, list)):
        parts = [_encoded(item) for item in value]
        kind = "tuple" if isinstance(value, tuple) else "list"
        return _tagged(kind, b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    if isinstance(value, mx.array):
        return _tagged("array", array_digest(value))
    try:
        view = memoryview(value)  # numpy shortens the repr of a long array, so its bytes are taken
    except TypeError:
        return _tagged(f"{type(value).__module__}.{type(value).__qualname__}", encode_salt(repr(value)))
    return _tagged(f"buffer {view.format} {view.shape}", view.tobytes())


def _tagged(kind: str, data: bytes) -> bytes:
    name = encode_salt(kind)
    return b"r" + len(name).to_bytes(8, "little") + name + data
