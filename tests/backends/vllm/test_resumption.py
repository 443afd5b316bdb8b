"""A request has the tokens of an undisturbed run after any number of moves between engines of any kind."""

from __future__ import annotations

import contextlib
from random import Random

import anyio

from hotswap import ModelId, Request, RequestId, Sampling
from hotswap.backends.vllm import VllmEngine
from hotswap.errors import RequestEvicted
from tests.backends.vllm.support import make_engine, make_store

KINDS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.0, seed=7),
    "seeded, cut": Sampling(temperature=0.8, seed=9, top_p=0.9, top_k=50),
    "penalised": Sampling(repetition_penalty=1.3),
    "penalised for presence": Sampling(presence_penalty=1.0),
    "penalised for frequency": Sampling(frequency_penalty=0.5),
    "seeded and penalised": Sampling(temperature=1.0, seed=5, repetition_penalty=1.2, presence_penalty=0.5),
    "biased": Sampling(logit_bias=((5, 3.0), (9, -4.0))),
    "not to end early": Sampling(min_tokens=30, stop_token_ids=tuple(range(100, 400))),
}
NUM_TOKENS, REQUESTS_OF_A_KIND, CUTS = 48, 5, 6


def asked(kind: str, number: int) -> Request:
    sampling = KINDS[kind]
    random = Random(f"{kind} {number}")
    settings = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
    return Request(
        id=RequestId(f"{kind} {number}"),
        model=ModelId("a"),
        prompt=tuple(random.randrange(2, 500) for _ in range(random.choice([3, 40, 90]))),
        sampling=Sampling(**settings | {"max_tokens": NUM_TOKENS, "ignore_eos": True}),
    )


async def whole(engine: VllmEngine, request: Request) -> list[int]:
    async with engine.stream(request) as tokens:
        return [token.id for token in await tokens.collect()]


async def moved(engines: list[VllmEngine], request: Request, random: Random) -> tuple[list[int], int]:
    """Go from one engine to another after some tokens, again and again."""
    got: list[int] = []
    at = num_moves = 0
    while True:
        cut = random.randint(1, max(1, 2 * NUM_TOKENS // CUTS))
        finished = False
        async with engines[at % len(engines)].stream(request.continued(got)) as tokens:
            async for token in tokens:
                got.append(token.id)
                finished = token.finish_reason is not None
                cut -= 1
                if not cut:
                    break
        if finished:
            return got, num_moves
        at, num_moves = at + 1, num_moves + 1


async def test_two_hundred_moves_at_random_tokens_change_nothing() -> None:
    store = make_store()
    requests = [asked(kind, number) for kind in KINDS for number in range(REQUESTS_OF_A_KIND)]
    random, moves = Random(1), list[int]()
    async with make_engine("e0") as one, make_engine("e1") as other:
        for engine in (one, other):
            await engine.load(store.card("a"), store)
            assert engine.resumes_exactly
        expected = {request.id: await whole(one, request) for request in requests}

        async def check(request: Request) -> None:
            got, num_moves = await moved([one, other], request, Random(random.random()))
            assert got == expected[request.id], request
            moves.append(num_moves)

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(check, request)
    assert sum(moves) >= 200


async def test_an_evicted_request_has_the_tokens_it_was_given() -> None:
    store, request = make_store(), asked("seeded", 0)
    async with make_engine("e0") as one:
        await one.load(store.card("a"), store)
        expected = await whole(one, request)
        got: list[int] = []
        async with one.stream(request) as tokens:
            got += [(await anext(tokens)).id for _ in range(5)]
            assert await one.evict(deadline_s=0) == 1
            with contextlib.suppress(RequestEvicted):
                got += [token.id async for token in tokens]
        await one.unload()
        await one.load(store.card("a"), store)
        rest = await whole(one, request.continued(got))
    assert got + rest == expected
