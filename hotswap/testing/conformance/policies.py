"""`RouterConformance` and `SchedulerConformance`: the contracts of policies, over generated fleets."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from hypothesis import HealthCheck, given, settings

from hotswap.action import Action, Migrate, PinAdapters, Prefetch, Resize, Swap, Unload
from hotswap.request import ModelId, Request, RequestId
from hotswap.router import Router
from hotswap.scheduler import Scheduler
from hotswap.testing.strategies import fleet_views, routings
from hotswap.view import FleetView, InstanceId, InstanceState, InstanceView, ModelView

__all__ = ["RouterConformance", "SchedulerConformance"]

EXAMPLES = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class RouterConformance:
    """Checks the contract of `hotswap.router.Router`; inherit from it and write `make_router`.

    Attributes:
        examples: the Hypothesis settings of each check, such as the number of generated fleets.
    """

    examples: ClassVar[settings] = EXAMPLES

    def make_router(self) -> Router:
        """Return a new router."""
        raise NotImplementedError("Write make_router(): it returns the router to be tested.")

    def test_it_chooses_only_instances_that_are_open_and_serve_the_model(self) -> None:
        def look(request: Request, fleet: FleetView) -> None:
            chosen = self.make_router().route(request, fleet)
            able = [instance.id for instance in fleet.serving(request.model)]
            assert chosen is None or chosen in able, f"{chosen!r} is not among {able}, for {request}"

        self._for_all(look)

    def test_it_is_a_function_of_request_and_view(self) -> None:
        router = self.make_router()

        def look(request: Request, fleet: FleetView) -> None:
            first = router.route(request, fleet)
            assert router.route(request, fleet) == first, "asked again, it answers differently"
            assert self.make_router().route(request, fleet) == first, "it depends on earlier calls"

        self._for_all(look)

    def test_it_changes_nothing(self) -> None:
        def look(request: Request, fleet: FleetView) -> None:
            before = copy.deepcopy((request, fleet))
            self.make_router().route(request, fleet)
            assert (request, fleet) == before

        self._for_all(look)

    def test_it_leaves_a_request_waiting_while_no_instance_serves_its_model(self) -> None:
        def look(request: Request, fleet: FleetView) -> None:
            if not fleet.serving(request.model):
                assert self.make_router().route(request, fleet) is None

        self._for_all(look)

    def test_it_uses_an_idle_replica(self) -> None:
        model = ModelId("a")
        idle = InstanceView(
            id=InstanceId("e0"),
            state=InstanceState.SERVING,
            model=model,
            num_kv_blocks=64,
            num_free_kv_blocks=64,
            serving_since_s=0.0,
        )
        fleet = FleetView(now_s=1.0, instances=(idle,), models=(ModelView(id=model),))
        request = Request(id=RequestId("r"), model=model, prompt=(1, 2, 3))
        assert self.make_router().route(request, fleet) == idle.id

    def _for_all(self, look: Callable[[Request, FleetView], None]) -> None:
        @self.examples
        @given(routings())
        def look_at(routing: tuple[Request, FleetView]) -> None:
            look(*routing)

        look_at()


class SchedulerConformance:
    """Checks the contract of `hotswap.scheduler.Scheduler`; inherit from it and write `make_scheduler`.

    Attributes:
        examples: the Hypothesis settings of each check, such as the number of generated fleets.
    """

    examples: ClassVar[settings] = EXAMPLES

    def make_scheduler(self) -> Scheduler:
        """Return a new scheduler."""
        raise NotImplementedError("Write make_scheduler(): it returns the scheduler to be tested.")

    def test_it_is_a_function_of_the_view(self) -> None:
        scheduler = self.make_scheduler()

        def look(fleet: FleetView) -> None:
            first = list(scheduler.plan(fleet))
            assert list(scheduler.plan(fleet)) == first, "asked again, it plans differently"
            assert list(self.make_scheduler().plan(fleet)) == first, "it depends on earlier calls"

        self._for_all(look)

    def test_it_changes_nothing(self) -> None:
        def look(fleet: FleetView) -> None:
            before = copy.deepcopy(fleet)
            self.make_scheduler().plan(fleet)
            assert fleet == before

        self._for_all(look)

    def test_its_actions_name_what_the_fleet_has(self) -> None:
        def look(fleet: FleetView) -> None:
            known = {instance.id for instance in fleet.instances}
            models = {model.id for model in fleet.models}
            requests = {running.id for running in fleet.running}
            for action in self.make_scheduler().plan(fleet):
                match action:
                    case Prefetch():
                        assert action.model in models, f"unknown: {action}"
                    case Migrate():
                        assert action.request in requests, f"unknown: {action}"
                        assert action.destination in known, f"unknown: {action}"
                    case PinAdapters():
                        assert action.instance in known, f"unknown: {action}"
                        adapters = {a.id for a in fleet.adapters if a.model == action.model}
                        adapters |= set(fleet.instance(action.instance).adapters)
                        assert adapters.issuperset(action.adapters), f"unknown: {action}"
                    case Resize():
                        assert action.instance in known, f"unknown: {action}"
                    case Swap() | Unload():
                        assert action.instance in known, f"unknown: {action}"
                        assert isinstance(action, Unload) or action.model in models, f"unknown: {action}"
                        assert 0 <= action.deadline_s < math.inf, f"{action}"

        self._for_all(look)

    def test_it_leaves_busy_instances_alone(self) -> None:
        def look(fleet: FleetView) -> None:
            for action in _on_instances(self.make_scheduler().plan(fleet)):
                instance = fleet.instance(action.instance)
                assert instance.free, f"{instance} is not free for {action}"
                same = isinstance(action, Swap) and action.model == instance.model
                assert not same, f"{instance} serves the model already: {action}"

        self._for_all(look)

    def test_it_plans_one_action_for_an_instance(self) -> None:
        def look(fleet: FleetView) -> None:
            planned = Counter(a.instance for a in _on_instances(self.make_scheduler().plan(fleet)))
            assert max(planned.values(), default=1) == 1, f"several actions for one instance: {planned}"

        self._for_all(look)

    def test_it_moves_requests_to_other_open_instances_of_their_model(self) -> None:
        def look(fleet: FleetView) -> None:
            running = {request.id: request for request in fleet.running}
            moves = [action for action in self.make_scheduler().plan(fleet) if isinstance(action, Migrate)]
            for move in moves:
                request, able = running[move.request], fleet.serving(running[move.request].model)
                assert move.destination != request.instance, f"it runs there already: {move}"
                assert move.destination in [instance.id for instance in able], f"not open for it: {move}"
                assert not request.moving, f"it moves already: {move}"
            assert len({move.request for move in moves}) == len(moves), f"one request moves twice: {moves}"

        self._for_all(look)

    def test_it_gives_adapters_to_instances_that_serve_their_model_and_have_the_places(self) -> None:
        def look(fleet: FleetView) -> None:
            holds = [
                action for action in self.make_scheduler().plan(fleet) if isinstance(action, PinAdapters)
            ]
            for hold in holds:
                instance = fleet.instance(hold.instance)
                assert instance.state is InstanceState.SERVING, f"{instance} holds nothing: {hold}"
                assert instance.model == hold.model, f"{instance} serves another model: {hold}"
                assert len(hold.adapters) <= instance.max_adapters, f"too many for {instance}: {hold}"
                assert len(set(hold.adapters)) == len(hold.adapters), f"one of them twice: {hold}"
            assert len({hold.instance for hold in holds}) == len(holds), f"several for one: {holds}"

        self._for_all(look)

    def test_it_resizes_kv_pools_within_their_bounds(self) -> None:
        def look(fleet: FleetView) -> None:
            actions = self.make_scheduler().plan(fleet)
            resizes = [action for action in actions if isinstance(action, Resize)]
            taken = {action.instance for action in _on_instances(actions)}
            for resize in resizes:
                instance = fleet.instance(resize.instance)
                assert instance.free, f"{instance} is not free for {resize}"
                assert instance.hosted is not None, f"{instance} has no pool: {resize}"
                assert instance.id not in taken, f"{instance} is swapped or unloaded as well: {resize}"
                assert instance.least_kv_blocks <= resize.kv_blocks <= instance.most_kv_blocks, f"{resize}"
            assert len({resize.instance for resize in resizes}) == len(resizes), f"several for one: {resizes}"

        self._for_all(look)

    def test_it_takes_no_model_below_its_least_replicas(self) -> None:
        def look(fleet: FleetView) -> None:
            change: Counter[ModelId | None] = Counter()
            actions = self.make_scheduler().plan(fleet)
            for action in _on_instances(actions):
                change[fleet.instance(action.instance).model] -= 1
                change[action.model if isinstance(action, Swap) else None] += 1
            for model in fleet.models:
                before = len(fleet.replicas(model.id))
                least = min(before, model.min_replicas)
                after = before + change[model.id]
                assert after >= least, f"{model.id!r} is left with {after} of {least} replicas by {actions}"

        self._for_all(look)

    def _for_all(self, look: Callable[[FleetView], None]) -> None:
        self.examples(given(fleet_views())(look))()


def _on_instances(actions: Sequence[Action]) -> list[Swap | Unload]:
    return [action for action in actions if isinstance(action, Swap | Unload)]
