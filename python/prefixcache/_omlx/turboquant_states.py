"""States of mlx-vlm's TurboQuant caches: named tuples, nested or not, of arrays whose axis 2 is that of tokens.

Arrays are ``[B, heads, tokens]`` (norms) and ``[B, heads, tokens, words or radii]``. Nothing is evaluated but, where a
head size must be found out, one word of each row. Functions are safe from every thread that may use the arrays.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx

from prefixcache._handlers.turboquant_codecs import Codec

_AXIS = 2
_OWNERS = ("keys", "values")
DEFAULT_BITS, DEFAULT_SEED = 4.0, 0


def unwrapped(state: Any) -> Any:
    """The state inside the proxy that attention gets, or the state itself."""
    return getattr(state, "_state", state)


def is_state(value: Any) -> bool:
    """Whether this is a state: a named tuple of arrays and such tuples."""
    value = unwrapped(value)
    return isinstance(value, tuple) and hasattr(type(value), "_fields") and all(map(_is_leaf, value))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, mx.array) or (isinstance(value, tuple) and len(value) > 0 and all(map(_is_leaf, value)))


def token_count(state: Any) -> int:
    """The number of tokens. ValueError unless the state is sound and all its arrays have as many."""
    counts = {array.shape[_AXIS] if array.ndim > _AXIS else -1 for array in _arrays(_checked(state))}
    if len(counts) != 1 or -1 in counts:
        raise ValueError(f"arrays of a TurboQuant state have different numbers of tokens: {sorted(counts)}")
    return int(counts.pop())


def sliced(state: Any, start: int, stop: int) -> Any:
    """The state of tokens [start, stop), cut to those that are there. ValueError for an unsound state or range."""
    if not 0 <= start <= stop:
        raise ValueError(f"expected 0 <= start <= stop, got {start} and {stop}")
    return _mapped(lambda arrays: arrays[0][:, :, start:stop], [_checked(state)])


def joined(states: Sequence[Any]) -> Any:
    """One state with the tokens of all, in order; each array is joined once.

    ValueError for no state, unsound ones, or states of different classes, shapes or dtypes.
    """
    states = [_checked(state) for state in states]
    if not states:
        raise ValueError("no TurboQuant state to join")
    return states[0] if len(states) == 1 else _mapped(_concatenated, states)


def _concatenated(arrays: Sequence[mx.array]) -> mx.array:
    shapes = {(array.dtype, *array.shape[:_AXIS], *array.shape[_AXIS + 1 :]) for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"TurboQuant states of different shapes: {[array.shape for array in arrays]}")
    return mx.concatenate(list(arrays), axis=_AXIS)


def _mapped(act: Callable[[Sequence[mx.array]], mx.array], states: Sequence[Any]) -> Any:
    """``act`` on each array of states that have one form."""
    first = states[0]
    if isinstance(first, mx.array):
        return act(states)
    if any(type(state) is not type(first) or len(state) != len(first) for state in states):
        raise ValueError(f"TurboQuant states of different classes: {[type(state).__name__ for state in states]}")
    items = [_mapped(act, parts) for parts in zip(*states, strict=True)]
    return type(first)(*items) if hasattr(type(first), "_fields") else tuple(items)


def _checked(state: Any) -> Any:
    state = unwrapped(state)
    if not is_state(state):
        raise ValueError(f"not a TurboQuant state: {type(state).__name__}")
    return state


def _arrays(state: Any) -> list[mx.array]:
    return [state] if isinstance(state, mx.array) else [array for part in state for array in _arrays(part)]


def rebuilt(
    keys: Any,
    values: Any,
    meta_state: Sequence[Any] = (),
    *,
    dims: Sequence[int] | None = None,
    codecs: Mapping[str, Any] | None = None,
) -> Any:
    """A ``TurboQuantKVCache`` that stands at the states' token count and goes on as their donor would.

    ``meta_state``: ``(offset, bits, seed[, key_bits, value_bits])``, numbers or strings; the offset is not read.
    ``dims``: the head sizes of keys and values. A state does not say them where codes end inside a word; without
    ``dims`` they are read off the bits in use. ``codecs``: what ``layer_dict`` kept of the donor's codecs; states of
    split codecs, which depend on the donor's first tokens, need it.

    ValueError (``Unsupported`` among it) for states that no codec of these settings makes; ImportError without mlx-vlm.
    """
    keys, values = _checked(keys), _checked(values)
    if (length := token_count(keys)) != token_count(values):
        raise ValueError(f"{length} tokens of keys, {token_count(values)} of values")
    module = importlib.import_module("mlx_vlm.turboquant")
    cache = empty(module.TurboQuantKVCache, meta_state)
    for step, (owner, state) in enumerate(zip(_OWNERS, (keys, values), strict=True)):
        bits = getattr(cache, ("key_bits", "value_bits")[step], cache.bits)
        if codecs is not None:
            codec = Codec.from_meta(codecs, owner, "TurboQuantKVCache").make(module, cache.seed + step, owner)
        else:
            codec = _codec(module, state, bits, cache.seed + step, None if dims is None else dims[step])
        setattr(cache, owner, state)
        setattr(cache, ("key_codec", "value_codec")[step], codec)
    cache.offset = length
    return cache


def empty(kind: Any, meta_state: Sequence[Any] = ()) -> Any:
    """An empty cache of the class ``kind`` with the settings of a donor's ``meta_state``. ValueError if it has none."""
    meta = list(meta_state)
    try:
        bits = float(meta[1]) if len(meta) > 1 else DEFAULT_BITS
        seed = int(meta[2]) if len(meta) > 2 else DEFAULT_SEED
        # Older releases know no bits of keys and values apart.
        apart = {name: float(value) for name, value in zip(("key_bits", "value_bits"), meta[3:5], strict=False)}
        return kind(bits, seed=seed, **apart)
    except TypeError as error:
        raise ValueError(f"meta_state {meta}: {error}") from None


