"""How TurboQuant in mlx-vlm turns rows into codes: what must be stored of a codec, and how to make it again.

A codec is made of random matrices that numpy draws from a seed. It is stored by its settings and a digest of those
matrices: another numpy may draw others, and codes of one codec mean nothing to another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import mlx.core as mx

from prefixcache._layer_state import MetaValue
from prefixcache.errors import Unsupported

_KINDS = {"_TurboQuantMSECodec": "mse", "_TurboQuantProdCodec": "prod", "_TurboQuantPolarProdCodec": "polar_prod"}
_CLASSES = {kind: name for name, kind in _KINDS.items()}
_SPLIT = "_SplitCodec"
_SIDES = ("low", "high")
_MOST_LEVELS = 4
_INNER = ("mse_codec", "polar_codec", "low_codec", "high_codec")
_MATRICES = ("rotation", "signs", "codebook", "angle_codebooks", "projection")


@dataclass(frozen=True)
class Codec:
    """``kind`` is "mse", "prod", "polar_prod", "split.mse" or "split.prod". A split codec treats the channels whose
    bits are set in ``high`` (hexadecimal) apart from the others; they depend on the first tokens it saw."""

    kind: str
    dim: int
    bits: float
    high: str
    matrices: str

    def meta(self, owner: str) -> dict[str, MetaValue]:
        return {f"{owner}.{name}": value for name, value in vars(self).items()}

    @classmethod
    def from_meta(cls, meta: Mapping[str, MetaValue], owner: str, where: str) -> Codec:
        """``Unsupported`` for values that ``meta`` could not have given."""
        kind, dim, bits, high, matrices = (meta.get(f"{owner}.{name}") for name in cls.__dataclass_fields__)
        if (
            isinstance(kind, str)
            and isinstance(dim, int)
            and isinstance(bits, int | float)
            and isinstance(high, str)
            and isinstance(matrices, str)
        ):
            codec = cls(kind, dim, bits, high, matrices)
            if codec._is_sound():
                return codec
        raise Unsupported("structure_mismatch", f"{where}: no codec of {owner} in {dict(meta)}")

    @property
    def tag(self) -> str:
        """Ends the names of slots: a store joins rows of equal names, and those of two codecs must never be joined."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]

    def _is_sound(self) -> bool:
        if self.dim < 1 or not 1 <= self.bits <= 32:
            return False
        if not self.kind.startswith("split."):
            return self.kind in _CLASSES and self.bits == int(self.bits) and not self.high
        mask = int(self.high, 16) if set(self.high) <= set("0123456789abcdef") and self.high else 0
        fits = f"{mask:x}" == self.high and 0 < mask < (1 << self.dim) - 1
        return self.kind in ("split.mse", "split.prod") and fits and self.bits != int(self.bits)

    def halves(self) -> tuple[Codec, Codec]:
        """The codecs of the low and the high channels of a split one."""
        count, kind = int(self.high, 16).bit_count(), self.kind.removeprefix("split.")
        low = Codec(kind, self.dim - count, math.floor(self.bits), "", "")
        return low, Codec(kind, count, math.ceil(self.bits), "", "")

    def leaves(self) -> dict[str, int | None]:
        """The path of every array in a state of this codec, with its last axis, or None where it has one number a row.

        Arrays are ``[1, heads, rows]`` or ``[1, heads, rows, words]``.
        """
        if self.kind.startswith("split."):
            parts = zip(_SIDES, self.halves(), strict=True)
            return {f"{side}.{path}": width for side, half in parts for path, width in half.leaves().items()}
        if self.kind == "mse":
            return {"norms": None, "indices": _words(self.dim, self.bits)}
        unit = {"mse_indices": _words(self.dim, self.bits - 1)} if self.kind == "prod" else self._polar_leaves()
        return {"norms": None, **unit, "residual_norms": None, "qjl_signs": _words(self.dim, 1)}

    def _polar_leaves(self) -> dict[str, int | None]:
        # Each level halves the row: an angle for every pair of radii, 4 bits wide at first and 2 later.
        levels = min(_MOST_LEVELS, self.dim.bit_length() - 1)
        widths = [_words(self.dim >> i + 1, 2 if i else 4) for i in range(levels)]
        angles = {f"polar_state.level_indices.{i}": width for i, width in enumerate(widths)}
        return {"polar_state.radii": self.dim >> levels, **angles}

    def state(self, module: Any, arrays: Mapping[str, mx.array]) -> Any:
        """The state of these arrays, by path."""
        if self.kind.startswith("split."):
            below = [{p[len(side) + 1 :]: a for p, a in arrays.items() if p.startswith(f"{side}.")} for side in _SIDES]
            return module.TurboQuantSplitState(*(h.state(module, a) for h, a in zip(self.halves(), below, strict=True)))
        if self.kind == "mse":
            return module.TurboQuantMSEState(*arrays.values())
        if self.kind == "prod":
            return module.TurboQuantProdState(*arrays.values())
        norms, radii, *angles, residual_norms, signs = arrays.values()
        return module.TurboQuantPolarProdState(
            norms, module.TurboQuantPolarState(radii, tuple(angles)), residual_norms, signs
        )

    def make(self, module: Any, seed: int, where: str) -> Any:
        """The codec itself. ``Unsupported`` where it would differ from the one that was stored."""
        try:
            made = self._make(module, seed)
        except (AttributeError, ValueError) as error:
            raise Unsupported("structure_mismatch", f"{where}: no {self.kind} codec of {self.dim}: {error}") from None
        if _digest(made) != self.matrices:
            raise Unsupported("structure_mismatch", f"{where}: this numpy or mlx-vlm draws other matrices")
        return made

    def _make(self, module: Any, seed: int) -> Any:
        if not self.kind.startswith("split."):
            return getattr(module, _CLASSES[self.kind])(self.dim, int(self.bits), seed)
        mask = int(self.high, 16)
        sides = [[i for i in range(self.dim) if mask >> i & 1 == side] for side in (0, 1)]
        mode = self.kind.removeprefix("split.")
        return getattr(module, _SPLIT).from_indices(self.dim, self.bits, mode, seed, *sides)


