"""How long an engine takes, seen from outside: steps of many kinds, loads and unloads."""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from random import Random
from statistics import fmean, median
from typing import TypeAlias

import anyio

from hotswap.engine import Engine
from hotswap.errors import ConfigError, InstanceError
from hotswap.model import ModelCard
from hotswap.profiling.fit import Measurements, StepSample
from hotswap.request import Request, RequestId
from hotswap.sampling import Sampling
from hotswap.store import WeightStore
from hotswap.view import InstanceState

__all__ = ["Shapes", "measure_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Which steps are measured, and how often.

    Attributes:
        token_budget: The most tokens of a step of the engine; no prompt is longer.
        batches: How many requests decode together.
        contexts: How many tokens these begin with, about: from half to twice as many, as users' differ.
        prompts: Tokens of prompts, computed alone and beside decodes.
        steps: Decodes of a kind in each round.
        repeats: Prompts of a kind in each round.
        rounds: How often one goes through all kinds; the median of each counts.
        loads: Loads and unloads.
        vocabulary: Token ids are drawn below it; no larger than that of the model.
        seed: Of the token ids.
    """

    token_budget: int = 256
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (32, 128, 512)
    prompts: tuple[int, ...] = (2, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
    steps: int = 16
    repeats: int = 3
    rounds: int = 3
    loads: int = 3
    vocabulary: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value: int | tuple[int, ...] = getattr(self, each.name)
            numbers = value if isinstance(value, tuple) else (value,)
            least = 2 if each.name == "prompts" else 0 if each.name == "seed" else 1
            if not numbers or min(numbers) < least:
                raise ConfigError(f"{each.name} is {value!r}; give numbers of {least} or more.")


async def measure_engine(
    engine: Engine,
    card: ModelCard,
    store: WeightStore,
    shapes: Shapes | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Measurements:
    """Measure an engine through its interface alone; it is EMPTY before and afterwards.

    Both must have been entered, nothing else may use the engine, and the machine should have nothing else to
    do. The model is loaded a few times, after the store has read it once. Then each kind of step is made:
    prompts that are computed alone to their first token, requests of different lengths that decode together,
    and others that come to these and leave them, with the steps in which their prompts are computed, those
    in which they decode for the first time, and those after they have left. The times are those at which
    tokens come out, so that what the engine does between steps counts as part of them. Prompts are random, so
    that none begins like another. Kinds for which the engine has too few places, KV blocks or context are
    left out. All kinds are made once in every round. Of a round the mean counts, in which steps that take
    longer now and then have their share; of the rounds the median, so that one which was disturbed, or in
    which the engine met sizes for the first time, does not. `progress` is told how often something was
    measured, of how many times.

    Raises:
        ConfigError: the engine is not EMPTY, or no kind of step fits.
        HotswapError: whatever the engine or the store raises.
    """
    if engine.status().state is not InstanceState.EMPTY:
        raise ConfigError(f"Engine {engine.id!r} is {engine.status().state}; give one that is EMPTY.")
    bench = _Bench(engine, card, shapes or Shapes())
    load_s, read_s, unload_s = await _loads(engine, card, store, bench.shapes.loads)
    await engine.load(card, store)
    try:
        view = engine.status()
        kinds = list(bench.kinds())
        if not kinds:
            raise ConfigError(f"Engine {engine.id!r} has no room for any of the steps; ask for smaller ones.")
        seen: list[dict[_Kind, list[StepSample]]] = [{} for _ in kinds]
        await kinds[-1]()  # whatever comes with the first requests
        order = [*enumerate(kinds)] * bench.shapes.rounds
        for done, (number, kind) in enumerate(order, start=1):
            for sample in await kind():
                seen[number].setdefault(_kind(sample), []).append(sample)
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
        steps=tuple(_typical(samples) for found in seen for samples in found.values()),
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


_Kind: TypeAlias = tuple[int, tuple[int, ...], int, int]


def _kind(step: StepSample) -> _Kind:
    """What steps of a kind have in common; their contexts are about the same."""
    return step.num_decodes, step.prompts, step.joined, step.left


def _typical(samples: Sequence[StepSample]) -> StepSample:
    """One kind of step as several rounds saw it."""
    return replace(
        samples[0],
        seconds=median(sample.seconds for sample in samples),
        context=round(fmean(sample.context for sample in samples)),
    )


def _mean(samples: Sequence[StepSample]) -> StepSample:
    """One kind of step as one round saw it."""
    return replace(_typical(samples), seconds=fmean(sample.seconds for sample in samples))


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


# Tokens of a request that comes to others: its first, three decodes, and the step in which the next has come.
_PASSING = 5
# So many times the steps that are to be seen may pass before they are: an engine goes on while a busy machine
# keeps what reads its tokens waiting.
_SPARE = 4


class _Bench:
    """Makes one kind of step after another on a loaded engine."""

    def __init__(self, engine: Engine, card: ModelCard, shapes: Shapes) -> None:
        self.shapes = shapes
        self._engine, self._card = engine, card
        self._random, self._numbers = Random(shapes.seed), itertools.count()

    def kinds(self) -> Iterator[Callable[[], Awaitable[list[StepSample]]]]:
        """Yield what makes steps of some kinds, wherever the engine has room for them."""
        shapes, view = self.shapes, self._engine.status()
        prompts = [tokens for tokens in shapes.prompts if tokens <= shapes.token_budget]
        prompts = [tokens for tokens in prompts if self._fits(view.max_tokens, [tokens], 1)]
        for tokens in prompts:
            yield partial(self._prompt, tokens)
        for batch, context in itertools.product(shapes.batches, shapes.contexts):
            contexts = _spread(batch, context)
            most = self._beginning(contexts) + _SPARE * shapes.steps
            if batch <= view.max_requests and self._fits(view.max_tokens, contexts, most):
                yield partial(self._decodes, contexts, most)
        for batch, tokens in itertools.product(shapes.batches, prompts[1::2]):
            contexts = _spread(batch, min(shapes.contexts))
            most = self._beginning(contexts) + _SPARE * _PASSING * (shapes.repeats + 2)
            room = batch + 1 + tokens <= shapes.token_budget and batch + 2 <= view.max_requests
            if room and self._fits(view.max_tokens, [*contexts, tokens, tokens], most):
                yield partial(self._passing, contexts, tokens, most)

    def _beginning(self, contexts: Sequence[int]) -> int:
        """Tokens that the first of some requests may get while the others begin."""
        return 32 + sum(1 + tokens // self.shapes.token_budget for tokens in contexts)

    def _fits(self, max_tokens: int | None, contexts: Sequence[int], more: int) -> bool:
        in_blocks = max_tokens is None or sum(contexts) + len(contexts) * more < max_tokens
        return in_blocks and max(contexts) + more < self._card.max_context_tokens

    async def first_token(self, tokens: int) -> float:
        """Ask for the first token of a new prompt; return how long it took to come."""
        began_s = anyio.current_time()
        async with self._engine.stream(self._request(tokens, 1)) as stream:
            await anext(stream)
            return anyio.current_time() - began_s

    async def _prompt(self, tokens: int) -> list[StepSample]:
        """Compute prompts on the idle engine."""
        times = [await self.first_token(tokens) for _ in range(self.shapes.repeats)]
        return [StepSample(seconds=fmean(times), prompts=(tokens,))]

    async def _decodes(self, contexts: Sequence[int], most: int) -> list[StepSample]:
        """Let requests decode together."""
        async with self._decoding(contexts, most) as decoding:
            await decoding.see(self.shapes.steps + 2)  # the first and the last do not count
        kind = (len(contexts), (), 0, 0)
        return [_mean([step for step in decoding.steps() if _kind(step) == kind])]

    async def _passing(self, contexts: Sequence[int], tokens: int, most: int) -> list[StepSample]:
        """Let requests come to others that decode, each before the one that came before it leaves."""
        async with self._decoding(contexts, most) as decoding, anyio.create_task_group() as readers:
            await decoding.see(2)
            for _ in range(self.shapes.repeats + 1):
                member = decoding.join(tokens, _PASSING)
                readers.start_soon(self._read, member, decoding)
                await decoding.until(partial(_decodes_again, member))
            await decoding.until(
                lambda: all(member.has_ended for member in decoding.members[len(contexts) :])
            )
            await decoding.see(1)
        beside = len(contexts) + 1  # with the one that came before, or comes next
        found: dict[_Kind, list[StepSample]] = {}
        for step in decoding.steps():
            found.setdefault(_kind(step), []).append(step)
        kinds = ((beside, (tokens,), 0, 0), (beside + 1, (), 1, 0), (beside, (), 0, 1))
        return [_mean(found[kind]) for kind in kinds if kind in found]

    @asynccontextmanager
    async def _decoding(self, contexts: Sequence[int], most: int) -> AsyncGenerator[_Decoding]:
        """Have requests decode for as long as the block runs, from when all of them do."""
        decoding = _Decoding()
        async with anyio.create_task_group() as readers:
            for tokens in contexts:
                readers.start_soon(self._read, decoding.join(tokens, most), decoding)
            await decoding.begin()
            yield decoding
            decoding.is_over = True
            readers.cancel_scope.cancel()
        await self.first_token(2)  # so that nothing of it is left in the next kind's first step

    async def _read(self, member: _Member, decoding: _Decoding) -> None:
        async with self._engine.stream(self._request(member.context, member.most)) as stream:
            async for _ in stream:
                member.times.append(anyio.current_time())
                decoding.came.set()
        if member is decoding.members[0] and not decoding.is_over:
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


def _spread(batch: int, context: int) -> list[int]:
    """Contexts of a batch from half to twice as long as one, evenly in their logarithms."""
    return [max(1, round(context * 2 ** ((2 * at + 1) / batch - 1))) for at in range(batch)]


@dataclass(slots=True, eq=False)
class _Member:
    """A request: the tokens it begins with, the most it gets, and when each came."""

    context: int
    most: int
    times: list[float] = field(default_factory=list[float])

    @property
    def has_ended(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.times) == self.most


def _decodes_again(member: _Member) -> bool:
    """Whether it has decoded once."""
    return len(member.times) > 1


class _Decoding:
    """When each of some requests got its tokens; the first of them is there from beginning to end."""

    def __init__(self) -> None:
        self.members: list[_Member] = []
        self.came = anyio.Event()
        self.is_over = False
        self._begun_s = 0.0

    def join(self, context: int, most: int) -> _Member:
        """Know of one more."""
        self.members.append(member := _Member(context, most))
        return member

    async def begin(self) -> None:
        """Return once all decode."""
        await self.until(lambda: all(member.times for member in self.members))
        self._begun_s = max(member.times[0] for member in self.members)

    async def see(self, steps: int) -> None:
        """Return after so many steps more."""
        clock = self.members[0].times
        num_tokens = len(clock) + steps + 1  # the step under way is none of them
        await self.until(lambda: len(clock) >= num_tokens)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return once something is so, looked at as tokens come."""
        while not is_so():
            self.came = anyio.Event()
            await self.came.wait()

    def steps(self) -> Iterator[StepSample]:
        """Yield the steps since all decoded: a step is what lies between two tokens of the first request."""
        clock = self.members[0].times
        middles = [(one + other) / 2 for one, other in itertools.pairwise(clock)]
        for at in range(1, len(middles) - 1):
            # Tokens of one step come out one after another, so those of others are about at the same time.
            before_s, now_s, after_s = middles[at - 1 : at + 2]
            if clock[at] >= self._begun_s:
                yield self._step(clock[at + 1] - clock[at], before_s, now_s, after_s)

    def _step(self, seconds: float, before_s: float, now_s: float, after_s: float) -> StepSample:
        """A step in whose middle it is `now_s`, as those before and after it have their own."""
        prompts, num_decodes, context, joined, left = list[int](), 0, 0, 0, 0
        for member in self.members:
            num_tokens = bisect(member.times, now_s)
            if num_tokens == member.most:
                left += member.times[-1] > before_s
            elif num_tokens:
                num_decodes, context = num_decodes + 1, context + member.context + num_tokens - 1
                joined += num_tokens == 1
            elif member.times and member.times[0] < after_s:
                prompts.append(member.context)
        return StepSample(
            seconds=seconds,
            num_decodes=num_decodes,
            context=context,
            prompts=tuple(prompts),
            joined=joined,
            left=left,
        )
