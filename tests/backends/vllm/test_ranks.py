"""A core of several ranks serves, swaps and resumes as one."""

from __future__ import annotations

from random import Random

import anyio
import pytest

from hotswap import Request
from tests.backends.vllm.support import make_engine, make_store
from tests.backends.vllm.test_resumption import KINDS, asked, moved, whole


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp=2", "pp=2"])
async def test_requests_are_resumed_exactly(tp: int, pp: int) -> None:
    store, random = make_store(), Random(3)
    requests = [asked(kind, 0) for kind in KINDS]
    async with make_engine("e0", tp=tp, pp=pp) as engine:
        await engine.load(store.card("b"), store)
        await engine.unload()
        await engine.load(store.card("a"), store)  # in place
        assert engine.resumes_exactly
        expected = {request.id: await whole(engine, request) for request in requests}
        moves: list[int] = []

        async def check(seed: float, request: Request) -> None:
            got, num_moves = await moved([engine], request, Random(seed))
            assert got == expected[request.id], request
            moves.append(num_moves)

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(check, random.random(), request)
    assert sum(moves) >= len(requests)
