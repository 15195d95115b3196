"""Salts and content keys of a request, encoded, and the chain of keys that they give with its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Protocol, SupportsIndex, TypeAlias

from prefixcache._core import KeyChain, Purpose, TokenBuffer, sha256

Salt: TypeAlias = "None | bool | int | str | bytes | tuple[Salt, ...]"
ContentRange: TypeAlias = "tuple[int, int, bytes]"
KvFormat: TypeAlias = "tuple[int, int, int]"

_LARGEST_POSITION = 2**63 - 1


class Chain(Protocol):
    """What storing and restoring ask of the keys of a sequence; a ``KeyChain`` is one."""

    @property
    def block_size(self) -> int: ...
    @property
    def tokens(self) -> TokenBuffer: ...
    @property
    def root(self) -> bytes: ...
    def key(self, i: int, /) -> bytes: ...
    def cut_key(self, i: int, depth: int, /) -> bytes: ...
    def content_of_block(self, i: int, /) -> list[ContentRange]: ...


def encode_salt(value: Salt) -> bytes:
    """Encode ``value`` so that different values, or values of different types, never give equal bytes.

    The bytes enter keys that are on disk: they must not change. TypeError for any other type.
    """
    try:
        return _encode(value)
    except RecursionError:
        raise ValueError("a salt is nested too deeply") from None


def _encode(value: Salt) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, int):
        return _tagged(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, str):
        # Lone surrogates are legal in a str; they must not raise here, nor be equal to anything else.
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _tagged(b"y", value)
    if isinstance(value, tuple):
        return b"t" + len(value).to_bytes(8, "little") + b"".join(_encode(item) for item in value)
    raise TypeError(f"a salt must be None, bool, int, str, bytes or a tuple of them, not {type(value).__name__}")


def _tagged(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def normalise_content(
    extra_keys: Iterable[tuple[int, int, Salt]] | None, length: int | None = None
) -> list[ContentRange]:
    """Turn ``(start, end, key)`` ranges of tokens into sorted ``(start, end, digest)``, equal ones once.

    ``length``: refuse ranges that end behind this many tokens; None lets them lie behind the tokens known so far.
    ValueError for a range that is empty, negative or too long; TypeError for what is no such triple.
    """
    if extra_keys is None:
        return []
    if isinstance(extra_keys, (str, bytes)) or not isinstance(extra_keys, Iterable):
        raise TypeError(f"extra_keys must be a list of (start, end, key), not {type(extra_keys).__name__}")
    return sorted({_content_range(item, number, length) for number, item in enumerate(extra_keys)})


def _content_range(item: object, number: int, length: int | None) -> ContentRange:
    where = f"extra_keys[{number}]"
    if not isinstance(item, (tuple, list)) or len(item) != 3:
        raise TypeError(f"{where} must be (start, end, key), not {item!r}")
    start, end = _integer(item[0], f"{where}: start"), _integer(item[1], f"{where}: end")
    if start < 0:
        raise ValueError(f"{where}: start must not be negative, not {start}")
    if end <= start:
        raise ValueError(f"{where}: the range [{start}, {end}) is empty")
    limit = _LARGEST_POSITION if length is None else length
    if end > limit:
        raise ValueError(f"{where}: the range [{start}, {end}) ends behind the {limit} tokens")
    return (start, end, sha256(encode_salt(item[2])))


def _integer(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    return index(value)


def request_salts(salt: Salt = None, kv_format: KvFormat | None = None) -> list[tuple[int, bytes]]:
    """Salts of a whole request as ``(purpose, encoded value)``.

    ``salt``: who may share, None for everybody. ``kv_format``: None or ``(bits, group_size, start)``, where
    quantisation begins at token ``start``. ValueError or TypeError for another ``kv_format``.
    """
    salts: list[tuple[int, bytes]] = []
    if salt is not None:
        salts.append((int(Purpose.tenant), encode_salt(salt)))
    if kv_format is not None:
        salts.append((int(Purpose.kv_format), encode_salt(_checked_format(kv_format))))
    return salts


def _checked_format(kv_format: object) -> KvFormat:
    if not isinstance(kv_format, (tuple, list)) or len(kv_format) != 3:
        raise TypeError(f"kv_format must be None or (bits, group_size, start), not {kv_format!r}")
    bits, group_size, start = (_integer(value, f"each of kv_format {kv_format!r}") for value in kv_format)
    if bits < 1 or group_size < 1 or start < 0:
        raise ValueError(f"kv_format (bits, group_size, start) must be >= (1, 1, 0), not {kv_format!r}")
    return (bits, group_size, start)


def key_chain(
    namespace: str,
    tokens: object,
    block_size: int,
    salt: Salt = None,
    extra_keys: Iterable[tuple[int, int, Salt]] | None = None,
    kv_format: KvFormat | None = None,
    previous: KeyChain | None = None,
) -> KeyChain:
    """Hash ``tokens`` once for a whole request. ``previous``: a chain to take the keys of equal leading blocks from.

    ``tokens``: a list, tuple or other sequence of ints, an MLX or numpy integer array, any buffer of integers, a
    TokenBuffer. ``extra_keys``: ``(start, end, key)`` content keys; ranges may lie behind the tokens known so far.
    ValueError or TypeError for bad tokens, salts, ranges, formats or a block size below 1.
    """
    salts = request_salts(salt, kv_format)
    return KeyChain(namespace, salts, tokens, block_size, normalise_content(extra_keys), previous)
