"""Llumnix's figure 10: how long a request pauses to move, beside copying it whole and computing it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.llumnix_paper import PAPER, Key
from benchmarks.table import show
from hotswap import FleetView, InstanceId, MigrationLimits
from hotswap.abc import Action, Migrate, Scheduler
from hotswap.policies import Chain, LeastLoadedRouter, RestoreMinReplicas
from hotswap.profiling import PROFILES
from hotswap.simulation import Cluster, Trace, TraceRequest, simulate

__all__ = ["CONTEXTS", "move", "show_moves"]

CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
PROFILE = "a10-llama-7b-vllm-0.2"
_MODEL = "LLaMA-7B"
_WITHIN_MS, _SHARE = 5.0, 0.05


@dataclass(frozen=True, slots=True)
class _MoveOnce(Scheduler):
    """Moves what decodes on the first engine to the second."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        here = fleet.running_on(InstanceId("e0"))
        return [Migrate(request=r.id, destination=InstanceId("e1"), method="kv") for r in here if r.begun]


def move(context: int) -> dict[str, float]:
    """Move one request of so many tokens between two idle engines, and return milliseconds.

    Its pause is from the last step on the source to the first on the destination, without that step's own
    time, as the paper's is.
    """
    profile = PROFILES[PROFILE]
    request = TraceRequest(arrive_s=10.0, prompt_tokens=context, output_tokens=400)
    outcome = simulate(
        Trace((request,), "one"),
        Cluster(num_engines=2, profile=PROFILE, min_replicas=2, token_budget=12_800),
        router=LeastLoadedRouter(),
        scheduler=Chain(RestoreMinReplicas(), _MoveOnce()),
        interval_s=0.5,
        migration_limits=MigrationLimits(chunk_bytes=1 << 40),
        driver="events",
    )
    (record,) = outcome.migrations
    assert record.outcome == "done", record.error
    step_s = profile.device.step_s(tokens=1, batch=1, context=record.num_tokens)
    again_s = profile.device.step_s(
        tokens=context, batch=1, context=0, prefill=context, prefill_squares=context**2
    )
    copy_s = profile.device.kv_s(context * profile.kv_bytes_per_token)
    return {
        "migration_downtime": 1000 * (record.downtime_s - step_s),
        "blocking_copy_downtime": 1000 * (profile.device.handover_s + copy_s),
        "recompute_downtime": 1000 * again_s,
    }


def show_moves(figures: Mapping[str, Mapping[str, float]]) -> None:
    """Print simulated moves beside the paper's."""
    rows: list[list[str]] = []
    for context, ours in figures.items():
        row = [f"{context} tokens"]
        for what, value in ours.items():
            theirs = PAPER[Key("10", _MODEL, what, float(context))]["ms"]
            within = _WITHIN_MS if what == "migration_downtime" else _SHARE * theirs
            judged = "within" if abs(value - theirs) <= within else f"{value - theirs:+.0f}"
            row.append(f"{value:.1f} / {theirs:.0f} {judged}")
        rows.append(row)
    head = ["", "pause", "copied at once", "computed again"]
    show(f"figure 10, {_MODEL}: ours / the paper's, ms", head, rows)
