"""vLLM cores: how they are started, given other weights and ended, and a pool of idle ones.

A core runs in processes of its own. To start one takes seconds; to replace its weights by others of the
same architecture takes a fraction of a second. So a core whose model was unloaded goes to a pool, and the
next model of its architecture takes it from there.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing.connection
import os
import signal
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

from hotswap.backends.vllm.directories import SHARED_MEMORY, CoreDirectory
from hotswap.backends.vllm.inside import worker
from hotswap.backends.vllm.inside.blocks import METHOD
from hotswap.backends.vllm.inside.pages import BlockShape
from hotswap.backends.vllm.names import named
from hotswap.backends.vllm.settings import Settings, StartMethod, choose_runner
from hotswap.backends.vllm.staging import Staged
from hotswap.backends.vllm.stats import Stats
from hotswap.errors import InstanceLost, OutOfMemory, UnsupportedModel
from hotswap.hardware import parse_bytes
from hotswap.worker_threads import in_thread, shielded

__all__ = ["Core", "CorePool", "start"]

log = logging.getLogger("hotswap.vllm")

_T = TypeVar("_T")

# Cores are started one after the other, by a thread that lives as long as the process: the kernel ends a core
# when the thread that started it ends.
_maker = ThreadPoolExecutor(1, thread_name_prefix="hotswap vllm cores")
# The process and the thread that start a core now; in the core itself and its ranks, any thread.
_making: list[tuple[int, int | None]] = []


def _arm_child() -> None:
    """Have a process end with its parent: those that the starting thread forks, and their children."""
    if not _making:
        return
    parent, thread = _making.pop()
    if thread in (None, threading.get_ident()):
        _making.append((os.getpid(), None))
        worker.die_with_parent(parent)


os.register_at_fork(after_in_child=_arm_child)


class Core:
    """A vLLM core that serves one model at a time; belongs to the event loop it was started from.

    Attributes:
        llm: vLLM's own client.
        stats: The last report of its scheduler.
        weights: A fingerprint of its weights, which keeps prefix caches apart; empty while unknown.
        kv_identity: Tells keys and values of its weights, and of its way of computing, from all others.
        died: Called on the event loop when its process has ended by itself, or vLLM's client of it.
        resumes: Whether requests that began elsewhere continue as if they had begun here; see `resume`.
        has_rules: Whether it samples by rules that vLLM itself has not; see `inside.sampling`.
        has_grammars: Whether it can constrain generations to a grammar, which takes the model's tokenizer.
        guides: Whether it compiles grammars as a `TorchEngine` does, not as vLLM is told in `arguments`.
        grammar_ends: The end tokens of its model that the tokenizer has.
        sleeps: Whether it can free its device memory while it is idle: on GPUs.
        is_lent: Whether a store has lent the weights that it has, and so has them in host memory.
        weight_bytes: The size of its weights.
        blocks: The shape of its KV blocks; `None` if requests cannot move with them. See `migration`.
    """

    def __init__(self, llm: Any, stats: Stats, directory: CoreDirectory, architecture: str) -> None:
        self.llm, self.stats = llm, stats
        self.weights = self.kv_identity = ""
        self.resumes = self.has_rules = self.guides = True
        self.has_grammars = False
        self.grammar_ends: tuple[int, ...] = ()
        self.blocks: BlockShape | None = None
        self.architecture = architecture
        self._directory = directory
        config: Any = llm.vllm_config
        self.sleeps, self.is_asleep = bool(config.model_config.enable_sleep_mode), False
        self.is_lent, self.weight_bytes = False, 0
        self.block_tokens = int(config.cache_config.block_size)
        # vLLM keeps one block for padding.
        self.num_blocks = int(config.cache_config.num_gpu_blocks) - 1
        self.context = int(config.model_config.max_model_len)
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        manager: Any = llm.engine_core.resources.engine_manager
        self.processes: list[Any] = list(manager.processes)
        self.died: Callable[[], None] = lambda: None
        self._is_dead = self._stopped = self._client_failed = False
        self._handler: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[anyio.CancelScope] = set()
        self._loop = asyncio.get_running_loop()
        self._sentinel: int = self.processes[0].sentinel
        self._loop.add_reader(self._sentinel, self._note_death)

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended, or cannot serve any more."""
        return self._is_dead or bool(self.llm.errored)

    @property
    def kept_bytes(self) -> int:
        """The memory that its weights take while it is idle; none where it sleeps and a store lends them."""
        return 0 if self.is_asleep and self.is_lent else self.weight_bytes

    @property
    def ending(self) -> str:
        """What has ended, and how: `"vLLM's core has ended by SIGKILL"`, `"... with exit code 1"`.

        The how is left out while it is not known: vLLM may give a core up before its process exits. What its
        client fails of, vLLM logs.
        """
        if (code := self._exit_code()) is None:
            return "vLLM's client of its core has failed" if self._client_failed else "vLLM's core has ended"
        if code >= 0:
            return f"vLLM's core has ended with exit code {code}"
        names = {int(known): known.name for known in signal.Signals}
        return f"vLLM's core has ended by {names.get(-code, f'signal {-code}')}"

    def _exit_code(self) -> int | None:
        process = self.processes[0]
        if not multiprocessing.connection.wait([process.sentinel], 0):
            return None
        # Where a thread of vLLM has reaped it this moment, the code comes a moment later.
        for _ in range(100):
            if process.exitcode is not None:
                break
            threading.Event().wait(0.001)
        code: int | None = process.exitcode
        return code

    def _note_death(self) -> None:
        self._loop.remove_reader(self._sentinel)
        self._is_dead = True
        self._cancel_calls()
        self.died()

    async def add_request(self, *args: Any, **given: Any) -> Any:
        """Pass a request on to vLLM's client; return where its output comes."""
        added = await self.llm.add_request(*args, **given)
        if self._handler is not self.llm.output_handler:  # it begins with the first request
            handler: asyncio.Task[None] = self.llm.output_handler
            handler.add_done_callback(self._note_end_of_client)
            self._handler = handler
        return added

    def _note_end_of_client(self, _: asyncio.Task[None]) -> None:
        """Note that no more output comes, though the process may go on."""
        if not self._is_dead:
            self._client_failed = not self.llm.engine_core.resources.engine_dead
            self._note_death()

    def _cancel_calls(self) -> None:
        for scope in self._calls:
            scope.cancel()

    def trace_headers(self) -> dict[str, str] | None:
        """Return headers that make vLLM's span of a request a child of the current one; `None` without."""
        if self.llm.vllm_config.observability_config.otlp_traces_endpoint is None:
            return None
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers)
        return headers

    async def sleep(self) -> None:
        """Free its device memory, if it can; `reload` wakes it.

        Weights are kept in host memory, unless a store lends them: then they are read from there again.

        Raises:
            UnsupportedModel: vLLM could not; the core must be stopped.
            InstanceLost: its process ended.
        """
        if self.sleeps and not self.is_asleep:
            await self.call(self.llm.sleep(level=2 if self.is_lent else 1), "go to sleep")
            self.is_asleep = True
            if self.is_lent:
                self.weights = ""

    async def reload(self, staged: Staged, weights: str) -> None:
        """Replace the weights by others of the same architecture, unless it has them; no request may run.

        Raises:
            UnsupportedModel: vLLM could not load them; the core must be stopped.
            InstanceLost: its process ended.
        """
        if self.is_asleep:
            await self.call(self.llm.wake_up(), "wake up")
            self.is_asleep = False
        if self.blocks is not None:  # what ended before was listed then, or is another engine's
            forget = self.llm.engine_core.call_utility_async(METHOD, "forget_ended", [])
            await self.call(forget, "forget requests that have ended")
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
        """Return the core's answer to a call.

        Raises:
            InstanceLost: its process ended.
            UnsupportedModel: it answered with an error.
        """
        try:
            # vLLM's client does not end calls of a core that dies.
            with anyio.CancelScope() as scope:
                self._calls.add(scope)
                try:
                    return await work
                finally:
                    self._calls.discard(scope)
            raise InstanceLost(f"{self.ending} while it was to {what}.")
        except InstanceLost:
            raise
        except Exception as exc:
            if self.is_dead or isinstance(exc, named("vllm.v1.engine.exceptions:EngineDeadError")):
                raise InstanceLost(f"{self.ending} while it was to {what}.") from exc
            raise UnsupportedModel(f"vLLM could not {what}: {exc}") from exc

    def tell(self, work: Callable[[], Awaitable[object]], what: str, then: Callable[[], None]) -> None:
        """Make a call without waiting for it; may be called from any callback of the event loop.

        `then` is called once this call and all before it are done, or have failed.
        """

        async def make_call() -> None:
            try:
                if not self.is_dead:
                    await self.call(work(), what)
            except InstanceLost:  # with the core all its calls end
                return
            except UnsupportedModel:
                log.exception("A core could not %s.", what)
            finally:
                then()

        task = self._loop.create_task(make_call())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kill(self) -> None:
        """End its processes at once, without calling `died`."""
        self._loop.remove_reader(self._sentinel)
        self._is_dead = True
        self._cancel_calls()
        for process in self.processes:
            process.kill()

    async def stop(self) -> None:
        """End its processes and free its memory; does nothing if called again. Cannot be interrupted."""
        if self._stopped:
            return
        self._stopped = self._is_dead = True
        self._loop.remove_reader(self._sentinel)
        if (handler := self.llm.output_handler) is not None:
            handler.cancel()  # otherwise it logs that the core has ended
        await in_thread(self._stop)
        for task in tuple(self._tasks):
            task.cancel()

    def _stop(self) -> None:
        self.llm.shutdown(timeout=0)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.remove()


