"""A torch engine in virtual time: each step lasts as long as the processor worked on it.

On a shared machine a step may wait for a processor at any moment. Here the steps of the torch engine are
computed one after the other in this thread, and virtual time advances by the processor time of each. Other
processes still slow a step down, through shared caches: so a fixed reference computation runs beside each
step, and the time of the step is scaled by how much slower the reference was than at its best.

The time between steps is not measured: tokens that cross from the engine's thread to the readers'.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import median

import anyio
import torch

from hotswap import InstanceState, Request, Token
from hotswap.abc import Engine, EngineStatus, ModelCard, TokenQueue, TokenStream, WeightStore
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.admission import to_sequence
from hotswap.backends.torch.runner import Runner

__all__ = ["ProcessorTimeEngine"]


class ProcessorTimeEngine(Engine):
    """Stands for a loaded torch engine that has no other clients; to be used in virtual time."""

    def __init__(self, engine: TorchEngine) -> None:
        self.id = engine.id
        runner, model = engine._running_worker._runner, engine._models.serving
        assert runner is not None
        assert model is not None
        self._runner: Runner = runner
        self._model, self._view = model, engine.status()
        self._state, self._queues = InstanceState.EMPTY, dict[int, TokenQueue]()
        self._last_ticket = runner.batcher.last_ticket
        self._work, self._reference = anyio.Event(), _ReferenceWork()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[ProcessorTimeEngine]:
        async with anyio.create_task_group() as workers:
            workers.start_soon(self._run_steps)
            yield self
            workers.cancel_scope.cancel()

    def status(self) -> EngineStatus:
        return replace(self._view, state=self._state)

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await anyio.sleep(0.001)  # virtual; loads are not measured
        self._state = InstanceState.SERVING

    async def unload(self) -> None:
        await anyio.sleep(0.001)
        self._state = InstanceState.EMPTY

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        self._last_ticket += 1
        ticket, tokens = self._last_ticket, TokenQueue()
        sequence = to_sequence(request, ticket, self._model, None, weights="")
        self._queues[ticket] = tokens
        self._runner.batcher.add(sequence)
        self._work.set()
        try:
            yield tokens
        finally:
            if self._queues.pop(ticket, None) is not None:
                self._runner.batcher.remove(sequence)

    async def evict(self, *, deadline_s: float) -> int:
        raise NotImplementedError("this engine is not swapped")

    async def _run_steps(self) -> None:
        while True:
            if self._runner.idle:
                self._work = anyio.Event()
                await self._work.wait()
            share = self._reference.share()
            began_s = time.thread_time()
            with torch.inference_mode():
                report = self._runner.step()
            await anyio.sleep((time.thread_time() - began_s) * share)
            for sampled in report.sampled:
                if (tokens := self._queues.get(sampled.ticket)) is None:
                    continue
                tokens.put(Token(id=sampled.token, index=sampled.index, finish_reason=sampled.finish_reason))
                if sampled.finish_reason is not None:
                    tokens.close()
                    del self._queues[sampled.ticket]


class _ReferenceWork:
    """The current speed of the processor over its best, by the median time of the last reference runs."""

    def __init__(self) -> None:
        self._inputs, self._weights = torch.randn(32, 256), torch.randn(256, 768)
        self._times_s = deque[float](maxlen=15)
        self._best_s = min(median(self._work_s() for _ in range(40)) for _ in range(20))

    def share(self) -> float:
        self._times_s.append(self._work_s())
        return self._best_s / median(self._times_s)

    def _work_s(self) -> float:
        """Products, copies and interpreted code, about as a small model's step has them."""
        began_s = time.thread_time()
        for number in range(12):
            torch.nn.functional.silu(self._inputs @ self._weights).sum()
            self._inputs.view(32, 4, 64).transpose(0, 1).contiguous()
            _ = [at * number for at in range(60)]
        return time.thread_time() - began_s
