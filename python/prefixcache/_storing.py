"""Describing live caches, checking them against the model's own, and storing what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefixcache._checkpoints import drop_at, drop_superseded
from prefixcache._core import BlockStore, KeyChain
from prefixcache._keys import KvFormat
from prefixcache._layer_state import LayerState, walk
from prefixcache._parts import Needs
from prefixcache._record import record, record_snapshot
from prefixcache._registry import common_offset, convertible, describe_layers
from prefixcache._results import StoreReport
from prefixcache.errors import Unsupported

Snapshots = Mapping[int, "Sequence[Any] | None"]
Amend = Callable[[Sequence[LayerState]], Sequence[LayerState]]


def check_snapshots(snapshots: object) -> None:
    """TypeError unless they are ``Snapshots`` or None."""
    if snapshots is None:
        return
    if not isinstance(snapshots, Mapping):
        raise TypeError(f"snapshots must map token counts to caches, not {type(snapshots).__name__}")
    for n in snapshots:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"snapshots must map token counts to caches, not {n!r}")


class Storing:
    """The store line of one cache. Any thread.

    ``own``: the model's own empty layers; None if there is a class that no handler knows. ``interval``: every so many
    tokens a state is kept for good; a multiple of the block size. ``count`` gets each report.
    """

    def __init__(
        self,
        store: BlockStore,
        own: Sequence[LayerState] | None,
        needs: Needs,
        interval: int,
        count: Callable[[StoreReport], StoreReport],
    ) -> None:
        self.needs = needs
        self.interval = interval
        self._store = store
        self._own = own
        self.count = count

    def describe(self, caches: Sequence[Any], kv_format: KvFormat | None) -> tuple[list[LayerState], int | None]:
        """The layers' states, and the tokens that they count, None if none counts. ``Unsupported`` for what no handler
        knows; ValueError for layers that disagree or have another form than the model's own, TypeError for what are no
        caches."""
        states = describe_layers(caches)
        counted = common_offset(states)
        self._check_form(states, kv_format)
        return states, counted

    def store(
        self,
        chain: KeyChain,
        caches: Sequence[Any],
        upto: int,
        kv_format: KvFormat | None = None,
        *,
        covers: int | None = None,
        uncounted: int | None = None,
        first_block: int = 0,
        tail: bool = True,
        state: bool = True,
        prune: bool = True,
        superseded: int | None = None,
        prompt_end: int | None = None,
        amend: Amend = list,
        snapshots: Snapshots | None = None,
    ) -> StoreReport:
        """Stores tokens [first_block * block_size, upto) from ``caches``; arguments as in ``record``.

        ``covers``: the tokens that the caches stand at; by default what their layers count, and if none of them counts
        ``uncounted``. Once a state is stored, the one at ``superseded`` tokens is dropped, and with ``prune`` those of
        the branch that it makes useless (``prompt_end``: see ``drop_superseded``). ``amend`` may add rows to the
        described layers. ``snapshots``: as in ``PrefixCache.store``.
        """
        snapshots = {} if snapshots is None else snapshots
        try:
            states, counted = self.describe(caches, kv_format)
        except Unsupported as refusal:
            return self._refuse(refusal.reason, str(refusal), snapshots)
        except (ValueError, TypeError) as error:
            # For the caller to see, and for those who see only the counters.
            self._refuse("contradictory", str(error), snapshots)
            raise
        if kv_format is not None and kv_format[2] > 0 and (plain := self._plain_layer(states)) is not None:
            detail = f"layer {plain} is not quantised yet; before token {kv_format[2]} record without kv_format"
            return self._refuse("not_converted", detail, snapshots)
        if upto < 1:
            return self._refuse("too_short", "there is no token to store", snapshots)
        stands_at = _standing(counted, uncounted if covers is None and counted is None else covers, upto)
        if stands_at is None:
            detail = "no layer counts tokens: say with covers how many the caches stand at"
            return self._refuse("unknown_count", detail, snapshots)
        kept = {
            n: self._keep_snapshot(chain, n, snapshots[n], kv_format) if 1 <= n <= upto else ("beyond_tokens", 0)
            for n in sorted(snapshots)
        }
        # A state that stands elsewhere than its caller says is nobody's.
        state = state and counted in (None, stands_at)
        report = record(self._store, chain, amend(states), upto, stands_at, first_block, tail, state)
        report.snapshots = {n: reason for n, (reason, _) in kept.items()}
        report.bytes += sum(added for _, added in kept.values())
        if state and self.needs.state and report.state_at is None and report.reason == "complete":
            report.reason = "state_elsewhere"
            standing = counted or stands_at
            elsewhere = f"the state is that of {standing} tokens, not of {upto}"
            report.detail = "the layers hold no state" if standing == upto else elsewhere
        if report.state_at is not None:
            if superseded not in (None, report.state_at):
                report.dropped_states += drop_at(self._store, chain, superseded)
            if prune:
                report.dropped_states += drop_superseded(
                    self._store, chain, report.state_at, self.interval, kept, prompt_end
                )
        return self.count(report)

    def _plain_layer(self, states: Sequence[LayerState]) -> str | None:
        """A layer that holds rows in a form that quantisation is yet to change."""
        for path, state in walk(states):
            if state.slots and "bits" not in state.meta and convertible(state.type_name):
                return path
        return None

    def _refuse(self, reason: str, detail: str, snapshots: Snapshots) -> StoreReport:
        missing = dict.fromkeys(snapshots, "rows_missing")
        return self.count(StoreReport(reason=reason, detail=detail, snapshots=missing))

    def _keep_snapshot(
        self, chain: KeyChain, n: int, caches: Sequence[Any] | None, kv_format: KvFormat | None
    ) -> tuple[str, int]:
        """What became of the snapshot for ``n`` tokens, and the bytes that it added."""
        if caches is None:
            return "missing", 0
        try:
            states, counted = self.describe(caches, kv_format)
        except Unsupported as refusal:
            return refusal.reason, 0
        except (ValueError, TypeError):
            return "contradictory", 0
        if counted not in (None, n):
            return "other_count", 0
        report = record_snapshot(self._store, chain, states, n)
        if report.reason != "complete":
            return report.reason, report.bytes
        return "no_state" if self.needs.state and report.state_at is None else "kept", report.bytes

    def _check_form(self, states: Sequence[LayerState], kv_format: KvFormat | None) -> None:
        """ValueError for layers that could not be handed out again under these keys."""
        own = self._own or []
        if len(states) != len(own):
            raise ValueError(f"{len(states)} caches were given, the model has {len(own)} layers")
        for (path, state), (_, mine) in zip(walk(states), walk(own), strict=False):
            # What a layer learns from its first tokens, such as TurboQuant's codecs, an empty one does not have.
            same = (state.type_name, len(state.children)) == (mine.type_name, len(mine.children))
            same = same and mine.meta.items() <= state.meta.items()
            if kv_format is None and not same:
                raise ValueError(
                    f"layer {path} is a {state.type_name} {dict(state.meta)}, the model's own is a {mine.type_name} "
                    f"{dict(mine.meta)}: say which form it has with kv_format=(bits, group_size, start)"
                )
            form = state.meta.get("bits"), state.meta.get("group_size")
            if kv_format is not None and form not in ((None, None), tuple(kv_format[:2])):
                raise ValueError(f"layer {path} has bits and group_size {form}, kv_format says {tuple(kv_format[:2])}")


def _standing(counted: int | None, covers: int | None, upto: int) -> int | None:
    """The tokens that the caches stand at. ValueError where what is said and what is counted cannot both be."""
    stands_at = counted if covers is None else covers
    if counted is not None and stands_at is not None and stands_at > counted:
        raise ValueError(f"covers is {covers}, but the layers hold {counted} tokens")
    if stands_at is not None and upto > stands_at:
        raise ValueError(f"{upto} tokens were given, but the caches stand at {stands_at}")
    return stands_at
