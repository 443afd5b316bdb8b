"""A vLLM core: an engine in a process of its own, our end of it, and cores that wait for their next model.

To start a core takes seconds, to give a running one other weights of the same architecture a fraction of one.
So a core whose model was unloaded waits in a pool, and the next model of its architecture takes it over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

import anyio
import torch
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hotswap.backends.stores.shielded import in_thread, shielded
from hotswap.backends.vllm.inside import worker
from hotswap.backends.vllm.inside.pages import BlockShape
from hotswap.backends.vllm.names import named
from hotswap.backends.vllm.settings import Settings, StartMethod
from hotswap.backends.vllm.staging import CONFIG, TOKENIZER, TOKENIZER_CONFIG, Staged
from hotswap.backends.vllm.stats import Stats
from hotswap.errors import InstanceLost, OutOfMemory, UnsupportedModel

__all__ = ["Core", "CorePool", "start"]

log = logging.getLogger("hotswap.vllm")

_T = TypeVar("_T")

# Cores are made one after the other, by a thread that lives as long as the process: the kernel ends a core
# when the thread ends that made it.
_maker = ThreadPoolExecutor(1, thread_name_prefix="hotswap vllm cores")
# The process and the thread that make one now; in the core itself and its ranks, any thread.
_making: list[tuple[int, int | None]] = []


def _arm_child() -> None:
    """In a process that the maker of cores has forked, and in those that it forks in turn."""
    if not _making:
        return
    parent, thread = _making.pop()
    if thread in (None, threading.get_ident()):
        _making.append((os.getpid(), None))
        worker.die_with_parent(parent)


os.register_at_fork(after_in_child=_arm_child)


class Core:
    """A vLLM core that serves one model at a time; lives on the event loop it was started from.

    Attributes:
        llm: vLLM's own client.
        stats: What its scheduler said last.
        weights: Stands for the weights it has, as prefix caches must tell them apart; empty while unknown.
        died: Called on the event loop when its process has ended unasked.
        resumes: Whether requests go on in it as if they had begun there; see `resume`.
        has_grammars: Whether requests can be held to a grammar, which takes the model's tokenizer.
        sleeps: Whether it can give its device memory up while it waits: on GPUs.
        blocks: What its KV blocks are; `None` if requests cannot move with them. See `migration`.
    """

    def __init__(self, llm: Any, stats: Stats, directory: Path, architecture: str) -> None:
        self.llm, self.stats = llm, stats
        self.weights = ""
        self.resumes, self.has_grammars = True, False
        self.blocks: BlockShape | None = None
        self.architecture = architecture
        self._directory = directory
        config: Any = llm.vllm_config
        self.sleeps, self.is_asleep = bool(config.model_config.enable_sleep_mode), False
        self.block_tokens = int(config.cache_config.block_size)
        # One block is everyone's padding.
        self.num_blocks = int(config.cache_config.num_gpu_blocks) - 1
        self.context = int(config.model_config.max_model_len)
        self.vocabulary = int(config.model_config.get_vocab_size())
        manager: Any = llm.engine_core.resources.engine_manager
        self.processes: list[Any] = list(manager.processes)
        self.died: Callable[[], None] = lambda: None
        self._is_dead = self._stopped = False
        self._told: set[asyncio.Task[None]] = set()
        self._calls: set[anyio.CancelScope] = set()
        self._loop = asyncio.get_running_loop()
        self._sentinel: int = self.processes[0].sentinel
        self._loop.add_reader(self._sentinel, self._note_death)

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended, or cannot serve any more."""
        return self._is_dead or bool(self.llm.errored)

    def _note_death(self) -> None:
        self._loop.remove_reader(self._sentinel)
        self._is_dead = True
        self._break_calls_off()
        self.died()

    def _break_calls_off(self) -> None:
        for scope in self._calls:
            scope.cancel()

    def trace_headers(self) -> dict[str, str] | None:
        """Return what makes vLLM's span of a request a child of the current one; `None` if it makes none."""
        if self.llm.vllm_config.observability_config.otlp_traces_endpoint is None:
            return None
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers)
        return headers

    async def rest(self) -> None:
        """Move its weights to host memory and drop its KV blocks, if it can; `reload` wakes it.

        Raises:
            UnsupportedModel: vLLM could not; the core is of no use any more.
            InstanceLost: its process ended.
        """
        if self.sleeps and not self.is_asleep:
            await self.call(self.llm.sleep(level=1), "go to sleep")
            self.is_asleep = True

    async def reload(self, staged: Staged, weights: str) -> None:
        """Replace the weights by others of the same architecture, unless it has them; nothing may run.

        Raises:
            UnsupportedModel: vLLM could not take them; the core is of no use any more.
            InstanceLost: its process ended.
        """
        if self.is_asleep:
            await self.call(self.llm.wake_up(), "wake up")
            self.is_asleep = False
        if self.weights == weights:
            return
        self.weights = ""
        await self.call(self._reload(staged), f"take the weights of {staged.card.id!r}")
        self.weights = weights

    async def _reload(self, staged: Staged) -> None:
        await self.llm.engine_core.pause_scheduler_async("abort", False)
        await self.llm.collective_rpc("hotswap_reload", args=(str(staged.index),))
        await self.llm.engine_core.resume_scheduler_async()

    async def call(self, work: Awaitable[_T], what: str) -> _T:
        """Return what the core answers.

        Raises:
            InstanceLost: its process ended.
            UnsupportedModel: it answered with an error.
        """
        try:
            # vLLM's client leaves who waits for a utility of a core that dies waiting.
            with anyio.CancelScope() as scope:
                self._calls.add(scope)
                try:
                    return await work
                finally:
                    self._calls.discard(scope)
            raise InstanceLost(f"vLLM's core has ended while it was to {what}.")
        except InstanceLost:
            raise
        except Exception as exc:
            if self.is_dead or isinstance(exc, named("vllm.v1.engine.exceptions:EngineDeadError")):
                raise InstanceLost(f"vLLM's core has ended while it was to {what}.") from exc
            raise UnsupportedModel(f"vLLM could not {what}: {exc}") from exc

    def tell(self, work: Callable[[], Awaitable[object]], what: str, then: Callable[[], None]) -> None:
        """Have the core do something that nobody waits for, from any callback of the event loop.

        `then` is called once it and all that was asked before are done, or never will be.
        """

        async def tell() -> None:
            try:
                if not self.is_dead:
                    await self.call(work(), what)
            except InstanceLost:  # and with it all that it was told
                return
            except UnsupportedModel:
                log.exception("A core could not %s.", what)
            finally:
                then()

        task = self._loop.create_task(tell())
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    def kill(self) -> None:
        """End its processes at once, without telling whoever waits for its death."""
        self._loop.remove_reader(self._sentinel)
        self._is_dead = True
        self._break_calls_off()
        for process in self.processes:
            process.kill()

    async def stop(self) -> None:
        """End it and free what it has; again does nothing. Cannot be interrupted."""
        if self._stopped:
            return
        self._stopped = self._is_dead = True
        self._loop.remove_reader(self._sentinel)
        if (handler := self.llm.output_handler) is not None:
            handler.cancel()  # or it logs that the core has ended
        await in_thread(self._stop)
        for task in tuple(self._told):
            task.cancel()

    def _stop(self) -> None:
        self.llm.shutdown(timeout=0)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._directory, ignore_errors=True)


