"""Calls into code that is not ours: a model's, an SSD manager's. What they may raise is not ours to list."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def answer_of(call: Callable[..., Any], *values: Any, otherwise: Any = None, **named: Any) -> Any:
    """What ``call`` answers; ``otherwise`` if it raises, whatever that is: a request goes on without it."""
    try:
        return call(*values, **named)
    except Exception as error:  # noqa: BLE001
        logger.debug("%s: %r", getattr(call, "__qualname__", call), error)
        return otherwise
