"""What cannot be meant is refused by name, before it reaches a timer, a queue or an instance."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import Adapter, Fleet, InstanceId, MigrationLimits, Sampling, SwapLimits
from hotswap.abc import Engine
from hotswap.errors import ConfigError, DeadlineExceeded, InvalidRequest
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import LeastLoadedRouter
from tests.runtime.support import Idle, engine_of, idle, models, read, sim_fleet, store_of, until

SOME = Sampling(max_tokens=5, ignore_eos=True)
LONG = Sampling(max_tokens=300, ignore_eos=True)
E0 = InstanceId("e0")

# Values that are no number of seconds, zero and infinity apart.
NO_SECONDS: list[Any] = [math.nan, -1, -1e-9, -math.inf, "1", "soon", True, False, [1.0], 1j, 10**400]
NO_PRIORITY: list[Any] = ["high", "1", math.nan, math.inf, 0.5, 1.0, None, [1], 1j, True, 10**400, -(10**400)]


def brief(value: object) -> str:
    return repr(value)[:9]


async def timers_go_on(fleet: Fleet) -> None:
    """Assert that sleeps end in their order and at their time, and that the fleet serves."""
    now_s, woken = anyio.current_time(), list[float]()

    async def sleeper(seconds: float) -> None:
        await anyio.sleep(seconds)
        woken.append(anyio.current_time() - now_s)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as sleepers:
            for seconds in (3.0, 1.0, 2.0):
                sleepers.start_soon(sleeper, seconds)
        await read(fleet, "a", (1,), SOME)
    assert woken == pytest.approx([1.0, 2.0, 3.0])


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize("deadline_s", NO_SECONDS, ids=brief)
@virtual_time
async def test_a_deadline_that_is_no_number_of_seconds_is_refused_by_name(deadline_s: Any) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(InvalidRequest, match="deadline_s"):
            await fleet.generate("a", (1,), SOME, deadline_s=deadline_s)
        with pytest.raises(InvalidRequest, match="deadline_s"):
            async with fleet.stream("a", (1,), SOME, deadline_s=deadline_s):
                raise AssertionError("the stream was opened")
        idle(fleet)
        await timers_go_on(fleet)


@virtual_time
async def test_a_deadline_that_is_no_number_leaves_requests_under_way_alone() -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        await fleet.swap("e0", to="a")
        for number in range(4):
            clients.start_soon(read, fleet, "a", (1, number), LONG)
        await anyio.sleep(0.5)
        with pytest.raises(InvalidRequest, match="deadline_s"):
            await fleet.generate("a", (1,), SOME, deadline_s=math.nan)
        await timers_go_on(fleet)


@pytest.mark.parametrize("deadline_s", [0, 0.0])
@pytest.mark.parametrize("serving", [True, False])
@virtual_time
async def test_a_deadline_of_zero_has_passed_at_once(deadline_s: float, serving: bool) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet:
        if serving:
            await fleet.swap("e0", to="a")
        now_s = anyio.current_time()
        with pytest.raises(DeadlineExceeded):
            await fleet.generate("a", (1,), LONG, deadline_s=deadline_s)
        assert anyio.current_time() == now_s
        idle(fleet)


@pytest.mark.parametrize("deadline_s", [None, math.inf, 10, 1e9])
@virtual_time
async def test_a_deadline_far_away_does_not_come(deadline_s: float | None) -> None:
    async with sim_fleet("a") as fleet:
        done = await fleet.generate("a", (1,), SOME, deadline_s=deadline_s)
        assert len(done.tokens) == 5


@pytest.mark.parametrize("flag", [0, 1, "yes", [], (1, 2)], ids=brief)
@virtual_time
async def test_a_flag_is_true_or_false(flag: Any) -> None:
    async with sim_fleet("a") as fleet:
        with pytest.raises(InvalidRequest, match="add_special_tokens is"):
            await fleet.generate("a", (1, 2, 3), add_special_tokens=flag)


@pytest.mark.parametrize("priority", NO_PRIORITY, ids=brief)
@virtual_time
async def test_a_priority_that_is_no_level_is_refused_by_name(priority: Any) -> None:
    async with sim_fleet("a", scheduler=Idle()) as fleet, anyio.create_task_group() as clients:
        for level in (0, 1):  # others wait, with which it would be compared
            clients.start_soon(partial(fleet.generate, "a", (1,), SOME, priority=level))
        await anyio.sleep(1)
        with anyio.move_on_after(1), pytest.raises(InvalidRequest, match="priority"):
            await fleet.generate("a", (1,), SOME, priority=priority)
        assert anyio.current_time() == 1, "it waited"
        await fleet.swap("e0", to="a")
        await timers_go_on(fleet)


# ---------------------------------------------------------------- operations

Operation = Callable[[Fleet, Any], Awaitable[object]]

OPERATIONS: dict[str, Operation] = {
    "swap": lambda fleet, value: fleet.swap("e0", to="b", deadline_s=value),
    "unload": lambda fleet, value: fleet.unload("e0", deadline_s=value),
    "drain": lambda fleet, value: fleet.drain("e0", deadline_s=value),
    "remove": lambda fleet, value: fleet.remove("e0", deadline_s=value),
    "replace": lambda fleet, value: fleet.replace("e0", by=engine_of("new"), deadline_s=value),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@virtual_time
async def test_an_operation_refuses_a_deadline_that_is_no_number_of_seconds_by_name(operation: str) -> None:
    async with sim_fleet("a", "b", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as clients:
            clients.start_soon(read, fleet, "a", (1,), LONG)
            await anyio.sleep(0.5)
            now_s = anyio.current_time()
            for deadline_s in NO_SECONDS:
                with anyio.fail_after(60), pytest.raises(ConfigError, match="deadline_s"):
                    await OPERATIONS[operation](fleet, deadline_s)
                assert anyio.current_time() == now_s, f"it was begun with {deadline_s!r}"
            assert [(i.id, i.open, i.swapping) for i in fleet.view().instances] == [("e0", True, False)]
            assert fleet.view().instance(E0).num_running == 1
        await timers_go_on(fleet)


OTHER_NAMES: list[Any] = [None, 5, ["e0"], {"e0"}, b"e0", ("e0",)]

BY_NAME: dict[str, tuple[str, Operation]] = {
    "swap": ("instance", lambda fleet, name: fleet.swap(name, to="b")),
    "swap to": ("to", lambda fleet, name: fleet.swap("e0", to=name)),
    "unload": ("instance", lambda fleet, name: fleet.unload(name)),
    "drain": ("instance", lambda fleet, name: fleet.drain(name)),
    "reopen": ("instance", lambda fleet, name: called(fleet.reopen, name)),
    "remove": ("instance", lambda fleet, name: fleet.remove(name)),
    "replace": ("instance", lambda fleet, name: fleet.replace(name, by=engine_of("new"))),
    "migrate": ("request", lambda fleet, name: fleet.migrate(name, to="e1")),
    "migrate to": ("to", lambda fleet, name: fleet.migrate(fleet.view().running[0].id, to=name)),
    "roll": ("model", lambda fleet, name: fleet.roll(name, to="b")),
    "roll to": ("to", lambda fleet, name: fleet.roll("a", to=name)),
    "models.sampling": ("model", lambda fleet, name: called(fleet.models.sampling, name)),
    "models.remove": ("model", lambda fleet, name: fleet.models.remove(name)),
    "adapters.remove": ("adapter", lambda fleet, name: fleet.adapters.remove("a", name)),
    "adapters.remove of": ("model", lambda fleet, name: fleet.adapters.remove(name, "x")),
    "generate": ("model", lambda fleet, name: fleet.generate(name, (1,), SOME)),
}

REASONED: dict[str, Operation] = {
    "swap": lambda fleet, reason: fleet.swap("none", to="b", reason=reason),
    "unload": lambda fleet, reason: fleet.unload("none", reason=reason),
    "drain": lambda fleet, reason: fleet.drain("none", reason=reason),
    "remove": lambda fleet, reason: fleet.remove("none", reason=reason),
    "replace": lambda fleet, reason: fleet.replace("none", by=engine_of("new"), reason=reason),
    "migrate": lambda fleet, reason: fleet.migrate("none", to="none", reason=reason),
    "roll": lambda fleet, reason: fleet.roll("none", to="b", reason=reason),
}

CHOICES: dict[str, tuple[str, str, Operation]] = {
    "roll": ("streams", "'pinned', 'moved'", lambda fleet, it: fleet.roll("a", to="b", streams=it)),
    "drain": ("method", "'kv', 'tokens'", lambda fleet, it: fleet.drain("e0", method=it)),
    "migrate": (
        "method",
        "'kv', 'tokens'",
        lambda fleet, it: fleet.migrate(fleet.view().running[0].id, to="e1", method=it),
    ),
}

OF_KIND: dict[str, tuple[str, str, Operation]] = {
    "add": ("engine", "Engine", lambda fleet, it: fleet.add(it)),
    "replace": ("by", "Engine", lambda fleet, it: fleet.replace("e0", by=it)),
    "models.add": ("model", "Model", lambda fleet, it: fleet.models.add(it)),
    "adapters.add": ("adapter", "Adapter", lambda fleet, it: called(fleet.adapters.add, it)),
    "adapters.update": ("adapter", "Adapter", lambda fleet, it: fleet.adapters.update(it)),
}


async def called(verb: Callable[[Any], object], value: Any) -> object:
    await checkpoint()
    return verb(value)


@asynccontextmanager
async def undisturbed() -> AsyncGenerator[Fleet]:
    """A fleet that serves a request, which must not notice what the block does to the fleet."""
    adapters = [Adapter("x", "a", "/x")]
    async with sim_fleet("a", "b", engines=2, scheduler=Idle(), adapters=adapters) as fleet:
        for instance in ("e0", "e1"):
            await fleet.swap(instance, to="a")
        num_swaps = len(fleet.swaps)
        async with anyio.create_task_group() as clients:
            clients.start_soon(read, fleet, "a", (1,), LONG)
            await until(lambda: len(fleet.view().running) == 1)
            before, now_s = repr(fleet), anyio.current_time()
            yield fleet
            assert repr(fleet) == before
            assert anyio.current_time() == now_s
            assert all(instance.open for instance in fleet.view().instances)
        assert len(fleet.swaps) == num_swaps
        assert [model.id for model in fleet.models] == ["a", "b"]
        assert [adapter.id for adapter in fleet.adapters] == ["x"]
        idle(fleet)


@pytest.mark.parametrize("verb", BY_NAME)
@virtual_time
async def test_a_name_that_is_no_string_is_refused_by_the_name_of_its_argument(verb: str) -> None:
    argument, call = BY_NAME[verb]
    async with undisturbed() as fleet:
        for name in OTHER_NAMES:
            with pytest.raises((ConfigError, InvalidRequest), match=f"^{argument} is "):
                await call(fleet, name)


@pytest.mark.parametrize("verb", REASONED)
@virtual_time
async def test_a_reason_that_is_no_string_is_refused_before_names_are_looked_up(verb: str) -> None:
    async with undisturbed() as fleet:
        for reason in (None, 5, ["why"], b"why"):
            with pytest.raises(ConfigError, match=r"^reason is "):
                await REASONED[verb](fleet, reason)


@pytest.mark.parametrize("verb", ["swap", "unload", "drain", "remove", "replace"])
@virtual_time
async def test_a_deadline_is_checked_before_names_are_looked_up(verb: str) -> None:
    async with undisturbed() as fleet:
        call = getattr(fleet, verb)
        others: dict[str, dict[str, Any]] = {"swap": {"to": "none"}, "replace": {"by": engine_of("new")}}
        arguments = others.get(verb, {})
        with pytest.raises(ConfigError, match=r"^deadline_s is nan"):
            await call("none", **arguments, deadline_s=math.nan)
        if verb in ("swap", "unload"):
            with pytest.raises(ConfigError, match=r"^deadline_s is None"):
                await call("none", **arguments, deadline_s=None)


@pytest.mark.parametrize("verb", CHOICES)
@virtual_time
async def test_a_choice_that_there_is_not_is_refused_with_those_that_there_are(verb: str) -> None:
    argument, choices, call = CHOICES[verb]
    async with undisturbed() as fleet:
        for value in ("fast", "", 5, ["kv"], True, *([None] if verb == "roll" else [])):
            with pytest.raises(ConfigError, match=f"^{argument} is .*{choices}"):
                await call(fleet, value)


@pytest.mark.parametrize("verb", OF_KIND)
@virtual_time
async def test_an_object_of_another_kind_is_refused_by_the_name_of_its_argument(verb: str) -> None:
    argument, kind, call = OF_KIND[verb]
    async with undisturbed() as fleet:
        for value in (None, "b", 5, ["b"], object(), type(engine_of("new")), store_of("a")):
            with pytest.raises(ConfigError, match=f"^{argument} is .*type {kind}"):
                await call(fleet, value)


@virtual_time
async def test_an_engine_without_an_id_is_refused() -> None:
    async with undisturbed() as fleet:
        for wrong in (None, 5, ["new"]):
            engine: Any = engine_of("new")
            engine.id = wrong
            with pytest.raises(ConfigError, match=r"engine\.id"):
                await fleet.add(engine)
            with pytest.raises(ConfigError, match=r"by\.id"):
                await fleet.replace("e0", by=engine)
            with pytest.raises(ConfigError, match=r"engine\.id"):
                sim_fleet("a", engines=[engine])


@virtual_time
async def test_a_model_cannot_be_rolled_to_itself() -> None:
    async with undisturbed() as fleet:
        with pytest.raises(ConfigError, match="'a' cannot be rolled to itself"):
            await fleet.roll("a", to="a")


class Duck:
    """Has all that an engine has, and is none by type."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> Any:
        return await self._engine.__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        return await self._engine.__aexit__(*error)


