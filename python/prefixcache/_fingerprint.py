"""model_fingerprint: one digest over everything of a model that its KV depends on.

Two models with equal parameters can still differ: RoPE bases, LoRA scales and quantisation settings are plain
attributes. So nothing is selected: the whole object is walked, values and code alike. What is equal in two processes
gives equal digests: no addresses, no order of sets or dicts and no file paths enter.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import sys
from collections.abc import Iterable
from types import CodeType, MethodType, ModuleType
from typing import Any

import mlx.core as mx

from prefixcache._core import array_digest

# Raise the number when the encoding changes: every stored namespace then misses once.
_FORMAT = b"prefixcache model fingerprint 1"

# Set by the interpreter or by copy and pickle, without a say in what the class computes.
_NOT_BEHAVIOUR = frozenset(
    {
        *("__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dict__", "__doc__"),
        *("__firstlineno__", "__module__", "__orig_bases__", "__parameters__", "__qualname__", "__slots__"),
        *("__slotnames__", "__static_attributes__", "__weakref__"),
    }
)
# What objects answer that cannot be taken apart: locks, handles, objects of an extension.
_CANNOT_REDUCE = (TypeError, ValueError, AttributeError, RuntimeError, pickle.PickleError)


def model_fingerprint(model: Any) -> str:
    """64 hexadecimal digits that are equal only for models whose KV is exchangeable.

    Covers every byte, shape, dtype and path of every array of ``model`` (an ``mlx.nn.Module``), parameters or not; all
    other attributes, private ones included, to any depth; the code of its classes and the source files that they lie
    in or use, within the same package; the MLX version and the kind of device.

    What an extension type hides (a function compiled twice, a custom function) is known only by its source.

    Takes one pass over the weights at memory speed and evaluates, on the calling thread, those that are still lazy.
    Call it before the model has run: some models keep what they compute on first use as attributes. The model must
    not change during the call. TypeError if ``model`` is no module.
    """
    if not _is_module_class(type(model)):
        raise TypeError(f"model must be an mlx.nn.Module, not {type(model).__name__}")
    walker = _Walker()
    content = walker.digest(model)
    sources = _source_digests(walker.modules)
    version: str = mx.__version__  # type: ignore[attr-defined]
    return _record(_FORMAT, _text(version), _text(_device_kind()), content, sources).hex()


def _device_kind() -> str:
    if mx.default_device().type == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _is_module_class(kind: type) -> bool:
    # mlx.nn is not imported for this: no model exists without it.
    return any(base.__module__ == "mlx.nn.layers.base" for base in kind.__mro__)


def _record(tag: bytes, *parts: bytes) -> bytes:
    """SHA-256 of the tag and the parts, each with its length before it."""
    sha = hashlib.sha256()
    for part in (tag, *parts):
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.digest()


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _leaf(value: object) -> bytes | None:
    """The digest of a plain value, or None if it is not one. Exact types: a subclass may carry more."""
    kind = type(value)
    if value is None or value is Ellipsis or value is NotImplemented or kind is bool:
        return _record(b"constant", _text(repr(value)))
    if kind is int:
        return _record(b"int", _text(f"{value:x}"))
    if isinstance(value, float) and kind is float:
        return _record(b"float", struct.pack("<d", value))
    if isinstance(value, complex) and kind is complex:
        return _record(b"complex", struct.pack("<dd", value.real, value.imag))
    if isinstance(value, str) and kind is str:
        return _record(b"str", _text(value))
    if isinstance(value, bytes | bytearray) and kind in (bytes, bytearray):
        return _record(b"bytes", bytes(value))
    # The text of these has no address in it. The file of a module is hashed where a class or a function needs it.
    if isinstance(value, os.PathLike):
        return _record(b"path", _text(kind.__name__), _text(str(os.fspath(value))))
    if isinstance(value, mx.Dtype | mx.Device | ModuleType):
        text = value.__name__ if isinstance(value, ModuleType) else str(value)
        return _record(b"named", _text(kind.__name__), _text(text))
    return None


class _Walker:
    """Digests of values, bottom up: equal structure gives equal digests, shared or copied.

    ``modules`` collects the names of the modules whose code was met.
    """

    def __init__(self, modules: set[str] | None = None) -> None:
        self.modules: set[str] = set() if modules is None else modules
        # Values are kept alive with their digests, so that an address stands for one value only.
        self._known: dict[int, tuple[object, bytes]] = {}
        self._open: dict[int, int] = {}

    def digest(self, value: Any) -> bytes:
        leaf = _leaf(value)
        if leaf is not None:
            return leaf
        key = id(value)
        if key in self._known:
            return self._known[key][1]
        if key in self._open:
            # A reference back to a value that is being walked: how far up says which one.
            return _record(b"cycle", str(len(self._open) - self._open[key]).encode())
        self._open[key] = len(self._open)
        result = self._compound(value)
        del self._open[key]
        self._known[key] = (value, result)
        return result

    def _compound(self, value: Any) -> bytes:
        if isinstance(value, mx.array):
            mx.eval(value)
            shape = ",".join(map(str, value.shape))
            return _record(b"array", _text(str(value.dtype)), _text(shape), array_digest(value))
        if isinstance(value, dict):
            items = sorted((self._unordered(key), key) for key in value)
            pairs = (part for name, key in items for part in (name, self.digest(value[key])))
            return _record(b"dict", self.digest(type(value)), *pairs, self._attributes(value))
        if isinstance(value, list | tuple):
            return _record(b"list", self.digest(type(value)), *map(self.digest, value), self._attributes(value))
        if isinstance(value, set | frozenset):
            return _record(b"set", self.digest(type(value)), *sorted(map(self._unordered, value)))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, CodeType):
            return self._code(value)
        return self._callable(value) or self._buffer(value) or self._object(value)

    def _unordered(self, value: object) -> bytes:
        # Nothing that was met before may influence it: the order in which a set is walked is random.
        return _Walker(self.modules).digest(value)

    def _attributes(self, value: object) -> bytes:
        """Instance attributes by name; empty for an object that has none."""
        attributes = getattr(value, "__dict__", None)
        if not attributes:
            return b""
        pairs = (part for name in sorted(attributes) for part in (_text(name), self.digest(attributes[name])))
        return _record(b"attributes", *pairs)

    def _class(self, kind: type) -> bytes:
        self.modules.add(kind.__module__)
        name = (_text(kind.__module__), _text(kind.__qualname__))
        if not _is_module_class(kind):
            return _record(b"class", *name)
        # Bodies as well as sources: a class may have been patched, or typed in at a prompt.
        body = [
            part
            for attribute in sorted(vars(kind).keys() - _NOT_BEHAVIOUR)
            for part in (_text(attribute), self.digest(vars(kind)[attribute]))
        ]
        return _record(b"module class", *name, *map(self.digest, kind.__bases__), *body)

    def _callable(self, value: Any) -> bytes | None:
        if isinstance(value, MethodType):
            return _record(b"method", self.digest(value.__func__), self.digest(value.__self__))
        if isinstance(value, classmethod | staticmethod):
            return _record(_text(type(value).__name__), self.digest(value.__func__))
        if isinstance(value, property):
            return _record(b"property", *map(self.digest, (value.fget, value.fset, value.fdel)))
        if not callable(value) or not isinstance(getattr(value, "__name__", None), str):
            return None
        # Compiled functions answer for the function inside them.
        module = getattr(value, "__module__", None) or ""
        name = (_text(type(value).__name__), _text(module), _text(getattr(value, "__qualname__", value.__name__)))
        code = getattr(value, "__code__", None)
        if not isinstance(code, CodeType):
            return _record(b"callable", *name, self._object(value))
        self.modules.add(module)
        return _record(
            b"function",
            *name,
            self._code(code),
            self.digest(value.__defaults__),
            self.digest(value.__kwdefaults__),
            *(self._cell(cell) for cell in value.__closure__ or ()),
            self._attributes(value),
        )

    def _cell(self, cell: Any) -> bytes:
        try:
            return self.digest(cell.cell_contents)
        except ValueError:
            return _record(b"empty cell")

    def _code(self, code: CodeType) -> bytes:
        shape = (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return _record(b"code", code.co_code, *map(self.digest, (shape, names, code.co_consts)))

    def _buffer(self, value: Any) -> bytes | None:
        """Arrays of other libraries, through the buffer protocol."""
        try:
            view = memoryview(value)
        except (TypeError, ValueError, BufferError):
            return None
        if "O" in view.format or "P" in view.format:
            return None  # its bytes are addresses
        shape = ",".join(map(str, view.shape or ()))
        return _record(b"buffer", self.digest(type(value)), _text(view.format), _text(shape), view.tobytes())

    def _object(self, value: Any) -> bytes:
        """Any other object: its class and what pickle would save of it, or else its attributes."""
        kind = self.digest(type(value))
        try:
            reduced = value.__reduce_ex__(4)
        except _CANNOT_REDUCE:
            return _record(b"opaque", kind, self._attributes(value))
        if isinstance(reduced, str):
            return _record(b"global", kind, _text(reduced), self._attributes(value))
        parts: Iterable[Any] = (part if index < 3 else list(part or ()) for index, part in enumerate(reduced[:5]))
        return _record(b"object", kind, *map(self.digest, parts))


def _source_digests(names: set[str]) -> bytes:
    """The source files of these modules and of all that they use from within their own package."""
    pending, found = sorted(names), dict[str, bytes]()
    while pending:
        name = pending.pop()
        package = name.partition(".")[0]
        module = sys.modules.get(name)
        if name in found or module is None or package in sys.stdlib_module_names and name != "__main__":
            continue
        found[name] = _source(module)
        pending.extend(used for used in _used_modules(module) if used.partition(".")[0] == package)
    return _record(b"sources", *(part for name in sorted(found) for part in (_text(name), found[name])))


def _source(module: ModuleType) -> bytes:
    path = getattr(module, "__file__", None)
    if not path or not path.endswith(".py"):
        return b"no source"
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).digest()
    except OSError:
        return b"no source"


def _used_modules(module: ModuleType) -> set[str]:
    used = set()
    for value in list(vars(module).values()):
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
        # Importing a submodule anywhere binds it in its package: that says nothing about the package's code.
        if isinstance(name, str) and not (isinstance(value, ModuleType) and name.startswith(module.__name__ + ".")):
            used.add(name)
    return used
