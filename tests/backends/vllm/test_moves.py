"""Requests that move between vLLM cores with their KV blocks have the tokens of an undisturbed run."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import anyio
import anyio.lowlevel
import pytest

from hotswap import (
    Adapter,
    Fleet,
    FleetStream,
    MigrationMethod,
    MigrationRecord,
    Model,
    Request,
    RequestId,
    Sampling,
)
from hotswap.abc import KVSource
from hotswap.backends.vllm import VllmEngine
from hotswap.backends.vllm.inside.blocks import METHOD, BlockVerbs
from hotswap.backends.vllm.migration import MigrationContext, VllmKVSink
from hotswap.backends.vllm.names import named
from hotswap.errors import MigrationAborted
from hotswap.policies import LeastLoadedRouter
from hotswap.testing.conformance.suite import until
from tests.backends.torch.adapters.files import write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.backends.vllm.support import llama, make_engine, make_store
from tests.backends.vllm.test_resumption import KINDS, asked
from tests.patience import PATIENCE_S
from tests.runtime.support import Idle

# Tokens that a core takes longer over than a test over what it does meanwhile.
MANY = 300

# Why a move is given up, and may be asked for again, where the source is faster than what follows it.
OUTRUN = re.compile("tokens came during the last of|copies were too few to catch up")


def make_fleet(store: DictStore, *engines: VllmEngine, **given: Any) -> Fleet:
    return Fleet(
        engines=engines,
        store=store,
        models=[Model("a")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        interval_s=3600.0,
        **given,
    )


async def read(
    fleet: Fleet, request: Request, *, moves_at: list[int], method: MigrationMethod | None = "kv"
) -> Read:
    """Read a stream that moves to the other engine once it has so many tokens, each time.

    A move that the source outran is asked for again at the next token.
    """
    got = Read([], [])
    async with fleet.stream("a", request.prompt, request.sampling) as stream:
        async for token in stream:
            got.tokens.append(token.id)
            # It may have ended, ahead of its reader.
            if len(got.tokens) in moves_at and stream.request.id in [r.id for r in fleet.view().running]:
                got.records.append(await move(fleet, stream, method))
                if OUTRUN.search(got.records[-1].error):
                    got.records.pop()
                    moves_at = [*moves_at, len(got.tokens) + 1]
    return got


class Read:
    def __init__(self, tokens: list[int], records: list[MigrationRecord]) -> None:
        self.tokens, self.records = tokens, records


async def move(fleet: Fleet, stream: FleetStream, method: MigrationMethod | None) -> MigrationRecord:
    other = "one" if stream.hops[-1].instance == "other" else "other"
    return await fleet.migrate(stream.request.id, to=other, method=method)


def all_came_through(records: list[MigrationRecord]) -> bool:
    """Whether every move came through, but those of requests that ended ahead of their reader."""
    outcomes = [record.outcome for record in records]
    return "done" in outcomes and set(outcomes) <= {"done", "finished"}


async def counts(engine: VllmEngine) -> list[int]:
    """The core's own counts: sinks that hold blocks, requests that are parked, free blocks."""
    assert engine._core is not None
    answer: list[int] = await engine._core.llm.engine_core.call_utility_async(METHOD, "counts", [])
    return answer


async def until_freed(engine: VllmEngine, num_free: int) -> None:
    with anyio.move_on_after(PATIENCE_S):
        while await counts(engine) != [0, 0, num_free]:
            await anyio.lowlevel.checkpoint()
    assert await counts(engine) == [0, 0, num_free]


async def serve(fleet: Fleet) -> None:
    for name in ("one", "other"):
        await fleet.swap(name, to="a")


async def test_requests_of_every_kind_move_with_their_blocks_and_change_nothing() -> None:
    store, random = make_store(), Random(2)
    requests = [asked(kind, number) for kind in KINDS for number in range(3)]
    outcomes: list[MigrationRecord] = []
    engines = make_engine("one"), make_engine("other")
    async with make_fleet(store, *engines) as fleet:
        await serve(fleet)
        expected_free = {engine.id: (await counts(engine))[2] for engine in engines}
        expected = {r.id: (await read(fleet, r, moves_at=[])).tokens for r in requests}

        async def check(request: Request) -> None:
            got = await read(fleet, request, moves_at=sorted(random.sample(range(1, 44), 3)))
            assert got.tokens == expected[request.id], request
            outcomes.extend(got.records)

        for request in requests:
            await check(request)
        done = [record for record in outcomes if record.outcome == "done"]
        # A request may end ahead of its reader, so not every move is made.
        assert len(done) >= len(requests), [record.error for record in outcomes]
        assert {record.method for record in outcomes} == {"kv"}
        assert all(record.copied_bytes > 0 for record in done)
        await until(
            lambda: all(view.num_free_kv_blocks == view.num_kv_blocks for view in fleet.view().instances)
        )
        for engine in engines:
            await until_freed(engine, expected_free[engine.id])


