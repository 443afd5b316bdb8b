"""The hooks of `EngineConformance`, and the bench that its checks work on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import anyio

from hotswap.engine import Engine, SupportsAdapters
from hotswap.errors import InstanceLost, RequestEvicted
from hotswap.model import Adapter, Model, ModelCard
from hotswap.request import ModelId, Request, RequestId, Sampling, Token
from hotswap.store import WeightStore
from hotswap.testing.conformance.suite import Suite, until
from hotswap.view import InstanceState

__all__ = ["Bench", "EngineSuite", "Reader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An engine that serves `card` from `store`, with every model's card beside."""

    engine: Engine
    store: WeightStore
    cards: tuple[ModelCard, ...]

    @property
    def card(self) -> ModelCard:
        """The model that is loaded."""
        return self.cards[0]


class Reader:
    """Reads one stream to its end and keeps what came and what ended it."""

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
        models: two models or more that the store holds; checks load the first and swap to the second.
        adapters: two adapters or more of the first model, all of which fit beside it; none where the engine
            holds none.
        bad_adapter: one of the first model that the engine must refuse; `None` if there is no such thing.
        long_tokens: a generation so long that it still runs when a check acts on it; three of them must fit
            the engine's KV pool side by side, and each the model's context with its prompt.
        step_s: no step of the engine lasts longer, by the event loop's clock.
        can_lose: whether `lose` is written.
    """

    models: ClassVar[tuple[Model, ...]] = ()
    adapters: ClassVar[tuple[Adapter, ...]] = ()
    bad_adapter: ClassVar[Adapter | None] = None
    long_tokens: ClassVar[int] = 200
    step_s: ClassVar[float] = 2.0
    can_lose: ClassVar[bool] = False

    def make_engine(self) -> AbstractAsyncContextManager[Engine]:
        """Return a context manager that starts a new engine; an engine is one itself."""
        raise NotImplementedError("Write make_engine(): it returns the engine to be tested.")

    def make_store(self) -> AbstractAsyncContextManager[WeightStore]:
        """Return a context manager that opens a store with all `models`."""
        raise NotImplementedError("Write make_store(): it returns a store that holds self.models.")

    def prompt(self, num_tokens: int, salt: int = 0) -> tuple[int, ...]:
        """Return a prompt, another one for each salt, of ids that lie in every model's vocabulary."""
        return tuple(1 + (salt * 5 + place * 3) % 20 for place in range(num_tokens))

    def lose(self, engine: Engine) -> None:
        """Make the engine LOST, as if its device had failed."""
        raise NotImplementedError("Write lose(engine), or leave can_lose False.")

    async def expected(self, request: Request, card: ModelCard) -> list[int]:
        """Return the tokens of an undisturbed run: those of a fresh engine, or by whatever else tells."""
        async with self.make_store() as store, self.make_engine() as engine:
            await engine.load(card, store)
            if request.adapter is not None and isinstance(engine, SupportsAdapters):
                await engine.load_adapter(next(a for a in self.adapters if a.id == request.adapter))
            return [token.id for token in await collect(engine, request)]

    def assert_books(self, engine: Engine) -> None:
        """Raise if an engine without requests holds something of them; extend it by what else it counts."""
        view = engine.status()
        assert (view.num_running, view.num_waiting) == (0, 0), f"requests are left over: {view}"
        assert view.num_prefill_tokens == 0, f"nobody is there to be computed: {view}"
        assert (view.num_next_kv_blocks, view.preempted) == (0, ()), f"nobody is there to wait: {view}"
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
        """Return requests that run for long."""
        return [self.request(card, salt=salt, max_tokens=self.long_tokens) for salt in range(count)]

    @asynccontextmanager
    async def idle(self) -> AsyncGenerator[Bench]:
        """An EMPTY engine and its store; the books are checked at the end."""
        async with self.make_store() as store, self.make_engine() as engine:
            yield Bench(engine=engine, store=store, cards=await cards(self.models, store))
            await until(lambda: no_requests(engine))
            self.assert_books(engine)

    @asynccontextmanager
    async def serving(self, **changes: Any) -> AsyncGenerator[Bench]:
        """An engine that serves the first model, with `changes` to its card."""
        async with self.idle() as bench:
            card = replace(bench.card, **changes)
            await bench.engine.load(card, bench.store)
            yield replace(bench, cards=(card, *bench.cards[1:]))

    @asynccontextmanager
    async def streaming(self, engine: Engine, requests: Sequence[Request]) -> AsyncGenerator[list[Reader]]:
        """Requests being read side by side, each past its first token; the end waits for their ends."""
        readers = [Reader(request) for request in requests]
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.read, engine)
            for reader in readers:
                await reader.began.wait()
            yield readers

    async def assert_whole(self, reader: Reader, card: ModelCard) -> None:
        """Raise unless a reader got exactly the tokens of an undisturbed run."""
        assert reader.error is None, f"{reader.request} was not to be disturbed: {reader.error!r}"
        assert reader.ids == await self.expected(reader.request, card), f"{reader.request} has other tokens"

    async def assert_part(self, reader: Reader, card: ModelCard) -> None:
        """Raise unless a reader was interrupted after a prefix of what an undisturbed run gives."""
        assert reader.error is not None, f"{reader.request} was to be interrupted"
        expected = await self.expected(reader.request, card)
        assert reader.ids == expected[: len(reader.ids)], f"{reader.request} has other tokens"


async def cards(models: Sequence[Model], store: WeightStore) -> tuple[ModelCard, ...]:
    """Return the models' cards by the store's manifests."""
    return tuple([ModelCard.of(model, await store.manifest(ModelId(model.id))) for model in models])


async def collect(engine: Engine, request: Request) -> list[Token]:
    """Run one request to its end."""
    async with engine.stream(request) as tokens:
        return await tokens.collect()


def no_requests(engine: Engine) -> bool:
    """Whether nothing of a request is left in the engine."""
    view = engine.status()
    return view.num_running == view.num_waiting == 0 and view.num_free_kv_blocks == view.num_kv_blocks
