"""Stages on other nodes: exact tokens, the loss of ranks and nodes, and nothing that is left over."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio

from hotswap import InstanceState, ModelId
from hotswap.abc import HostChunk, Shard, WrapperStore
from hotswap.backends.remote.messages import said
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import LinkedNode, TorchEngine
from hotswap.backends.torch.parallel.link import StageLink
from hotswap.backends.torch.parallel.link_messages import said_commands
from hotswap.backends.torch.parallel.messages import Setup
from hotswap.errors import ConfigError, InstanceLost, ShardCorrupt
from hotswap.metered_store import MeteredStore
from tests.backends.torch.parallel.nodes import ADDRESS, HostProcess, children, host_process
from tests.backends.torch.parallel.support import (
    add,
    ask,
    card_of,
    loader_of,
    make_engine,
    make_prompts,
    tokens_of,
)
from tests.backends.torch.parallel.test_loss import is_alive
from tests.backends.torch.parallel.test_ranks import HIDDEN_SIZE, NUM_TOKENS, check_tokens, serving
from tests.backends.torch.zoo import generate, make_model
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

EMPTY, LOST, SERVING = InstanceState.EMPTY, InstanceState.LOST, InstanceState.SERVING


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Directories with the models "llama" and "gemma2" for one and for two ranks of a stage."""
    made = dict[int, Path]()
    for tp in (1, 2):
        made[tp] = tmp_path_factory.mktemp(f"tp{tp}") / "store"
        for name in ("llama", "gemma2"):
            add(made[tp], name, make_model(name), tp=tp)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(roots: dict[int, Path]) -> AsyncGenerator[HostProcess]:
    async with host_process(roots[2]) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(roots: dict[int, Path]) -> AsyncGenerator[NvmeStore]:
    async with NvmeStore(roots[2]) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store_of_one(roots: dict[int, Path]) -> AsyncGenerator[NvmeStore]:
    """Models for one rank of a stage, where no more are needed: each rank imports PyTorch for seconds."""
    async with NvmeStore(roots[1]) as opened:
        yield opened


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def engine(host: HostProcess) -> AsyncGenerator[TorchEngine]:
    """Two stages of two ranks, the first on the other node; tests leave it EMPTY."""
    async with engine_over(host.node) as made:
        yield made
    await host.no_ranks()


def engine_over(node: LinkedNode, **options: Any) -> TorchEngine:
    given: dict[str, Any] = {"tp": 2, "pp": 2, "stage_nodes": [node], **options}
    return make_engine(**given)


async def until(engine: TorchEngine, state: InstanceState) -> None:
    with anyio.fail_after(PATIENCE_S):
        while engine.status().state is not state:  # noqa: ASYNC110 - other processes end
            await anyio.sleep(0.01)


class TestAnEngineOfTwoNodes:
    async def test_two_stages_of_two_nodes_give_the_tokens_of_one_process(
        self, engine: TorchEngine, host: HostProcess, store: NvmeStore
    ) -> None:
        """A rank of the first node sends 1/tp of each hidden state, and each node reads its own store."""
        prompt = make_prompts(3, 75)[0]
        assert len(host.ranks()) == 2
        assert len(loader_of(engine).pids) == 2
        for name in ("llama", "gemma2"):
            async with serving(engine, store, name):
                await check_tokens(engine, name)
        async with serving(engine, store, "llama"):
            before = await loader_of(engine).sent_bytes()
            await tokens_of(engine, ask("llama", prompt, NUM_TOKENS))
            after = await loader_of(engine).sent_bytes()
            sent = [now - then for then, now in zip(before, after, strict=True)]
            assert sent == [HIDDEN_SIZE * (len(prompt) + NUM_TOKENS - 1) * 4 // 2] * 2 + [0] * 2

    async def test_a_load_counts_what_the_nodes_have_read(
        self, engine: TorchEngine, store: NvmeStore
    ) -> None:
        here = MeteredStore(store)
        everywhere = MeteredStore(here)
        async with serving(engine, everywhere, "llama"):
            manifest = await store.manifest(ModelId("llama"))
            assert here.num_bytes == sum(shard.size_bytes for shard in manifest.shards)
            assert everywhere.num_bytes == 2 * here.num_bytes, (
                "each of the nodes reads the one shard of a part"
            )
            assert everywhere.tier == "nvme"

    async def test_a_cancelled_load_frees_the_memory_of_all_nodes(
        self, engine: TorchEngine, store: NvmeStore
    ) -> None:
        card = await card_of(store, "llama")
        for turns in (1, 3, 6, 12, 20, 40):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.load, card, store)
                for _ in range(turns):
                    await anyio.sleep(0.001)
                tasks.cancel_scope.cancel()
            if engine.status().state is SERVING:
                await engine.unload()
            assert (engine.status().state, engine.status().weight_bytes) == (EMPTY, 0)
        async with serving(engine, store, "llama"):
            await check_tokens(engine, "llama")

    async def test_all_nodes_load_or_none(
        self, engine: TorchEngine, store: NvmeStore, tmp_path: Path
    ) -> None:
        """The engine's store has a model that the node's has with other weights."""
        add(tmp_path / "store", "llama", make_model("qwen3"), tp=2)
        async with NvmeStore(tmp_path / "store") as other:
            with pytest.raises(ShardCorrupt, match="other weights of model 'llama'"):
                await engine.load(await card_of(other, "llama"), other)
        assert (engine.status().state, engine.status().weight_bytes) == (EMPTY, 0)
        async with serving(engine, store, "llama"):
            await check_tokens(engine, "llama")