async def test_nothing_that_arrived_is_computed_again() -> None:
    """Also where the engine keeps no prefixes."""
    store = make_store()
    engines = make_engine("one"), make_engine("other", prefix_reuse=False)
    for engine in engines:
        assert isinstance(engine, VllmEngine)
    async with engines[0] as one, engines[1] as other:
        for engine in (one, other):
            await engine.load(store.card("a"), store)
            assert engine.moves_blocks
        for number, (source, destination) in enumerate([(one, other), (other, one)]):
            request, got = asked("greedy", number), list[int]()  # neither has seen it
            async with source.stream(request) as tokens:
                got += [(await anext(tokens)).id for _ in range(7)]
                async with source.export_kv(request.id) as giving, destination.import_kv(request) as taking:
                    stopped = await giving.stop()
                    await taking.reserve(stopped.num_computed)
                    await taking.write(await giving.read(0, stopped.num_computed))
                    await taking.commit(stopped.tokens)
                    await giving.release()
                    rest = request.continued(list(stopped.tokens[len(request.prompt) :]))
                    async with destination.stream(rest) as arrived:
                        await anext(arrived)
                        assert arrived.num_reused_tokens == stopped.num_computed


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp=2", "pp=2"])
async def test_every_rank_sends_and_receives_its_part(tp: int, pp: int) -> None:
    store = make_store()
    requests, records = [asked(kind, 1) for kind in KINDS], list[MigrationRecord]()
    engines = make_engine("one", tp=tp, pp=pp), make_engine("other", tp=tp, pp=pp)
    async with make_fleet(store, *engines) as fleet:
        await serve(fleet)
        assert all(engine.moves_blocks for engine in engines)
        for request in requests:
            expected = (await read(fleet, request, moves_at=[])).tokens
            got = await read(fleet, request, moves_at=[5, 20])
            assert got.tokens == expected, request
            records += got.records
        assert all_came_through(records), records


async def test_a_copy_that_was_cancelled_writes_to_no_other_file(tmp_path: Path) -> None:
    """A core may carry it out late, by a file descriptor that a file opened since might have."""
    store, asked_for = make_store(), asked("greedy", 1)
    request = replace(asked_for, sampling=replace(asked_for.sampling, max_tokens=MANY))
    num_cancelled = 0
    async with make_engine("one") as engine:
        await engine.load(store.card("a"), store)
        num_before = num_shared()
        for num_turns in range(12):
            got: list[int] = []
            async with engine.stream(request) as tokens:
                got += [(await anext(tokens)).id for _ in range(3)]
                with suppress(MigrationAborted):  # it may have ended, ahead of its reader
                    async with engine.export_kv(request.id) as source, anyio.create_task_group() as tasks:
                        assert num_shared() > num_before
                        tasks.start_soon(read_from, source, len(request.prompt))
                        for _ in range(num_turns):
                            await anyio.lowlevel.checkpoint()
                        tasks.cancel_scope.cancel()
                        num_cancelled += 1
                with ExitStack() as opened:
                    paths = [tmp_path / str(number) for number in range(4)]
                    for path in paths:
                        path.write_bytes(b"mine" * (1 << 16))
                        opened.enter_context(path.open("r+b"))
                    await counts(engine)  # asked after the copy, so answered after it
                    assert all(path.read_bytes() == b"mine" * (1 << 16) for path in paths)
                if num_turns % 4 == 3:
                    got += [token.id async for token in tokens]
                    async with engine.stream(request) as again:
                        assert got == [token.id async for token in again]
        assert num_cancelled >= 6
        await until(lambda: num_shared() <= num_before)


async def read_from(source: KVSource, num_tokens: int) -> None:
    with suppress(MigrationAborted):
        await source.read(0, num_tokens)


