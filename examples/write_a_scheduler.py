"""Write a scheduler: swap an idle instance to the model whose requests have waited longest.

    python -m examples.write_a_scheduler

A scheduler is one pure function from a frozen view to actions: it neither awaits nor remembers, so it can be
tried on a view made by hand, as `main` does first. The fleet calls it every interval, and at once when a
request waits for a model that no instance serves, and carries out the actions that it returns.
"""

from collections.abc import Sequence

import anyio

from hotswap import Fleet, Model, Sampling, SwapRecord
from hotswap.abc import (
    Action,
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelId,
    RequestId,
    Scheduler,
    Swap,
    WaitingView,
)
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.policies import LeastLoadedRouter

SIZES = {"smollm-135m": "270 MB", "qwen-0.5b": "1 GB", "llama-1b": "2.5 GB"}


class LongestWaitFirst(Scheduler):
    """Swaps idle instances to models with waiting requests and no replica, in the order of the queue.

    An instance with requests keeps its model, so no request is ever evicted, and a model that is never idle
    is never swapped out: `hotswap.policies.WeightedLoadSwap` compares loads instead.
    """

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        unserved = dict.fromkeys(w.model for w in fleet.waiting if not fleet.replicas(w.model))
        idle = [i for i in fleet.instances if i.free and not i.num_requests]
        return [
            Swap(instance=instance.id, model=model, reason=f"{model} waited longest")
            for model, instance in zip(unserved, idle, strict=False)
        ]


def try_on_a_view() -> Sequence[Action]:
    """Plan without a fleet."""
    e0 = InstanceView(id=InstanceId("e0"), state=InstanceState.EMPTY)
    waiting = WaitingView(id=RequestId("r0"), model=ModelId("llama-1b"))
    return LongestWaitFirst().plan(FleetView(now_s=0.0, instances=(e0,), waiting=(waiting,)))


async def main() -> tuple[SwapRecord, ...]:
    """Serve three models on one engine, each model twice; return the swaps."""
    print("a plan:", *try_on_a_view())
    fleet = Fleet(
        engines=[SimEngine("e0")],
        store=SimStore(SIZES),
        models=[Model(name) for name in SIZES],
        router=LeastLoadedRouter(),
        scheduler=LongestWaitFirst(),
    )
    async with fleet, anyio.create_task_group() as clients:
        for name in (*SIZES, *SIZES):
            clients.start_soon(fleet.generate, name, [1, 2, 3], Sampling(max_tokens=20))
    for swap in fleet.swaps:
        print(f"{swap.instance} now serves {swap.model} after {swap.seconds:.2f} s, because {swap.reason}")
    return fleet.swaps


if __name__ == "__main__":
    anyio.run(main)
