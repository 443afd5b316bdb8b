"""Both drivers make the same decisions at the same times, whatever happens to a cluster."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Literal

import anyio
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hotswap import (
    Adapter,
    FleetView,
    InstanceId,
    InstanceState,
    Model,
    ModelId,
    Request,
    RequestId,
    Sampling,
)
from hotswap.abc import Action, KVStore, Router, Scheduler, Swap
from hotswap.backends.sim import DeviceProfile, SimKVStore, SimStore
from hotswap.backends.sim.batcher import Batcher, Batching
from hotswap.backends.sim.load import Reporting
from hotswap.backends.sim.sequence import Sequence as SimSequence
from hotswap.backends.sim.sequence import Step
from hotswap.errors import ConfigError
from hotswap.offline.virtual_time import virtual_time
from hotswap.offline.workloads import power_law_lengths
from hotswap.policies import (
    AdapterPool,
    AffinityRouter,
    Chain,
    ConsistentHashRouter,
    Freeness,
    FreenessRouter,
    LeastLoadedRouter,
    LeastTimeRouter,
    MoveCosts,
    RestoreMinReplicas,
    RoundRobinRouter,
    StartupTimePlacement,
    VirtualUsageRescheduler,
    WeightedLoadSwap,
)
from hotswap.profiling import PROFILES
from hotswap.simulation import Cluster, Outcome, Trace, TraceRequest, generate, simulate
from hotswap.simulation.events import EventEngine, EventFleet, SimulatedRequest
from hotswap.simulation.events.decode_run import DecodeRun, num_alike, num_missing
from hotswap.simulation.events.engine import Counted
from hotswap.simulation.run import Driver

# Of seconds: sums of steps and the formula of a decode run round differently.
TOLERANCE = 1e-6


def decisions(outcome: Outcome) -> Iterator[tuple[list[object], list[float]]]:
    """What was decided, and when: facts that must be equal, and seconds that must be so but for rounding."""
    for r in outcome.requests:
        facts = [r.number, r.model, r.adapter, r.output_tokens, r.num_hops, r.error, r.first_s is None]
        yield facts, [r.arrived_s, r.first_s or 0.0, r.ended_s, r.preempted_s]
    # Those that the end of a trace cancels have no order among them.
    for s in sorted(outcome.swaps, key=lambda s: s.instance if s.outcome == "cancelled" else ""):
        phases = [phase.name for phase in s.phases]
        facts = [s.instance, s.model_before, s.model, s.outcome, s.reason, s.num_evicted, s.tier, phases]
        facts += [s.num_saved, s.saved_bytes]
        yield facts, [s.started_s, s.seconds, s.downtime_s]
    for m in outcome.migrations:
        facts = [
            m.source,
            m.destination,
            m.method,
            m.outcome,
            m.num_tokens,
            m.num_stages,
            m.copied_bytes,
        ]
        yield facts, [m.started_s, m.seconds, m.downtime_s]
    for sample in outcome.samples:
        yield [sample.instance, sample.model, sample.num_requests, sample.memory_bytes], [sample.kv_used]


def assert_same(
    trace: Trace,
    cluster: Cluster,
    *,
    router: Callable[[], Router] | Router,
    scheduler: Scheduler,
    mover: Callable[[], MoveCosts] | None = None,
    kv_store: Callable[[], KVStore] | None = None,
) -> Outcome:
    one, other = (
        simulate(
            trace,
            cluster,
            router=router if isinstance(router, Router) else router(),
            scheduler=scheduler,
            mover=None if mover is None else mover(),
            kv_store=None if kv_store is None else kv_store(),
            driver=driver,
        )
        for driver in ("clients", "events")
    )
    assert len(list(decisions(one))) == len(list(decisions(other)))
    assert one.num_reused_tokens == other.num_reused_tokens
    for (facts, times), (other_facts, other_times) in zip(decisions(one), decisions(other), strict=True):
        assert facts == other_facts
        assert times == pytest.approx(other_times, abs=TOLERANCE)
    return one


def long_ones(seed: int, rate_per_s: float) -> Trace:
    lengths = power_law_lengths(256)
    return generate(
        seed,
        models={"m": 1},
        rate_per_s=rate_per_s,
        seconds=40,
        prompt_tokens=lengths,
        output_tokens=lengths,
    )


def mixed(seed: int, *, adapters: int = 0, rate_per_s: float = 8) -> Trace:
    trace = generate(seed, models={"a": 5, "b": 2, "c": 1}, rate_per_s=rate_per_s, seconds=30, cv=2)
    return Trace(
        tuple(
            replace(
                request,
                adapter=f"{request.model}{number % adapters}" if adapters and number % 3 else "",
                priority=int(number % 5 == 0),
            )
            for number, request in enumerate(trace.requests)
        ),
        trace.name,
    )


TURNING = replace(
    PROFILES["a10-llama-7b"],
    device=replace(PROFILES["a10-llama-7b"].device, chunk_s=0.003, join_s=0.011, leave_s=0.004),
)
SWAP = WeightedLoadSwap(4, 50, 2, patience_s=3.0, sigmas=0)
LLUMNIX = Chain(RestoreMinReplicas(), VirtualUsageRescheduler())


@pytest.mark.parametrize("router", [AffinityRouter(), LeastTimeRouter(), LeastLoadedRouter()], ids=repr)
def test_swaps_and_evictions(router: Router) -> None:
    outcome = assert_same(mixed(1), Cluster(num_engines=2), router=router, scheduler=SWAP)
    assert sum(swap.num_evicted for swap in outcome.swaps)


@pytest.mark.parametrize("adapters", [0, 3])
def test_kv_blocks_that_survive_swaps(adapters: int) -> None:
    """Every copy takes its time in both, and a request that comes back has its blocks."""
    trace, cluster = mixed(1, adapters=adapters), Cluster(num_engines=2)
    kept = assert_same(
        trace, cluster, router=AffinityRouter(), scheduler=SWAP, kv_store=partial(SimKVStore, "64 GiB")
    )
    lost = assert_same(trace, cluster, router=AffinityRouter(), scheduler=SWAP)
    assert sum(swap.num_saved for swap in kept.swaps) > 0
    assert sum(swap.saved_bytes for swap in lost.swaps) == 0
    assert all(request.output_tokens for request in kept.requests)


def test_a_little_store_of_kv_blocks_that_is_always_full() -> None:
    store = partial(SimKVStore, "1 GiB")
    assert_same(mixed(4), Cluster(num_engines=2), router=LeastLoadedRouter(), scheduler=SWAP, kv_store=store)


def test_lost_engines() -> None:
    cluster = Cluster(num_engines=3, losses=((5.1, "e0"), (9.7, "e1"), (9.8, "e0")))
    outcome = assert_same(mixed(2), cluster, router=AffinityRouter(), scheduler=SWAP)
    assert max(request.num_hops for request in outcome.requests) > 1


def test_placement_by_startup_time() -> None:
    trace, scheduler = mixed(8, rate_per_s=4), StartupTimePlacement()
    assert_same(trace, Cluster(num_engines=2), router=LeastLoadedRouter(), scheduler=scheduler)


def test_kv_blocks_that_run_out_and_requests_that_are_preempted() -> None:
    cluster = Cluster(num_engines=2, profile="a10-llama-7b", min_replicas=2, token_budget=512)
    outcome = assert_same(
        long_ones(3, 3.0), cluster, router=RoundRobinRouter(), scheduler=RestoreMinReplicas()
    )
    assert outcome.summary()["num_preempted"] > 0
    assert all(0 <= r.preempted_s < r.seconds for r in outcome.requests)


def test_staged_moves() -> None:
    cluster = Cluster(num_engines=4, profile="a10-llama-7b", min_replicas=4)
    outcome = assert_same(long_ones(0, 6.0), cluster, router=RoundRobinRouter(), scheduler=LLUMNIX)
    assert sum(move.outcome == "done" for move in outcome.migrations) > 3


@pytest.mark.parametrize("driver", ["clients", "events"])
def test_the_same_moves_have_the_same_text(driver: Driver) -> None:
    """Though a fleet names its requests at random."""
    cluster = Cluster(num_engines=4, profile="a10-llama-7b", min_replicas=4)
    outcomes = [
        simulate(long_ones(0, 6.0), cluster, router=RoundRobinRouter(), scheduler=LLUMNIX, driver=driver)
        for _ in range(2)
    ]
    assert any(move.outcome == "done" for move in outcomes[0].migrations)
    assert outcomes[0].as_json() == outcomes[1].as_json()


class FillsAtTheEnd(Scheduler):
    """Loads a model to every empty instance from the twentieth second on."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        empty = [i for i in fleet.instances if i.state is InstanceState.EMPTY and not i.swapping]
        return [Swap(instance=i.id, model=ModelId("b")) for i in empty] if fleet.now_s >= 20 else []


