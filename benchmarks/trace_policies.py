"""The policies compared on real traces: shipped ones as a user would compose them, and baselines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.trace_loads import Load
from hotswap.abc import Router, Scheduler
from hotswap.policies import (
    AdapterPool,
    AffinityRouter,
    Chain,
    ConsistentHashRouter,
    FreenessRouter,
    HorizontalAutoscaler,
    KeepAliveSwap,
    LeastLoadedRouter,
    LeastTimeRouter,
    PrefixRouter,
    RoundRobinRouter,
    ShepherdSwap,
    StaticPinning,
    VirtualUsageRescheduler,
    WeightedLoadSwap,
    infaas_router,
)
from hotswap.simulation import Trace

__all__ = ["AUTOSCALED", "TARGETS", "Policy", "autoscaler", "pins_of", "policies"]

# Requests per replica that a horizontal autoscaler may be told; the fewer engines, the later.
TARGETS = (2, 8, 16, 32, 64)
AUTOSCALED = "horizontal autoscaling (mean)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A router, and the scheduler for a trace on so many engines.

    Attributes:
        router: Its router.
        scheduler: Makes its scheduler.
        baseline: Whether it is a baseline.
        dedicated: Whether every model has engines of its own, so that there are as many at least.
    """

    router: Router
    scheduler: Callable[[Trace, int], Scheduler]
    baseline: bool = False
    dedicated: bool = False


def policies(name: str, load: Load) -> Mapping[str, Policy]:
    """Return the policies for a load, by name, except autoscaling, which has no number of engines."""
    if name.endswith("-models"):
        return _swapping(load)
    if name.endswith("-adapters"):
        return _adapters(load)
    return _one_model(load)


def autoscaler(target: int) -> Scheduler:
    """Return the baseline that starts and stops engines; idle ones go after a minute."""
    return HorizontalAutoscaler(target=target, stabilization_s=60.0)


def _swapping(load: Load) -> dict[str, Policy]:
    weighted = WeightedLoadSwap(patience_s=load.patience_s)
    return {
        "weighted loads": _shipped(LeastLoadedRouter(), weighted),
        "keep-alive": _baseline(LeastLoadedRouter(), KeepAliveSwap()),
        "Shepherd": _baseline(LeastLoadedRouter(), ShepherdSwap()),
        # Nearly every model has one engine, so that no router changes anything: one stands for all.
        "pinned": _pinned(LeastLoadedRouter(), load),
    }


def _one_model(load: Load) -> dict[str, Policy]:
    """Every engine has the model, by pinning; what differs is where requests go, and whether they move."""
    pins, moves = _pins(load), _pins(load, VirtualUsageRescheduler())
    blind = {
        "pinned": _pinned(LeastLoadedRouter(), load),
        "pinned, round robin": _pinned(RoundRobinRouter(), load),
    }
    if load.cluster.prefix_reuse:
        # Blocks of Mooncake's trace have 512 tokens; all prompts share the first, so that two tell more.
        prefix, time = PrefixRouter(block_tokens=512, num_blocks=2), _least_time(load)
        return {
            "prefix": Policy(router=prefix, scheduler=pins, dedicated=True),
            "prefix, by time": Policy(router=replace(prefix, time=time), scheduler=pins, dedicated=True),
            "least time": Policy(router=time, scheduler=pins, dedicated=True),
            **blind,
            "pinned, INFaaS++": _pinned(infaas_router(), load),
        }
    return {
        "least time": Policy(router=_least_time(load), scheduler=pins, dedicated=True),
        "Llumnix": Policy(router=FreenessRouter(), scheduler=moves, dedicated=True),
        **blind,
        "pinned, INFaaS++": _pinned(infaas_router(), load),
    }


def _adapters(load: Load) -> dict[str, Policy]:
    pool, pins = AdapterPool(), _pins(load)
    held = _pins(load, pool)
    return {
        "affinity, adapter pool": Policy(router=AffinityRouter(), scheduler=held, dedicated=True),
        "affinity": Policy(router=AffinityRouter(), scheduler=pins, dedicated=True),
        "least time, adapter pool": Policy(router=_least_time(load), scheduler=held, dedicated=True),
        "consistent hash of the adapter": Policy(
            router=ConsistentHashRouter(key="adapter"), scheduler=pins, dedicated=True
        ),
        "pinned": _pinned(LeastLoadedRouter(), load),
        "pinned, round robin": _pinned(RoundRobinRouter(), load),
        "pinned, INFaaS++": _pinned(infaas_router(), load),
    }


def _least_time(load: Load) -> LeastTimeRouter:
    """The router with the constants of the device."""
    device, budget = load.cluster.measured.device, load.cluster.token_budget
    step_s = device.step_s(tokens=budget, batch=1, context=0, prefill=budget, prefill_squares=budget * budget)
    return LeastTimeRouter(
        prefill_tokens_per_s=budget / step_s,
        step_tokens=budget,
        request_s=device.request_s + 1000 * device.context_token_s,
        adapter_s=device.adapter_s,
    )


def _shipped(router: Router, scheduler: Scheduler) -> Policy:
    return Policy(router=router, scheduler=lambda trace, num_engines: scheduler)


def _baseline(router: Router, scheduler: Scheduler) -> Policy:
    return Policy(router=router, scheduler=lambda trace, num_engines: scheduler, baseline=True)


def _pinned(router: Router, load: Load) -> Policy:
    return Policy(router=router, scheduler=_pins(load), baseline=True, dedicated=True)


def _pins(load: Load, *more: Scheduler) -> Callable[[Trace, int], Scheduler]:
    """Give every model one engine, and each other engine to the model with the most work for each it has.

    Such pinning needs to know the trace beforehand.
    """
    device, kv_tokens = load.cluster.measured.device, 16 * load.cluster.measured.kv_blocks
    step_s = device.step_s(tokens=8, batch=8, context=kv_tokens // 2)

    def scheduler(trace: Trace, num_engines: int) -> Scheduler:
        work: defaultdict[str, float] = defaultdict(float)
        for request in trace.requests:
            held = (request.prompt_tokens + request.output_tokens / 2) / kv_tokens
            seconds = request.prompt_tokens * device.token_s + held * request.output_tokens * step_s
            work[request.model] += seconds
        pins = StaticPinning(pins_of(work, num_engines))
        return Chain(pins, *more) if more else pins

    return scheduler


def pins_of(work: Mapping[str, float], num_engines: int) -> dict[str, str]:
    """Return the model of every engine."""
    homes: Sequence[str] = sorted(work, key=lambda model: (-work[model], model))
    replicas = Counter(homes)
    while replicas.total() < num_engines:
        replicas[max(work, key=lambda model: (work[model] / replicas[model], model))] += 1
    return {f"e{number}": model for number, model in enumerate(replicas.elements())}
