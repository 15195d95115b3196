"""Exceptions of the Python layer.

A miss is a value, never an exception. Misuse is a plain ``ValueError`` or ``TypeError``. The one class here marks
caches that are sound but that this library will not store or rebuild.
"""

from __future__ import annotations

REASONS = frozenset({"unsupported_type", "unknown_field", "running_request", "structure_mismatch"})
"""Why a cache is refused. These words reach reports and metrics: do not change them."""


class Unsupported(ValueError):
    """A cache that the library declines to handle; a store reports it and a fetch treats it as a miss.

    ``reason`` is one of ``REASONS``:

    * ``unsupported_type``: no handler knows the class, or a value in it is of a type that it is not known to hold;
    * ``unknown_field``: the object does not have exactly the attributes its class is known to have;
    * ``running_request``: it carries lengths or paddings of the request that is running, which no other may inherit;
    * ``structure_mismatch``: what was stored does not fit the model's own caches.
    """

    def __init__(self, reason: str, message: str) -> None:
        if reason not in REASONS:
            raise ValueError(f"reason must be one of {sorted(REASONS)}, not {reason!r}")
        super().__init__(message)
        self.reason = reason
