"""Serve adapters of one model: each request names its own, or none, and they share the batch.

    python -m examples.serve_adapters

An instance keeps the adapters that were used last, and loads another when a request names it. An adapter gets
new weights while it is served: requests that run keep the old ones. Replace the simulated engine and store by
a `TorchEngine` and by directories that PEFT wrote.
"""

import anyio

from hotswap import Adapter, Fleet, Model, Sampling
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.errors import UnknownAdapter
from hotswap.policies import AffinityRouter

ADAPTERS = [Adapter(name, "qwen-0.5b", f"/adapters/{name}") for name in ("sql", "law", "poems")]


async def ask(fleet: Fleet, adapter: str | None, answers: dict[str | None, list[int]]) -> None:
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    async with fleet.stream("qwen-0.5b", (1, 2, 3), sampling, adapter=adapter) as tokens:
        answers[adapter] = [token.id async for token in tokens]


async def main() -> dict[str | None, list[int]]:
    answers: dict[str | None, list[int]] = {}
    async with Fleet(
        engines=[SimEngine("e0", max_adapters=2)],  # holds two of the three at a time
        store=SimStore({"qwen-0.5b": "1 GB"}),
        models=[Model("qwen-0.5b", min_replicas=1)],
        adapters=ADAPTERS,
        router=AffinityRouter(),
    ) as fleet:
        async with anyio.create_task_group() as clients:
            for adapter in (None, *(adapter.id for adapter in ADAPTERS)):
                clients.start_soon(ask, fleet, adapter, answers)
        print(*(f"{adapter or 'plain'}: {tokens}" for adapter, tokens in answers.items()), sep="\n")
        print("held now:", *fleet.view().instances[0].adapters)
        update = await fleet.adapters.update(Adapter("sql", "qwen-0.5b", "/adapters/sql-of-friday"))
        await ask(fleet, "sql", answers)
        print(f"sql is {update.version} now: {answers['sql']}")
        try:
            await ask(fleet, "chess", answers)
        except UnknownAdapter as exc:
            print(exc)
    return answers


if __name__ == "__main__":
    anyio.run(main)
