"""Lists of caches: one layer that keeps several, each stored by its own handler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from prefixcache._handlers.base import Handler, check_fields
from prefixcache._layer_state import LayerState, Reach
from prefixcache.errors import Unsupported

_FIELDS = frozenset({"caches"})


class CacheListHandler(Handler):
    """``of_cache`` finds the handler of a live child, ``of_type`` that of a stored one; both raise ``Unsupported``."""

    type_name: ClassVar[str] = "CacheList"
    prototypes: ClassVar[tuple[str, ...]] = ("CacheList",)

    def __init__(self, of_cache: Callable[[object, str], Handler], of_type: Callable[[str, str], Handler]) -> None:
        self._of_cache = of_cache
        self._of_type = of_type

    def describe(self, cache: Any, where: str) -> LayerState:
        children = [self._of_cache(child, label).describe(child, label) for label, child in _labelled(cache, where)]
        return LayerState(self.type_name, children=tuple(children))

    def reaches(self, cache: Any, where: str) -> frozenset[Reach]:
        found: frozenset[Reach] = frozenset()
        return found.union(*(self._of_cache(c, label).reaches(c, label) for label, c in _labelled(cache, where)))

    def rebuild(self, prototype: Any, state: LayerState, n: int, where: str) -> Any:
        self.check_prototype(prototype, where)
        labelled = _labelled(prototype, where)
        if state.slots or len(state.children) != len(labelled):
            raise Unsupported(
                "structure_mismatch",
                f"{where}: stored with {len(state.children)} caches, the model's own has {len(labelled)}",
            )
        caches = []
        for (label, child), stored in zip(labelled, state.children, strict=True):
            self._of_cache(child, label)
            caches.append(self._of_type(stored.type_name, label).rebuild(child, stored, n, label))
        return type(prototype)(*caches)


def _labelled(cache: Any, where: str) -> Sequence[tuple[str, Any]]:
    check_fields(cache, _FIELDS, where)
    # The class makes a tuple; mlx-lm's loader leaves a list.
    if not isinstance(cache.caches, list | tuple):
        raise TypeError(f"{where}: caches must be a list of caches, not {type(cache.caches).__name__}")
    return [(f"{where}, cache {i} ({type(child).__name__})", child) for i, child in enumerate(cache.caches)]
