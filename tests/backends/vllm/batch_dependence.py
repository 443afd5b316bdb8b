"""Whether vLLM on this CPU gives a request other tokens beside other requests than alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

import anyio

from hotswap import RequestId
from tests.backends.vllm.support import make_engine, make_store
from tests.backends.vllm.test_resumption import KINDS, asked, whole

__all__ = ["depends_on_the_batch"]

_DEPENDS = 3


@cache
def depends_on_the_batch() -> bool:
    """Return whether it does, tried once in a process of its own; half a minute."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", __name__], check=False, capture_output=True)
    return done.returncode == _DEPENDS


async def _try() -> bool:
    requests = [asked(kind, number) for kind in KINDS for number in range(5)]
    beside: dict[RequestId, list[int]] = {}
    async with make_engine("e0") as engine:
        store = make_store()
        await engine.load(store.card("a"), store)
        alone = {request.id: await whole(engine, request) for request in requests}

        async def run(id: RequestId) -> None:
            request = next(request for request in requests if request.id == id)
            beside[id] = await whole(engine, replace(request, id=RequestId(f"{id} beside others")))

        async with anyio.create_task_group() as tasks:
            for id in alone:
                tasks.start_soon(run, id)
    return alone != beside


if __name__ == "__main__":
    sys.exit(_DEPENDS if anyio.run(_try) else 0)
