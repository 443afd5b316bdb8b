"""The time it takes to start a model, learned from past swaps and moves: loads, and moves that make room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from math import fsum, isfinite
from statistics import median

from hotswap.action import MigrationRecord, SwapRecord
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.policies.linear_fit import LinearFit
from hotswap.request import ModelId
from hotswap.times_view import TimesView
from hotswap.view import InstanceState, InstanceView, Residency, RunningView, StoreView

__all__ = ["LoadCosts", "QueuedLoads", "StartupCosts"]

# The errors of so many latest loads are kept.
_NUM_ERRORS = 256


@check_arguments
class LoadCosts:
    """The time of a load: `q + n / b`, with a bandwidth for each tier that is learned from loads.

    Source: ServerlessLLM (Fu et al., OSDI 2024), section 6: *q* is the time of the loads that are queued on
    the tier, *n* the bytes of the model, *b* the bandwidth of the slowest link on the load path. Here *b* is
    the bandwidth of the whole path from the tier to the device, which is what a `SwapRecord` tells: bytes
    over seconds of the load, with older loads counting less. Until the first record of a tier it is the
    bandwidth that the store names.

    Args:
        memory: The share of a load's weight that is left when the next load comes from the same tier.
        unknown_s: Seconds for a model whose tier the store does not name.
    """

    def __init__(self, *, memory: float = 0.8, unknown_s: float = 10.0) -> None:
        if not 0 <= memory < 1:
            raise ConfigError(f"memory is {memory!r}; give 0 (the last load alone counts) to below 1.")
        if not (unknown_s >= 0 and isfinite(unknown_s)):
            raise ConfigError(f"unknown_s is {unknown_s!r}; give 0 or more seconds.")
        self._memory, self._unknown_s = memory, unknown_s
        self._seen: dict[str, tuple[float, float]] = {}  # bytes and seconds, by tier
        self._errors: deque[float] = deque(maxlen=_NUM_ERRORS)

    def load_s(self, store: StoreView, model: ModelId) -> float:
        """Return the seconds of a load from the model's fastest tier.

        Pass `store.seen_from(instance.node)` for a load on a given instance.
        """
        link, num_bytes = store.source(model), store.load_bytes(model)
        if link is None or num_bytes is None:
            return self._unknown_s
        return num_bytes / (self.bandwidths.get(link.name) or link.bytes_per_s)

    def learn(self, record: SwapRecord) -> None:
        """Learn from the record of a swap; one that failed or read nothing is ignored."""
        seconds = record.phase_s("load") + record.phase_s("preload")
        if record.outcome != "done" or not record.tier or record.loaded_bytes <= 0 or seconds <= 0:
            return
        known = self.bandwidths.get(record.tier)
        if known is not None:
            self._errors.append(abs(record.loaded_bytes / known - seconds) / seconds)
        old_bytes, old_s = self._seen.get(record.tier, (0.0, 0.0))
        self._seen[record.tier] = (
            self._memory * old_bytes + record.loaded_bytes,
            self._memory * old_s + seconds,
        )

    @property
    def bandwidths(self) -> dict[str, float]:
        """Bytes per second by tier, for the tiers that loads came from."""
        return {tier: num_bytes / seconds for tier, (num_bytes, seconds) in self._seen.items()}

    @property
    def median_error(self) -> float | None:
        """The median relative error of the last 256 predicted loads; `None` before the first prediction.

        Each load was predicted from earlier ones alone. Time that a load spent in a queue counts as error,
        since a record does not tell it.
        """
        return median(self._errors) if self._errors else None

    def __repr__(self) -> str:
        tiers = ", ".join(f"{tier}: {rate / 1e9:.3g} GB/s" for tier, rate in self.bandwidths.items())
        return f"<LoadCosts [{tiers or 'as the store says'}]>"


class QueuedLoads:
    """The times of loads while a plan adds loads, each of which queues its bytes before the next.

    Args:
        costs: The time of a single load.
        store: The tiers, the models on them and the loads under way.
        times: What the fleet has measured. For tiers that it loaded from it is used in place of `costs`.
    """

    def __init__(self, costs: LoadCosts, store: StoreView, times: TimesView | None = None) -> None:
        self._costs, self._store, self._times = costs, store, times
        self._measured = frozenset(tier for tier, _ in times.load_bytes_per_s) if times else frozenset[str]()
        self._known_s: dict[tuple[ModelId, str], float] = {}

    def at(self, model: ModelId, instance: InstanceView) -> float:
        """Return the seconds in which an instance without requests comes to a model.

        The unload of the model that it has is part of them where a fleet has measured it.
        """
        taken = instance.state is not InstanceState.EMPTY
        unload_s = self._times.unload_s if self._times is not None and taken else 0.0
        return unload_s + (0.0 if instance.preloaded == model else self.load_s(model, instance.node))

    def load_s(self, model: ModelId, node: str) -> float:
        """Return the seconds of a load on a node."""
        known_s = self._known_s.get((model, node))
        if known_s is None:
            known_s = self._known_s[model, node] = self._alone_s(model, self._store.seen_from(node))
        return known_s

    def queue(self, model: ModelId, node: str) -> None:
        """Add a model's bytes to the queue of a node; the bytes of one model count once."""
        self._store = _with_queued(self._store, model, node)
        self._known_s.clear()

    def _alone_s(self, model: ModelId, seen: StoreView) -> float:
        link = seen.source(model)
        if self._times is not None and link is not None and link.name in self._measured:
            return self._times.load_s(seen, model)
        return self._costs.load_s(seen, model)