async def test_a_node_between_the_first_and_the_last_stage(roots: dict[int, Path]) -> None:
    async with host_process(roots[1]) as host, NvmeStore(roots[1]) as store:
        async with engine_over(host.node, tp=1, pp=3, stage_nodes=[None, host.node]) as engine:
            assert (len(host.ranks()), len(loader_of(engine).pids)) == (1, 2)
            async with serving(engine, store, "llama"):
                await check_tokens(engine, "llama")
        await host.no_ranks()


async def test_a_killed_rank_of_a_node_loses_the_instance_which_restarts_there(
    roots: dict[int, Path], store: NvmeStore
) -> None:
    async with host_process(roots[2]) as host, engine_over(host.node) as engine:
        before = host.ranks()
        await check_lost(engine, store, before[1].pid, match=r"rank 1 .* on node '127\.0\.0\.2' .*code -9")
        await engine.unload()
        await check_restarted(engine, store, host, num_ranks=2)
        assert not set(before) & set(host.ranks())


async def test_the_loss_of_a_node_loses_the_instance_which_restarts_when_the_node_is_back(
    roots: dict[int, Path], store_of_one: NvmeStore
) -> None:
    store = store_of_one
    async with host_process(roots[1]) as host, engine_over(host.node, tp=1) as engine:
        ranks, mine = host.ranks(), loader_of(engine).pids
        await check_lost(engine, store, host.process.pid, match=r"node '127\.0\.0\.2' of stage 0 .*is lost")
        with pytest.raises(InstanceLost, match=r"node .127\.0\.0\.2. of stage 0 .*gives no ranks"):
            await engine.unload()
        assert engine.status().state is LOST
        assert not any(map(is_alive, (*mine, *(rank.pid for rank in ranks))))
        async with host_process(roots[1], port=host.port) as again:
            await engine.unload()
            await check_restarted(engine, store, again, num_ranks=1)


async def test_the_loss_of_a_node_during_a_load_loses_the_instance(
    roots: dict[int, Path], store_of_one: NvmeStore
) -> None:
    store = store_of_one
    async with host_process(roots[1]) as host, engine_over(host.node, tp=1) as engine:

        class Killing(WrapperStore):
            """Kills the host as the engine begins to read."""

            def open(self, shard: Shard) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
                host.send_signal(signal.SIGKILL)
                return super().open(shard)

        with pytest.raises(InstanceLost, match="stage 0"):
            await engine.load(await card_of(store, "llama"), Killing(store))
        assert (engine.status().state, engine.status().weight_bytes) == (LOST, 0)


