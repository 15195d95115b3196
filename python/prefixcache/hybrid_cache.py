"""What kinds of caches a model's layers have, under oMLX's names. Plain records; not for several threads at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixcache.type_handlers import CacheType, CacheTypeHandler
from prefixcache.type_registry import CacheTypeRegistry

_SHOWN = 5


@dataclass
class LayerCacheConfig:
    """The cache of one layer. ``class_name``: as it was found, empty if only the type is known."""

    layer_idx: int
    cache_type: CacheType
    supports_block_slicing: bool
    class_name: str = ""

    @property
    def handler(self) -> CacheTypeHandler:
        """The handler of the layer's type."""
        return CacheTypeRegistry.get_handler(self.cache_type)


@dataclass
class ModelCacheConfig:
    """The caches of a model. ``is_hybrid``: layers of more than one type. ``_max_window_size``, which may be set: the
    largest sliding window in tokens, 0 if none is known."""

    model_name: str = ""
    num_layers: int = 0
    layer_configs: list[LayerCacheConfig] = field(default_factory=list)
    is_hybrid: bool = False
    sliceable_layer_count: int = 0

    def __post_init__(self) -> None:
        self._max_window_size = 0

    @classmethod
    def from_cache_list(cls, cache_list: Sequence[Any], model_name: str = "") -> ModelCacheConfig:
        """From one live cache per layer."""
        detect = CacheTypeRegistry.detect_cache_type
        layers = [(detect(cache), type(cache).__name__) for cache in cache_list or ()]
        config = cls._of(layers, model_name)
        config._max_window_size = max(_windows(cache_list or ()), default=0)
        return config

    @classmethod
    def from_type_list(cls, type_list: Sequence[str], model_name: str = "") -> ModelCacheConfig:
        """From one class name per layer; no window is known then."""
        by_name = CacheTypeRegistry.get_handler_by_class_name
        return cls._of([(by_name(name).cache_type, name) for name in type_list or ()], model_name)

    @classmethod
    def _of(cls, layers: Sequence[tuple[CacheType, str]], model_name: str) -> ModelCacheConfig:
        configs = [
            LayerCacheConfig(i, kind, CacheTypeRegistry.get_handler(kind).supports_block_slicing, name)
            for i, (kind, name) in enumerate(layers)
        ]
        sliceable = sum(config.supports_block_slicing for config in configs)
        return cls(model_name, len(configs), configs, len({kind for kind, _ in layers}) > 1, sliceable)

    def get_sliceable_layers(self) -> list[int]:
        """The layers whose rows can be cut into blocks."""
        return [config.layer_idx for config in self.layer_configs if config.supports_block_slicing]

    def get_non_sliceable_layers(self) -> list[int]:
        """The layers that are stored whole."""
        return [config.layer_idx for config in self.layer_configs if not config.supports_block_slicing]

    def get_layer_type(self, layer_idx: int) -> CacheType:
        """The type of a layer, ``KVCACHE`` for one that the model does not have."""
        if 0 <= layer_idx < len(self.layer_configs):
            return self.layer_configs[layer_idx].cache_type
        return CacheType.KVCACHE

    def get_layer_handler(self, layer_idx: int) -> CacheTypeHandler:
        """The handler of a layer's type."""
        return CacheTypeRegistry.get_handler(self.get_layer_type(layer_idx))

    def get_type_names(self) -> list[str]:
        """The class name of each layer's cache, as it was found."""
        return [config.class_name or config.cache_type.value for config in self.layer_configs]

    def get_meta_states(self, cache_list: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The meta state of each live cache; ``(offset,)`` where the class has none but counts tokens."""
        return [self._meta_state(i, cache) for i, cache in enumerate(cache_list)]

    def _meta_state(self, layer_idx: int, cache: Any) -> tuple[Any, ...]:
        known = layer_idx < len(self.layer_configs)
        handler = self.get_layer_handler(layer_idx) if known else CacheTypeRegistry.get_handler_for_object(cache)
        meta = handler.serialize_meta_state(cache)
        offset = getattr(cache, "offset", None)
        return meta if meta or offset is None else (offset,)

    def supports_full_block_slicing(self) -> bool:
        """Whether every layer's rows can be cut into blocks."""
        return all(config.supports_block_slicing for config in self.layer_configs)

    def has_rotating_layers(self) -> bool:
        """Whether a layer is a sliding window."""
        return any(config.cache_type is CacheType.ROTATING_KVCACHE for config in self.layer_configs)

    def get_max_window_size(self) -> int:
        """The largest sliding window in tokens, 0 if none is known."""
        return self._max_window_size

    def __repr__(self) -> str:
        names = self.get_type_names()
        more = ", ..." if len(names) > _SHOWN else ""
        return (
            f"ModelCacheConfig(model_name={self.model_name!r}, num_layers={self.num_layers}, "
            f"is_hybrid={self.is_hybrid}, sliceable={self.sliceable_layer_count}/{self.num_layers}, "
            f"types=[{', '.join(names[:_SHOWN])}{more}])"
        )


def _windows(caches: Sequence[Any]) -> Iterator[int]:
    for cache in caches:
        kind = CacheTypeRegistry.detect_cache_type(cache)
        size = getattr(cache, "max_size", None)
        if kind is CacheType.CACHE_LIST:
            yield from _windows(getattr(cache, "caches", ()))
        elif kind in (CacheType.ROTATING_KVCACHE, CacheType.BATCH_ROTATING_KVCACHE) and isinstance(size, int):
            yield size


def create_default_kvcache_config(num_layers: int, model_name: str = "") -> ModelCacheConfig:
    """A model whose layers all have plain rows."""
    return ModelCacheConfig.from_type_list([CacheType.KVCACHE.value] * num_layers, model_name)
