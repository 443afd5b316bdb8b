"""`ProcessEngine`: an engine in a process of its own on this machine, over links in shared memory."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import pickletools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self, cast

import anyio

from hotswap.backends.locked_directory import LockedDirectory
from hotswap.backends.nodes import StoreHost
from hotswap.backends.process.child import Child
from hotswap.backends.process.mps import Mps
from hotswap.backends.process.serving import EngineMaker, ServeEngine, StoreMaker
from hotswap.backends.remote import RemoteEngine
from hotswap.backends.transports import serve_shared
from hotswap.backends.transports.link_errors import ENDED
from hotswap.checks import (
    check_callables,
    check_counts,
    check_kind,
    check_positive_seconds,
    check_strings,
    shown,
)
from hotswap.errors import ConfigError, InstanceLost, MigrationAborted, StoreError
from hotswap.metered_store import MeteredStore
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import SupportsSideFiles, WeightStore
from hotswap.store_view import StoreView
from hotswap.transport import Channel
from hotswap.worker_threads import run_in_thread

__all__ = ["EngineMaker", "ProcessEngine", "StoreMaker"]

log = logging.getLogger("hotswap")

_STORE = "store.sock"

# From the end of a link until the kernel tells that the process has ended: if the link was closed by the
# process, as its end does, and otherwise.
_CLOSED_NOTICE_S, _NOTICE_S = 2.0, 0.1


class ProcessEngine(RemoteEngine):
    """An engine in a child process: what crashes there costs this instance alone.

    ```python
    ProcessEngine("e0", partial(TorchEngine, "e0", threads=2), cpus=[0, 1])
    ```

    The process starts with the engine, or with the fleet that has it. When it ends, or says nothing for
    `silence_s`, the engine is LOST with the reason; `unload`, which a fleet calls, kills what is left of it
    and starts another one. It does so, too, if the engine in a healthy process is LOST and its own `unload`
    does not bring it back. The child never outlives this process, even if that is killed. Everything else is
    as of `RemoteEngine`. KV blocks go from one child to another in shared memory.

    Args:
        id: The instance's name; give the engine the same.
        make_engine: Makes the engine, in the child. It is pickled: a class or a function that can be
            imported, or a `functools.partial` of one.
        make_store: Makes the store that the engine reads, in the child, likewise. Default: `None`, it reads
            the store of `load` through shared memory, which costs a copy of the weights.
        env: Environment variables of the child, beside those of this process. They are set before anything
            is imported: `{"CUDA_VISIBLE_DEVICES": "1"}`.
        cpus: The cores that the child may run on; also `OMP_NUM_THREADS`, unless `env` has it. Default: all.
        mps: A share of a GPU through NVIDIA's MPS, whose daemon is started if none runs.
        node: As of `RemoteEngine`.
        silence_s: As of `RemoteEngine`.
        start_s: The time limit of a start: of the process, its imports, and the engine.
        end_s: The time that the engine has to end, before its process is killed.

    Raises:
        ConfigError: an argument cannot be used, or `make_engine` or `make_store` cannot be pickled.
    """

    def __init__(
        self,
        id: str,
        make_engine: EngineMaker,
        make_store: StoreMaker | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cpus: Iterable[int] = (),
        mps: Mps | None = None,
        node: str = "",
        silence_s: float = 8.0,
        start_s: float = 60.0,
        end_s: float = 10.0,
    ) -> None:
        super().__init__(id, self._open, node=node, silence_s=silence_s, start_s=start_s)
        check_positive_seconds(ConfigError, end_s=end_s)
        check_callables(ConfigError, make_engine=make_engine, make_store=make_store)
        if mps is not None:
            check_kind(ConfigError, "mps", mps, Mps)
        self._cpus = _cores(cpus)
        self._env = _variables(env)
        if self._cpus:
            self._env.setdefault("OMP_NUM_THREADS", str(len(self._cpus)))
        self._mps, self._end_s = mps, end_s
        self._make_engine, self._make_store = make_engine, make_store
        self._pickled(ServeEngine(
            name=id, make_engine=make_engine, make_store=make_store, path="", store_path="",
            silence_s=silence_s, end_s=end_s,
        ))  # fmt: skip
        self._store = _GivenStore()
        self._directory: LockedDirectory | None = None  # of the sockets
        self._starts = itertools.count(1)
        self._child: Child | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        error: Exception | None = None
        self._directory = directory = await run_in_thread(LockedDirectory.make)
        try:
            async with anyio.create_task_group() as tasks:
                if self._make_store is None:
                    host = StoreHost(self.id, self._store)
                    await tasks.start(serve_shared, host.serve, directory.path / _STORE)
                try:
                    async with super().__asynccontextmanager__():
                        yield self
                except Exception as exc:
                    error = exc  # the task group would wrap it
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._stop(self._end_s)
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await run_in_thread(directory.remove)
        if error is not None:
            raise error

    @property
    def pid(self) -> int | None:
        """The id of the child process; `None` while there is none."""
        return None if self._child is None or self._child.has_ended else self._child.pid

    async def open_channel(self) -> Channel:
        if self._child is None:
            raise MigrationAborted(f"Engine {self.id!r} has no process.", stage="link")
        try:
            return await self._child.connect()
        except MigrationAborted as exc:
            if because := await self._reason_of_loss(""):
                raise InstanceLost(f"Engine {self.id!r} is lost: {because}.") from exc
            raise

    # ------------------------------------------------------------------ private

    def _give(self, store: WeightStore) -> None:
        self._store.give(store)

    async def _open(self) -> Channel:
        """Start a process in the place of the one there was, if there was one."""
        with anyio.CancelScope(shield=True):
            await self._stop(0.0)
        env = dict(self._env)
        if self._mps is not None:
            await self._mps.start()
            env = {**self._mps.env, **env}
        assert self._directory is not None, "it was entered"
        task = ServeEngine(
            name=self.id,
            make_engine=self._make_engine,
            make_store=self._make_store,
            path=str(self._directory.path / f"engine-{next(self._starts)}.sock"),
            store_path=str(self._directory.path / _STORE),
            silence_s=self._silence_s,
            end_s=self._end_s,
        )
        self._child = await Child.start(task, self._pickled(task), env=env, cpus=self._cpus)
        log.info("Engine %r runs in process %d.", self.id, self._child.pid)
        return await self._child.connect()

    async def _stop(self, end_s: float) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.stop(end_s=end_s)

    async def _end_host(self, because: str) -> bool:
        log.warning("The process of engine %r is replaced: %s", self.id, because)
        with anyio.CancelScope(shield=True):
            await self._stop(self._end_s)
        return True

    async def _reason_of_loss(self, because: str) -> str:
        if self._child is not None:
            notice_s = _CLOSED_NOTICE_S if because.startswith(ENDED) else _NOTICE_S
            with anyio.move_on_after(notice_s, shield=True):
                return await self._child.ending()
        return because

    def _pickled(self, task: ServeEngine) -> bytes:
        try:
            pickled = pickle.dumps(task)
        except Exception as exc:
            raise ConfigError(
                f"make_engine or make_store of engine {self.id!r} cannot be pickled ({exc}); give a class "
                "or a function of a module, or a functools.partial of one."
            ) from exc
        if any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled)):
            raise ConfigError(
                f"make_engine or make_store of engine {self.id!r} is defined in the script that is run, "
                "which its process does not import; move it to a module."
            )
        return pickled

    def __repr__(self) -> str:
        where = "no process" if self.pid is None else f"process {self.pid}"
        return f"<{type(self).__name__} {self.id!r} [{self.status().state}, {where}]>"


class _GivenStore(WeightStore):
    """The store of the latest load or preload, for a child that has none of its own."""

    def __init__(self) -> None:
        self._given: WeightStore | None = None

    def give(self, store: WeightStore) -> None:
        """Read from this store from now on; the child tells how much, so nothing is counted here."""
        self._given = store.wrapped if isinstance(store, MeteredStore) else store

    async def manifest(self, model: ModelId) -> Manifest:
        return await self._store().manifest(model)

    def open(self, shard: Shard) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
        return self._store().open(shard)

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        store = self._store()
        return await store.side_files(model) if isinstance(store, SupportsSideFiles) else {}

    def view(self) -> StoreView:
        return StoreView() if self._given is None else self._given.view()

    def _store(self) -> WeightStore:
        if self._given is None:
            raise StoreError("There is no store before the first load.")
        return self._given


def _variables(env: object) -> dict[str, str]:
    if env is not None and not isinstance(env, Mapping):
        raise ConfigError(f"env is {shown(env)}; give a dict of names and values.")
    variables = dict(cast("Mapping[str, str]", env or {}))
    for name, value in variables.items():
        check_strings(ConfigError, **{"a name in env": name, f"env[{name!r}]": value})
        try:
            os.fsencode(name + value)
        except UnicodeEncodeError:
            is_usable = False
        else:
            is_usable = bool(name) and "=" not in name and "\0" not in name + value
        if not is_usable:
            raise ConfigError(f"env has {name!r}: {shown(value)}, which no process can be given.")
    return variables


def _cores(cpus: object) -> tuple[int, ...]:
    if not isinstance(cpus, Iterable):
        raise ConfigError(f"cpus is {shown(cpus)}; give the numbers of cores, as range(4).")
    cores = tuple(cast("Iterable[int]", cpus))
    for core in cores:
        check_counts(ConfigError, 0, cpus=core)
    known = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(cores)
    if unknown := sorted(set(cores) - known):
        raise ConfigError(f"cpus names {unknown[0]}; this process may run on {sorted(known)}.")
    return cores
