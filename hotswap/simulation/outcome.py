"""What became of a simulated workload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from hotswap.action import MigrationRecord, SwapRecord
from hotswap.checks import check_required_seconds
from hotswap.errors import ConfigError

__all__ = ["Outcome", "Sample", "Served", "Slo", "percentile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request of the trace, by its number there; times are seconds of virtual time.

    `first_s` is when its first token came, `None` if none did; `error` the kind of what ended it early.
    `num_stalls` is the most times in a row that it left an instance without a token in between.

    `preempted_s` is its **preemption loss**: seconds from when it was preempted for want of KV blocks until
    all that it had computed was computed again, or until it left the instance; 0 if it never was. Source: Sun
    et al., Llumnix, OSDI 2024, figure 11: queuing and computing again together. The scripts of its artifact
    take one decode off that, which would have been due anyway.
    """

    number: int
    model: str
    adapter: str = ""
    priority: int = 0
    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    first_s: float | None
    ended_s: float
    num_hops: int = 1
    num_stalls: int = 0
    preempted_s: float = 0.0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite if none came."""
        return float("inf") if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first; 0 if there is none."""
        if self.first_s is None or self.output_tokens < 2:
            return 0.0
        return (self.ended_s - self.first_s) / (self.output_tokens - 1)

    @property
    def seconds(self) -> float:
        """From arrival to the last token."""
        return self.ended_s - self.arrived_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What an instance held at a moment: its model, requests, share of KV blocks and bytes of weights.

    With `Cluster(reporting="by_step")` requests and blocks are those of its last report.
    """

    at_s: float
    instance: str
    model: str
    num_requests: int
    kv_used: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request should get: its first token within `ttft_s`, each other within `tpot_s` in the mean."""

    ttft_s: float = 10.0
    tpot_s: float = 0.1

    def __post_init__(self) -> None:
        check_required_seconds(ConfigError, ttft_s=self.ttft_s, tpot_s=self.tpot_s)

    def met(self, request: Served) -> bool:
        """Whether it got that, and ended well."""
        return not request.error and request.ttft_s <= self.ttft_s and request.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A simulation's end: requests in their order, records of swaps and moves, and samples of instances.

    Attributes:
        num_reused_tokens: How many tokens of prompts engines found computed (`Cluster.prefix_reuse`).
    """

    name: str
    trace: str
    requests: tuple[Served, ...]
    swaps: tuple[SwapRecord, ...] = ()
    migrations: tuple[MigrationRecord, ...] = ()
    samples: tuple[Sample, ...] = ()
    num_reused_tokens: int = 0
    settings: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def seconds(self) -> float:
        """When the last request had ended."""
        return max((request.ended_s for request in self.requests), default=0.0)

    def attainment(self, slo: Slo) -> float:
        """The share of requests that got what they should; 1 of none."""
        return fmean(slo.met(request) for request in self.requests) if self.requests else 1.0

    def summary(self, slo: Slo | None = None) -> dict[str, float]:
        """Return the figures that a report shows; latencies and losses are of requests that ended well."""
        asked = slo or Slo()
        well = [request for request in self.requests if not request.error]
        figures: dict[str, float] = {
            "num_requests": len(self.requests),
            "num_failed": len(self.requests) - len(well),
            "attainment": self.attainment(asked),
            "seconds": self.seconds,
            "tokens_per_s": sum(r.output_tokens for r in well) / self.seconds if self.seconds else 0.0,
            "num_swaps": sum(swap.outcome == "done" for swap in self.swaps),
            "num_evicted": sum(swap.num_evicted for swap in self.swaps),
            "num_moved": sum(move.outcome == "done" for move in self.migrations),
            "num_reused_tokens": self.num_reused_tokens,
        }
        for what, values in (
            ("ttft_s", [request.ttft_s for request in well]),
            ("tpot_s", [request.tpot_s for request in well if request.output_tokens > 1]),
            ("latency_s", [request.seconds for request in well]),
        ):
            figures[f"{what}_mean"] = fmean(values) if values else 0.0
            for share in (50, 90, 99):
                figures[f"{what}_p{share}"] = percentile(values, share)
        figures["num_preempted"] = sum(request.preempted_s > 0 for request in well)
        figures["preemption_loss_s_mean"] = fmean(r.preempted_s for r in well) if well else 0.0
        return figures

    def as_json(self, slo: Slo | None = None) -> str:
        """Return everything as one JSON object, the same text for the same simulation.

        Moves name their requests by the number of arrival, since the fleet's part of an id is random.
        """
        asked = slo or Slo()
        whole = {
            "name": self.name,
            "trace": self.trace,
            "settings": dict(self.settings),
            "slo": asdict(asked),
            "summary": self.summary(asked),
            "requests": [asdict(request) for request in self.requests],
            "swaps": [asdict(swap) for swap in self.swaps],
            "migrations": [
                {**asdict(move), "request": move.request.rpartition("-")[2]} for move in self.migrations
            ],
            "samples": [asdict(sample) for sample in self.samples],
        }
        return json.dumps(whole, sort_keys=True)

    def __repr__(self) -> str:
        return (
            f"<Outcome of {self.name} on {self.trace} [{len(self.requests)} requests, "
            f"{len(self.swaps)} swaps, {len(self.migrations)} moves, {self.seconds:.1f} s]>"
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` percent of them do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -(-len(ordered) * share // 100)
    return ordered[max(0, int(rank) - 1)]