@pytest.mark.parametrize("driver", ["clients", "events"])
def test_swaps_that_the_end_cuts_off_have_the_same_text(driver: Driver) -> None:
    requests = [
        TraceRequest(arrive_s=at_s, model=model, prompt_tokens=10, output_tokens=50)
        for at_s, model in ((0.0, "a"), (0.0, "b"), (20.0, "a"))
    ]
    scheduler = Chain(RestoreMinReplicas(), FillsAtTheEnd())
    outcomes = [
        simulate(
            Trace(tuple(requests)),
            Cluster(num_engines=6, min_replicas=1),
            router=LeastLoadedRouter(),
            scheduler=scheduler,
            driver=driver,
            interval_s=0.1,
        )
        for _ in range(4)
    ]
    assert [swap.outcome for swap in outcomes[0].swaps].count("cancelled") == 4
    assert len({outcome.as_json() for outcome in outcomes}) == 1


def test_moves_whose_method_is_learned_and_a_loss_among_them() -> None:
    cluster = Cluster(
        num_engines=4, profile="a10-llama-7b", min_replicas=4, losses=((12.0, "e1"), (20.0, "e2"))
    )
    router = FreenessRouter(Freeness("artifact"))
    assert_same(long_ones(4, 4.0), cluster, router=router, scheduler=LLUMNIX, mover=MoveCosts)


