"""How long decisions take, from ten instances to ten thousand.

    python -m benchmarks policies                     up to a thousand
    python -m benchmarks policies --full --json FILE  up to ten thousand; a few minutes

There are eight requests on an instance. Most fleets have a model for every four instances, and one fleet has
a single model on all. A route is measured as a fleet makes it: a new view, the answer, and one request more
on the chosen instance, which the next route sees. After every 16 routes the engines tell of the requests that
they were sent, and end those that they were sent before. A plan is for a view that was made, for the same
with ten more models that have requests waiting and no replica, and for such a fleet where every instance has
requests.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, machine
from benchmarks.table import show
from hotswap import (
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelId,
    ModelView,
    Request,
    RequestId,
    RunningView,
    WaitingView,
)
from hotswap.abc import Router, Scheduler
from hotswap.backends.sim import SimStore
from hotswap.policies import (
    AffinityRouter,
    ConsistentHashRouter,
    FreenessRouter,
    KeepAliveSwap,
    LeastLoadedRouter,
    LeastTimeRouter,
    PrefixRouter,
    RoundRobinRouter,
    StartupTimePlacement,
    VirtualUsageRescheduler,
    WeightedLoadSwap,
)
from hotswap.runtime.state import FleetState
from hotswap.runtime.views import LiveView

__all__ = ["main", "measure", "view_of"]

ROUTERS: tuple[Router, ...] = (
    AffinityRouter(),
    ConsistentHashRouter(),
    FreenessRouter(),
    LeastLoadedRouter(),
    LeastTimeRouter(),
    PrefixRouter(),
    RoundRobinRouter(),
)
SCHEDULERS: tuple[Scheduler, ...] = (
    WeightedLoadSwap(t1=8, t2=50, b=2, sigmas=3),
    VirtualUsageRescheduler(),
    StartupTimePlacement(),
    KeepAliveSwap(),
)
REQUESTS_EACH, INSTANCES_A_MODEL, KV_BLOCKS = 8, 4, 1024
REPEATS, ROUTES, ROUTES_A_STEP = 5, 200, 16
STARVED, WAITING_EACH = 10, 5
SIZES = (10, 100, 1000)


def view_of(
    num_instances: int, *, num_models: int | None = None, all_busy: bool = False, seed: int = 0
) -> FleetView:
    """A fleet that serves, some of it busier than the rest, with all its requests.

    One in sixteen instances has none, unless all are to be busy.
    """
    random = Random(seed)
    count = num_models or max(1, num_instances // INSTANCES_A_MODEL)
    names = [ModelId(f"m{number}") for number in range(count)]
    instances: list[InstanceView] = []
    running: list[RunningView] = []
    for number in range(num_instances):
        instance, model = InstanceId(f"e{number}"), names[number % len(names)]
        requests = random.randrange(2 * REQUESTS_EACH)
        if all_busy:
            requests = max(requests, 1)
        running += (
            RunningView(
                id=RequestId(f"r{number}-{at}"),
                model=model,
                instance=instance,
                num_tokens=random.randrange(20, 800),
                num_remaining=100,
            )
            for at in range(requests)
        )
        instances.append(
            InstanceView(
                id=instance,
                state=InstanceState.SERVING,
                model=model,
                num_running=requests,
                num_requests=requests,
                num_kv_blocks=KV_BLOCKS,
                num_free_kv_blocks=random.randrange(KV_BLOCKS),
                serving_since_s=0.0,
                last_used_s=99.0,
            )
        )
    loads = dict.fromkeys(names, 0)
    for request in running:
        loads[request.model] += 1
    models = tuple(ModelView(id=name, num_running=load) for name, load in loads.items())
    return FleetView(now_s=100.0, instances=tuple(instances), models=models, running=tuple(running))


def starved(view: FleetView) -> FleetView:
    """The same, and models that have no replica and requests that wait for one."""
    names = [ModelId(f"starved{number}") for number in range(STARVED)]
    waiting = tuple(
        WaitingView(id=RequestId(f"{name}-{at}"), model=name, arrived_s=0.0, waiting_since_s=0.0)
        for name in names
        for at in range(WAITING_EACH)
    )
    models = (*view.models, *(ModelView(id=name, num_waiting=WAITING_EACH) for name in names))
    return FleetView(
        now_s=view.now_s,
        instances=view.instances,
        models=models,
        waiting=waiting,
        running=view.running,
    )


class _Shown:
    """An instance as an index sees it."""

    def __init__(self, now: InstanceView) -> None:
        self.now = now

    def view(self) -> InstanceView:
        return self.now

    def last_view(self) -> InstanceView:
        return self.now

    def counted(self, view: InstanceView) -> InstanceView:
        return view.updated(num_requests=self.now.num_requests)


class Kept:
    """What a fleet keeps of its instances from one view to the next."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self.state = FleetState(SimStore({}))
        self._shown = {instance.id: _Shown(instance) for instance in view.instances}
        for name, shown in self._shown.items():
            self.state.index.add(name, shown)
        self.state.index.refresh()
        self._sent: list[InstanceId] = []
        self._running: list[InstanceId] = []

    def view(self) -> FleetView:
        """The fleet as it is now; good until the next change."""
        live = LiveView.of(self.state, now_s=self._view.now_s, running=False)
        parts = ("models", "waiting", "store", "running", "adapters")  # the instances alone are live
        vars(live).update({name: getattr(self._view, name) for name in parts})
        return live

    def route(self, router: Router, request: Request) -> None:
        """Ask a router, and count the request to the instance that it names."""
        chosen = router.route(request, self.view())
        assert chosen is not None
        shown = self._shown[chosen]
        shown.now = shown.now.updated(num_requests=shown.now.num_requests + 1)
        self.state.index.counts_changed(chosen)
        self._sent.append(chosen)

    def step(self) -> None:
        """Have engines tell of the requests that they were sent, and end those that they were sent before."""
        for name in self._sent:
            self._change(name, num_running=self._shown[name].now.num_running + 1)
        for name in self._running:
            now = self._shown[name].now
            self._change(name, num_requests=now.num_requests - 1, num_running=now.num_running - 1)
        self._sent, self._running = [], self._sent

    def _change(self, name: InstanceId, **fields: int) -> None:
        self._shown[name].now = self._shown[name].now.updated(**fields)
        self.state.index.counts_changed(name)
        self.state.index.load_changed(name)


