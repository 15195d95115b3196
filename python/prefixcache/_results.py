"""What fetch and store answer. Plain values; any thread may read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prefixcache._core import KeyChain

HIT_REASONS = frozenset(
    {
        "complete",  # everything but the one token that must be run
        "end_of_stored",  # what is stored ends here
        "diverged",  # what is stored goes on with other tokens: see diverged_at
        "no_checkpoint",  # stored tokens go on, but no recurrent state was kept further on
        "window_gone",  # stored tokens go on, but not all rows of a sliding window are there
        "no_match",  # nothing stored begins like this
        "too_short",  # fewer than two tokens: one must always be run
        "damaged",  # a stored block failed a check and was removed
        "lost",  # a stored block was gone
        "io_error",  # a stored block could not be read
        "no_memory",  # the device has no memory for the result
        "structure_mismatch",  # what is stored does not fit the model's caches
        "unsupported_type",  # the model has a cache class that no handler knows
        "closed",  # the cache is closed
    }
)
"""Why a hit ended where it did. These words reach metrics: do not change them."""

STORE_REASONS = frozenset(
    {
        "complete",  # everything that was asked for is stored
        "too_short",  # no token to store
        "contradictory",  # counted before the error is raised: layers that contradict one another or themselves
        "not_converted",  # the keys are those of quantised rows, and the rows are still plain
        "unknown_count",  # no layer counts tokens, and the caller did not say how many the caches stand at
        "rows_gone",  # stored, but not all rows of a window were there: it can be taken up at fewer places
        "state_elsewhere",  # rows are stored, but the recurrent state is that of another number of tokens
        "unsupported_type",  # a cache class that no handler knows
        "unknown_field",  # a cache with attributes that its class is not known to have
        "running_request",  # a cache with lengths or paddings of the request that is running
        "queue_full",  # the disk is slower than the store for too long, or memory is short: the rest was left out
        "closed",  # the cache is closed
    }
)
"""Why a store ended where it did. These words reach metrics: do not change them."""

SNAPSHOT_REASONS = frozenset(
    {
        "beyond_tokens",  # for no token, or for more than were given
        "rows_missing",  # the store that it came with kept no rows
        "no_state",  # its layers should hold a recurrent state and do not
        "missing",  # the mapping has its count, but nothing for it
        "other_count",  # its layers stand at another number of tokens than it was given for
        "contradictory",  # its layers disagree with one another, with the model's or with themselves
        "unsupported_type",
        "unknown_field",
        "running_request",
        "queue_full",
        "closed",
    }
)
"""Why a snapshot was not kept; words that stand in ``STORE_REASONS`` too mean the same there."""


@dataclass(eq=False)
class Hit:
    """The longest stored prefix of a prompt, ready to use. False on a miss.

    ``caches``: one cache object per layer that stands at ``cached_tokens``; fresh empty ones on a miss. They belong to
    the caller. ``remaining``: the tokens still to run, at least one unless the prompt was empty; of the type that was
    given for lists, tuples and arrays. ``reason``: one of ``HIT_REASONS``. ``diverged_at``: position of the first token
    that differs from the nearest stored chain, None if there is no such chain or it ends here. ``tiers``: restored
    tokens by tier, ``"ram"`` and ``"ssd"``. ``bytes`` were copied, in ``seconds``, lookup included. ``checkpoint``: how
    far stored tokens agree, if a recurrent state at that point would have made the hit longer; a recorder made from
    the hit keeps one there.
    """

    caches: list[Any]
    cached_tokens: int
    remaining: Any
    reason: str
    diverged_at: int | None = None
    checkpoint: int | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    chain: KeyChain | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.cached_tokens > 0


@dataclass
class StoreReport:
    """What a store kept. False if nothing is stored for these tokens.

    ``stored_tokens``: leading tokens whose rows are stored now, by this call or before. ``new_blocks`` and ``bytes``
    count what this call added. ``state_at``: tokens of the recurrent state that is stored now, None if there is none;
    ``state_bytes`` of it were added.
    ``dropped_states``: states of this branch that it made useless. ``snapshots``: for each one given what became of it:
    ``"kept"``, or one of ``SNAPSHOT_REASONS``. ``reason``: one of ``STORE_REASONS``; ``detail`` names the layer and the
    values.
    """

    stored_tokens: int = 0
    new_blocks: int = 0
    bytes: int = 0
    state_at: int | None = None
    state_bytes: int = 0
    dropped_states: int = 0
    snapshots: dict[int, str] = field(default_factory=dict)
    reason: str = "complete"
    detail: str = ""

    def __bool__(self) -> bool:
        return self.stored_tokens > 0
