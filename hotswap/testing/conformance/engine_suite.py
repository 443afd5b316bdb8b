"""The hooks of `EngineConformance`, and the setup of its checks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import anyio

from hotswap.engine import Engine, SupportsAdapters
from hotswap.errors import InstanceLost, RequestEvicted
from hotswap.model import Adapter, Model, ModelCard
from hotswap.request import ModelId, Request, RequestId, Token
from hotswap.sampling import Sampling
from hotswap.store import WeightStore
from hotswap.testing.conformance.suite import Suite, until
from hotswap.view import InstanceState

__all__ = ["EngineSetup", "EngineSuite", "Reader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """An engine, its store, and the cards of all models."""

    engine: Engine
    store: WeightStore
    cards: tuple[ModelCard, ...]

    @property
    def card(self) -> ModelCard:
        """The first model, which `serving` loads."""
        return self.cards[0]


class Reader:
    """Reads one stream to its end; keeps its tokens and the error that ended it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[Token] = []
        self.error: RequestEvicted | InstanceLost | None = None
        self.began = anyio.Event()
        self.ended = anyio.Event()

    @property
    def ids(self) -> list[int]:
        """The tokens' ids."""
        return [token.id for token in self.tokens]

    async def read(self, engine: Engine) -> None:
        """Read until the stream ends; an eviction or a loss is kept as `error`."""
        try:
            async with engine.stream(self.request) as tokens:
                async for token in tokens:
                    self.tokens.append(token)
                    self.began.set()
        except (RequestEvicted, InstanceLost) as error:
            self.error = error
        finally:
            self.began.set()
            self.ended.set()


