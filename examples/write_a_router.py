"""Write a router: send the turns of one conversation where its first words already went.

    python -m examples.write_a_router

A router is one pure function from a request and a frozen view to an instance: it neither awaits nor
remembers, so the same view always gives the same answer.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass

import anyio

from hotswap import Fleet, Model, Sampling
from hotswap.abc import FleetView, InstanceId, InstanceView, Request, Router
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.policies import KeepAsIs


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRouter(Router):
    """Keeps a conversation on one replica by rendezvous hashing of its first tokens.

    The replica with the highest hash of (conversation, replica) wins, so that when a replica is added or
    removed only its own conversations move (Thaler, Ravishankar, 1998). A replica with over `spill` requests
    more than the least loaded one is skipped.
    """

    first_tokens: int = 8
    spill: int = 16

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        replicas = fleet.serving(request.model)
        if not replicas:
            return None  # wait; asked again whenever an instance changes state
        least = min(replica.num_requests for replica in replicas)
        near = [replica for replica in replicas if replica.num_requests <= least + self.spill]
        conversation = repr(request.prompt[: self.first_tokens])

        def weight(replica: InstanceView) -> bytes:
            return hashlib.blake2b(f"{conversation} {replica.id}".encode()).digest()

        return max(near, key=weight).id


async def main() -> dict[int, Counter[InstanceId]]:
    """Run twelve conversations of four turns each; return how many turns of each ran on which instance."""
    fleet = Fleet(
        engines=[SimEngine("e0"), SimEngine("e1"), SimEngine("e2")],
        store=SimStore({"smollm-135m": "270 MB"}),
        models=[Model("smollm-135m")],
        router=ConversationRouter(),
        scheduler=KeepAsIs(),  # the swaps are made by hand
    )
    went: dict[int, Counter[InstanceId]] = {number: Counter() for number in range(12)}
    async with fleet:
        for instance in ("e0", "e1", "e2"):
            await fleet.swap(instance, to="smollm-135m")
        async with anyio.create_task_group() as clients:
            for number, instances in went.items():
                clients.start_soon(converse, fleet, number, instances)
    for number, instances in went.items():
        print(f"conversation {number:2}: {dict(instances)}")
    return went


async def converse(fleet: Fleet, number: int, went: Counter[InstanceId]) -> None:
    prompt = [number] * 8
    for turn in range(4):
        async with fleet.stream("smollm-135m", prompt, Sampling(max_tokens=5)) as tokens:
            answer = await tokens.collect()
        went[tokens.hops[-1].instance] += 1
        prompt += [*(token.id for token in answer), turn]  # the next turn's prompt holds all so far


if __name__ == "__main__":
    anyio.run(main)
