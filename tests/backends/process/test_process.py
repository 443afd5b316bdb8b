"""An engine's process: what it is given, how it ends, and what its end costs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from hotswap import Fleet, InstanceState, Model, ModelId, Sampling
from hotswap.abc import Engine, ModelCard, Shard, WeightStore, WrapperStore
from hotswap.backends.process import ProcessEngine
from hotswap.backends.process import engine as process_engine
from hotswap.backends.sim import SimEngine, expected_tokens
from hotswap.engine import StatusListener
from hotswap.errors import ConfigError, InstanceLost, OutOfMemory, SwapFailed
from tests.backends.process.support import (
    QUICK,
    checked_manifest,
    checked_store,
    sim_engine,
    sim_process,
    until,
    wait_for_end,
)
from tests.patience import PATIENCE_S

CARD = ModelCard.of(Model("a"), checked_manifest("a"))
LONG = Sampling(max_tokens=150, ignore_eos=True)


@asynccontextmanager
async def fleet_of(*engines: Engine) -> AsyncGenerator[Fleet]:
    async with Fleet(engines=engines, store=checked_store(), models=[Model("a"), Model("b")]) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        yield fleet


def is_lost(engine: Engine) -> bool:
    return engine.status().state is InstanceState.LOST


def pid_of(engine: ProcessEngine) -> int:
    assert engine.pid is not None
    return engine.pid


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_ends_or_freezes_costs_its_instance_alone(
    how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [sim_process(name, step_s=0.01, silence_s=2.0) for name in ("e0", "e1")]
    victim = engines[0]
    async with fleet_of(*engines) as fleet:
        ended, old = dict[int, list[int]](), pid_of(victim)
        bystander = pid_of(engines[1])

        async def client(number: int) -> None:
            async with fleet.stream("a", (1, 2, number + 1), LONG) as stream:
                ended[number] = [token.id for token in await stream.collect()]
                assert ended[number] == expected_tokens(stream.request, CARD, vocabulary=500)

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as clients:
                for number in range(8):
                    clients.start_soon(client, number)
                await until(lambda: all(view.num_running for view in fleet.view().instances))
                os.kill(old, how)
            assert sorted(ended) == list(range(8))
            await until(lambda: victim.pid not in (None, old) and not is_lost(victim))
        assert pid_of(engines[1]) == bystander
        await wait_for_end(old)
    reasons = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    expected = f"its process was ended by {how.name}" if how is not signal.SIGSTOP else "silent"
    assert any("'e0' is lost" in reason and expected in reason for reason in reasons), reasons


async def test_the_record_of_a_swap_tells_what_was_read_from_the_store_of_the_fleet() -> None:
    async with fleet_of(sim_process()) as fleet:
        record = await fleet.swap("e0", to="b")
        assert record.loaded_bytes == 15 * 4096
        assert record.tier == "disk"


async def test_nothing_is_left_when_the_engine_is_left(own_tmp: Path) -> None:
    async with sim_process() as engine:
        pid = pid_of(engine)
        assert "process" in repr(engine)
        assert entries(own_tmp) != []
    assert engine.pid is None
    await wait_for_end(pid)
    assert entries(own_tmp) == []


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A directory for temporary files that no other test uses, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="own-") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


_PARENT = """
import anyio
from tests.backends.process.support import sim_process

async def main():
    async with sim_process() as engine:
        print(engine.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_a_child_never_outlives_its_parent(own_tmp: Path) -> None:
    env = {**os.environ, "TMPDIR": str(own_tmp)}
    async with await anyio.open_process([sys.executable, "-c", _PARENT], env=env) as parent:
        assert parent.stdout is not None
        child = int(await parent.stdout.receive())
        os.kill(child, 0)
        parent.kill()
    await wait_for_end(child)
    left = entries(own_tmp)
    assert left != []
    async with sim_process():
        assert not set(left) & set(entries(own_tmp)), "the next engine removes what a killed parent has left"


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("of a task"), 1), (SystemExit(3), 3)])
async def test_a_process_whose_engine_fails_ends_and_says_how(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_engine, "_CLOSED_NOTICE_S", 60.0)  # on a busy machine it may end late
    async with ProcessEngine("e0", partial(_Failing, error)) as engine:
        old = pid_of(engine)
        await until(lambda: is_lost(engine))
        assert engine.status().lost_because == f"its process ended with exit code {code}"
        await wait_for_end(old)


