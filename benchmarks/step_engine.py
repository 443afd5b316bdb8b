"""An engine that computes nothing: in every step it gives each of its requests a token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Self

import anyio
from anyio.lowlevel import checkpoint

from hotswap import InstanceId, InstanceState, ModelId, Request, Token
from hotswap.abc import Engine, EngineStatus, ModelCard, TokenQueue, TokenStream, WeightStore

__all__ = ["StepEngine"]


class StepEngine(Engine):
    """Gives every request a token a step, and computes nothing.

    Args:
        step_s: Seconds from the beginning of one step to that of the next; with 0 a step follows the other.
        answer: Token ids that every answer repeats.
    """

    def __init__(self, *, step_s: float = 0.0, answer: Sequence[int] = (7,)) -> None:
        self.id = InstanceId("e0")
        self._step_s, self._answer = step_s, tuple(answer)
        self._state, self._model = InstanceState.EMPTY, ModelId("")
        self._open: dict[TokenQueue, tuple[int, int]] = {}
        self._asked = anyio.Event()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._step_on)
            yield self
            tasks.cancel_scope.cancel()

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await checkpoint()
        self._state, self._model = InstanceState.SERVING, model.id

    async def unload(self) -> None:
        await checkpoint()
        self._state = InstanceState.EMPTY

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        tokens = TokenQueue()
        self._open[tokens] = len(request.generated), request.sampling.max_tokens
        self._asked.set()
        try:
            yield tokens
        finally:
            self._open.pop(tokens, None)

    async def evict(self, *, deadline_s: float) -> int:
        await checkpoint()
        self._state = InstanceState.DRAINING
        return 0

    def status(self) -> EngineStatus:
        return EngineStatus(
            id=self.id,
            state=self._state,
            model=self._model or None,
            num_running=len(self._open),
            memory_bytes=1 << 30,
        )

    async def _step_on(self) -> None:
        due_s = 0.0
        while True:
            if not self._open:
                self._asked = anyio.Event()
                await self._asked.wait()
            for tokens, (index, most) in tuple(self._open.items()):
                last = index + 1 == most
                token = self._answer[index % len(self._answer)]
                tokens.put(Token(id=token, index=index, finish_reason="length" if last else None))
                if last:
                    tokens.close()
                    del self._open[tokens]
                else:
                    self._open[tokens] = index + 1, most
            due_s = max(due_s, anyio.current_time() - self._step_s) + self._step_s
            await anyio.sleep_until(due_s)