def num_shared() -> int:
    """How many files of memory for KV blocks this process has open."""
    num_found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            num_found += "hotswap-kv" in str(entry.readlink())
    return num_found


def test_blocks_of_a_request_that_has_begun_anew_are_not_taken_for_those_it_had() -> None:
    """It gave them up for others, and has some of the new ones already."""
    running: Any = named("vllm.v1.request:RequestStatus").RUNNING
    request = SimpleNamespace(status=running, num_computed_tokens=64, num_in_flight_tokens=0)
    core, saved = MagicMock(), list[Any]()
    core.scheduler.requests = {"r": request}
    core.scheduler.kv_cache_manager.get_block_ids.return_value = [[7, 8, 9, 10]]
    core.model_executor.collective_rpc = lambda verb, args: saved.append((verb, args[0]))
    verbs = BlockVerbs(core)
    assert verbs.save("r", 1, 1, 64, "/pages", 32, [0]) is True
    assert saved == [("hotswap_save", [8])]
    assert verbs.save("r", 1, 2, 96, "/pages", 32, [0]) is None, "the third is there, and empty"
    request.num_computed_tokens, request.num_in_flight_tokens = 96, 32
    assert verbs.save("r", 1, 2, 96, "/pages", 32, [0]) is None, "a step that fills it is under way"
    request.status = named("vllm.v1.request:RequestStatus").PREEMPTED
    assert verbs.save("r", 1, 1, 64, "/pages", 32, [0]) is None
    assert len(saved) == 1


async def test_requests_of_an_adapter_move_with_it(tmp_path: Path) -> None:
    store = make_store()
    source = write(tmp_path / "x", make_model(llama(), seed=1), seed=1, r=4, names=("q_proj",), size=4.0)
    engines = make_engine("one", max_adapters=1), make_engine("other", max_adapters=1)
    async with make_fleet(store, *engines, adapters=[Adapter("x", "a", source)]) as fleet:
        await serve(fleet)
        request = Request(
            id=RequestId("r"),
            model=store.card("a").id,
            prompt=tuple(range(2, 80)),
            sampling=Sampling(max_tokens=40, ignore_eos=True),
        )
        plain = (await read(fleet, request, moves_at=[])).tokens
        async with fleet.stream("a", request.prompt, request.sampling, adapter="x") as stream:
            whole = [token.id for token in await stream.collect()]
        got: list[int] = []
        async with fleet.stream("a", request.prompt, request.sampling, adapter="x") as stream:
            async for token in stream:
                got.append(token.id)
                if len(got) == 9:
                    assert (await move(fleet, stream, "kv")).outcome == "done"
        assert got == whole != plain


async def test_where_blocks_cannot_move_requests_move_as_tokens(tmp_path: Path) -> None:
    """As with another connector, say of a cache that several engines share."""
    store, request = make_store(), asked("seeded and penalised", 2)
    request = replace(request, sampling=replace(request.sampling, max_tokens=MANY))
    offload = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    engines = make_engine("one"), make_engine("other", arguments={"kv_transfer_config": offload})
    async with make_fleet(store, *engines) as fleet:
        await serve(fleet)
        assert [engine.moves_blocks for engine in engines] == [True, False]
        expected = (await read(fleet, request, moves_at=[])).tokens
        got = await read(fleet, request, moves_at=[6, 30], method=None)
        assert got.tokens == expected
        assert {record.method for record in got.records} == {"tokens"}
        assert all_came_through(got.records), got.records
        # Far beyond its prompt, which is all that this connector counts.
        got = await read(fleet, request, moves_at=[60, 120, 180, 240], method=None)
        assert got.tokens == expected
        assert {record.method for record in got.records} == {"tokens"}
        assert all_came_through(got.records), got.records


async def test_a_destination_that_gets_no_call_frees_its_blocks() -> None:
    store, request = make_store(), asked("greedy", 0)
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        assert engine._core is not None
        assert engine._core.blocks is not None
        _, _, num_free = await counts(engine)
        lapsed = anyio.Event()
        context = MigrationContext(engine._life, engine._core, engine._core.blocks, lambda: engine._core)
        sink = VllmKVSink(context, request, lambda sink: lapsed.set(), lapse_s=0.5)
        await sink.reserve(100)
        assert await counts(engine) == [1, 0, num_free - 4]
        await lapsed.wait()
        await until_freed(engine, num_free)
        with pytest.raises(MigrationAborted, match="got no call"):
            await sink.reserve(32)