def _codec(module: Any, state: Any, bits: float, seed: int, dim: int | None) -> Any:
    name = type(state).__name__
    if bits != int(bits):
        raise ValueError(f"{name} of {bits} bits: a split codec depends on the donor's first tokens")
    bits = int(bits)
    if name == "TurboQuantMSEState":
        return module._TurboQuantMSECodec(head_dim(state.indices, bits, dim), bits, seed)
    if name == "TurboQuantProdState":
        # One bit for each number: the words leave few head sizes, the signs one.
        return module._TurboQuantProdCodec(head_dim(state.qjl_signs, 1, dim), bits, seed)
    if name == "TurboQuantPolarProdState":
        polar = state.polar_state
        return module._TurboQuantPolarProdCodec(polar.radii.shape[-1] << len(polar.level_indices), bits, seed)
    raise ValueError(f"no codec for {name}")


def head_dim(words: mx.array, bits: int, dim: int | None = None) -> int:
    """The number of codes of ``bits`` bits in each row of 32-bit ``words``: ``dim`` if it fits, else found out.

    Head sizes are multiples of 8. Where several fit, the smallest that has room for the highest bit in use is meant:
    codes of real rows are not all 0. ValueError if none fits or ``dim`` does not.
    """
    width = words.shape[-1]
    fitting = [d for d in range((width - 1) * 32 // bits + 1, width * 32 // bits + 1) if d > 0]
    if dim is not None:
        if dim not in fitting:
            raise ValueError(f"a head size of {dim} does not fit {width} words of {bits}-bit codes")
        return dim
    usual = [d for d in fitting if d % 8 == 0] or fitting
    if not usual:
        raise ValueError(f"no head size fits {width} words of {bits}-bit codes")
    if len(usual) == 1:
        return usual[0]
    highest = int(cast(int, mx.max(words[..., -1]).item())) if words.size else 0
    if highest == 0:
        return usual[-1]
    used = (width - 1) * 32 + highest.bit_length()
    return next((d for d in usual if d * bits >= used), usual[-1])
