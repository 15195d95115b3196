"""
Native core of prefixcache: chain hashes, the block store and the gather.
"""

from collections.abc import Sequence
import enum

import mlx.core


class Purpose(enum.IntEnum):
    """What a salt is for. The numbers enter the keys."""

    tenant = 1
    """who may share"""

    kv_format = 2
    """how the KV is represented"""

    content = 3
    """what stands behind a range of tokens"""

class TokenBuffer:
    """
    Tokens as contiguous unsigned 32-bit integers. Never changes; slices share its memory; any thread may read it.
    It has the buffer protocol (format 'I', one dimension, read-only).
    """

    def __init__(self, tokens: object) -> None:
        """
        Takes a list, tuple or other sequence of integers, an MLX integer array, or a one-dimensional buffer of
        integers (array.array, numpy, memoryview; any stride). ValueError names a token that is negative or above
        2**32 - 1 and its position; TypeError names what is not an integer.
        """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def slice(self, lo: int, hi: int) -> TokenBuffer:
        """Tokens [lo, hi), sharing memory. ValueError outside of 0..len."""

    def tobytes(self) -> bytes:
        """The tokens as bytes, four each, in the machine's order."""

    def tolist(self) -> list[int]: ...

    def common_prefix(self, other: object, start: int = 0) -> int:
        """How many tokens are equal from position `start` of both on."""

class KeyChain:
    """
    The tokens of one request and the keys of their whole blocks, hashed once without the GIL.
    Reading from several threads is fine; extend() needs the chain to itself.
    """

    def __init__(self, namespace: str, salts: Sequence[tuple[int, bytes]], tokens: object, block_size: int, content: Sequence[tuple[int, int, bytes]] = (), previous: KeyChain | None = None) -> None:
        """
        salts: (purpose, canonically encoded value) for the whole request. tokens: what TokenBuffer takes.
        content: (start, end, 32-byte digest), ranges of tokens in any order; ranges may lie behind the tokens.
        previous: a chain whose keys are taken over for the leading blocks that are equal.
        """

    def __len__(self) -> int:
        """The number of whole blocks."""

    def extend(self, tokens: object) -> None:
        """
        Adds tokens behind the last one and hashes the blocks that became whole.
        """

    def key(self, i: int) -> bytes:
        """The key of whole block i. IndexError if there is none."""

    def cut_key(self, i: int, depth: int) -> bytes:
        """
        The key of block i cut after token `depth` of the sequence; i = len(self) is the tail. ValueError if that
        is not in the block.
        """

    def block_tokens(self, i: int) -> TokenBuffer:
        """
        The tokens of block i, sharing memory. i = len(self) is the tail. IndexError if there is none.
        """

    def content_of_block(self, i: int) -> list[tuple[int, int, bytes]]:
        """
        The (start, end, digest) that first apply in block i. i = len(self) is the tail.
        """

    @property
    def root(self) -> bytes:
        """The parent of the first block, 32 bytes: namespace and salts."""

    @property
    def keys(self) -> list[bytes]:
        """The keys of the whole blocks, 32 bytes each. A new list."""

    @property
    def content(self) -> list[tuple[int, int, bytes]]:
        """All (start, end, digest), sorted."""

    @property
    def tokens(self) -> TokenBuffer:
        """All tokens, sharing memory."""

    @property
    def block_size(self) -> int: ...

def chain_hashes(namespace: str, tokens: object, block_size: int, salts: Sequence[tuple[int, bytes]] = (), content: Sequence[tuple[int, int, bytes]] = ()) -> list[bytes]:
    """
    The keys of all whole blocks, 32 bytes each: equal keys mean equal prefixes, in every process.
    ValueError for a block size below 1, a token or a range out of range; TypeError for tokens that are none.
    """

def block_key(namespace: str, parent: bytes, tokens: object, content: Sequence[tuple[int, int, bytes]] = ()) -> bytes:
    """
    The key of one block. `parent` may be any bytes; `content` is what first applies in this block.
    """

def group_key(key: bytes, group: int) -> bytes:
    """
    The key under which rows that are needed over another reach are stored. Its own inverse.
    """

def sha256(data: bytes) -> bytes:
    """SHA-256 of `data`, 32 bytes."""

def array_digest(array: mlx.core.array, threads: int = 0) -> bytes:
    """
    Digest (32 bytes) of dtype, shape and every byte of an array in row-major order, whatever its strides.
    Not proof against an attacker. threads: 0 is one a core, at most 8; it does not change the digest.
    """

class Part(enum.Enum):
    """The slots of one reach in one block."""

    kv = 0

    win = 1

    state = 2

class StatusCode(enum.Enum):
    """What became of an operation."""

    OK = 0

    NOT_FOUND = 1

    CORRUPT = 2

    FULL = 3

    IO_ERROR = 4

    CLOSED = 5

class Status:
    """The result of an operation; true if it went well."""

    def __bool__(self) -> bool: ...

    @property
    def code(self) -> StatusCode: ...

    @property
    def error_number(self) -> int:
        """The errno behind IO_ERROR, else 0."""

    @property
    def message(self) -> str: ...

    def __repr__(self) -> str: ...

class Slots:
    """Arrays to store from, evaluated on the thread that makes this."""

    def __init__(self, items: list[tuple[str, mlx.core.array, int | None, int]]) -> None:
        """
        items: (name, array, sequence axis or None, position of the array's first row).
        """