def test_adapters_that_make_room_for_each_other() -> None:
    cluster = Cluster(num_engines=3, max_adapters=2, losses=((15.0, "e0"),))
    for router in (AffinityRouter(), ConsistentHashRouter(key="adapter")):
        assert_same(mixed(5, adapters=7), cluster, router=router, scheduler=SWAP)


def test_adapters_that_are_held_ahead() -> None:
    scheduler = Chain(SWAP, AdapterPool())
    cluster = Cluster(num_engines=3, max_adapters=3)
    assert_same(mixed(6, adapters=9), cluster, router=AffinityRouter(), scheduler=scheduler)


def test_one_with_an_adapter_and_one_without_that_are_admitted_at_the_same_moment() -> None:
    """Two places come free at once. The one with an adapter, which is held by then, was there first."""
    fields = [(0.0, 9, 1, "x"), (9.0, 9, 20, ""), (9.0, 9, 19, ""), (9.1, 9, 1, "x"), (9.1, 3_000, 1, "")]
    trace = Trace(
        tuple(
            TraceRequest(arrive_s=at_s, prompt_tokens=prompt, output_tokens=output, adapter=adapter)
            for at_s, prompt, output, adapter in fields
        )
    )
    cluster = Cluster(num_engines=1, max_requests=2, min_replicas=1)
    outcome = assert_same(trace, cluster, router=LeastLoadedRouter(), scheduler=SWAP)
    first_s = [request.first_s or 0.0 for request in outcome.requests]
    assert outcome.requests[1].ended_s == outcome.requests[2].ended_s
    assert first_s[3] < first_s[4]


def test_a_host_tier_that_holds_one_model() -> None:
    cluster = Cluster(num_engines=2, host_bytes=40 << 30)
    outcome = assert_same(
        mixed(7, rate_per_s=4), cluster, router=LeastLoadedRouter(), scheduler=StartupTimePlacement()
    )
    assert {swap.tier for swap in outcome.swaps} >= {"disk", "host"}


@pytest.mark.parametrize("victims", ["move", "evict", "stay"])
def test_nodes_whose_engines_load_at_once(victims: Literal["move", "evict", "stay"]) -> None:
    cluster = Cluster(num_engines=4, num_nodes=2, host_bytes=40 << 30, max_requests=1)
    outcome = assert_same(
        mixed(7, rate_per_s=3),
        cluster,
        router=LeastLoadedRouter(),
        scheduler=StartupTimePlacement(victims=victims),
    )
    assert {swap.tier for swap in outcome.swaps} >= {"disk", "host"}