def measure(sizes: Sequence[int], directory: Path) -> dict[str, Any]:
    """Time every policy at every size and return the report."""
    report: dict[str, Any] = {"machine": machine(directory)}
    for what, num_models in (("routers", None), ("routers_of_one_model", 1)):
        report[what] = {
            type(router).__name__: {
                str(size): route_s(router, view_of(size, num_models=num_models)) for size in sizes
            }
            for router in ROUTERS
        }
        print(f"{what}: done", file=sys.stderr)
    report["schedulers"] = {
        type(scheduler).__name__: {str(size): plan_s(scheduler, view_of(size)) for size in sizes}
        for scheduler in SCHEDULERS
    }
    report["schedulers_with_ten_models_waiting"] = {
        type(scheduler).__name__: {str(size): plan_s(scheduler, starved(view_of(size))) for size in sizes}
        for scheduler in SCHEDULERS
    }
    report["schedulers_without_idle_instances"] = {
        type(scheduler).__name__: {
            str(size): plan_s(scheduler, starved(view_of(size, all_busy=True))) for size in sizes
        }
        for scheduler in SCHEDULERS
    }
    report["route_s"] = report["routers"]["AffinityRouter"]
    report["plan_s"] = report["schedulers"]["WeightedLoadSwap"]
    return report


def route_s(router: Router, view: FleetView) -> list[float]:
    """Seconds of processor time of a route: the median of some, `REPEATS` times, after once unseen."""
    kept, models = Kept(view), view.models
    requests = [
        Request(id=RequestId(f"n{n}"), model=models[n % len(models)].id, prompt=tuple(range(n, n + 200)))
        for n in range(ROUTES)
    ]
    medians: list[float] = []
    for _ in range(REPEATS + 1):
        seconds: list[float] = []
        for number, request in enumerate(requests):
            if number % ROUTES_A_STEP == 0:
                kept.step()
            began_s = time.thread_time()
            kept.route(router, request)
            seconds.append(time.thread_time() - began_s)
        medians.append(statistics.median(seconds))
    return medians[1:]


def plan_s(scheduler: Scheduler, view: FleetView) -> list[float]:
    """Seconds of processor time of a plan, `REPEATS` times, after once unseen."""
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        began_s = time.thread_time()
        scheduler.plan(view)
        seconds.append(time.thread_time() - began_s)
    return seconds[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report."""
    parser = parser_of("policies", __doc__, full="up to ten thousand instances")
    options = parser.parse_args(arguments)
    sizes = (*SIZES, 10_000) if options.full else SIZES
    report = measure(sizes, Path.cwd())
    for what, unit, factor in (
        ("routers", "us", 1e6),
        ("routers_of_one_model", "us", 1e6),
        ("schedulers", "ms", 1e3),
        ("schedulers_with_ten_models_waiting", "ms", 1e3),
        ("schedulers_without_idle_instances", "ms", 1e3),
    ):
        rows = [
            [name, *(Summary.of([s * factor for s in series[str(size)]]).format(1) for size in sizes)]
            for name, series in report[what].items()
        ]
        title = f"a decision of {what.replace('_', ' ')}, {unit} of processor time"
        show(title, ["", *map(str, sizes)], rows)
    save(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
