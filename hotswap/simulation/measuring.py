"""How long an engine takes, seen from outside: steps of many kinds, loads and unloads."""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from functools import partial
from random import Random
from statistics import median

import anyio

from hotswap.engine import Engine
from hotswap.errors import ConfigError, InstanceError
from hotswap.model import ModelCard
from hotswap.request import Request, RequestId, Sampling
from hotswap.simulation.fit import Measurements, StepSample
from hotswap.store import WeightStore
from hotswap.view import InstanceState

__all__ = ["Shapes", "measure_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Which steps are measured, and how often.

    Attributes:
        token_budget: The most tokens of a step of the engine; no prompt is longer.
        batches: How many requests decode together.
        contexts: How many tokens each of these begins with.
        prompts: Tokens of prompts, computed alone and beside decodes.
        steps: Decodes of a kind in each round.
        repeats: Prompts of a kind in each round.
        rounds: How often one goes through all kinds; the quickest of each counts.
        loads: Loads and unloads.
        vocabulary: Token ids are drawn below it; no larger than that of the model.
        seed: Of the token ids.
    """

    token_budget: int = 256
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (32, 128, 512)
    prompts: tuple[int, ...] = (2, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
    steps: int = 9
    repeats: int = 3
    rounds: int = 3
    loads: int = 3
    vocabulary: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value: int | tuple[int, ...] = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            least = 2 if field.name == "prompts" else 0 if field.name == "seed" else 1
            if not numbers or min(numbers) < least:
                raise ConfigError(f"{field.name} is {value!r}; give numbers of {least} or more.")


async def measure_engine(
    engine: Engine,
    card: ModelCard,
    store: WeightStore,
    shapes: Shapes | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Measurements:
    """Measure an engine through its interface alone; it is EMPTY before and afterwards.

    Both must have been entered, nobody else may use the engine, and the machine should have nothing else to
    do. The model is loaded a few times, after the store has read it once. Then each kind of step is made:
    requests that decode together, prompts that are computed alone to their first token, and prompts beside
    decodes; the times are those at which tokens come out, so that what the engine does between steps counts
    as part of them. Prompts are random, so that none begins like another. Kinds for which the engine has too
    few places, KV blocks or context are left out. All kinds are made once in every round, of which the
    quickest counts: whatever else the machine does can only add to a step. `progress` is told how many were
    measured, of how many.

    Raises:
        ConfigError: the engine is not EMPTY, or no kind of step fits.
        HotswapError: whatever the engine or the store raises.
    """
    if engine.view().state is not InstanceState.EMPTY:
        raise ConfigError(f"Engine {engine.id!r} is {engine.view().state}; give one that is EMPTY.")
    bench = _Bench(engine, card, shapes or Shapes())
    load_s, read_s, unload_s = await _loads(engine, card, store, bench.shapes.loads)
    await engine.load(card, store)
    try:
        view = engine.view()
        kinds = list(bench.kinds())
        if not kinds:
            raise ConfigError(f"Engine {engine.id!r} has no room for any of the steps; ask for smaller ones.")
        seen: list[list[StepSample]] = [[] for _ in kinds]
        await kinds[-1]()  # whatever comes with the first requests
        order = [*enumerate(kinds)] * bench.shapes.rounds
        for done, (number, kind) in enumerate(order, start=1):
            seen[number].append(await kind())
            if progress is not None:
                progress(done, len(order))
    finally:
        with anyio.CancelScope(shield=True):
            await engine.unload()
    return Measurements(
        engine=engine.id,
        model=card.id,
        weight_bytes=card.weight_bytes,
        kv_tokens=view.num_kv_blocks * view.kv_block_tokens,
        kv_bytes_per_token=card.kv_bytes_per_token,
        memory_bytes=view.memory_bytes,
        steps=tuple(map(_quickest, seen)),
        load_s=load_s,
        read_s=read_s,
        unload_s=unload_s,
    )


async def _loads(
    engine: Engine, card: ModelCard, store: WeightStore, times: int
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Seconds of loads, of reading the same bytes from the store alone, and of unloads."""
    load_s, read_s, unload_s = list[float](), list[float](), list[float]()
    await _read(card, store)  # so that all of them find it on the same tier
    for _ in range(times):
        read_s.append(await _timed(lambda: _read(card, store)))
        load_s.append(await _timed(lambda: engine.load(card, store)))
        unload_s.append(await _timed(engine.unload))
    return tuple(load_s), tuple(read_s), tuple(unload_s)


def _quickest(samples: Sequence[StepSample]) -> StepSample:
    """One kind of step as several rounds saw it."""
    return min(samples, key=lambda sample: sample.seconds)


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    began_s = anyio.current_time()
    await work()
    return anyio.current_time() - began_s


async def _read(card: ModelCard, store: WeightStore) -> None:
    manifest = await store.manifest(card.id)
    for rank in range(manifest.world_size):
        for shard in manifest.shards_of(rank):
            async with store.open(shard) as chunks:
                async for _ in chunks:
                    pass


class _Bench:
    """Makes one kind of step after another on a loaded engine."""

    def __init__(self, engine: Engine, card: ModelCard, shapes: Shapes) -> None:
        self.shapes = shapes
        self._engine, self._card = engine, card
        self._random, self._numbers = Random(shapes.seed), itertools.count()

    def kinds(self) -> Iterator[Callable[[], Awaitable[StepSample]]]:
        """Yield every kind of step that the engine has room for."""
        shapes, view = self.shapes, self._engine.view()
        prompts = [tokens for tokens in shapes.prompts if tokens <= shapes.token_budget]
        prompts = [tokens for tokens in prompts if self._fits(view.max_tokens, 1, tokens, 1)]
        for tokens in prompts:
            yield partial(self._prompt, tokens)
        for batch, context in itertools.product(shapes.batches, shapes.contexts):
            first = 32 + batch * (1 + context // shapes.token_budget)  # tokens of one while others begin
            most = first + 2 * shapes.steps
            if batch <= view.max_requests and self._fits(view.max_tokens, batch, context, most):
                yield partial(self._decodes, batch, context, most)
        context = min(shapes.contexts)
        for batch, tokens in itertools.product(shapes.batches, prompts[1::2]):
            most = 32 + batch * (1 + context // shapes.token_budget) + 8 * shapes.repeats
            room = batch + tokens <= shapes.token_budget and batch < view.max_requests
            if room and self._fits(view.max_tokens, batch + 1, max(context, tokens), most):
                yield partial(self._mixed, batch, context, tokens, most)

    def _fits(self, max_tokens: int | None, batch: int, tokens: int, more: int) -> bool:
        in_blocks = max_tokens is None or batch * (tokens + more) < max_tokens
        return in_blocks and tokens + more < self._card.max_context_tokens

    async def first_token(self, tokens: int) -> tuple[float, float]:
        """Ask for the first token of a new prompt; return when that was, and when it came."""
        began_s = anyio.current_time()
        async with self._engine.stream(self._request(tokens, 1)) as stream:
            await anext(stream)
            return began_s, anyio.current_time()

    async def _prompt(self, tokens: int) -> StepSample:
        """Compute prompts on the idle engine."""
        times = [await self.first_token(tokens) for _ in range(self.shapes.repeats)]
        return StepSample(seconds=median(end_s - start_s for start_s, end_s in times), prompts=(tokens,))

    async def _decodes(self, batch: int, context: int, most: int) -> StepSample:
        """Let requests decode together; each gap between two tokens is a step."""
        async with self._decoding(batch, context, most) as decoding:
            await decoding.see(self.shapes.steps)
        gaps = decoding.gaps()
        return StepSample(
            seconds=median(end_s - start_s for start_s, end_s in gaps),
            num_decodes=batch,
            context=round(median(decoding.context_in(gap) for gap in gaps)),
        )

    async def _mixed(self, batch: int, context: int, tokens: int, most: int) -> StepSample:
        """Let prompts come while others decode; the gap that ends with a first token is the step."""
        found: list[tuple[float, int]] = []
        async with self._decoding(batch, context, most) as decoding:
            await decoding.see(2)
            for _ in range(self.shapes.repeats):
                _, first_s = await self.first_token(tokens)
                await decoding.see(2)
                gap = min(decoding.gaps(), key=lambda gap: abs(gap[1] - first_s))
                found.append((gap[1] - gap[0], decoding.context_in(gap)))
        return StepSample(
            seconds=median(seconds for seconds, _ in found),
            num_decodes=batch,
            context=round(median(held for _, held in found)),
            prompts=(tokens,),
        )

    @asynccontextmanager
    async def _decoding(self, batch: int, context: int, most: int) -> AsyncGenerator[_Decoding]:
        """Have requests decode for as long as the block runs, from when all of them do."""
        requests = [self._request(context, most) for _ in range(batch)]
        decoding = _Decoding(context, [[] for _ in requests])
        async with anyio.create_task_group() as readers:
            for request, times in zip(requests, decoding.times, strict=True):
                readers.start_soon(self._read, request, times, decoding)
            await decoding.begin()
            yield decoding
            readers.cancel_scope.cancel()
        await self.first_token(2)  # so that nothing of it is left in the next kind's first step

    async def _read(self, request: Request, times: list[float], decoding: _Decoding) -> None:
        async with self._engine.stream(request) as stream:
            async for _ in stream:
                times.append(anyio.current_time())
                decoding.came.set()
        if not decoding.is_seen:
            raise InstanceError(
                f"Engine {self._engine.id!r} gave a request all its tokens before what was measured had been "
                "seen; ask for fewer steps."
            )

    def _request(self, tokens: int, most: int) -> Request:
        prompt = tuple(self._random.choices(range(self.shapes.vocabulary), k=tokens))
        return Request(
            id=RequestId(f"measured-{next(self._numbers)}"),
            model=self._card.id,
            prompt=prompt,
            sampling=Sampling(max_tokens=most, ignore_eos=True),
        )


class _Decoding:
    """When each of some requests got its tokens; each had `context` tokens to begin with."""

    def __init__(self, context: int, times: list[list[float]]) -> None:
        self.times = times
        self.came = anyio.Event()
        self.is_seen = False
        self._context, self._begun_s = context, 0.0

    async def begin(self) -> None:
        """Return once all decode."""
        while not all(self.times):
            await self._next()
        self._begun_s = max(times[0] for times in self.times)

    async def see(self, steps: int) -> None:
        """Return after so many steps more."""
        num_tokens = len(self.times[0]) + steps + 1  # the step under way is none of them
        self.is_seen = False
        while len(self.times[0]) < num_tokens:
            await self._next()
        self.is_seen = True

    def gaps(self) -> list[tuple[float, float]]:
        """From when to when each step took, from the moment on at which all decoded."""
        times = [time_s for time_s in self.times[0] if time_s >= self._begun_s]
        return list(itertools.pairwise(times))

    def context_in(self, gap: tuple[float, float]) -> int:
        """Tokens in KV blocks that the step attended to: all but the last that each request had."""
        middle_s = (gap[0] + gap[1]) / 2  # tokens of one step come out one after another
        return sum(self._context + bisect(times, middle_s) - 1 for times in self.times)

    async def _next(self) -> None:
        self.came = anyio.Event()
        await self.came.wait()