async def start(settings: Settings, staged: Staged) -> Core:
    """Start a core with a model; takes seconds, during which the event loop goes on.

    Cannot be interrupted: whoever is cancelled meanwhile has a core all the same.

    Raises:
        UnsupportedModel: vLLM refuses the model, or the arguments.
        OutOfMemory: vLLM found too little memory.
    """
    stats, loop = Stats(), asyncio.get_running_loop()
    try:
        # In a context of ours, so that vLLM's spans of its start are children of the current one.
        context = copy_context()
        llm, directory = await shielded(
            lambda: loop.run_in_executor(_maker, lambda: context.run(_make, settings, staged, stats))
        )
    except Exception as exc:
        raise _why_not(exc, staged) from exc
    core = Core(llm, stats, directory, staged.architecture)
    core.has_grammars = bool(staged.tokenizer)
    if settings.pp > 1:
        # Stages learn in a first pass what they hand on, and the core ends with a request that comes before.
        try:
            await core.call(llm.collective_rpc("execute_dummy_batch"), "try its stages out")
        except BaseException:
            await core.stop()
            raise
    return core


def _make(settings: Settings, staged: Staged, stats: Stats) -> tuple[Any, Path]:
    """In the thread that makes cores."""
    on_cpu = bool(named("vllm.platforms:current_platform").is_cpu())
    # The config outlives the staged weights.
    directory = Path(tempfile.mkdtemp(prefix="hotswap-vllm-core-"))
    try:
        for name in (CONFIG, *((TOKENIZER, TOKENIZER_CONFIG) if staged.tokenizer else ())):
            shutil.copyfile(staged.directory / name, directory / name)
        arguments = settings.vllm_arguments(
            directory, staged.index, on_cpu=on_cpu, has_tokenizer=bool(staged.tokenizer)
        )
        config = named("vllm.engine.arg_utils:AsyncEngineArgs")(**arguments).create_engine_config()
        _choose_start(settings.start, on_cpu=on_cpu)
        if on_cpu and settings.num_ranks > 1:
            # Ranks would each be bound to a NUMA node of their own, and refuse to start without.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        _making.append((os.getpid(), threading.get_ident()))
        os.environ[worker.FAMILY] = str(os.getpid())
        try:
            return named("vllm.v1.engine.async_llm:AsyncLLM").from_vllm_config(
                config, stat_loggers=[stats.logger]
            ), directory
        finally:
            _making.clear()
            del os.environ[worker.FAMILY]
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _choose_start(start: StartMethod | None, *, on_cpu: bool) -> None:
    """Say how the core's process is made; vLLM's own choice is set anew with each config.

    A fork is several times as quick as a fresh interpreter, but a trap for a process that has computed with
    several OpenMP threads, which do not exist in the child.
    """
    if start is None and on_cpu:
        start = "fork" if torch.get_num_threads() == 1 else "spawn"
    if start is not None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start