@virtual_time
async def test_an_engine_is_what_has_the_methods_of_one() -> None:
    first, second, third = (cast("Any", Duck(engine_of(name))) for name in ("e0", "e1", "e2"))
    async with sim_fleet("a", engines=[first], scheduler=Idle()) as fleet:
        await fleet.add(second)
        await fleet.replace("e0", by=third)
        for name in ("e1", "e2"):
            await fleet.swap(name, to="a")
        await read(fleet, "a", (1,), SOME)


# ---------------------------------------------------------------- parts

PARTS: dict[str, str] = {
    "engines": "Engine",
    "models": "Model",
    "adapters": "Adapter",
    "store": "WeightStore",
    "router": "Router",
    "scheduler": "Scheduler",
    "mover": "Mover",
    "limits": "SwapLimits",
    "migration_limits": "MigrationLimits",
    "random": "Random",
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_another_kind_is_refused_by_name(part: str) -> None:
    parts: dict[str, Any] = {
        "engines": [engine_of("e0")],
        "models": models("a"),
        "store": store_of("a"),
        "router": LeastLoadedRouter(),
        "scheduler": Idle(),
    }
    Fleet(**parts)
    values: list[Any] = ["b", 5, 0, object(), LeastLoadedRouter]
    if part in ("engines", "models", "adapters"):
        values += [[value] for value in (None, *values)]
    if part in ("engines", "models", "store"):  # others have a default
        values.append(None)
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{part}(\[0\])? is .*type {PARTS[part]}"):
            Fleet(**{**parts, part: value})


def test_the_one_object_of_another_kind_in_a_list_is_named() -> None:
    engines: list[Any] = [engine_of("e0"), "e1"]
    with pytest.raises(ConfigError, match=r"^engines\[1\] is 'e1'"):
        sim_fleet("a", engines=engines)


# ---------------------------------------------------------------- settings


def of_fleet(name: str) -> Callable[[Any], object]:
    return lambda value: sim_fleet("a", **{name: value})


def of_swaps(name: str) -> Callable[[Any], object]:
    return lambda value: SwapLimits(**{name: value})


def of_moves(name: str) -> Callable[[Any], object]:
    return lambda value: MigrationLimits(**{name: value})


SECONDS_OF: dict[str, Callable[[Any], object]] = {
    "interval_s": of_fleet("interval_s"),
    **{name: of_swaps(name) for name in ("preflight_s", "preload_s", "evict_s", "unload_s", "load_s")},
    **{name: of_moves(name) for name in ("stage_s", "round_s")},
}
COUNTS_OF: dict[str, Callable[[Any], object]] = {
    **{name: of_fleet(name) for name in ("max_waiting", "max_load_attempts")},
    **{name: of_moves(name) for name in ("per_instance", "max_stages", "chunk_bytes")},
    **{name: of_moves(name) for name in ("last_stage_blocks", "last_round_tokens")},
}


@pytest.mark.parametrize("name", SECONDS_OF)
def test_a_setting_that_is_no_number_of_seconds_is_refused_by_name(name: str) -> None:
    for value in (*NO_SECONDS, 0, None):
        with pytest.raises(ConfigError, match=name):
            SECONDS_OF[name](value)


@pytest.mark.parametrize("name", COUNTS_OF)
def test_a_setting_that_is_no_whole_number_is_refused_by_name(name: str) -> None:
    for value in (math.nan, -1, 1.5, "3", [3]):
        with pytest.raises(ConfigError, match=name):
            COUNTS_OF[name](value)


def test_settings_that_can_be_meant_are_taken() -> None:
    for name in SECONDS_OF:
        for value in (1, 0.5, 1e9):
            SECONDS_OF[name](value)
    for name in COUNTS_OF:
        COUNTS_OF[name](3)
    SwapLimits(load_s=math.inf)
    MigrationLimits(stage_s=math.inf, round_s=math.inf)
