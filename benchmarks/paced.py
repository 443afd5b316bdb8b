"""A torch engine's steps in virtual time, each as long as the processor worked on it, whoever else was there.

On a machine that others use a step may wait for a processor at any moment, and mean latencies are those of
the others. Here the steps are the torch engine's own, computed one after the other in this thread, and the
clock goes on by the processor time of each. Others still slow a processor down, by its caches: so a fixed
piece of work is done beside each step, and the step counts as it would have where that takes least.

What it does not see is what lies between steps: tokens that cross from the engine's thread to the readers'.
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

from hotswap import Engine, InstanceState, InstanceView, ModelCard, Request, Token, TokenStream, WeightStore
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.admission import to_sequence
from hotswap.backends.torch.runner import Runner
from hotswap.stream import TokenQueue

__all__ = ["PacedEngine"]


class PacedEngine(Engine):
    """Stands for a loaded torch engine that nobody else asks for anything; to be used in virtual time."""

    def __init__(self, engine: TorchEngine) -> None:
        self.id = engine.id
        runner, model = engine._running_worker._runner, engine._models.serving
        assert runner is not None
        assert model is not None
        self._runner: Runner = runner
        self._model, self._shown = model, engine.view()
        self._state, self._queues = InstanceState.EMPTY, dict[int, TokenQueue]()
        self._last_ticket = runner.batcher.last_ticket
        self._work, self._yardstick = anyio.Event(), _Yardstick()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[PacedEngine]:
        async with anyio.create_task_group() as workers:
            workers.start_soon(self._step_for_ever)
            yield self
            workers.cancel_scope.cancel()

    def view(self) -> InstanceView:
        return replace(self._shown, state=self._state)

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await anyio.sleep(0.001)  # virtual; loads are not what is looked at
        self._state = InstanceState.SERVING

    async def unload(self) -> None:
        await anyio.sleep(0.001)
        self._state = InstanceState.EMPTY

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        self._last_ticket += 1
        ticket, tokens = self._last_ticket, TokenQueue()
        sequence = to_sequence(request, ticket, self._model, None, epoch=1)
        self._queues[ticket] = tokens
        self._runner.batcher.add(sequence)
        self._work.set()
        try:
            yield tokens
        finally:
            if self._queues.pop(ticket, None) is not None:
                self._runner.batcher.remove(sequence)

    async def evict(self, *, deadline_s: float) -> int:
        raise NotImplementedError("nobody swaps it")

    async def _step_for_ever(self) -> None:
        while True:
            if self._runner.idle:
                self._work = anyio.Event()
                await self._work.wait()
            share = self._yardstick.share()
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


class _Yardstick:
    """How much of its speed a processor has now: by the median of the last few pieces of fixed work."""

    def __init__(self) -> None:
        self._inputs, self._weights = torch.randn(32, 256), torch.randn(256, 768)
        self._times_s = deque[float](maxlen=15)
        self._least_s = min(median(self._work_s() for _ in range(40)) for _ in range(20))

    def share(self) -> float:
        self._times_s.append(self._work_s())
        return self._least_s / median(self._times_s)

    def _work_s(self) -> float:
        """Products, copies and interpreted code, about as a small model's step has them."""
        began_s = time.thread_time()
        for number in range(12):
            torch.nn.functional.silu(self._inputs @ self._weights).sum()
            self._inputs.view(32, 4, 64).transpose(0, 1).contiguous()
            _ = [at * number for at in range(60)]
        return time.thread_time() - began_s