class Gathered:
    """What gather() and load() answer."""

    @property
    def status(self) -> Status: ...

    @property
    def good(self) -> int:
        """Leading blocks that may be asked for again after a failure."""

    @property
    def meta(self) -> str: ...

    @property
    def ram_bytes(self) -> int: ...

    @property
    def disk_bytes(self) -> int: ...

    @property
    def ram_blocks(self) -> int: ...

    @property
    def disk_blocks(self) -> int: ...

    def take_slots(self) -> dict[str, mlx.core.array]:
        """
        The arrays by slot name. They leave this object: a second call gives an empty dict.
        """

class BlockStore:
    """
    Rows of cache slots in blocks of tokens, in RAM and on SSD. Any thread.
    """

    @staticmethod
    def open(*, directory: str, namespace: str, ram_bytes: int, disk_bytes: int, queue_bytes: int, put_wait_seconds: float = 2.0, disk_wait_seconds: float = 2.0, flush_wait_seconds: float = 60.0, write: str = 'through', verify: str = 'first', threads: int = 0) -> BlockStore:
        """Opens or makes a store. ValueError names the option that is wrong."""

    def put(self, key: bytes, parent: bytes, depth: int, tokens: TokenBuffer, slots: Slots, row_lo: int, row_hi: int, meta: str = '', part: Part = Part.kv, content: Sequence[tuple[int, int, bytes]] = [], group: int = 0) -> tuple[Status, int]:
        """
        Copies rows [row_lo, row_hi) of every slot. Returns OK, FULL or CLOSED, and the bytes copied: 0 for rows
        that were there.
        """

    def presence(self, keys: list[bytes]) -> list[dict[str, tuple[bool, bool, int, int]]]:
        """
        For each key its parts: (in RAM, on disk, first row, row behind the last; -1 where not known yet).
        """

    def longest_prefix(self, keys: list[bytes], root: bytes, block_size: int, part: Part = ...) -> int:
        """Leading blocks of a chain that have the part."""

    def longest_child(self, parent: bytes, start: int, tokens: TokenBuffer, content: Sequence[tuple[int, int, bytes]], part: Part = Part.kv) -> tuple[bytes, int, int, int] | None:
        """
        The child of `parent` with the longest run of `tokens`: (key, depth, rows in common, its rows), or None.
        """

    def deepest_window(self, chain: KeyChain, window: int, keep: int, group: int, limit: int) -> tuple[int, bytes] | None:
        """
        The largest n <= limit whose window of rows is stored, and the key of the block in which it lies; or None.
        """

    def deepest_state(self, chain: KeyChain, limit: int) -> tuple[int, bytes] | None:
        """
        The largest n <= limit at which a state of these tokens was put, and the key of its block; or None.
        """

    def deepest_fork(self, chain: KeyChain, limit: int) -> int:
        """
        The largest n < limit where something stored goes on with other tokens than these; 0: nowhere.
        """

    def touch(self, key: bytes, part: Part = Part.kv) -> None:
        """
        Makes a part the most recently used, and with a part kv the blocks before it.
        """

    def children(self, parent: bytes) -> list[tuple[bytes, int, list[int]]]:
        """Blocks stored under `parent`: (key, depth, tokens), newest first."""

    def gather(self, keys: list[bytes], row_lo: int, row_hi: int, capacity: int, part: Part = ..., slots: list[str] = [], group: int = 0) -> Gathered:
        """
        Copies rows of consecutive blocks into fresh arrays of `capacity` rows; spare rows are zero.
        """

    def load(self, key: bytes, part: Part = Part.kv) -> Gathered:
        """One part as it was put."""

    def erase(self, keys: list[bytes], parts: list[Part]) -> Status:
        """Forgets parts and their files."""

    def clear(self) -> Status:
        """Forgets everything of this namespace."""

    def flush(self) -> Status:
        """
        Waits for queued writes, as long as the disk answers; the first error since the last flush.
        """

    def trim_ram(self, target_bytes: int, protected: list[bytes] = []) -> int:
        """
        Gives memory back to the system until the RAM tier holds at most that; returns how much. What is only in
        RAM stays, unless there is no disk; so does what is being read or written, and what is protected.
        """

    def stats(self) -> dict[str, int | bool | str]:
        """Counters and sizes; see StoreStats."""

    def close(self) -> Status:
        """
        Writes what waits, as long as the disk answers, and stops. Safe to call twice.
        """

class PartSummary:
    """What the header of a part file says."""

    @property
    def row_lo(self) -> int: ...

    @property
    def row_hi(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def tensors(self) -> int: ...

    @property
    def tensor_bytes(self) -> int: ...

def parse_part_name(name: str) -> tuple[bytes, int, int, Part] | None:
    """
    What the name of a part file says: (key, first 8 bytes of its parent's as a number, depth, part), or None.
    """

def check_part(path: bytes, data: bool = True) -> tuple[Status, PartSummary]:
    """
    Checks a part file: its header, that it is what its name says and, with `data`, every tensor's digest.
    Returns OK, NOT_FOUND, CORRUPT or IO_ERROR, and the header's summary: all zero unless the header is sound.
    """

def eviction_order(parts: Sequence[tuple[str, float]]) -> list[tuple[int, float]]:
    """
    The order in which a store would evict parts, given as (file name, time of last use): (place in `parts`, time
    that counts), first to go first. What stays are prefixes, wherever one stops.
    """