async def check_lost(engine: TorchEngine, store: NvmeStore, pid: int, *, match: str) -> None:
    """Kill a process while a stream gets tokens, and check that they are exact and the reason is told."""
    prompt = make_prompts(4, 30)[0]
    await engine.load(await card_of(store, "llama"), store)
    received = list[int]()

    async def read() -> None:
        async with engine.stream(ask("llama", prompt, 300)) as tokens:
            async for token in tokens:
                received.append(token.id)
                if len(received) == 5:
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(InstanceLost) as caught:
        await read()
    assert received == generate(make_model("llama"), prompt, 300)[: len(received)]
    assert engine.status().state is LOST
    told = [str(caught.value), *map(str, (caught.value.__cause__, caught.value.__context__))]
    assert any(re.search(match, text) for text in told), told


async def check_restarted(
    engine: TorchEngine, store: NvmeStore, host: HostProcess, *, num_ranks: int
) -> None:
    assert engine.status().state is EMPTY
    async with serving(engine, store, "llama"):
        await check_tokens(engine, "llama")
    assert len(host.ranks()) == num_ranks


async def test_a_frozen_node_is_lost_while_idle_and_its_ranks_end_when_it_goes_on(
    roots: dict[int, Path], store_of_one: NvmeStore
) -> None:
    store = store_of_one
    async with host_process(roots[1], silence_s=2.0) as host, engine_over(host.node, tp=1) as engine:
        await engine.load(await card_of(store, "llama"), store)
        host.send_signal(signal.SIGSTOP)
        await until(engine, LOST)
        with pytest.raises(InstanceLost, match="silent for 2 s"):
            async with engine.stream(ask("llama", [1, 2, 3], 4)):
                pass
        host.send_signal(signal.SIGCONT)
        await host.no_ranks()
        await engine.unload()
        await check_restarted(engine, store, host, num_ranks=1)


async def test_a_cancelled_start_leaves_nothing(host: HostProcess) -> None:
    for num_ranks in (0, 1, 2):
        async with anyio.create_task_group() as tasks:

            async def start() -> None:
                async with engine_over(host.node):
                    pytest.fail("it started")

            tasks.start_soon(start)
            while len(host.ranks()) < num_ranks:  # noqa: ASYNC110 - another process starts them
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        await host.no_ranks()
        assert [child.pid for child in children(os.getpid())] == [host.process.pid]


async def test_a_node_with_another_secret_is_refused(host: HostProcess) -> None:
    node = LinkedNode(ADDRESS, partial(host.connect, "some other secret"))
    with pytest.raises(InstanceLost, match="did not accept this end's proof"):
        async with engine_over(node):
            pytest.fail("it started")
    assert host.ranks() == []


@pytest.mark.parametrize("how", ["closes", "falls silent", "says nonsense"])
async def test_ranks_end_when_their_engine(how: str, roots: dict[int, Path]) -> None:
    silence_s = 1.0 if how == "falls silent" else PATIENCE_S
    async with host_process(roots[2], silence_s=silence_s) as host, await host.connect() as channel:
        link = StageLink(channel, silence_s)
        link.say(said_commands(1, [a_setup(rank) for rank in (0, 1)]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unless_broken, link)
            while len(host.ranks()) < 2:  # noqa: ASYNC110 - another process starts them
                await anyio.sleep(0.01)
            if how == "closes":
                await channel.aclose()
            elif how == "says nonsense":
                link.say(said("step", 2, {"pieces": 7}))
            else:
                tasks.cancel_scope.cancel()
        await host.no_ranks()


async def unless_broken(link: StageLink) -> None:
    with suppress(BaseExceptionGroup):
        await link.run()


def a_setup(rank: int) -> Setup:
    return Setup(
        rank=rank, tp=2, pp=2, rendezvous=f"tcp://9/{ADDRESS}", device="cpu", threads=1, invariant=True,
        depth=2, timeout_s=PATIENCE_S,
    )  # fmt: skip


async def test_nodes_that_no_stage_can_have_are_refused() -> None:
    node = LinkedNode(ADDRESS, partial(pytest.fail, "it was opened"))
    with pytest.raises(ConfigError, match="with pp=2 there are 1 stages before the last"):
        make_engine(pp=2, stage_nodes=[None, node])
    with pytest.raises(ConfigError, match=r"stage_nodes\[0\]"):
        make_engine(pp=2, stage_nodes=["10.0.0.7"])
    with pytest.raises(ConfigError, match="stage_nodes is"):
        make_engine(pp=2, stage_nodes=node)