def _why_not(error: Exception, staged: Staged) -> Exception:
    text = f"vLLM could not start with {staged.card.id!r}: {error}"
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return OutOfMemory(text)
    return UnsupportedModel(text)


class CorePool:
    """Cores that wait for their next model. May be shared by engines of one event loop.

    On a CPU a waiting core keeps the memory of its weights and KV blocks; on a GPU it sleeps, its weights in
    host memory and its KV blocks dropped, so that cores of several architectures may wait beside one that
    serves, and the way back takes a copy.

    Args:
        max_idle: How many may wait; the one that waited longest goes first.
    """

    def __init__(self, max_idle: int = 1) -> None:
        self.max_idle = max_idle
        self._idle: list[tuple[Settings, Core]] = []

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, settings: Settings, architecture: str, weights: str) -> Core | None:
        """Return a core that can take weights of the architecture over, best one that has them already."""
        self._idle = [(held, core) for held, core in self._idle if not core.is_dead]
        fitting = [
            core for held, core in self._idle if held == settings and core.architecture == architecture
        ]
        chosen = next((core for core in fitting if core.weights == weights), fitting[-1] if fitting else None)
        self._idle = [entry for entry in self._idle if entry[1] is not chosen]
        return chosen

    async def give(self, settings: Settings, core: Core) -> None:
        """Take a core back that runs nothing; one too many is stopped, and a dead one."""
        try:
            if not core.is_dead:
                await core.rest()
        except (InstanceLost, UnsupportedModel) as exc:
            log.warning("A core that was to wait for its next model is stopped: %s", exc)
            await core.stop()
        if core.is_dead:
            await core.stop()
            return
        self._idle.append((settings, core))
        await self.shrink(self.max_idle)

    async def shrink(self, most: int) -> None:
        """Stop waiting cores until so many are left. Cannot be interrupted."""
        while len(self._idle) > most:
            _, core = self._idle.pop(0)
            await core.stop()

    async def make_room(self) -> None:
        """Stop those that wait with their memory, which a new core is to have. Cannot be interrupted."""
        awake = [core for _, core in self._idle if not core.is_asleep]
        self._idle = [entry for entry in self._idle if entry[1].is_asleep]
        for core in awake:
            await core.stop()

    async def close(self) -> None:
        """Stop all that wait; with the pool of one engine its end does. Cannot be interrupted."""
        await self.shrink(0)

    def __repr__(self) -> str:
        return f"<CorePool [{len(self._idle)} of {self.max_idle} idle]>"
