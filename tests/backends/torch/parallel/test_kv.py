"""KV blocks of ranks outlive a swap in a KV store: each rank has a part of a block, in the order of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from hotswap import Fleet, FleetStream, InstanceId, InstanceState, Model, Request, Sampling
from hotswap.abc import Engine, FleetView, KVStore, Router
from hotswap.backends.kv_stores import HostKVStore, NodeKVStore
from hotswap.backends.remote import EngineHost, RemoteEngine
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch.parallel.messages import Done
from hotswap.backends.torch.parallel.processes import Ranks
from hotswap.errors import SwapFailed
from hotswap.policies import LeastLoadedRouter
from tests.backends.remote.support import MemoryLinks
from tests.backends.torch.hybrids import HYBRIDS, make_hybrid
from tests.backends.torch.parallel.support import add, make_engine, make_prompts
from tests.backends.torch.zoo import generate, make_model
from tests.runtime.support import Idle

PROMPTS = make_prompts(0, 90, 37, 150)
COUNT = 400
SAMPLING = Sampling(max_tokens=COUNT, ignore_eos=True)
GRIDS: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}]


class ToFirst(Router):
    """Sends each request to the first engine."""

    def route(self, request: Request, fleet: FleetView) -> InstanceId:
        return fleet.instances[0].id


class Clients:
    """Streams of model "a" from one engine, until two tokens have come after each has come back."""

    def __init__(self, engine: Engine, store: Any, kv_store: KVStore) -> None:
        self.fleet = Fleet(
            engines=[engine],
            store=store,
            models=[Model("a"), Model("b")],
            router=LeastLoadedRouter(),
            scheduler=Idle(),
            kv_store=kv_store,
        )
        self.received: list[list[int]] = [[] for _ in PROMPTS]
        self.streams: dict[int, FleetStream] = {}

    async def read(self, at: int) -> None:
        async with self.fleet.stream("a", tuple(PROMPTS[at]), SAMPLING) as self.streams[at]:
            async for token in self.streams[at]:
                self.received[at].append(token.id)
                hops = self.streams[at].hops
                if len(hops) > 1 and token.index > hops[-1].first_index:
                    return

    async def have_begun(self) -> None:
        while not all(len(got) > 20 for got in self.received):  # noqa: ASYNC110 - as clients do
            await anyio.sleep(0.01)


def make_store(root: Path, kind: str = "llama", tp: int = 1) -> tuple[NvmeStore, Any]:
    """A store with models "a", which is returned too, and "b"."""
    model = make_hybrid(kind) if kind in HYBRIDS else make_model(kind, seed=1)
    add(root / "store", "a", model, tp=tp)
    add(root / "store", "b", make_model("llama", seed=2), tp=tp)
    return NvmeStore(root / "store"), model


@pytest.mark.parametrize(
    ("kind", "grid"),
    [("llama", {"tp": 2}), ("llama", {"pp": 2}), ("qwen3_5", {"tp": 2}), ("bamba", {"pp": 2})],
    ids=str,
)
async def test_requests_come_back_with_the_blocks_and_states_of_all_ranks(
    tmp_path: Path, kind: str, grid: dict[str, Any]
) -> None:
    store, model = make_store(tmp_path, kind, grid.get("tp", 1))
    clients = Clients(make_engine(**grid), store, HostKVStore("8 MiB"))
    async with clients.fleet as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        for at in range(len(PROMPTS)):
            tasks.start_soon(clients.read, at)
        await clients.have_begun()
        record = await fleet.swap("e0", to="b")
        assert record.num_saved == len(PROMPTS)
        assert record.saved_bytes > 0
        await fleet.swap("e0", to="a")
    for at, prompt in enumerate(PROMPTS):
        got, (_, back) = clients.received[at], clients.streams[at].hops
        assert got == generate(model, prompt, len(got))
        assert len(prompt) + back.first_index - back.restored_tokens <= 1, "the last one, for its logits"


async def test_blocks_of_ranks_behind_a_host_stay_there(tmp_path: Path) -> None:
    store, model = make_store(tmp_path, tp=2)
    async with make_engine(tp=2) as engine, MemoryLinks(EngineHost(engine, store)) as links:
        clients = Clients(RemoteEngine("e0", links.open), store, NodeKVStore("8 MiB"))
        async with clients.fleet as fleet, anyio.create_task_group() as tasks:
            await fleet.swap("e0", to="a")
            for at in range(len(PROMPTS)):
                tasks.start_soon(clients.read, at)
            await clients.have_begun()
            record = await fleet.swap("e0", to="b")
            assert record.num_saved == len(PROMPTS)
            await fleet.swap("e0", to="a")
    for at, prompt in enumerate(PROMPTS):
        got, (_, back) = clients.received[at], clients.streams[at].hops
        assert got == generate(model, prompt, len(got))
        assert len(prompt) + back.first_index - back.restored_tokens <= 1


@pytest.mark.parametrize("grid", GRIDS, ids=str)
async def test_a_rank_that_is_killed_amid_saving_is_a_loss_as_any(
    tmp_path: Path, grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, model = make_store(tmp_path, tp=grid.get("tp", 1))
    clients = Clients(engine := make_engine(**grid), store, HostKVStore("8 MiB"))
    copy, killed = Ranks.copy, list[int]()

    def killing(ranks: Ranks, commands: Any) -> list[Done]:
        if not killed:
            killed.append(ranks.pids[1])
            os.kill(killed[0], signal.SIGKILL)
        return copy(ranks, commands)

    async with clients.fleet as fleet, anyio.create_task_group() as tasks:
        await fleet.swap("e0", to="a")
        for at in range(len(PROMPTS)):
            tasks.start_soon(clients.read, at)
        await clients.have_begun()
        monkeypatch.setattr(Ranks, "copy", killing)
        with pytest.raises(SwapFailed):
            await fleet.swap("e0", to="b")
        while engine.status().state is not InstanceState.EMPTY:  # noqa: ASYNC110 - processes start
            await anyio.sleep(0.05)
        await fleet.swap("e0", to="a")
    assert killed
    for prompt, got in zip(PROMPTS, clients.received, strict=True):
        assert got == generate(model, prompt, len(got))


async def test_requests_move_with_their_blocks_between_engines_of_one_grid_alone(tmp_path: Path) -> None:
    store, model = make_store(tmp_path)
    engines = [make_engine("e0", pp=2), make_engine("e1", pp=2), make_engine("single")]
    fleet = Fleet(
        engines=engines,
        store=store,
        models=[Model("a")],
        router=ToFirst(),
        scheduler=Idle(),
    )
    async with fleet:
        for engine in engines:  # before the request comes, which would end meanwhile
            await fleet.swap(engine.id, to="a")
        async with fleet.stream("a", tuple(PROMPTS[0]), SAMPLING) as stream:
            received = [(await anext(stream)).id for _ in range(20)]
            record = await fleet.migrate(stream.request.id, to="e1", method="kv")
            assert (record.outcome, record.method) == ("done", "kv"), record
            received += [(await anext(stream)).id for _ in range(20)]
            record = await fleet.migrate(stream.request.id, to="single", method="kv")
            assert record.outcome == "aborted", record
            received += [(await anext(stream)).id for _ in range(20)]
            assert [hop.instance for hop in stream.hops] == ["e0", "e1"]
        assert engines[1].num_reused_tokens > len(PROMPTS[0])
    assert received == generate(model, PROMPTS[0], len(received))