@pytest.mark.parametrize("batching", ["mixed", "prefill_first"])
@pytest.mark.parametrize("prefix_reuse", [False, True])
def test_steps_that_take_longer_as_requests_come_and_go(batching: Batching, prefix_reuse: bool) -> None:
    """With preemption, staged moves and a lost engine among them."""
    cluster = Cluster(
        num_engines=3,
        profile=TURNING,
        min_replicas=3,
        losses=((12.0, "e1"),),
        batching=batching,
        prefix_reuse=prefix_reuse,
    )
    steady = replace(cluster, profile=PROFILES["a10-llama-7b"])
    trace = long_ones(4, 4.0)
    one, other = (
        assert_same(trace, each, router=RoundRobinRouter(), scheduler=LLUMNIX) for each in (cluster, steady)
    )
    assert one.summary()["tpot_s_mean"] > other.summary()["tpot_s_mean"]


arrivals = st.lists(
    st.builds(
        TraceRequest,
        arrive_s=st.floats(0, 5),
        model=st.sampled_from("ab"),
        prompt_tokens=st.integers(1, 1000),
        output_tokens=st.integers(1, 120),
        priority=st.integers(0, 1),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda request: request.arrive_s,
)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(arrivals, st.integers(1, 3), st.sampled_from([64, 512, 2048]), st.integers(1, 6), st.booleans())
def test_any_requests(
    requests: list[TraceRequest], num_engines: int, token_budget: int, max_requests: int, turning: bool
) -> None:
    cluster = Cluster(num_engines=num_engines, token_budget=token_budget, max_requests=max_requests)
    if turning:
        cluster = replace(cluster, profile=TURNING)
    assert_same(Trace.of(requests), cluster, router=LeastLoadedRouter(), scheduler=SWAP)


def test_another_driver_is_refused() -> None:
    with pytest.raises(ConfigError, match="'clients', 'events'"):
        simulate(mixed(0), Cluster(), router=AffinityRouter(), scheduler=SWAP, driver="steps")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- decode runs


class Silent:
    def got_first_token(self) -> None:
        return

    def ended(self, error: Exception | None) -> None:
        return


def counted(prompt_tokens: int, output_tokens: int) -> Counted:
    request = Request(
        id=RequestId("r"),
        model=ModelId("m"),
        prompt=(1,) * prompt_tokens,
        sampling=Sampling(max_tokens=output_tokens),
    )
    return Counted(request, Silent(), output_tokens)


def decoding(lengths: Sequence[tuple[int, int]], num_blocks: int) -> tuple[Batcher, Step] | None:
    """A batch of requests with their first token, and the step that follows; none if they do not fit."""
    batcher = Batcher(
        num_blocks=num_blocks, block_tokens=16, max_requests=64, token_budget=100_000, turnover=True
    )
    for prompt_tokens, output_tokens in lengths:
        batcher.add(counted(prompt_tokens, output_tokens))
    first = batcher.plan()
    if len(first.chunks) < len(lengths):
        return None
    batcher.commit(first)
    step = batcher.plan()
    return (batcher, step) if len(step.chunks) == len(lengths) else None


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(2, 90)), min_size=1, max_size=6), st.integers(20, 45)
)
def test_a_decode_run_lasts_while_its_steps_are_equal(
    lengths: list[tuple[int, int]], num_blocks: int
) -> None:
    ready = decoding(lengths, num_blocks)
    if ready is None:
        return
    batcher, step = ready
    profile = DeviceProfile(join_s=0.003, leave_s=0.001)
    left = min(s.limit - s.position for s in step.chunks if isinstance(s, Counted))
    steps = num_alike(step, batcher, left)
    decode_run = DecodeRun.of(step, steps, 10.0, profile)
    seconds: list[float] = []
    members: list[SimSequence] = list(step.chunks)
    for number in range(steps):  # each of them, planned and committed by itself
        assert list(step.chunks) == members, "another batch"
        seconds.append(step.seconds(profile))
        batcher.commit(step)
        if number < steps - 1:
            assert len(batcher) == len(members), "a request ended before the last step"
            step = batcher.plan()
    ends = list(accumulate(seconds, initial=10.0))
    assert [decode_run.end_s(count) for count in range(1, steps + 1)] == pytest.approx(ends[1:])
    for count, end_s in enumerate(ends[1:-1], start=1):
        assert decode_run.num_ended(end_s - 1e-9) == count - 1
        assert decode_run.num_ended(end_s + 1e-9) == count
    if steps < left:  # it ended for lack of blocks: not all requests can go on
        assert num_missing(members, 1, 16) > batcher.num_free_blocks


