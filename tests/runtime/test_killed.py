"""A process of an engine that is killed in the middle of a hundred streams costs each of them one prefill."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random

import anyio

from hotswap import Fleet, InstanceState, Model, Sampling
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.parallel.support import add, loader_of
from tests.backends.torch.zoo import make_model
from tests.runtime.support import Idle

STREAMS = 100
SAMPLING = Sampling(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3)


def make_engine(name: str, pp: int = 1) -> TorchEngine:
    return TorchEngine(name, pp=pp, threads=1, kv_tokens=16_384, max_requests=128, memory_bytes="256 MiB")


def make_fleet(root: Path, *engines: TorchEngine) -> Fleet:
    return Fleet(
        engines=engines,
        store=NvmeStore(root),
        models=[Model("m")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        interval_s=3600.0,  # the test does not need the control loop
    )


async def test_a_hundred_streams_outlive_the_process_that_half_of_them_ran_in(tmp_path: Path) -> None:
    add(tmp_path / "store", "m", make_model("llama"))
    random = Random(1)
    prompts = [
        tuple(random.randrange(2, 500) for _ in range(random.choice([2, 9, 40]))) for _ in range(STREAMS)
    ]
    received: list[list[int]] = [[] for _ in prompts]
    hops: list[int] = [0] * STREAMS
    killed: list[int] = []
    ranked, single = make_engine("ranked", pp=2), make_engine("single")

    async def read(fleet: Fleet, at: int) -> None:
        async with fleet.stream("m", prompts[at], SAMPLING) as tokens:
            async for token in tokens:
                received[at].append(token.id)
                if not killed and ranked.status().num_running >= STREAMS // 2 and all(received):
                    killed.append(loader_of(ranked).pids[1])
                    os.kill(killed[0], signal.SIGKILL)
            hops[at] = tokens.num_hops

    async with make_fleet(tmp_path / "store", ranked, single) as fleet:
        for name in ("ranked", "single"):
            await fleet.swap(name, to="m")
        async with anyio.create_task_group() as tasks:
            for at in range(STREAMS):
                tasks.start_soon(read, fleet, at)
        assert killed
        assert ranked.status().state is not InstanceState.SERVING
        # Each went straight to the other instance, once: one prefill.
        assert sorted(set(hops)) == [1, 2]
        assert hops.count(2) >= STREAMS // 2 - 1
    async with make_fleet(tmp_path / "store", make_engine("alone")) as fleet:
        await fleet.swap("alone", to="m")
        for prompt, tokens in zip(prompts, received, strict=True):
            async with fleet.stream("m", prompt, SAMPLING) as stream:
                assert [token.id for token in await stream.collect()] == tokens
