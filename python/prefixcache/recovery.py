"""Getting a scheduler going again after a broken cache made a step of it fail."""

from __future__ import annotations

import gc
import re
from collections.abc import MutableMapping
from typing import Any, Protocol

# What a step raises whose cache lost its arrays, or is of another class than expected. Errors of shapes are left out: a
# model's own fault would make it start again for ever.
_CORRUPTION = re.compile(
    r"'NoneType' object (is not subscriptable|has no attribute '(shape|dtype|state|keys|values|offset|nbytes)')"
    r"|\b[A-Z]\w*Cache\b"
)


class _Clearable(Protocol):
    def clear(self) -> Any: ...


class _Queue(Protocol):
    def appendleft(self, item: Any, /) -> Any: ...


class CacheRecoveryManager:
    """Drops what may be broken and puts the running requests back. Belongs to the scheduler's own thread.

    ``block_aware_cache``: the prefix cache to clear with it, or None.
    """

    def __init__(self, block_aware_cache: _Clearable | None = None) -> None:
        self.block_aware_cache = block_aware_cache

    @staticmethod
    def is_cache_corruption(error: BaseException) -> bool:
        """Whether an exception of a step is one that broken caches cause: its text tells."""
        return isinstance(error, Exception) and _CORRUPTION.search(str(error)) is not None

    def recover(
        self,
        holder: Any,
        rid_to_uid: MutableMapping[Any, Any],
        uid_to_rid: MutableMapping[Any, Any],
        detokenizers: MutableMapping[Any, Any],
    ) -> None:
        """Sets ``holder.batch_generator`` to None, clears the prefix cache and the three maps, and collects garbage.

        An error of the prefix cache's ``clear`` reaches the caller after all the rest was done.
        """
        holder.batch_generator = None
        for table in (rid_to_uid, uid_to_rid, detokenizers):
            table.clear()
        try:
            if self.block_aware_cache is not None:
                self.block_aware_cache.clear()
        finally:
            gc.collect()

    @staticmethod
    def reschedule_running_requests(running: MutableMapping[Any, Any], waiting: _Queue, waiting_status: Any) -> int:
        """Moves every running request to the front of the queue, to be prefilled from its first token.

        Sets ``status`` to ``waiting_status``, ``batch_uid`` and ``prompt_cache`` to None, ``cached_tokens`` to 0 and
        ``remaining_tokens`` to the whole prompt (``prompt_token_ids``). The one that ran first is served first again.
        Returns how many there were.
        """
        requests = list(running.values())
        running.clear()
        for request in reversed(requests):
            request.status = waiting_status
            request.batch_uid = None
            request.prompt_cache = None
            request.cached_tokens = 0
            request.remaining_tokens = request.prompt_token_ids
            waiting.appendleft(request)
        return len(requests)