class EngineSuite(Suite):
    """Hooks to write or to override.

    Attributes:
        models: at least two models that the store holds; checks load the first and swap to the second.
        adapters: at least two adapters of the first model, all of which fit beside it; none if the engine
            does not support adapters.
        bad_adapter: an adapter of the first model that the engine must refuse; `None` if there is none.
        long_tokens: the length of a generation that still runs when a check acts on it; three of them must
            fit in the engine's KV pool together, and each in the model's context with its prompt.
        step_s: an upper bound of the engine's step time, by the event loop's clock.
        can_lose: whether `lose` is implemented.
        keeps_prefixes: whether the engine keeps KV blocks of ended requests of its models.
        can_resize: whether the engine has a `DeviceBudget`, and alone.
    """

    models: ClassVar[tuple[Model, ...]] = ()
    adapters: ClassVar[tuple[Adapter, ...]] = ()
    bad_adapter: ClassVar[Adapter | None] = None
    long_tokens: ClassVar[int] = 200
    step_s: ClassVar[float] = 2.0
    can_lose: ClassVar[bool] = False
    keeps_prefixes: ClassVar[bool] = True
    can_resize: ClassVar[bool] = False

    def make_engine(self) -> AbstractAsyncContextManager[Engine]:
        """Return a context manager that starts a new engine; an engine is one itself."""
        raise NotImplementedError("Write make_engine(): it returns the engine to be tested.")

    def make_store(self) -> AbstractAsyncContextManager[WeightStore]:
        """Return a context manager that opens a store with all `models`."""
        raise NotImplementedError("Write make_store(): it returns a store that holds self.models.")

    def prompt(self, num_tokens: int, salt: int = 0) -> tuple[int, ...]:
        """Return a prompt of ids in every model's vocabulary, a different one for each salt."""
        return tuple(1 + (salt * 5 + place * 3) % 20 for place in range(num_tokens))

    def lose(self, engine: Engine) -> None:
        """Make the engine LOST, as if its device had failed."""
        raise NotImplementedError("Write lose(engine), or leave can_lose False.")

    async def expected(self, request: Request, card: ModelCard) -> list[int]:
        """Return the tokens of an undisturbed run; by default those of a fresh engine."""
        async with self.make_store() as store, self.make_engine() as engine:
            await engine.load(card, store)
            if request.adapter is not None and isinstance(engine, SupportsAdapters):
                await engine.load_adapter(next(a for a in self.adapters if a.id == request.adapter))
            return [token.id for token in await collect(engine, request)]

    def assert_released(self, engine: Engine) -> None:
        """Raise if an engine without requests holds resources of requests; extend it for further ones."""
        view = engine.status()
        assert (view.num_running, view.num_waiting) == (0, 0), f"requests are left over: {view}"
        assert view.num_prefill_tokens == 0, f"there is no prompt to compute: {view}"
        assert (view.num_next_kv_blocks, view.preempted) == (0, ()), f"no request waits: {view}"
        assert view.num_free_kv_blocks == view.num_kv_blocks, f"KV blocks are left over: {view}"
        if view.state is InstanceState.EMPTY:
            assert view.weight_bytes == 0, f"weights are left over: {view}"

    # ------------------------------------------------------------------ for the checks

    def request(self, card: ModelCard, prompt_tokens: int = 6, *, salt: int = 0, **sampling: Any) -> Request:
        """Return a request that runs to its `max_tokens` unless told otherwise."""
        chosen: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True} | sampling
        return Request(
            id=RequestId(f"r{salt}"),
            model=card.id,
            prompt=self.prompt(prompt_tokens, salt),
            sampling=Sampling(**chosen),
        )

    def long_requests(self, card: ModelCard, count: int = 3) -> list[Request]:
        """Return requests of `long_tokens`."""
        return [self.request(card, salt=salt, max_tokens=self.long_tokens) for salt in range(count)]

    @asynccontextmanager
    async def idle(self) -> AsyncGenerator[EngineSetup]:
        """An EMPTY engine and its store; at the end all resources must be released."""
        async with self.make_store() as store, self.make_engine() as engine:
            yield EngineSetup(engine=engine, store=store, cards=await cards(self.models, store))
            await until(lambda: no_requests(engine))
            self.assert_released(engine)

    @asynccontextmanager
    async def serving(self, **changes: Any) -> AsyncGenerator[EngineSetup]:
        """An engine that serves the first model, with `changes` to its card."""
        async with self.idle() as setup:
            card = replace(setup.card, **changes)
            await setup.engine.load(card, setup.store)
            yield replace(setup, cards=(card, *setup.cards[1:]))

    @asynccontextmanager
    async def streaming(self, engine: Engine, requests: Sequence[Request]) -> AsyncGenerator[list[Reader]]:
        """Concurrent readers of requests, each past its first token; leaving waits for their ends."""
        readers = [Reader(request) for request in requests]
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.read, engine)
            for reader in readers:
                await reader.began.wait()
            yield readers

    async def assert_whole(self, reader: Reader, card: ModelCard) -> None:
        """Raise unless a reader got all tokens of an undisturbed run and no others."""
        assert reader.error is None, f"{reader.request} was not to be disturbed: {reader.error!r}"
        assert reader.ids == await self.expected(reader.request, card), f"{reader.request} has other tokens"

    async def assert_part(self, reader: Reader, card: ModelCard) -> None:
        """Raise unless a reader was interrupted after a prefix of the tokens of an undisturbed run."""
        assert reader.error is not None, f"{reader.request} was to be interrupted"
        expected = await self.expected(reader.request, card)
        assert reader.ids == expected[: len(reader.ids)], f"{reader.request} has other tokens"


async def cards(models: Sequence[Model], store: WeightStore) -> tuple[ModelCard, ...]:
    """Return the models' cards, from the store's manifests."""
    return tuple([ModelCard.of(model, await store.manifest(ModelId(model.id))) for model in models])


async def collect(engine: Engine, request: Request) -> list[Token]:
    """Run one request to its end."""
    async with engine.stream(request) as tokens:
        return await tokens.collect()


def no_requests(engine: Engine) -> bool:
    """Whether an engine has no requests and holds no KV blocks of any."""
    view = engine.status()
    return view.num_running == view.num_waiting == 0 and view.num_free_kv_blocks == view.num_kv_blocks