@check_arguments
class StartupCosts:
    """The three times that a placement compares: of a load, of moving a request, of the rest of a request.

    A move takes `a * (t_in + t_out) + b` seconds (ServerlessLLM, section 6), since the tokens of the request,
    prompt and generated, are computed again elsewhere. *a* and *b* are fitted to the records of moves. Moves
    with KV blocks are included, as their bytes are proportional to tokens. The rest of a running request
    takes `tpot_s` for each token that it may still generate, which is an upper bound.

    Pass its learners to the fleet: `Fleet(on_swap=costs.learn_swap, on_migration=costs.learn_move)`. A policy
    only reads it. `StartupTimePlacement` takes loads from what the fleet itself has measured, unless told
    otherwise, and needs `learn_move` alone.

    Args:
        loads: The times of loads.
        token_s: The initial *a*: seconds per token of a moved request.
        start_s: The initial *b*: seconds that every move takes besides.
        tpot_s: Seconds per decoded token.
    """

    def __init__(
        self,
        loads: LoadCosts | None = None,
        *,
        token_s: float = 1e-4,
        start_s: float = 0.02,
        tpot_s: float = 0.03,
    ) -> None:
        if not (tpot_s >= 0 and isfinite(tpot_s)):
            raise ConfigError(f"tpot_s is {tpot_s!r}; give 0 or more seconds.")
        self.loads = loads or LoadCosts()
        self.tpot_s = tpot_s
        self._resume = LinearFit(token_s, start_s, span=1024.0)

    def resume_s(self, num_tokens: int) -> float:
        """Return the seconds in which a request with `num_tokens` is moved."""
        return self._resume.at(num_tokens)

    def rest_s(self, num_remaining: int) -> float:
        """Return the seconds until a request ends that may still generate `num_remaining` tokens."""
        return num_remaining * self.tpot_s

    def leave_s(self, runs: Iterable[RunningView]) -> float:
        """Return the seconds until all requests have left: moved one by one, or ended if that is sooner."""
        a, b = self._resume.slope, self._resume.intercept  # inlined: this runs for thousands of requests
        tpot_s = self.tpot_s
        moves_s: list[float] = []
        last_s = 0.0
        for run in runs:
            move_s, rest_s = a * run.num_tokens + b, run.num_remaining * tpot_s
            if rest_s > move_s:
                moves_s.append(move_s)
            elif rest_s > last_s:
                last_s = rest_s
        return max(fsum(moves_s), last_s)

    def learn_swap(self, record: SwapRecord) -> None:
        """Learn from the record of a swap."""
        self.loads.learn(record)

    def learn_move(self, record: MigrationRecord) -> None:
        """Learn from the record of a move; one that was not completed is ignored."""
        if record.outcome == "done":
            self._resume.learn(record.num_tokens, record.seconds)

    @property
    def move_error(self) -> float:
        """The mean relative error of the expected times of recent moves."""
        return self._resume.mean_error

    def __repr__(self) -> str:
        move = f"{self._resume.slope:.3g} s a token + {self._resume.intercept:.3g} s"
        return f"<StartupCosts [{self.loads!r}, moves: {move}]>"


def _with_queued(store: StoreView, model: ModelId, node: str) -> StoreView:
    """The store with the bytes of a model queued on a node; queued again they do not count twice."""
    seen = store.seen_from(node)
    link, num_bytes = seen.source(model), seen.load_bytes(model)
    if link is None or num_bytes is None:
        return store
    own_bytes = num_bytes - link.queued_bytes
    busy = replace(link, queued_bytes=num_bytes)
    return replace(
        store,
        tiers=tuple(busy if (t.name, t.node) == (link.name, link.node) else t for t in store.tiers),
        loading=(
            *store.loading,
            Residency(model=model, tier=link.name, size_bytes=own_bytes, node=link.node),
        ),
    )