# A digest reads every matrix; a codec lives as long as its cache.
_known: WeakKeyDictionary[Any, tuple[int, Codec]] = WeakKeyDictionary()


def codec_of(live: Any, module: Any, seed: int, where: str) -> Codec:
    """What must be stored of a live codec. ``Unsupported`` for one that its settings and ``seed`` do not determine."""
    known = _known.get(live)
    if known is None or known[0] != seed:
        codec = _read(live, where)
        if _digest(codec._make(module, seed)) != codec.matrices:
            raise Unsupported("unsupported_type", f"{where}: a codec with other matrices than those of seed {seed}")
        known = _known[live] = (seed, codec)
    return known[1]


def _read(live: Any, where: str) -> Codec:
    name = type(live).__name__
    kind, high = _KINDS.get(name, ""), ""
    if name == _SPLIT:
        low_idx, high_idx = live.low_idx.tolist(), live.high_idx.tolist()
        kind, high = f"split.{live.mode}", f"{sum(1 << i for i in high_idx):x}"
        if any(side != sorted(side) for side in (low_idx, high_idx)):
            kind = ""
    codec = Codec(kind, int(getattr(live, "dim", 0)), getattr(live, "bits", 0), high, _digest(live))
    if not codec._is_sound():
        raise Unsupported("unsupported_type", f"{where}: a codec of class {name} that is not known")
    return codec


def _digest(live: Any) -> str:
    digest = hashlib.sha256()
    for matrix in _matrices(live):
        digest.update(f"{matrix.shape}{matrix.dtype}".encode())
        # A buffer, which MLX's types do not say.
        digest.update(cast(Any, mx.contiguous(matrix).reshape(-1)))
    return digest.hexdigest()[:16]


def _matrices(live: Any) -> Iterator[mx.array]:
    for name in _INNER:
        if hasattr(live, name):
            yield from _matrices(getattr(live, name))
    for name in _MATRICES:
        value = getattr(live, name, None)
        yield from (value if isinstance(value, tuple) else () if value is None else (value,))


def _words(dim: int, bits: float) -> int:
    return (dim * int(bits) + 31) // 32
