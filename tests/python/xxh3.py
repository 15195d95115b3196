"""XXH3-64 of xxHash with seed 0, slowly and in plain Python: for a reader of part files that uses nothing of ours."""

from __future__ import annotations

import struct

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_MASK = (1 << 64) - 1


def _u64(data: bytes, at: int) -> int:
    return struct.unpack_from("<Q", data, at)[0]


def _u32(data: bytes, at: int) -> int:
    return struct.unpack_from("<I", data, at)[0]


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product ^ (product >> 64)) & _MASK


def _avalanche(h: int) -> int:
    h &= _MASK
    h = ((h ^ (h >> 37)) * 0x165667919E3779F9) & _MASK
    return h ^ (h >> 32)


def _avalanche64(h: int) -> int:
    h &= _MASK
    h = ((h ^ (h >> 33)) * _P64[1]) & _MASK
    h = ((h ^ (h >> 29)) * _P64[2]) & _MASK
    return h ^ (h >> 32)


def _rotated(h: int, by: int) -> int:
    return ((h << by) | (h >> (64 - by))) & _MASK


def _mix(data: bytes, at: int, secret_at: int) -> int:
    return _fold(_u64(data, at) ^ _u64(_SECRET, secret_at), _u64(data, at + 8) ^ _u64(_SECRET, secret_at + 8))


def _up_to_16(data: bytes) -> int:
    n = len(data)
    if n > 8:
        low = _u64(data, 0) ^ _u64(_SECRET, 24) ^ _u64(_SECRET, 32)
        high = _u64(data, n - 8) ^ _u64(_SECRET, 40) ^ _u64(_SECRET, 48)
        return _avalanche(n + int.from_bytes(low.to_bytes(8, "little"), "big") + high + _fold(low, high))
    if n >= 4:
        h = _u32(data, n - 4) + (_u32(data, 0) << 32) ^ _u64(_SECRET, 8) ^ _u64(_SECRET, 16)
        h = ((h ^ _rotated(h, 49) ^ _rotated(h, 24)) * 0x9FB21C651E98DF25) & _MASK
        h = ((h ^ ((h >> 35) + n)) * 0x9FB21C651E98DF25) & _MASK
        return h ^ (h >> 28)
    if n:
        joined = data[0] << 16 | data[n >> 1] << 24 | data[-1] | n << 8
        return _avalanche64(joined ^ _u32(_SECRET, 0) ^ _u32(_SECRET, 4))
    return _avalanche64(_u64(_SECRET, 56) ^ _u64(_SECRET, 64))


def _up_to_240(data: bytes) -> int:
    n = len(data)
    h = n * _P64[0]
    if n <= 128:
        for i in range((n - 1) // 32 + 1):
            h += _mix(data, 16 * i, 32 * i) + _mix(data, n - 16 * (i + 1), 32 * i + 16)
        return _avalanche(h)
    for i in range(8):
        h += _mix(data, 16 * i, 16 * i)
    h = _avalanche(h)
    for i in range(8, n // 16):
        h += _mix(data, 16 * i, 16 * (i - 8) + 3)
    return _avalanche(h + _mix(data, n - 16, 136 - 17))


def _accumulate(lanes: list[int], data: bytes, at: int, secret_at: int) -> None:
    words = struct.unpack_from("<8Q", data, at)
    keys = struct.unpack_from("<8Q", _SECRET, secret_at)
    for i, (word, key) in enumerate(zip(words, keys, strict=True)):
        key ^= word
        lanes[i ^ 1] = (lanes[i ^ 1] + word) & _MASK
        lanes[i] = (lanes[i] + (key & 0xFFFFFFFF) * (key >> 32)) & _MASK


def _long(data: bytes) -> int:
    n = len(data)
    lanes = [_P32[2], _P64[0], _P64[1], _P64[2], _P64[3], _P32[1], _P64[4], _P32[0]]
    for stripe in range((n - 1) // 64):
        _accumulate(lanes, data, 64 * stripe, 8 * (stripe % 16))
        if stripe % 16 == 15:
            keys = struct.unpack_from("<8Q", _SECRET, 128)
            lanes = [((lane ^ lane >> 47 ^ key) * _P32[0]) & _MASK for lane, key in zip(lanes, keys, strict=True)]
    _accumulate(lanes, data, n - 64, 128 - 7)
    h = n * _P64[0]
    for i in range(0, 8, 2):
        h += _fold(lanes[i] ^ _u64(_SECRET, 11 + 8 * i), lanes[i + 1] ^ _u64(_SECRET, 19 + 8 * i))
    return _avalanche(h)


def xxh3_64(data: bytes) -> int:
    """The digest of ``data``."""
    if len(data) <= 16:
        return _up_to_16(data)
    return _up_to_240(data) if len(data) <= 240 else _long(data)