async def start(settings: Settings, staged: Staged) -> Core:
    """Start a core with a model, in a thread; takes seconds.

    Cannot be interrupted: a caller that is cancelled meanwhile gets the core all the same.

    Raises:
        UnsupportedModel: vLLM refuses the model, or the arguments.
        OutOfMemory: vLLM found too little memory.
    """
    stats, loop = Stats(), asyncio.get_running_loop()
    try:
        # In a copied context, so that vLLM's spans of its start are children of the current span.
        context = copy_context()
        llm, directory = await shielded(
            lambda: loop.run_in_executor(_maker, lambda: context.run(_make, settings, staged, stats))
        )
    except Exception as exc:
        raise _start_error(exc, staged) from exc
    core = Core(llm, stats, directory, staged.architecture)
    core.has_grammars, core.guides = bool(staged.tokenizer), settings.guides
    if settings.pp > 1:
        # Stages learn in a first pass what they send; a request that comes before it ends the core.
        try:
            await core.call(llm.collective_rpc("execute_dummy_batch"), "run a first pass through its stages")
        except BaseException:
            await core.stop()
            raise
    return core


def _make(settings: Settings, staged: Staged, stats: Stats) -> tuple[Any, CoreDirectory]:
    """Start vLLM; runs in the thread that starts cores."""
    on_cpu = bool(named("vllm.platforms:current_platform").is_cpu())
    # A copy of the config, since the staged directory goes before the core does.
    directory = CoreDirectory.make(Path(tempfile.gettempdir()))
    try:
        staged.copy_settings(directory.path)
        arguments = settings.vllm_arguments(
            directory.path, staged.index, on_cpu=on_cpu, has_tokenizer=bool(staged.tokenizer)
        )
        choose_runner()
        config = named("vllm.engine.arg_utils:AsyncEngineArgs")(**arguments).create_engine_config()
        _choose_start(settings.start, on_cpu=on_cpu)
        if on_cpu and settings.num_ranks > 1:
            # By default each rank is bound to a NUMA node of its own, and refuses to start without one.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        before = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
        _making.append((os.getpid(), threading.get_ident()))
        os.environ[worker.OWNER] = str(os.getpid())
        try:
            llm: Any = named("vllm.v1.engine.async_llm:AsyncLLM").from_vllm_config(
                config, stat_loggers=[stats.logger_class()]
            )
            processes = llm.engine_core.resources.engine_manager.processes
            directory.note_shared_memory([process.pid for process in processes], before)
            return llm, directory
        finally:
            _making.clear()
            del os.environ[worker.OWNER]
    except BaseException:
        directory.remove()
        raise


