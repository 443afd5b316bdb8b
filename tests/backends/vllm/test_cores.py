"""Cores are started, taken over, killed and stopped, and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import anyio
import anyio.lowlevel
import psutil
import pytest

from hotswap import Adapter, Fleet, InstanceState, Model, ModelId, Request, RequestId, Sampling
from hotswap.backends.stores import SharedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.backends.vllm import CorePool, VllmEngine
from hotswap.errors import InstanceError, InstanceLost, StoreError, UnsupportedAdapter, UnsupportedModel
from hotswap.policies import LeastLoadedRouter
from hotswap.testing.conformance.suite import until
from tests.backends.torch.adapters.files import write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.backends.vllm.support import llama, make_engine, make_store
from tests.patience import PATIENCE_S
from tests.runtime.support import Idle
from tests.runtime.test_telemetry import Recorder


def ask(model: str = "a", name: str = "r", max_tokens: int = 8) -> Request:
    return Request(
        id=RequestId(name),
        model=ModelId(model),
        prompt=(5, 6, 7),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
    )


async def generate(engine: VllmEngine, request: Request) -> list[int]:
    async with engine.stream(request) as tokens:
        return [token.id for token in await tokens.collect()]


def process_of(engine: VllmEngine) -> int:
    assert engine._core is not None
    return int(engine._core.processes[0].pid)


async def test_a_core_is_taken_over_by_the_same_architecture_alone() -> None:
    store = make_store()
    async with make_engine() as engine:
        seen: dict[str, int] = {}
        texts: dict[str, list[int]] = {}
        for name in ("a", "b", "a", "deep", "a"):
            await engine.load(store.card(name), store)
            tokens = await generate(engine, ask(name))
            assert texts.setdefault(name, tokens) == tokens
            if name in ("a", "b") and "deep" not in seen:
                assert seen.setdefault("first", process_of(engine)) == process_of(engine)
            else:
                assert process_of(engine) not in seen.values()
            seen[name] = process_of(engine)
            await engine.unload()
        assert len({tuple(tokens) for tokens in texts.values()}) == 3


async def test_the_record_of_a_swap_has_the_load_path() -> None:
    store, engine, recorder = make_store(), make_engine("one"), Recorder()
    async with Fleet(
        engines=[engine],
        tracer_provider=recorder.provider,
        store=store,
        models=[Model(name) for name in ("a", "b", "deep")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    ) as fleet:
        load_paths = [(await fleet.swap("one", to=name)).load_path for name in ("a", "b", "deep")]
        assert load_paths == ["new core", "in place", "new core"]
        first, second, _ = recorder.spans("hotswap.load")
        assert [event.name.split()[-1] for event in first.events] == ["memory", "started", "tested"]
        assert [event.name.split()[-1] for event in second.events] == ["weights"]
        staged = recorder.spans("hotswap.preload")[0]
        assert [event.name.split()[-1] for event in staged.events] == ["memory"]
        assert (await fleet.unload("one")).load_path == ""
        assert (await fleet.swap("one", to="deep")).load_path == "kept"


async def test_cores_that_can_sleep_wait_asleep_and_outlive_other_architectures() -> None:
    """As on GPUs; on a CPU vLLM cannot, so its two calls are stood in for."""
    store, said = make_store(), list[str]()

    async def sleep(level: int) -> None:
        said.append(f"sleep {level}")

    async def wake_up() -> None:
        said.append("wake up")

    cores = CorePool(max_idle=2)
    async with make_engine(cores=cores) as engine:
        await engine.load(store.card("a"), store)
        core = engine._core
        assert core is not None
        assert not core.sleeps
        core.sleeps, core.llm.sleep, core.llm.wake_up = True, sleep, wake_up
        expected = await generate(engine, ask())
        await engine.unload()
        await cores.make_room()
        assert (said, len(cores)) == (["sleep 1"], 1)
        await engine.load(store.card("deep"), store)
        await engine.unload()
        await cores.make_room()
        assert len(cores) == 1, "one that is awake is stopped"
        await engine.load(store.card("a"), store)
        assert (engine._core, engine.status().load_path, said) == (core, "woken", ["sleep 1", "wake up"])
        assert await generate(engine, ask()) == expected
        await engine.unload()
        await engine.load(store.card("b"), store)
        assert (engine._core, engine.status().load_path) == (core, "in place")
        await engine.unload()
    await cores.close()


async def test_the_weights_of_idle_cores_have_a_budget() -> None:
    """The core that is idle for longest is stopped; weights that a store lends while it sleeps are none."""
    store = make_store()
    sizes = {name: (await store.manifest(ModelId(name))).buffer_bytes for name in ("a", "deep")}
    cores = CorePool(max_idle=3, max_bytes=sum(sizes.values()) - 1)
    async with make_engine(cores=cores) as engine:
        for name, kept_bytes in (("a", sizes["a"]), ("deep", sizes["deep"])):
            await engine.load(store.card(name), store)
            core = engine._core
            await engine.unload()
            assert (len(cores), cores.kept_bytes) == (1, kept_bytes)
    assert core is not None
    core.is_asleep = core.is_lent = True
    assert cores.kept_bytes == 0
    await cores.close()


async def test_weights_that_a_store_lends_are_not_kept_by_a_core_that_sleeps(tmp_path: Path) -> None:
    """It drops them (vLLM's level 2), and reads them from the store again, whichever model is next."""
    below, said = make_store(), list[str]()

    async def sleep(level: int) -> None:
        said.append(f"sleep {level}")

    async def wake_up() -> None:
        said.append("wake up")

    async with (
        TieredStore(SharedStore(tmp_path / "shared", "64 MiB"), below) as store,
        make_engine() as engine,
    ):
        await engine.load(below.card("a"), store)
        core = engine._core
        assert core is not None
        core.sleeps, core.llm.sleep, core.llm.wake_up = True, sleep, wake_up
        expected = await generate(engine, ask())
        await engine.unload()
        assert (said, core.weights) == (["sleep 2"], "")
        await engine.load(below.card("a"), store)
        assert (engine._core, engine.status().load_path, said[1:]) == (core, "in place", ["wake up"])
        assert await generate(engine, ask()) == expected
        await engine.unload()


async def test_weights_that_do_not_fit_the_running_model_are_never_loaded_into_it() -> None:
    """Even with an equal config: a reload that fails half way would cost the core."""
    store = make_store()
    store.add("like a", make_model(llama(), seed=4))
    manifest = store.manifests["like a"]
    store.manifests["like a"] = replace(manifest, tensors=manifest.tensors[:-1])
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        core = engine._core
        expected = await generate(engine, ask())
        await engine.unload()
        with contextlib.suppress(UnsupportedModel):
            await engine.load(store.card("like a"), store)
            await engine.unload()
        assert core is not None
        assert not core.weights or core.weights.startswith("a ")
        await engine.load(store.card("a"), store)
        assert await generate(engine, ask()) == expected


async def test_a_request_of_higher_priority_goes_first() -> None:
    store, order = make_store(), list[str]()
    async with make_engine(max_requests=1) as engine, anyio.create_task_group() as tasks:
        await engine.load(store.card("a"), store)

        async def run(name: str, priority: int) -> None:
            await generate(engine, replace(ask(name=name, max_tokens=40), priority=priority))
            order.append(name)

        tasks.start_soon(run, "first", 0)
        await until(lambda: engine.status().num_running == 1)
        for name, priority in (("low", -1), ("middle", 0), ("high", 5)):
            tasks.start_soon(run, name, priority)
    assert order == ["first", "high", "middle", "low"]


async def test_prefixes_of_other_weights_are_never_reused() -> None:
    store, prompt = make_store(), tuple(range(2, 200))
    request = Request(
        id=RequestId("r"), model=ModelId("a"), prompt=prompt, sampling=Sampling(max_tokens=8, ignore_eos=True)
    )
    async with make_engine() as engine:
        texts: list[tuple[list[int], int]] = []
        for name in ("a", "b", "a"):
            await engine.load(store.card(name), store)
            async with engine.stream(replace(request, model=ModelId(name))) as tokens:
                ids = [token.id for token in await tokens.collect()]
                texts.append((ids, tokens.num_reused_tokens))
            await engine.unload()
    (first, none), (other, none_either), (again, reused) = texts
    assert first == again != other
    assert none == none_either == 0
    assert reused >= 128, "on the way back its own prefix is still there"


async def test_ten_starts_and_stops_leave_nothing_behind() -> None:
    store, me = make_store(), psutil.Process()

    async def cycle() -> None:
        async with make_engine() as engine:
            await engine.load(store.card("a"), store)
            await generate(engine, ask())
            await engine.unload()

    def held() -> tuple[int, int, int, int]:
        gc.collect()  # vLLM's client and its sockets' contexts keep each other
        shared = len(list(Path("/dev/shm").glob(f"hotswap-vllm-{os.getpid()}-*")))  # others' tests run too
        return me.num_fds(), threading.active_count(), len(me.children(recursive=True)), shared

    for _ in range(2):
        await cycle()
    files, *others = held()
    # What a client's sockets have goes some time after it: one more file for each of eight cycles is a leak.
    before, before_bytes = (files + 7, *others), me.memory_info().rss
    for _ in range(8):
        await cycle()
    # The last threads and sockets of a core end beside us.
    with anyio.move_on_after(PATIENCE_S):
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    assert all(now <= then for now, then in zip(held(), before, strict=True)), (held(), before)
    assert me.memory_info().rss - before_bytes < 40 << 20


async def test_twenty_streams_outlive_the_core_that_they_ran_in() -> None:
    store, killed = make_store(), list[int]()
    prompts = [tuple(range(2 + at, 12 + at)) for at in range(20)]
    sampling = Sampling(max_tokens=40, ignore_eos=True, temperature=0.8, seed=3)
    received: list[list[int]] = [[] for _ in prompts]
    one, other = make_engine("one"), make_engine("other")

    async def read(fleet: Fleet, at: int) -> None:
        async with fleet.stream("a", prompts[at], sampling) as tokens:
            async for token in tokens:
                received[at].append(token.id)
                if not killed and all(received):
                    killed.append(process_of(one))
                    os.kill(killed[0], signal.SIGKILL)

    async with make_fleet(store, one, other) as fleet:
        for name in ("one", "other"):
            await fleet.swap(name, to="a")
        async with anyio.create_task_group() as tasks:
            for at in range(len(prompts)):
                tasks.start_soon(read, fleet, at)
        assert killed
        assert not psutil.pid_exists(killed[0]) or psutil.Process(killed[0]).status() == "zombie"
        assert one.status().state is not InstanceState.SERVING
        for prompt, tokens in zip(prompts, received, strict=True):
            async with fleet.stream("a", prompt, sampling) as stream:
                assert [token.id for token in await stream.collect()] == tokens
    assert psutil.Process().children(recursive=True) == []


def make_fleet(store: DictStore, *engines: VllmEngine) -> Fleet:
    return Fleet(
        engines=engines,
        store=store,
        models=[Model("a")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        interval_s=3600.0,
    )


async def test_a_core_that_ends_while_nothing_runs_is_noticed_at_once() -> None:
    store = make_store()
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        os.kill(process_of(engine), signal.SIGKILL)
        await until(lambda: engine.status().state is InstanceState.LOST)
        with pytest.raises(InstanceLost, match="ended by SIGKILL"):
            await generate(engine, ask())
        await engine.unload()
        await engine.load(store.card("b"), store)
        assert len(await generate(engine, ask("b"))) == 8


async def test_a_client_of_a_core_that_fails_loses_the_engine() -> None:
    """After a fault vLLM's client reads no more output, while the core's process goes on."""
    store = make_store()
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        assert engine._core is not None
        engine._core.stats.notifier = MagicMock(load_changed=MagicMock(side_effect=ValueError("planted")))
        for name in ("here", "later"):
            with pytest.raises(InstanceLost, match="vLLM's client of its core has failed"):
                await generate(engine, ask(name=name))
        assert engine.status().state is InstanceState.LOST
        process = process_of(engine)
        await engine.unload()
        assert not psutil.pid_exists(process)
        await engine.load(store.card("a"), store)
        assert len(await generate(engine, ask())) == 8


async def test_metrics_of_other_engines_stay_in_the_registry() -> None:
    """vLLM's own logger, made for each engine, takes out all whose names begin as its own do."""
    store, prometheus = make_store(), importlib.import_module("prometheus_client")
    registry = prometheus.REGISTRY
    mine = prometheus.Counter("vllm:mine", "Of another engine.")
    before = set(registry._collector_to_names)
    try:
        async with make_engine() as engine:
            await engine.load(store.card("a"), store)
            assert len(await generate(engine, ask())) == 8
            assert set(registry._collector_to_names) == before
    finally:
        registry.unregister(mine)


async def test_a_core_starts_where_a_torch_engine_has_computed() -> None:
    """Its kernels are compiled by numba, in one of whose modules vLLM would end a core that starts."""
    store = make_store()
    async with TorchEngine("t", kv_bytes="8 MiB") as computing:
        await computing.load(store.card("a"), store)
        async with computing.stream(ask()) as tokens:
            assert len(await tokens.collect()) == 8
    importlib.import_module("llvmlite.binding.ffi")
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        assert len(await generate(engine, ask())) == 8


async def test_calls_of_a_core_that_died_end() -> None:
    store = make_store()
    async with make_engine() as engine:
        await engine.load(store.card("a"), store)
        core = engine._core
        assert core is not None
        os.kill(process_of(engine), signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_kill_soon, process_of(engine))
            with pytest.raises(InstanceLost, match="ended by SIGKILL while it was to answer"):
                await core.call(core.llm.collective_rpc("hotswap_process"), "answer")
        await engine.unload()


async def _kill_soon(process: int) -> None:
    await anyio.lowlevel.checkpoint()
    os.kill(process, signal.SIGKILL)


async def test_a_wrong_adapter_disturbs_no_other_request(tmp_path: Path) -> None:
    store = make_store()
    async with make_engine(max_adapters=1) as engine:
        await engine.load(store.card("a"), store)
        before = await generate(engine, ask())
        with pytest.raises(StoreError):
            await engine.load_adapter(Adapter("x", "a", tmp_path / "nowhere"))
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "adapter_config.json").write_text('{"r": 4, "target_modules": ["q_proj"]}')
        (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(b"no tensors")
        with pytest.raises(UnsupportedAdapter):
            await engine.load_adapter(Adapter("y", "a", tmp_path / "bad"))
        assert await generate(engine, ask()) == before


async def test_an_adapter_that_comes_after_its_model_went_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, began, go_on = make_store(), anyio.Event(), anyio.Event()
    source = write(tmp_path / "x", make_model(llama(), seed=1), seed=1, r=4, names=("q_proj",))
    async with make_engine(max_adapters=1) as engine:
        await engine.load(store.card("a"), store)
        assert engine._core is not None
        llm = engine._core.llm
        honest = llm.add_lora

        async def add_lora(lora: object) -> object:
            began.set()
            await go_on.wait()
            return await honest(lora)

        monkeypatch.setattr(llm, "add_lora", add_lora)

        async def ask_for_it() -> None:
            with pytest.raises(InstanceError):
                await engine.load_adapter(Adapter("x", "a", source))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_for_it)
            await began.wait()
            await engine.unload()
            go_on.set()
        assert list(await llm.list_loras()) == []


_ORPHAN = """
    import os, signal, sys
    import anyio
    from tests.backends.vllm.support import llama, make_engine, make_store

    async def main():
        store = make_store()
        async with make_engine(start=sys.argv[1]) as engine:
            await engine.load(store.card("a"), store)
            print(engine._core.processes[0].pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        anyio.run(main)
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_core_ends_with_its_parent_however_that_ends(start: str, tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(textwrap.dedent(_ORPHAN))
    run = subprocess.run(
        [sys.executable, str(script), start],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    core = int(run.stdout.split()[-1])
    gone, _ = psutil.wait_procs([psutil.Process(core)] if psutil.pid_exists(core) else [], timeout=PATIENCE_S)
    assert not psutil.pid_exists(core) or gone or psutil.Process(core).status() == psutil.STATUS_ZOMBIE
