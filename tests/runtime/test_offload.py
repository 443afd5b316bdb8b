"""KV blocks that survive a swap, in simulation: what is copied and when, what fails, and what is counted."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from hotswap import (
    Adapter,
    Fleet,
    FleetStream,
    InstanceState,
    ModelId,
    Request,
    Sampling,
    SwapLimits,
    TimesView,
)
from hotswap.abc import (
    CachedKV,
    Engine,
    KVLease,
    KVPages,
    KVPrefix,
    KVPut,
    KVSink,
    KVStore,
    KVStoreView,
)
from hotswap.backends.sim import DeviceProfile, SimEngine, SimKVStore, SimStore, sim_manifest
from hotswap.errors import ConfigError, SwapFailed, TierFull
from hotswap.offline.replay import dump_view, load_view
from hotswap.offline.virtual_time import virtual_time
from hotswap.testing import cancel_everywhere
from tests.runtime.edited_moves import EditedMoves
from tests.runtime.support import Idle, expected, idle, sim_fleet, until
from tests.runtime.test_telemetry import Recorder, points

KV_BYTES = 1024
PROFILE = DeviceProfile(
    memory_bytes=64 << 20,
    floor_s=0.01,
    base_s=0.001,
    token_s=1e-3,
    load_bytes_per_s=10 << 20,
    unload_s=0.02,
    kv_bytes_per_s=10e6,
)
WITHOUT_PRELOAD = replace(PROFILE, memory_bytes=19 << 19)
LONG = Sampling(max_tokens=400, ignore_eos=True)
SHORT = Sampling(max_tokens=100, ignore_eos=True)
PROMPTS = [tuple(range(100 * number, 100 * number + 150)) for number in range(4)]


def make_engine(name: str = "e0", kind: type[SimEngine] = SimEngine, **options: Any) -> SimEngine:
    return kind(name, PROFILE, **{"kv_blocks": 512, "kv_block_tokens": 16, "max_requests": 8, **options})


def make_fleet(kv_store: KVStore | None, engines: Sequence[Engine] = (), **options: Any) -> Fleet:
    store = SimStore(
        [
            sim_manifest(
                name, 1 << 20, max_context_tokens=4096, eos_token_ids=(0,), kv_bytes_per_token=KV_BYTES
            )
            for name in ("a", "b")
        ]
    )
    chosen = engines or [make_engine()]
    return sim_fleet("a", "b", engines=chosen, store=store, scheduler=Idle(), kv_store=kv_store, **options)


class Client:
    """Reads one stream to its end, and keeps its tokens and hops."""

    def __init__(self, fleet: Fleet, prompt: tuple[int, ...], sampling: Sampling = LONG) -> None:
        self.fleet, self.prompt, self.sampling = fleet, prompt, sampling
        self.tokens: list[int] = []
        self.stream: FleetStream | None = None

    async def run(self) -> None:
        async with self.fleet.stream("a", self.prompt, self.sampling) as stream:
            self.stream = stream
            async for token in stream:
                self.tokens.append(token.id)
        assert self.tokens == expected(stream.request)

    async def has(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count)

    @property
    def restored(self) -> list[int]:
        assert self.stream is not None
        return [hop.restored_tokens for hop in self.stream.hops]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)


@asynccontextmanager
async def running(
    fleet: Fleet, prompts: Sequence[tuple[int, ...]] = PROMPTS, sampling: Sampling = LONG
) -> AsyncGenerator[list[Client]]:
    """Clients that read to their ends, on a fleet that is idle again afterwards."""
    await fleet.swap("e0", to="a")
    clients = [Client(fleet, prompt, sampling) for prompt in prompts]
    async with anyio.create_task_group() as tasks:
        for client in clients:
            tasks.start_soon(client.run)
        for client in clients:
            await client.has(10)
        yield clients
    await anyio.sleep(0.1)
    idle(fleet)
    view = fleet.view().kv_store
    assert view is None or view.num_leases == 0


async def away_and_back(fleet: Fleet, **options: Any) -> None:
    await fleet.swap("e0", to="b", **options)
    await fleet.swap("e0", to="a")


# ---------------------------------------------------------------------- what comes back


@virtual_time
async def test_requests_are_restored_after_a_swap_and_compute_one_token_anew() -> None:
    async with make_fleet(SimKVStore("1 GiB")) as fleet:
        async with running(fleet) as clients:
            await away_and_back(fleet)
            after = [client.num_tokens for client in clients]
        assert [client.restored for client in clients] == [[0, num_tokens - 1] for num_tokens in after]
        there, back = fleet.swaps[-2:]
        assert (there.num_evicted, there.num_saved, back.num_saved) == (4, 4, 0)
        assert there.saved_bytes == sum(-(-(num_tokens - 1) // 16) * 16 * KV_BYTES for num_tokens in after)


@virtual_time
async def test_views_tell_what_is_stored_of_requests_and_what_restoring_takes() -> None:
    prompts = [tuple(range(number, number + 1200)) for number in range(2)]
    store = SimKVStore("1 GiB", bytes_per_s=10e6)
    async with make_fleet(store) as fleet, running(fleet, prompts) as clients:
        assert all(request.stored_tokens == 0 for request in fleet.view().running)
        await fleet.swap("e0", to="b")
        before = [client.num_tokens - 1 for client in clients]
        waiting = fleet.view().waiting
        assert sorted(request.stored_tokens for request in waiting) == sorted(before)
        await fleet.swap("e0", to="a")
        for client in clients:
            await client.has(len(client.tokens) + 1)
        view = fleet.view()
        assert sorted(request.stored_tokens for request in view.running) == sorted(before)
        assert view.times.restore_token_s == pytest.approx(KV_BYTES / 10e6, rel=0.1)
        assert view.times.kept_share > 0.98
        stored = sum(before)
        assert view.times.resume_s(stored, stored) <= view.times.prefill_s(stored)
        assert load_view(dump_view(view)) == view


@virtual_time
async def test_what_is_stored_of_a_chat_is_told_while_its_next_message_waits() -> None:
    async with make_fleet(SimKVStore("1 GiB")) as fleet:
        async with running(fleet, PROMPTS[:1], SHORT):
            await away_and_back(fleet)
        await fleet.swap("e0", to="b")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Client(fleet, (*PROMPTS[0], 7), SHORT).run)
            tasks.start_soon(Client(fleet, PROMPTS[1], SHORT).run)
            await until(lambda: len(fleet.view().waiting) == 2)
            assert [request.stored_tokens for request in fleet.view().waiting] == [150, 0]
            await fleet.swap("e0", to="a")


@virtual_time
async def test_five_turns_copy_at_most_two_blocks_each_of_a_request_that_did_not_go_on() -> None:
    async with make_fleet(SimKVStore("1 GiB")) as fleet, running(fleet) as clients:
        for turn in range(5):
            await away_and_back(fleet)
            for client in clients:
                await client.has(11 + 2 * turn)
            if turn:
                assert fleet.swaps[-2].saved_bytes <= 2 * len(clients) * 16 * KV_BYTES


@virtual_time
async def test_blocks_stay_stored_when_the_next_swap_comes_before_the_request_runs() -> None:
    async with make_fleet(SimKVStore("1 GiB")) as fleet, running(fleet) as clients:
        num_tokens = [client.num_tokens for client in clients]
        for _ in range(3):
            await away_and_back(fleet)
        await clients[0].has(len(clients[0].tokens) + 2)
        for client, before in zip(clients, num_tokens, strict=True):
            assert client.restored[-1] >= before - 1


@virtual_time
async def test_restoring_takes_the_time_of_its_copies_one_request_at_a_time() -> None:
    store = SimKVStore("1 GiB", bytes_per_s=1e6)
    async with make_fleet(store) as fleet, running(fleet) as clients:
        await away_and_back(fleet)
        began_s, seen = anyio.current_time(), [len(client.tokens) for client in clients]
        sizes = [-(-(client.num_tokens - 1) // 16) * 16 * KV_BYTES for client in clients]
        for client, count in zip(clients, seen, strict=True):
            await client.has(count + 1)
        assert anyio.current_time() - began_s >= sum(sizes) / 1e6


@virtual_time
async def test_blocks_are_written_in_pieces_that_need_not_wait_between_steps() -> None:
    """An engine takes 4 MiB, or four blocks, beside a step; more would have 4 % of the time."""
    written: list[int] = []

    class Noting(EditedMoves):
        def edit_sink(self, sink: Any) -> None:
            write = sink.write

            async def noted(pages: KVPages) -> None:
                written.append(-(-pages.num_tokens // 16) * 16 * KV_BYTES)
                await write(pages)

            sink.write = noted

    prompts = [tuple(range(5000, 5000 + 3900))]
    engines = [make_engine(kind=Noting)]
    async with make_fleet(SimKVStore("1 GiB"), engines) as fleet, running(fleet, prompts, SHORT):
        await away_and_back(fleet)
    assert sum(written) >= 3900 * KV_BYTES
    assert max(written) <= 4 << 20


@virtual_time
async def test_a_request_goes_on_with_its_blocks_on_any_instance() -> None:
    engines = [make_engine("e0"), make_engine("e1")]
    async with make_fleet(SimKVStore("1 GiB"), engines) as fleet, running(fleet) as clients:
        await fleet.swap("e0", to="b")
        num_tokens = [client.num_tokens for client in clients]
        await fleet.swap("e1", to="a")
        for client, before in zip(clients, num_tokens, strict=True):
            await client.has(before - len(client.prompt) + 2)
            assert client.restored == [0, before - 1]


@virtual_time
async def test_full_blocks_are_copied_before_the_deadline_and_the_rest_at_it() -> None:
    down: dict[float, float] = {}
    for deadline_s in (0.0, 1.0):
        engine = SimEngine("e0", WITHOUT_PRELOAD, kv_blocks=512, kv_block_tokens=16)
        async with make_fleet(SimKVStore("1 GiB"), [engine]) as fleet, running(fleet):
            await away_and_back(fleet, deadline_s=deadline_s)
            record = fleet.swaps[-2]
            assert (record.num_saved, record.phase_s("preload")) == (4, 0)
            down[deadline_s] = record.phase_s("evict") - deadline_s
    assert down[1.0] < down[0.0] / 2


@virtual_time
async def test_full_blocks_are_copied_while_the_next_model_is_preloaded() -> None:
    async with make_fleet(SimKVStore("1 GiB")) as fleet:
        async with running(fleet):
            await away_and_back(fleet)
        record = fleet.swaps[-2]
        full_s = record.saved_bytes / PROFILE.kv_bytes_per_s
        assert record.phase_s("preload") > 0
        assert record.phase_s("evict") < full_s / 2


@virtual_time
async def test_all_requests_stop_at_one_step_boundary() -> None:
    """One after another they would decode on, and the last be down as long as all copies take."""
    stopped_s: list[float] = []

    class Noting(EditedMoves):
        def edit_source(self, source: Any) -> None:
            stop = source.stop

            async def noted() -> Any:
                result = await stop()
                stopped_s.append(anyio.current_time())
                return result

            source.stop = noted

    async with make_fleet(SimKVStore("1 GiB"), [make_engine(kind=Noting)]) as fleet, running(fleet):
        await away_and_back(fleet)
        assert len(stopped_s) == 4
        assert len(set(stopped_s)) == 1


@virtual_time
async def test_a_drain_that_is_out_of_time_saves_what_it_interrupts() -> None:
    engines = [make_engine("e0"), make_engine("e1")]
    async with make_fleet(SimKVStore("1 GiB"), engines) as fleet, running(fleet) as clients:
        record = await fleet.drain("e0", deadline_s=0.0)
        assert record.num_evicted == 4
        num_tokens = [client.num_tokens for client in clients]
        await fleet.swap("e1", to="a")
        for client, before in zip(clients, num_tokens, strict=True):
            await client.has(before - len(client.prompt) + 2)
            assert client.restored == [0, before - 1]


@virtual_time
async def test_what_requests_have_in_common_is_copied_once() -> None:
    engine = SimEngine("e0", WITHOUT_PRELOAD, kv_blocks=512, kv_block_tokens=16)
    async with make_fleet(SimKVStore("1 GiB"), [engine]) as fleet, running(fleet, PROMPTS[:1] * 4) as clients:
        await away_and_back(fleet)
        assert fleet.swaps[-2].num_saved == 4
        most = max(client.num_tokens for client in clients)
        assert fleet.swaps[-2].saved_bytes <= (-(-most // 16) + 3) * 16 * KV_BYTES


# ---------------------------------------------------------------------- without a store, without room


@virtual_time
async def test_without_a_store_nothing_changes() -> None:
    seconds: list[list[float]] = []
    for kv_store in (None, SimKVStore(0)):
        async with make_fleet(kv_store) as fleet:
            async with running(fleet) as clients:
                await away_and_back(fleet)
            assert [client.restored for client in clients] == [[0, 0]] * 4
            assert fleet.swaps[-2].num_saved == 0
            seconds.append([record.phase_s("load") for record in fleet.swaps])
    assert seconds[0] == pytest.approx(seconds[1])


@virtual_time
async def test_a_store_of_little_more_than_one_request_keeps_one_whole() -> None:
    """Saved one after another without a plan they would evict each other, and none would be whole."""
    async with make_fleet(SimKVStore(round(1.2 * 11 * 16 * KV_BYTES))) as fleet:
        async with running(fleet) as clients:
            await away_and_back(fleet)
        restored = sorted(client.restored[-1] for client in clients)
        assert restored[-1] >= 160
        assert restored[:-2] == [0, 0]
        assert fleet.swaps[-2].num_saved <= 1


@virtual_time
async def test_what_was_restored_teaches_nothing_of_prefills() -> None:
    """Else prefills would seem to take no time, and nothing would be worth being saved."""
    async with make_fleet(SimKVStore("1 GiB")) as fleet, running(fleet):
        for _ in range(3):
            await away_and_back(fleet)
            await anyio.sleep(0.5)
            assert fleet.swaps[-2].num_saved == 4
        times = fleet.view().times
        assert times.prefill_token_s == pytest.approx(TimesView().prefill_token_s, rel=0.5)


@virtual_time
async def test_blocks_that_are_sooner_computed_than_copied_are_hardly_copied() -> None:
    """On a slow link; a few are, to learn whether it still is slow."""
    slow = SimKVStore("1 GiB", bytes_per_s=5e5)
    prompts = [tuple(range(2000 * number, 2000 * number + 1200)) for number in range(2)]
    async with make_fleet(slow, [make_engine(kv_blocks=1024)]) as fleet, running(fleet, prompts) as clients:
        for _ in range(6):
            await away_and_back(fleet)
            for client in clients:
                await client.has(len(client.tokens) + 3)
        restored = [bool(tokens) for client in clients for tokens in client.restored[1:]]
        assert any(restored[:2]) or any(restored[6:8])
        assert sum(restored) <= 4


# ---------------------------------------------------------------------- faults


class Faulty(SimKVStore):
    """Fails in one of its verbs."""

    def __init__(self, fails_in: str, error: type[Exception]) -> None:
        super().__init__("1 GiB")
        self.fails_in, self.error = fails_in, error

    def _fail_in(self, verb: str) -> None:
        if self.fails_in == verb:
            raise self.error(f"a planted fault in {verb}")

    def lookup(self, prefix: KVPrefix) -> int:
        self._fail_in("lookup")
        return super().lookup(prefix)

    def lease(self, prefix: KVPrefix) -> KVLease:
        self._fail_in("lease")
        return super().lease(prefix)

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        self._fail_in("put")
        return super().put(prefix, prefill_s=prefill_s, copy_s=copy_s)

    async def fill(self, places: Sequence[None], data: memoryview) -> None:
        self._fail_in("fill")
        await super().fill(places, data)

    async def content(self, places: Sequence[None], block_bytes: int) -> memoryview:
        self._fail_in("content")
        return await super().content(places, block_bytes)

    def view(self) -> KVStoreView:
        self._fail_in("view")
        return super().view()


@pytest.mark.parametrize("error", [RuntimeError, TierFull])
@pytest.mark.parametrize("verb", ["lookup", "lease", "put", "fill", "content", "view"])
def test_a_fault_of_the_store_fails_no_swap_and_no_request(
    verb: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_time
    async def test() -> None:
        reader = InMemoryMetricReader()
        async with make_fleet(Faulty(verb, error), meter_provider=MeterProvider([reader])) as fleet:
            async with running(fleet):
                await away_and_back(fleet)
            assert [record.outcome for record in fleet.swaps] == ["done"] * 3
            assert points(reader.get_metrics_data())["hotswap.instances"]

    with caplog.at_level(logging.INFO, "hotswap"):
        test()
    assert f"a planted fault in {verb}" in caplog.text
    if verb == "view":
        assert caplog.text.count("cannot tell its view") == 1
    else:  # an error of stores says itself what is to be done
        assert ("Traceback" in caplog.text) is (error is RuntimeError)


@pytest.mark.parametrize("found", [10**6, -1, 1.5, None, "all"], ids=str)
def test_a_lookup_that_tells_what_no_store_can_have_is_one_of_nothing(
    found: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Mistaken(SimKVStore):
        def lookup(self, prefix: KVPrefix) -> Any:
            return found

    @virtual_time
    async def test() -> None:
        async with make_fleet(Mistaken("1 GiB")) as fleet:
            async with running(fleet):
                await away_and_back(fleet)
            assert [record.outcome for record in fleet.swaps] == ["done"] * 3

    test()
    assert f"lookup() returned {found!r} for" in caplog.text


@virtual_time
async def test_a_view_that_is_none_of_a_store_is_told_as_none(caplog: pytest.LogCaptureFixture) -> None:
    class Mistaken(SimKVStore):
        def view(self) -> Any:
            return "full"

    async with make_fleet(Mistaken("1 GiB")) as fleet, running(fleet):
        await away_and_back(fleet)
        assert fleet.view().kv_store is None
        assert [record.outcome for record in fleet.swaps] == ["done"] * 3
    assert caplog.text.count("view() is 'full'; give an object of type KVStoreView") == 1


@virtual_time
async def test_an_engine_that_is_lost_while_it_is_saved_ends_the_swap_as_ever() -> None:
    engine = make_engine()
    async with make_fleet(SimKVStore("1 GiB"), [engine]) as fleet, running(fleet):
        async with anyio.create_task_group() as tasks:

            async def swap() -> None:
                with pytest.raises(SwapFailed, match="evict"):
                    await fleet.swap("e0", to="b", deadline_s=1.0)

            tasks.start_soon(swap)
            await until(lambda: engine.status().state is InstanceState.DRAINING)
            engine.lose()
        await until(lambda: engine.status().state is InstanceState.EMPTY)
        await fleet.swap("e0", to="a")


@pytest.mark.parametrize("write_through_s", [0.25, None])
@virtual_time
async def test_a_lost_engine_costs_the_tokens_since_the_last_write_through(
    write_through_s: float | None,
) -> None:
    """Without one all tokens are computed again."""
    engines = [make_engine("e0"), make_engine("e1")]
    store = SimKVStore("1 GiB")
    fleet = make_fleet(store, engines, kv_write_through_s=write_through_s)
    async with fleet, running(fleet, PROMPTS[:2]) as clients:
        await fleet.swap("e1", to="a")
        for client in clients:
            await client.has(100)
        num_tokens = [client.num_tokens for client in clients]
        engines[0].lose()
        for client, before in zip(clients, num_tokens, strict=True):
            await client.has(before - len(client.prompt) + 2)
            assert len(client.restored) == 2
            if write_through_s is None:
                assert client.restored[1] == 0
            else:  # a quarter of a second of steps of 12 ms, and a block that is not full
                assert before - 48 < client.restored[1] < before
        await until(lambda: engines[0].status().state is InstanceState.EMPTY)


@virtual_time
async def test_a_write_through_copies_only_what_is_new_and_leases_nothing() -> None:
    store = SimKVStore("1 GiB")
    async with make_fleet(store, kv_write_through_s=0.1) as fleet, running(fleet) as clients:
        await clients[0].has(200)
        view = store.view()
        (stored,) = view.models
        held = sum(client.num_tokens // 16 for client in clients)
        assert held - 4 * len(clients) < stored.num_blocks <= held
        assert view.num_leases == 0
        record = await fleet.swap("e0", to="b")
        assert record.saved_bytes <= 4 * len(clients) * 16 * KV_BYTES
        await fleet.swap("e0", to="a")


def test_a_write_through_needs_seconds_and_a_store() -> None:
    with pytest.raises(ConfigError, match="kv_write_through_s is 0"):
        make_fleet(SimKVStore("1 GiB"), kv_write_through_s=0)
    with pytest.raises(ConfigError, match="without a kv_store"):
        make_fleet(None, kv_write_through_s=1.0)


@virtual_time
async def test_a_swap_that_is_cancelled_while_it_saves_leaves_the_model_and_its_requests() -> None:
    engine = make_engine()
    async with make_fleet(SimKVStore("1 GiB"), [engine]) as fleet, running(fleet) as clients:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(fleet.swap, "e0", to="b", deadline_s=1.0))
                await until(lambda: engine.status().state is InstanceState.DRAINING)
                scope.cancel()
        assert engine.status().state is InstanceState.SERVING
        assert fleet.swaps[-1].outcome == "cancelled"
        num_tokens = [len(client.tokens) for client in clients]
        for client, before in zip(clients, num_tokens, strict=True):
            await client.has(before + 2)


@virtual_time
async def test_admission_is_closed_while_requests_are_saved() -> None:
    """A request that is released would come straight back, and be evicted without its blocks."""
    async with make_fleet(SimKVStore("1 GiB")) as fleet, running(fleet) as clients:
        await away_and_back(fleet)
        for client in clients:
            await client.has(60)
            assert len(client.restored) == 2


class Asked(SimKVStore):
    """Notes how long each token of a put would take to be computed."""

    def __init__(self) -> None:
        super().__init__("1 GiB")
        self.token_s: list[float] = []

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        self.token_s.append(prefill_s / len(prefix.tokens))
        return super().put(prefix, prefill_s=prefill_s, copy_s=copy_s)


class SlowSink(SimEngine):
    """Imports for ever."""

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        await anyio.sleep_forever()
        async with super().import_kv(request) as sink:
            yield sink


@virtual_time
async def test_a_restore_that_takes_for_ever_is_given_up() -> None:
    async with make_fleet(SimKVStore("1 GiB"), [make_engine(kind=SlowSink)]) as fleet:
        async with running(fleet) as clients:
            await away_and_back(fleet)
        assert [client.restored for client in clients] == [[0, 0]] * 4


@virtual_time
async def test_stays_that_waited_for_a_restore_teach_nothing_of_computing() -> None:
    """Else restoring would seem to be worth the more, the longer it takes."""
    store = Asked()
    async with make_fleet(store, [make_engine(kind=SlowSink)]) as fleet, running(fleet) as clients:
        for _ in range(2):
            await away_and_back(fleet)
            for client in clients:
                await client.has(len(client.tokens) + 2)
    assert max(store.token_s) < 2 * min(store.token_s)


@virtual_time
async def test_loads_of_adapters_teach_nothing_of_computing() -> None:
    """Requests wait for them whether their blocks are restored or computed."""
    store, adapters = Asked(), [Adapter(name, "a") for name in ("x", "y")]
    engine = SimEngine("e0", replace(PROFILE, adapter_s=2.0), kv_blocks=512, kv_block_tokens=16)
    async with make_fleet(store, [engine], adapters=adapters) as fleet:
        await fleet.swap("e0", to="a")
        for number, adapter in enumerate(adapters):
            await fleet.generate("a", PROMPTS[number], SHORT, adapter=adapter.id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(fleet.generate, "a", PROMPTS[2], SHORT, adapter="x"))
            await anyio.sleep(0.5)
            await fleet.swap("e0", to="b")
            await fleet.swap("e0", to="a")
    assert 0 < max(store.token_s) < 3 * PROFILE.token_s


@virtual_time
async def test_what_is_stored_is_told_by_adapter() -> None:
    """Requests of one prompt have blocks of their own for each adapter, and for none."""
    adapters = [Adapter(name, "a") for name in ("x", "y")]
    async with make_fleet(SimKVStore("1 GiB"), adapters=adapters) as fleet:
        await fleet.swap("e0", to="a")
        async with anyio.create_task_group() as tasks:
            for name in ("x", "y"):
                tasks.start_soon(partial(fleet.generate, "a", PROMPTS[0], LONG, adapter=name))
            await until(lambda: fleet.num_tokens[ModelId("a")] > 20)
            await fleet.swap("e0", to="b")
            begun = fleet.view().waiting
            assert [request.stored_tokens for request in begun] == [one.num_tokens - 1 for one in begun]
            for other in ("x", "y", None):
                tasks.start_soon(partial(fleet.generate, "a", (*PROMPTS[0], 7), SHORT, adapter=other))
            await until(lambda: len(fleet.view().waiting) == 5)
            new = {one.adapter: one.stored_tokens for one in fleet.view().waiting if one not in begun}
            assert new == {"x": 150, "y": 150, None: 0}
            await fleet.swap("e0", to="a")


class StuckSource(EditedMoves):
    """Stops so many requests and no more."""

    num_stops = 0

    def edit_source(self, source: Any) -> None:
        if not self.num_stops:
            source.stop = anyio.sleep_forever
        else:
            self.num_stops -= 1


@virtual_time
async def test_a_save_that_takes_for_ever_is_given_up_within_the_limit_of_an_eviction() -> None:
    limits = SwapLimits(evict_s=1.0)
    async with (
        make_fleet(SimKVStore("1 GiB"), [make_engine(kind=StuckSource)], limits=limits) as fleet,
        running(fleet),
    ):
        await away_and_back(fleet)
        assert fleet.swaps[-2].outcome == "done"
        assert (fleet.swaps[-2].num_evicted, fleet.swaps[-2].num_saved) == (4, 0)


class StuckListing(StuckSource):
    """Stops no request, and tells of none that has ended."""

    async def cached_kv(self) -> Sequence[CachedKV]:
        await anyio.sleep_forever()
        raise AssertionError


@virtual_time
async def test_saving_that_takes_for_ever_ends_before_the_limit_of_an_eviction() -> None:
    limits = SwapLimits(evict_s=1.0)
    engine = StuckListing("e0", WITHOUT_PRELOAD, kv_blocks=512, kv_block_tokens=16)
    async with make_fleet(SimKVStore("1 GiB"), [engine], limits=limits) as fleet, running(fleet):
        await away_and_back(fleet)
        assert [record.outcome for record in fleet.swaps] == ["done"] * 3


class FarAway(SimEngine):
    """Hears of a cancellation once it has evicted all, as an engine elsewhere may."""

    async def evict(self, *, deadline_s: float) -> int:
        with anyio.CancelScope(shield=True):
            num_evicted = await super().evict(deadline_s=deadline_s)
        await anyio.sleep(0.01)
        return num_evicted


@virtual_time
async def test_an_engine_that_has_evicted_all_before_it_hears_of_the_saving_is_not_asked_again() -> None:
    engine = FarAway("e0", WITHOUT_PRELOAD, kv_blocks=512, kv_block_tokens=16)
    async with make_fleet(SimKVStore("1 GiB"), [engine]) as fleet:
        await fleet.swap("e0", to="a")
        await away_and_back(fleet)
        assert [record.outcome for record in fleet.swaps] == ["done"] * 3


class ByUse(SimKVStore):
    """Evicts what was used longest ago, whatever it is worth."""

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        return super().put(prefix)


@virtual_time
async def test_a_save_that_is_given_up_evicts_nothing_from_the_store() -> None:
    engine = StuckSource("e0", WITHOUT_PRELOAD, kv_blocks=512, kv_block_tokens=16)
    async with make_fleet(ByUse(24 * 16 * KV_BYTES), [engine]) as fleet:
        engine.num_stops = 2
        async with running(fleet, PROMPTS[:2], SHORT):
            await away_and_back(fleet)
            assert fleet.swaps[-2].num_saved == 2
        await fleet.swap("e0", to="b")
        engine.num_stops = 1
        async with running(fleet, PROMPTS[2:], SHORT):
            await away_and_back(fleet)
            assert fleet.swaps[-2].num_saved == 0
        view = fleet.view().kv_store
        assert view is not None
        assert view.num_evicted == 0


@virtual_time
async def test_everything_is_given_back_wherever_a_swap_is_cancelled() -> None:
    engine = make_engine(kv_blocks=64)
    async with make_fleet(SimKVStore("1 GiB"), [engine]) as fleet:
        await fleet.swap("e0", to="a")

        async def swaps() -> None:
            async with fleet.stream("a", PROMPTS[0][:20], Sampling(max_tokens=30, ignore_eos=True)) as stream:
                await anext(stream)
                await fleet.swap("e0", to="b", deadline_s=0.02)
                await fleet.swap("e0", to="a")
                await stream.collect()

        async def all_given_back() -> None:
            await anyio.sleep(0.1)
            idle(fleet)
            view = fleet.view().kv_store
            assert view is not None
            assert view.num_leases == 0
            assert view.used_bytes == sum(stored.size_bytes for stored in view.models)
            if engine.status().model != "a" or engine.status().state is not InstanceState.SERVING:
                await fleet.swap("e0", to="a")

        assert await cancel_everywhere(swaps, all_given_back) > 20


# ---------------------------------------------------------------------- what is counted


@virtual_time
async def test_what_is_saved_and_restored_is_counted_and_traced() -> None:
    reader, recorder = InMemoryMetricReader(), Recorder()
    async with make_fleet(
        SimKVStore("1 GiB"), meter_provider=MeterProvider([reader]), tracer_provider=recorder.provider
    ) as fleet:
        async with running(fleet) as clients:
            await away_and_back(fleet)
        saved_bytes = fleet.swaps[-2].saved_bytes
        restored = sum(client.restored[-1] for client in clients)
        view = fleet.view().kv_store
        assert view is not None
        assert [stored.model for stored in view.models] == ["a"]
        assert view.used_bytes == saved_bytes
        assert view.capacity_bytes == 1 << 30
        measured = points(reader.get_metrics_data())
        assert sum(value for _, value in measured["hotswap.kv.saved"]) == saved_bytes
        assert sum(value for _, value in measured["hotswap.kv.restored"]) == restored
        assert [value for _, value in measured["hotswap.kv.stored"]] == [saved_bytes]
    assert total(recorder, "hotswap.offload", "hotswap.kv.saved_bytes") == saved_bytes
    assert total(recorder, "hotswap.hop", "hotswap.kv.restored_tokens") == restored


def total(recorder: Recorder, span: str, attribute: str) -> float:
    """The sum of an attribute of all spans of a name."""
    values = [(of.attributes or {}).get(attribute, 0) for of in recorder.spans(span)]
    return sum(value for value in values if isinstance(value, int | float))