def _choose_start(start: StartMethod | None, *, on_cpu: bool) -> None:
    """Set the start method of the core's process; vLLM sets its own choice with each config.

    A fork is several times as fast as a new interpreter, but hangs where the process has computed with
    several OpenMP threads, which do not exist in the child.
    """
    if start is None and on_cpu:
        start = "fork" if torch.get_num_threads() == 1 else "spawn"
    if start is not None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start


def _start_error(error: Exception, staged: Staged) -> Exception:
    text = f"vLLM could not start with {staged.card.id!r}: {error}"
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return OutOfMemory(text)
    return UnsupportedModel(text)


class CorePool:
    """Idle cores, kept for their next model. May be shared by engines of one event loop.

    On a CPU an idle core keeps the memory of its weights and KV blocks. On a GPU it sleeps, its weights in
    host memory and its KV blocks dropped, so that idle cores of several architectures fit beside one that
    serves; to wake one takes a copy of its weights. Weights that a store lends are not kept a second time.

    Args:
        max_idle: How many are kept; the one that is idle for longest is stopped first.
        max_bytes: The memory that the weights of all of them may take, in the host where they sleep; `None`
            is unbounded. Weights that a store lends to sleeping cores do not count.
    """

    def __init__(self, max_idle: int = 1, *, max_bytes: int | str | None = None) -> None:
        self.max_idle = max_idle
        self.max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        self._idle: list[tuple[Settings, Core]] = []

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, settings: Settings, architecture: str, weights: str) -> Core | None:
        """Return an idle core of the architecture, with the same weights if there is one; `None` without."""
        self._idle = [(held, core) for held, core in self._idle if not core.is_dead]
        fitting = [
            core for held, core in self._idle if held == settings and core.architecture == architecture
        ]
        chosen = next((core for core in fitting if core.weights == weights), fitting[-1] if fitting else None)
        self._idle = [entry for entry in self._idle if entry[1] is not chosen]
        return chosen

    async def give(self, settings: Settings, core: Core) -> None:
        """Add a core that runs no requests; stop it if it is dead, and the oldest if there are too many."""
        try:
            if not core.is_dead:
                await core.sleep()
        except (InstanceLost, UnsupportedModel) as exc:
            log.warning("A core that could not be kept for its next model is stopped: %s", exc)
            await core.stop()
        if core.is_dead:
            await core.stop()
            return
        self._idle.append((settings, core))
        await self.shrink(self.max_idle)

    async def shrink(self, most: int) -> None:
        """Stop the oldest cores until `most` are left, within `max_bytes`. Cannot be interrupted."""
        while len(self._idle) > most or (self.max_bytes is not None and self.kept_bytes > self.max_bytes):
            _, core = self._idle.pop(0)
            await core.stop()

    @property
    def kept_bytes(self) -> int:
        """The memory that the weights of idle cores take."""
        return sum(core.kept_bytes for _, core in self._idle)

    async def make_room(self) -> None:
        """Stop the cores that keep their memory, for a new core. Cannot be interrupted."""
        awake = [core for _, core in self._idle if not core.is_asleep]
        self._idle = [entry for entry in self._idle if entry[1].is_asleep]
        for core in awake:
            await core.stop()

    async def close(self) -> None:
        """Stop all idle cores; an engine does so with a pool of its own. Cannot be interrupted."""
        await self.shrink(0)

    def __repr__(self) -> str:
        return f"<CorePool [{len(self._idle)} of {self.max_idle} idle]>"
