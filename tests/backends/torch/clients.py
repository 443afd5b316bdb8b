"""Random clients of an engine: they send, abort and continue requests, in an order given by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import anyio

from hotswap import ModelId, Request, RequestId, Sampling
from hotswap.abc import Engine
from hotswap.backends.torch import TorchEngine

MAX_RUNS = 20


@dataclass(frozen=True)
class ClientPlan:
    """A request, and when its client sends and aborts it.

    The client sends the request when the plan of index `after` has received a token. It aborts the stream
    after each number of tokens in `leaves`, and sends the rest as a continued request.
    """

    request: Request
    after: int | None
    leaves: tuple[int, ...]


def make_client_plans(
    random: Random, model: str, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> list[ClientPlan]:
    """Return random plans for the prompts."""
    plans: list[ClientPlan] = []
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        request = Request(
            id=RequestId(f"r{index}"), model=ModelId(model), prompt=tuple(prompt), sampling=sampling
        )
        after = random.randrange(index) if index and random.random() < 0.7 else None
        leaves = tuple(random.randrange(6) for _ in range(random.choice([0, 0, 1, 2])))
        plans.append(ClientPlan(request, after, leaves))
    return plans


async def run_clients(engine: Engine, plans: Sequence[ClientPlan]) -> list[list[int]]:
    """Run all plans concurrently and return the tokens of each."""
    received: list[list[int]] = [[] for _ in plans]
    began = [anyio.Event() for _ in plans]

    async def client(index: int) -> None:
        plan = plans[index]
        if plan.after is not None:
            await began[plan.after].wait()
        for stay in (*plan.leaves, None):
            if plan.request.sampling.max_tokens > len(received[index]):
                rest = plan.request.continued(received[index])
                if await _read(engine, rest, received[index], stay, began[index]):
                    return

    async with anyio.create_task_group() as tasks:
        for index in range(len(plans)):
            tasks.start_soon(client, index)
    return received


async def run_until_preempted(
    engine: TorchEngine, plans: Sequence[ClientPlan], expected: Sequence[Sequence[int]]
) -> None:
    """Run the plans until the engine has preempted a request, and compare the tokens of each run.

    Which requests run at the same time depends on the machine: on a busy one, few of a run may do.
    """
    for _ in range(MAX_RUNS):
        assert await run_clients(engine, plans) == expected
        if engine.num_preempted:
            return
    raise AssertionError("too many blocks: the test must preempt")


async def _read(
    engine: Engine, request: Request, received: list[int], stay: int | None, began: anyio.Event
) -> bool:
    """Read `stay` tokens, or all; return whether the request has ended."""
    async with engine.stream(request) as tokens:
        num_read = 0
        while stay is None or num_read < stay:
            token = await anext(tokens, None)
            if token is None:
                return True
            received.append(token.id)
            began.set()
            num_read += 1
            if token.finish_reason is not None:
                return True
    return False
