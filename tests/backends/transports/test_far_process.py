"""A running request moves to an engine in another process, through a remote sink.

hotswap has no such engine of its own; this is an example of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import anyio
import pytest
from anyio import to_thread
from anyio.lowlevel import checkpoint

from hotswap import Fleet, InstanceId, InstanceState, Model, Request, RequestId, Token
from hotswap.abc import Channel, Engine, EngineStatus, KVSink, KVSource, ModelCard, TokenStream, WeightStore
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.transports import connect_shared, remote_sink
from hotswap.errors import InstanceLost, MigrationAborted
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.backends.transports.test_moves import KIND, PROMPT, SAMPLING, make_engine, undisturbed
from tests.runtime.support import Idle

ROOT = Path(__file__).parents[3]
LONG = replace(SAMPLING, max_tokens=300)  # long enough to be running during the whole test


class FarEngine(Engine):
    """The engine of another process, with its one model; each stream and move has a link of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.id = InstanceId("far")
        self.process, self.num_reused_tokens = process, 0
        self.dies_in_a_move = False
        self._folder = folder
        self._card: ModelCard | None = None
        self._is_lost = False

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._card = model
        await checkpoint()

    async def unload(self) -> None:
        await checkpoint()
        if self._is_lost:
            raise InstanceLost("Its process has ended; replace the engine.")
        self._card = None

    async def evict(self, *, deadline_s: float) -> int:
        await checkpoint()
        return 0

    def status(self) -> EngineStatus:
        if self._card is None:
            return EngineStatus(id=self.id, state=InstanceState.EMPTY)
        state = InstanceState.LOST if self._is_lost else InstanceState.SERVING
        return EngineStatus(id=self.id, state=state, model=self._card.id)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        try:
            async with await connect_shared(self._folder / "streams") as channel:
                await channel.send(json.dumps(asdict(request)).encode())
                yield FarStream(self, channel)
        except MigrationAborted as exc:
            self._is_lost = True
            raise InstanceLost(str(exc)) from exc

    def export_kv(self, request: RequestId) -> AbstractAsyncContextManager[KVSource]:
        raise MigrationAborted("Requests do not leave it with their blocks.", stage="export")

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        async with (
            await connect_shared(self._folder / "kv") as channel,
            remote_sink(channel, request) as sink,
        ):
            if self.dies_in_a_move:
                self.process.kill()
            yield sink


class FarStream(TokenStream):
    """Tokens streamed by another process."""

    def __init__(self, engine: FarEngine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._has_ended = False

    async def __anext__(self) -> Token:
        if self._has_ended:
            raise StopAsyncIteration
        token_id, index, reason, reused = json.loads((await self._channel.receive()).message)
        self.num_reused_tokens = self._engine.num_reused_tokens = reused
        self._has_ended = reason is not None
        return Token(id=token_id, index=index, finish_reason=reason)


@asynccontextmanager
async def far_engine(folder: Path) -> AsyncGenerator[FarEngine]:
    process = subprocess.Popen(  # noqa: ASYNC220  # to start one takes a moment only
        [sys.executable, "-m", "tests.backends.transports.far_process", KIND, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        assert await to_thread.run_sync(process.stdout.readline) == "ready\n"
        yield FarEngine(process, folder)
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(process.communicate)


@pytest.mark.parametrize("killed", ["never", "while it takes the request", "with the request"])
async def test_a_running_request_moves_to_another_process(
    tmp_path: Path, killed: Literal["never", "while it takes the request", "with the request"]
) -> None:
    store, skeletons = DictStore(), SkeletonCache()
    store.add(KIND, make_model(KIND))
    read: list[int] = []
    async with far_engine(tmp_path) as far:
        near: TorchEngine = make_engine("near", skeletons)
        far.dies_in_a_move = killed == "while it takes the request"
        fleet = Fleet(
            engines=[near, far],
            store=store,
            models=[Model(KIND)],
            router=LeastLoadedRouter(),
            scheduler=Idle(),
        )
        async with fleet:
            await fleet.swap("near", to=KIND)
            async with fleet.stream(KIND, PROMPT, LONG) as stream:
                async for token in stream:
                    read.append(token.id)
                    if len(read) == 5:
                        await fleet.swap("far", to=KIND)
                        record = await fleet.migrate(stream.request.id, to="far", method="kv")
                        if killed == "with the request":
                            far.process.kill()
                places = [hop.instance for hop in stream.hops]
    match killed:
        case "never":
            assert (record.outcome, places) == ("done", ["near", "far"])
            assert far.num_reused_tokens == record.num_tokens - 1, "something was computed again"
        case "while it takes the request":
            assert (record.outcome, places) == ("aborted", ["near"])
            assert "link" in record.error
        case "with the request":
            assert (record.outcome, places) == ("done", ["near", "far", "near"])
    assert read == await undisturbed(store, skeletons, LONG)