class _Failing(SimEngine):
    """An engine with a task of its own, which fails once the parent is there."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("e0", QUICK)
        self._error, self._is_watched = error, anyio.Event()

    def watch(self, listener: StatusListener) -> bool:
        self._is_watched.set()
        return super().watch(listener)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with super().__asynccontextmanager__(), anyio.create_task_group() as tasks:
            tasks.start_soon(self._fail)
            yield self

    async def _fail(self) -> None:
        await self._is_watched.wait()
        await anyio.sleep(0.1)
        raise self._error


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ValueError, match="of the block"):
        async with sim_process():
            raise ValueError("of the block")


async def test_an_engine_that_cannot_come_back_is_made_anew_in_another_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ProcessEngine("e0", _Doomed)
    async with fleet_of(engine) as fleet:
        old = pid_of(engine)
        with pytest.raises(SwapFailed):
            await fleet.swap("e0", to="b")
        await until(lambda: engine.pid not in (None, old) and not is_lost(engine))
        await until(lambda: not fleet.view().instances[0].swapping)
        await wait_for_end(old)
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1, 2, 3), Sampling(max_tokens=5, ignore_eos=True)) as stream:
            assert len(await stream.collect()) == 5
    assert "replaced: Engine 'e0' is lost: its device fails" in caplog.text


class _Doomed(SimEngine):
    """An engine that the load of model "b" costs for good."""

    def __init__(self) -> None:
        super().__init__("e0", QUICK, kv_blocks=160, kv_block_tokens=4)

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        if model.id == "b":
            self.lose("its device fails", for_good=True)
        await super().load(model, store)


async def test_a_loss_is_told_once_and_with_its_reason_though_no_request_ran(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = sim_process()
    async with fleet_of(engine) as fleet:
        old = pid_of(engine)
        os.kill(old, signal.SIGKILL)
        await until(lambda: engine.pid not in (None, old) and not is_lost(engine))
        await until(lambda: not fleet.view().instances[0].swapping)
    told = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
    assert told == ["Instance 'e0' was lost: its process was ended by SIGKILL"]


# ------------------------------------------------------------------ starts


async def test_the_environment_and_the_cores_are_there_before_anything_is_imported() -> None:
    core = min(os.sched_getaffinity(0))
    make = partial(_engine_that_was_given, "from env", core)
    async with ProcessEngine("e0", make, env={"HOTSWAP_TEST": "from env"}, cpus=[core]):
        pass
    with pytest.raises(InstanceLost, match="AssertionError"):
        async with ProcessEngine("e0", partial(_engine_that_was_given, "other", core), cpus=[core]):
            pass


def _engine_that_was_given(variable: str, core: int) -> SimEngine:
    assert os.environ.get("HOTSWAP_TEST") == variable
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.sched_getaffinity(0) == {core}
    return sim_engine()


async def test_an_engine_that_cannot_be_made_is_an_error_with_its_reason() -> None:
    with pytest.raises(InstanceLost, match=r"'e0' did not start: ValueError: no such device"):
        async with ProcessEngine("e0", _no_engine):
            pass
    with pytest.raises(InstanceLost, match=r"'e0' did not start: OutOfMemory: no room"):
        async with ProcessEngine("e0", _Unstartable):
            pass
    with pytest.raises(InstanceLost, match="its process was ended by SIGKILL"):
        async with ProcessEngine("e0", _killed):
            pass


def _no_engine() -> SimEngine:
    raise ValueError("no such device")


class _Unstartable(SimEngine):
    """An engine that fails as it is entered."""

    def __init__(self) -> None:
        super().__init__("e0")

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        _take_room()
        yield self


def _take_room() -> None:
    raise OutOfMemory("no room")


def _killed() -> SimEngine:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _leaves_a_process(told: str, *, ends: bool) -> SimEngine:
    """Make an engine beside a process that never ends by itself, or end."""
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(told).write_text(str(other.pid))
    if ends:
        os._exit(5)
    return sim_engine()


async def test_what_a_process_has_started_ends_with_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with pytest.raises(InstanceLost, match="its process ended with exit code 5"):
        async with ProcessEngine("e0", partial(_leaves_a_process, str(told), ends=True)):
            pass
    await wait_for_end(int(told.read_text()))
    async with ProcessEngine("e0", partial(_leaves_a_process, str(told), ends=False)) as engine:
        first = int(told.read_text())
        os.kill(pid_of(engine), signal.SIGKILL)
        await until(lambda: is_lost(engine))
        await engine.unload()
        await wait_for_end(first)
    await wait_for_end(int(told.read_text()))


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            async with ProcessEngine("e0", partial(_hang, str(told))):
                raise AssertionError("it started")

        tasks.start_soon(start)
        await until(lambda: told.exists() and told.read_text())
        tasks.cancel_scope.cancel()
    await wait_for_end(int(told.read_text()))


async def test_a_start_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with pytest.raises(InstanceLost, match="within 3 s"):
        async with ProcessEngine("e0", partial(_hang, str(told)), start_s=3.0):
            pass
    if told.exists():
        await wait_for_end(int(told.read_text()))


def _hang(told: str) -> SimEngine:
    Path(told).write_text(str(os.getpid()))
    while True:
        signal.pause()


def test_what_a_child_cannot_import_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"cannot be pickled .* give a class or a function of a module"):
        ProcessEngine("e0", lambda: sim_engine())
    with pytest.raises(ConfigError, match="defined in the script that is run"):
        ProcessEngine("e0", partial(_in_main(), "e0"))


def _in_main() -> type[SimEngine]:
    """A class as one of the script that is run."""
    made = type("Mine", (SimEngine,), {"__module__": "__main__"})
    sys.modules["__main__"].Mine = made  # type: ignore[attr-defined]  # made here
    return made


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cpus": [10_000]}, "cpus"),
        ({"cpus": [-1]}, "cpus"),
        ({"cpus": 2}, "cpus"),
        ({"env": {"A": 1}}, "env"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"env": {"A": "x\0y"}}, "env"),
        ({"env": {"A": "\ud800"}}, "env"),
        ({"env": "A=x"}, "env"),
        ({"end_s": 0}, "end_s"),
        ({"mps": 25}, "mps"),
        ({"make_store": 1}, "make_store"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ProcessEngine("e0", sim_engine, **options)  # type: ignore[arg-type]  # wrong ones


async def test_a_child_with_a_store_of_its_own_reads_nothing_here() -> None:
    engine = ProcessEngine("e0", sim_engine, checked_store)
    async with Unread() as store, engine:
        card = ModelCard.of(Model("a"), await store.manifest(ModelId("a")))
        await engine.load(card, store)
        assert engine.status().model == "a"


class Unread(WrapperStore):
    """A store whose weights may not be read."""

    def __init__(self) -> None:
        super().__init__(checked_store())

    def open(self, shard: Shard) -> Any:
        raise AssertionError(f"{shard.file} was read here")