def test_an_event_engine_says_what_it_is() -> None:
    assert repr(EventEngine("e0")) == "<EventEngine e0 EMPTY [requests: 0 running, 0 waiting]>"


@pytest.mark.parametrize(
    ("token_budget", "rate_per_s", "reporting"),
    [(256, 4.5, "live"), (12_800, 9.0, "live"), (12_800, 9.0, "by_step")],
)
def test_whole_prompts_first(token_budget: int, rate_per_s: float, reporting: Reporting) -> None:
    cluster = Cluster(
        num_engines=3,
        profile="a10-llama-7b",
        min_replicas=3,
        token_budget=token_budget,
        batching="prefill_first",
        watermark=0.01,
        reporting=reporting,
    )
    router = FreenessRouter(Freeness("artifact"))
    outcome = assert_same(long_ones(9, rate_per_s), cluster, router=router, scheduler=LLUMNIX)
    figures = outcome.summary()
    assert (figures["num_preempted"] > 0) == (rate_per_s > 5) == (figures["preemption_loss_s_mean"] > 0)
    assert json.loads(outcome.as_json())["summary"] == figures


def test_a_step_of_whole_prompts_has_no_decode_and_leaves_blocks_free() -> None:
    batcher = Batcher(
        num_blocks=100,
        block_tokens=16,
        max_requests=8,
        token_budget=600,
        batching="prefill_first",
        watermark=0.1,
    )
    running, *waiting = [counted(length, 50) for length in (160, 400, 200, 800)]
    batcher.add(running)
    batcher.commit(batcher.plan())
    for sequence in waiting:
        batcher.add(sequence)
    steps = [batcher.plan()]
    batcher.commit(steps[0])
    steps.append(batcher.plan())
    assert list(steps[0].chunks.values()) == [400, 200]  # the budget is full, and the decode waits
    assert list(steps[1].chunks.values()) == [1, 1, 1]  # 800 tokens would take what is to be kept free
    assert list(batcher.waiting) == waiting[2:]


def test_prompts_that_trickle_in_beside_many_decodes() -> None:
    cluster = Cluster(num_engines=2, profile="a10-llama-7b", min_replicas=2, token_budget=12)
    assert_same(long_ones(3, 0.8), cluster, router=RoundRobinRouter(), scheduler=RestoreMinReplicas())


def test_a_fault_in_a_policy_of_ones_own_leaves_the_simulation() -> None:
    class Faulty(LeastLoadedRouter):
        def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
            raise ZeroDivisionError("mine")

    for driver in ("clients", "events"):
        with pytest.raises((ZeroDivisionError, BaseExceptionGroup)):
            simulate(mixed(0), Cluster(), router=Faulty(), scheduler=SWAP, driver=driver)


@contextmanager
def no_collections() -> Iterator[None]:
    """Free objects only by their last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Deaf:
    """A listener that keeps nothing."""

    def request_ended(self, request: SimulatedRequest) -> None:
        return


@virtual_time
async def test_of_requests_that_have_ended_nothing_is_left() -> None:
    requests: list[weakref.ref[SimulatedRequest]] = []
    engines = [EventEngine(f"e{number}") for number in range(2)]
    fleet = EventFleet(
        engines=engines,
        store=SimStore({"m": "1 GiB"}),
        models=[Model("m", min_replicas=2)],
        adapters=[Adapter("x", model="m")],
        router=LeastLoadedRouter(),
        scheduler=WeightedLoadSwap(t1=8, t2=50, b=2, sigmas=0),
    )
    with no_collections():
        async with fleet:
            for adapter in (None, "x") * 4:
                sampling = Sampling(max_tokens=50)
                request = fleet.submit(
                    "m", (1,) * 20, sampling, adapter=adapter, number=len(requests), listener=Deaf()
                )
                requests.append(weakref.ref(request))
                del request
                await anyio.sleep(0.3)  # some wait for the model, others do not
                if len(requests) == 6:
                    engines[0].lose()
            await anyio.sleep(60)
            assert [request() for request in requests] == [None] * 8
