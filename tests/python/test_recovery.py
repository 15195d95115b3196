"""What a scheduler needs after a broken cache made a step fail."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from prefixcache.recovery import CacheRecoveryManager


class Cache:
    def __init__(self, error: Exception | None = None) -> None:
        self.cleared = 0
        self.error = error

    def clear(self) -> int:
        self.cleared += 1
        if self.error is not None:
            raise self.error
        return 3


@dataclass
class Holder:
    batch_generator: Any = "generator"


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    status: str = "running"
    batch_uid: int | None = 7
    prompt_cache: Any = "caches"
    cached_tokens: int = 2
    remaining_tokens: Any = None


def error_of(action: Any) -> Exception:
    with pytest.raises((TypeError, AttributeError)) as caught:
        action()
    return caught.value


def test_errors_that_broken_caches_cause_are_told_from_others() -> None:
    empty: Any = KVCache()
    broken: Any = BatchKVCache([0])
    caused = [
        error_of(lambda: empty.keys[..., :1]),
        error_of(lambda: empty.keys.shape),
        error_of(lambda: broken.no_such_thing),
        error_of(lambda: empty.extract(0)),
    ]
    assert [CacheRecoveryManager.is_cache_corruption(error) for error in caused] == [True] * 4
    others = [
        ValueError("a token out of range"),
        RuntimeError("[matmul] Last dimension of first input"),
        error_of(lambda: None + 1),  # type: ignore[operator]
        KeyError("cache"),
        OSError(28, "No space left on device"),
        MemoryError(),
        KeyboardInterrupt("KVCache"),
    ]
    assert [CacheRecoveryManager().is_cache_corruption(error) for error in others] == [False] * 7


def test_recover_drops_everything_that_may_be_broken() -> None:
    cache, holder = Cache(), Holder()
    maps: list[dict[Any, Any]] = [{"r": 1}, {1: "r"}, {"r": "detokenizer"}]
    arrays = mx.zeros((4,))

    class Cycle:
        pass

    cycle = Cycle()
    cycle.itself = cycle  # type: ignore[attr-defined]
    cycle.arrays = arrays  # type: ignore[attr-defined]
    left = weakref.ref(cycle)
    gc.disable()
    try:
        del cycle
        assert left() is not None
        assert CacheRecoveryManager(cache).recover(holder, *maps) is None
        assert left() is None, "garbage with arrays in it is collected"
    finally:
        gc.enable()
    assert holder.batch_generator is None
    assert cache.cleared == 1
    assert maps == [{}, {}, {}]


def test_recover_without_a_cache() -> None:
    holder = Holder()
    maps: list[dict[Any, Any]] = [{"r": 1}, {1: "r"}, {"r": "detokenizer"}]
    CacheRecoveryManager().recover(holder, *maps)
    assert (holder.batch_generator, maps) == (None, [{}, {}, {}])


def test_an_error_of_clear_comes_after_the_rest_was_done() -> None:
    holder = Holder()
    maps: list[dict[Any, Any]] = [{"r": 1}, {1: "r"}, {"r": "detokenizer"}]
    with pytest.raises(OSError, match="gone"):
        CacheRecoveryManager(block_aware_cache=Cache(OSError("gone"))).recover(holder, *maps)
    assert (holder.batch_generator, maps) == (None, [{}, {}, {}])


def test_running_requests_go_back_to_the_front() -> None:
    running = {name: Request(name) for name in ("first", "second")}
    requests = list(running.values())
    waiting = deque([Request("third", status="waiting")])
    assert CacheRecoveryManager().reschedule_running_requests(running, waiting, "waiting") == 2
    assert running == {}
    assert [request.request_id for request in waiting] == ["first", "second", "third"]
    for request in requests:
        assert request.status == "waiting"
        assert request.batch_uid is None
        assert request.prompt_cache is None
        assert request.cached_tokens == 0
        assert request.remaining_tokens == [1, 2, 3]
    assert waiting[2].prompt_cache == "caches", "what waits stays as it is"


def test_nothing_runs() -> None:
    waiting: deque[Any] = deque()
    assert CacheRecoveryManager().reschedule_running_requests({}, waiting, "waiting") == 0
    assert not waiting
