"""Views that are built from cached parts show the current state, and a view never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import anyio
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hotswap import Adapter, Fleet, FleetView, InstanceId, InstanceState, Model, Request, RequestId, Sampling
from hotswap.abc import (
    Action,
    Engine,
    EngineStatus,
    Migrate,
    Router,
    Scheduler,
    StatusListener,
    WrapperEngine,
)
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.errors import ConfigError, HotswapError
from hotswap.offline.replay import dump_view
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap
from hotswap.simulation.events import EventEngine, EventFleet, SimulatedRequest

# What the fleet adds to an engine's own view.
FLEETS_OWN = {
    "max_adapters",  # none where a wrapper hides the ability
    "num_requests",
    "swapping",
    "target",
    "serving_since_s",
    "cooling_down",
    "draining",
    "last_used_s",
    "num_high_priority",
    "num_moves",
    "last_assigned",
    "swapped_s",
    "lost_because",  # as a request was told, or the engine says
}
ENGINES_OWN = [field.name for field in fields(EngineStatus) if field.name not in FLEETS_OWN]


class Witness(Router, Scheduler):
    """Routes and plans as the shipped policies do, moves what it can, and compares what it is shown."""

    def __init__(self, engines: Sequence[Engine], keeps: bool = False) -> None:
        self.engines = {engine.id: engine for engine in engines}
        self.keeps = keeps
        self.kept: list[tuple[FleetView, str]] = []
        self.seen: set[InstanceState] = set()
        self.num_questions = 0
        self.wrong: list[str] = []  # a fleet forgives a policy its errors

    def look(self, fleet: FleetView) -> None:
        self.num_questions += 1
        for shown in fleet.instances:
            now = self.engines[shown.id].status()
            for name in ENGINES_OWN:
                if getattr(shown, name) != getattr(now, name):
                    self.wrong.append(f"{name} of {shown.id} at {fleet.now_s}")
            self.seen.add(shown.state)
            on = [running for running in fleet.running if running.instance == shown.id]
            if list(fleet.running_on(shown.id)) != on:
                self.wrong.append(f"those that run on {shown.id} at {fleet.now_s}")
        if self.keeps:
            self.kept.append((fleet, dump_view(fleet)))

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        self.look(fleet)
        return LeastLoadedRouter().route(request, fleet)

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        self.look(fleet)
        moves = [
            Migrate(request=running.id, destination=other.id)
            for running in fleet.running[:2]
            for other in fleet.serving(running.model)[:1]
            if other.id != running.instance and not running.moving
        ]
        return (*moves, *WeightedLoadSwap(1, 50, 1, patience_s=2.0, sigmas=0).plan(fleet))


class Plain(WrapperEngine):
    """Says nothing of its changes."""

    def watch(self, listener: StatusListener) -> bool:
        return False


class End:
    """Waits for the end of a simulated request."""

    def __init__(self) -> None:
        self.event = anyio.Event()

    def request_ended(self, request: SimulatedRequest) -> None:
        self.event.set()


async def ridden(fleet: EventFleet, model: str, adapter: str | None, num_tokens: int) -> None:
    end = End()
    sampling = Sampling(max_tokens=num_tokens)
    fleet.submit(model, (1,) * 20, sampling, adapter=adapter, number=0, listener=end)
    await end.event.wait()


async def play(witness: Witness, engines: Sequence[Engine], asked: list[tuple[str, bool, int]]) -> None:
    fleet = (EventFleet if isinstance(engines[0], EventEngine) else Fleet)(
        engines=engines,
        store=SimStore(dict.fromkeys("abc", "1 GiB")),
        models=[Model(name) for name in "abc"],
        adapters=[Adapter("x", model="a"), Adapter("y", model="a")],
        router=witness,
        scheduler=witness,
        interval_s=0.5,
    )

    async def ask(model: str, adapted: bool, num_tokens: int) -> None:
        adapter = ("x" if num_tokens % 2 else "y") if adapted and model == "a" else None
        if isinstance(fleet, EventFleet):
            return await ridden(fleet, model, adapter, num_tokens)
        try:
            await fleet.generate(model, [1] * 20, Sampling(max_tokens=num_tokens), adapter=adapter)
        except HotswapError:
            assert witness.engines  # one that was lost too often; its client is told

    with anyio.fail_after(600):
        async with fleet, anyio.create_task_group() as clients:
            for number, (model, adapted, num_tokens) in enumerate(asked):
                clients.start_soon(ask, model, adapted, num_tokens)
                await anyio.sleep(0.1)
                if number == len(asked) // 2 and isinstance(engines[0], SimEngine):
                    engines[0].lose()
            await anyio.sleep(1)


requests = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 500)), min_size=4, max_size=12
)


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(requests, st.sampled_from(["plain", "watched", "events"]))
def test_what_is_shown_is_what_there_is(asked: list[tuple[str, bool, int]], kind: str) -> None:
    plain = kind == "plain"
    make = EventEngine if kind == "events" else SimEngine
    sims: list[Engine] = [make(f"e{n}", kv_blocks=40) for n in range(3)]
    engines: list[Engine] = [sims[0], Plain(sims[1]), sims[2]] if plain else sims
    witness = Witness(engines)
    # The one replica of a model may be the engine that holds no adapters.
    run(play, witness, engines, [(m, adapted and not plain, n) for m, adapted, n in asked])
    assert witness.wrong == []
    assert witness.num_questions > len(asked)
    assert {InstanceState.EMPTY, InstanceState.SERVING} <= witness.seen


def test_a_view_that_is_kept_does_not_change() -> None:
    engines = [SimEngine(f"e{n}") for n in range(2)]
    witness = Witness(engines, keeps=True)
    run(play, witness, engines, [("a", True, 40), ("b", False, 90), ("c", False, 20), ("a", False, 60)])
    assert len({text for _, text in witness.kept}) > 5
    assert all(dump_view(view) == text for view, text in witness.kept)


class Blinking(WrapperEngine):
    """Cannot be looked at while it blinks."""

    blinks = False

    def status(self) -> EngineStatus:
        if self.blinks:
            raise RuntimeError("It blinks.")
        return super().status()


@virtual_time
async def test_an_engine_that_cannot_be_looked_at_for_a_while_ends_nothing() -> None:
    blinking, other = Blinking(SimEngine("e0")), SimEngine("e1")
    fleet = Fleet(
        engines=[blinking, other],
        store=SimStore({"m": "1 GiB"}),
        models=[Model("m")],
        router=LeastLoadedRouter(),
        scheduler=WeightedLoadSwap(1, 50, 1, sigmas=0),
    )
    async with fleet:
        await fleet.swap("e1", to="m")
        async with fleet.stream("m", [1, 2, 3], Sampling(max_tokens=400)) as stream:
            await anext(stream)
            blinking.blinks = True
            await anyio.sleep(1.5)  # the control loop has turns meanwhile
            blinking.blinks = False
            other.lose()
            assert len(await stream.collect()) == 399  # it went on, where the fleet found a place


@virtual_time
async def test_an_engine_that_is_added_twice_is_still_watched() -> None:
    engine = SimEngine("e0")
    fleet = Fleet(
        engines=[engine],
        store=SimStore({"m": "1 GiB"}),
        models=[Model("m")],
        router=LeastLoadedRouter(),
        scheduler=WeightedLoadSwap(1, 50, 1, sigmas=0),
    )
    async with fleet:
        with pytest.raises(ConfigError, match="already"):
            await fleet.add(engine)
        with anyio.fail_after(60):
            await fleet.generate("m", [1, 2, 3])
            engine.lose()
            await fleet.generate("m", [1, 2, 3])


class Glancer(Router):
    """Keeps views unread, and answers from what it may."""

    def __init__(self) -> None:
        self.kept: list[tuple[FleetView, float]] = []

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        self.kept.append((fleet, fleet.now_s))
        return LeastLoadedRouter().route(request, fleet)


@virtual_time
async def test_a_view_that_is_kept_unread_is_still_that_of_its_moment() -> None:
    router = Glancer()
    fleet = Fleet(
        engines=[SimEngine("e0")],
        store=SimStore({"m": "1 GiB"}),
        models=[Model("m")],
        router=router,
        scheduler=WeightedLoadSwap(1, 50, 1, sigmas=0),
    )
    async with fleet:
        await fleet.swap("e0", to="m")
        async with fleet.stream("m", [1, 2, 3]) as stream:
            await anext(stream)
            async with fleet.stream("m", [4, 5, 6]) as other:
                await anext(other)
            assert [view.instance(InstanceId("e0")).num_requests for view, _ in router.kept] == [0, 1]
            assert [view.now_s for view, _ in router.kept] == [now_s for _, now_s in router.kept]
        assert fleet.view().running_on(InstanceId("e0")) == ()
        assert RequestId(stream.request.id) not in {r.id for r in fleet.view().running}
