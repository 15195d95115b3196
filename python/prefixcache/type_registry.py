"""Which handler serves which type of cache, under oMLX's names.

One table for the process. Nothing of a server, of mlx-lm or of mlx-vlm is imported here. Look-ups are safe from every
thread; register before caches are used.
"""

from __future__ import annotations

from typing import Any

from prefixcache._omlx.cache_types import CLASS_TYPES, CacheType
from prefixcache.type_handlers import (
    ArraysCacheHandler,
    BatchKVCacheHandler,
    BatchPoolingCacheHandler,
    BatchRotatingKVCacheHandler,
    CacheListHandler,
    CacheTypeHandler,
    ChunkedKVCacheHandler,
    ConcatenateKVCacheHandler,
    DefaultCacheHandler,
    KVCacheHandler,
    MiniMaxM3BatchKVCacheHandler,
    MiniMaxM3KVCacheHandler,
    PoolingCacheHandler,
    QuantizedKVCacheHandler,
    RotatingKVCacheHandler,
    SizedArraysCache,
)

_HANDLERS: tuple[CacheTypeHandler, ...] = (
    KVCacheHandler(),
    RotatingKVCacheHandler(),
    BatchKVCacheHandler(),
    BatchRotatingKVCacheHandler(),
    ArraysCacheHandler(),
    QuantizedKVCacheHandler(),
    CacheListHandler(),
    PoolingCacheHandler(),
    BatchPoolingCacheHandler(),
    MiniMaxM3KVCacheHandler(),
    MiniMaxM3BatchKVCacheHandler(),
    ChunkedKVCacheHandler(),
    ConcatenateKVCacheHandler(),
)
_ROTATING = frozenset({CacheType.ROTATING_KVCACHE, CacheType.BATCH_ROTATING_KVCACHE})


class CacheTypeRegistry:
    """Handlers by type, by class name and by live cache. Nothing raises: what is not known is taken for plain rows."""

    _handlers: dict[CacheType, CacheTypeHandler] = {handler.cache_type: handler for handler in _HANDLERS}
    _default: CacheTypeHandler = DefaultCacheHandler()

    @classmethod
    def register(cls, handler: CacheTypeHandler) -> None:
        """Lets ``handler`` serve its type from now on, in place of the one before."""
        cls._handlers = {**cls._handlers, handler.cache_type: handler}

    @classmethod
    def get_handler(cls, cache_type: CacheType) -> CacheTypeHandler:
        """The handler of a type; the default one for a type that has none."""
        return cls._handlers.get(cache_type, cls._default)

    @classmethod
    def get_handler_by_class_name(cls, class_name: str) -> CacheTypeHandler:
        """The handler of caches of this class; the default one for a name that is not known."""
        found = _type_named(class_name)
        return cls._default if found is None else cls.get_handler(found)

    @classmethod
    def is_rotating_family(cls, class_name: str) -> bool:
        """Whether caches of this class are sliding windows, of one sequence or of several."""
        return _type_named(class_name) in _ROTATING

    @classmethod
    def detect_cache_type(cls, cache_obj: Any) -> CacheType:
        """The type of a live cache: by its class's name, else by the attributes that it has, else ``KVCACHE``."""
        if isinstance(cache_obj, SizedArraysCache):
            return CacheType.ARRAYS_CACHE
        found = _type_named(type(cache_obj).__name__)
        if found is not None:
            return found
        children = getattr(cache_obj, "caches", None)
        if isinstance(children, list | tuple) and children:
            return CacheType.CACHE_LIST
        if hasattr(cache_obj, "max_size") and hasattr(cache_obj, "_idx"):
            return CacheType.ROTATING_KVCACHE
        if hasattr(cache_obj, "keys") and hasattr(cache_obj, "values"):
            return CacheType.KVCACHE
        if isinstance(getattr(cache_obj, "cache", None), list):
            return CacheType.ARRAYS_CACHE
        return CacheType.KVCACHE

    @classmethod
    def get_handler_for_object(cls, cache_obj: Any) -> CacheTypeHandler:
        """The handler of a live cache."""
        return cls.get_handler(cls.detect_cache_type(cache_obj))

    @classmethod
    def is_sliceable(cls, cache_obj: Any) -> bool:
        """Whether blocks of rows can be cut out of a live cache's state."""
        return cls.get_handler_for_object(cache_obj).supports_block_slicing

    @classmethod
    def get_class_name_for_type(cls, cache_type: CacheType) -> str:
        """The first class name of a type; its own value if no name is known."""
        for name, found in CLASS_TYPES.items():
            if found is cache_type:
                return name
        return str(getattr(cache_type, "value", cache_type))

    @classmethod
    def list_registered_types(cls) -> list[CacheType]:
        """The types that have a handler."""
        return list(cls._handlers)

    @classmethod
    def list_known_class_names(cls) -> list[str]:
        """The class names that are known."""
        return list(CLASS_TYPES)


def _type_named(class_name: Any) -> CacheType | None:
    if class_name == SizedArraysCache.__name__:
        return CacheType.ARRAYS_CACHE
    return CLASS_TYPES.get(class_name) if isinstance(class_name, str) else None
