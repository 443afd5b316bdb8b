"""The shipped routers and turns in a fleet: which requests share an instance, waiting times, exact tokens."""

from itertools import pairwise
from random import Random
from statistics import mean

import anyio
import pytest

from hotswap import Fleet, InstanceId, Sampling
from hotswap.abc import Router
from hotswap.backends.sim import DeviceProfile, SimEngine
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.policies import (
    ConsistentHashRouter,
    ElasticQuota,
    LeastLoadedRouter,
    LeastTimeRouter,
    PrefixRouter,
    RestoreMinReplicas,
)
from tests.runtime.support import idle, models, read, sim_fleet, store_of

ROUTERS = (ConsistentHashRouter(), PrefixRouter(block_tokens=2), LeastTimeRouter())


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
@virtual_time
async def test_a_fleet_that_swaps_stays_exact_with_any_router(router: Router) -> None:
    async with sim_fleet("a", "b", "c", engines=2, router=router, interval_s=0.05) as fleet:
        async with anyio.create_task_group() as clients:
            for turn in range(45):
                clients.start_soon(read, fleet, "abc"[turn % 3], (turn, turn % 2), Sampling(max_tokens=60))
                await anyio.sleep(0.02)
        assert len({swap.model for swap in fleet.swaps}) == 3
        idle(fleet)


@pytest.mark.parametrize("router", [ConsistentHashRouter(c=3.0), PrefixRouter(block_tokens=2)], ids=repr)
@virtual_time
async def test_requests_of_one_beginning_meet(router: Router) -> None:
    where: dict[int, set[InstanceId | None]] = {key: set() for key in range(6)}
    registered = models("a", min_replicas=4)
    async with sim_fleet(
        "a", engines=4, router=router, models=registered, scheduler=RestoreMinReplicas()
    ) as fleet:
        await fleet.ready()
        for turn in range(30):
            key = turn % 6
            prompt = (key,) * 64 if isinstance(router, ConsistentHashRouter) else (key,) * 8
            async with fleet.stream("a", (*prompt, turn), Sampling(max_tokens=4)) as stream:
                await stream.collect()
            where[key] |= {hop.instance for hop in stream.hops}
    assert [len(instances) for instances in where.values()] == [1] * 6
    assert len(set.union(*where.values())) > 1


async def first_tokens_s(router: Router) -> list[float]:
    """How long first tokens took where one prompt in twenty has eight thousand tokens."""
    random, waits_s = Random(3), list[float]()
    device = DeviceProfile(floor_s=0.006, token_s=50e-6, request_s=2e-4)
    engines = [SimEngine(f"e{n}", device, kv_blocks=4096, max_requests=64) for n in range(4)]

    async def client(fleet: Fleet, num_tokens: int) -> None:
        came_s = anyio.current_time()
        async with fleet.stream("a", (1,) * num_tokens, Sampling(max_tokens=40, ignore_eos=True)) as stream:
            async for token in stream:
                if token.index == 0:
                    waits_s.append(anyio.current_time() - came_s)

    async with sim_fleet(
        "a",
        engines=engines,
        router=router,
        store=store_of("a", context=20_000),
        models=models("a", min_replicas=4),
        scheduler=RestoreMinReplicas(),
    ) as fleet:
        await fleet.ready()
        async with anyio.create_task_group() as clients:
            for _ in range(400):
                await anyio.sleep(random.expovariate(70))
                clients.start_soon(client, fleet, 8000 if random.random() < 0.05 else random.randint(20, 400))
    return waits_s


def test_first_tokens_come_sooner_where_prompts_are_weighed() -> None:
    by_count = run(first_tokens_s, LeastLoadedRouter())
    by_time = run(first_tokens_s, LeastTimeRouter(prefill_tokens_per_s=20_000))
    assert len(by_time) == len(by_count) == 400
    assert mean(by_time) < 0.75 * mean(by_count)


@virtual_time
async def test_three_models_take_turns_on_one_instance() -> None:
    rule = ElasticQuota(tbt_s=0.1, step_s=0.025, max_quota_s=1.0, switch_s=0.1)
    endless = Sampling(max_tokens=400, ignore_eos=True)
    async with sim_fleet("a", "b", "c", engines=1, scheduler=rule, interval_s=0.05) as fleet:
        async with anyio.create_task_group() as clients:
            for model in "abc":
                clients.start_soon(read, fleet, model, (1,), endless)
            await anyio.sleep(2.0)
            quotas_s = rule.quotas_s(fleet.view())
        idle(fleet)
        assert set(quotas_s) == {"a", "b", "c"}
        while_all_go_on = fleet.swaps[:8]
        assert [swap.model for swap in while_all_go_on[:3]] == [swap.model for swap in while_all_go_on[3:6]]
        for swap, after in pairwise(while_all_go_on):
            assert swap.model is not None
            served_s = after.started_s - (swap.started_s + swap.seconds)
            assert quotas_s[swap.model] <= served_s <= quotas_s[swap.model] + 0.2
