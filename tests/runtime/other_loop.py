"""A program: a fleet serves on one event loop while a thread with a loop of its own calls it by one verb.

Its only argument is the verb. It writes one line of JSON: how the call ended, and whether the fleet went on.
A process of its own, since what this guards against is that nothing ends any more.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import anyio
import anyio.lowlevel

from hotswap import Adapter, Fleet, FleetStream, Model, Sampling
from hotswap.errors import HotswapError
from tests.runtime.support import Idle, engine_of, expected, sim_fleet

__all__ = ["VERBS"]

HANGS_S, ENDS_S = 5.0, 100.0  # of a call that takes no time, and of the whole program
LONG = Sampling(max_tokens=150, ignore_eos=True)
SOME = Sampling(max_tokens=2, ignore_eos=True)


async def _stream(fleet: Fleet) -> None:
    async with fleet.stream("a", (1,), SOME) as stream:
        await stream.collect()


async def _view(fleet: Fleet) -> None:
    await anyio.lowlevel.checkpoint()
    fleet.view()


async def _reopen(fleet: Fleet) -> None:
    await anyio.lowlevel.checkpoint()
    fleet.reopen("e0")


async def _migrate(fleet: Fleet) -> None:
    await fleet.migrate(REQUESTS[0], to="e1")


REQUESTS: list[str] = []
OPEN: list[tuple[AbstractAsyncContextManager[FleetStream], FleetStream]] = []
LEAVE = "leave a stream"

VERBS: dict[str, Callable[[Fleet], Awaitable[object]]] = {
    "stream": _stream,
    "generate": lambda fleet: fleet.generate("a", (1,), SOME),
    "generate for a model that is not served": lambda fleet: fleet.generate("b", (1,), SOME),
    "read a stream": lambda fleet: anext(OPEN[0][1]),
    "collect a stream": lambda fleet: OPEN[0][1].collect(),
    "complete a stream": lambda fleet: OPEN[0][1].complete(),
    LEAVE: lambda fleet: OPEN[0][0].__aexit__(None, None, None),
    "swap": lambda fleet: fleet.swap("e1", to="b"),
    "unload": lambda fleet: fleet.unload("e0"),
    "migrate": _migrate,
    "drain": lambda fleet: fleet.drain("e0"),
    "reopen": _reopen,
    "add": lambda fleet: fleet.add(engine_of("new")),
    "remove": lambda fleet: fleet.remove("e0"),
    "replace": lambda fleet: fleet.replace("e0", by=engine_of("new")),
    "roll": lambda fleet: fleet.roll("a", to="b"),
    "ready": lambda fleet: fleet.ready(),
    "view": _view,
    "add a model": lambda fleet: fleet.models.add(Model("c")),
    "remove a model": lambda fleet: fleet.models.remove("b"),
    "update an adapter": lambda fleet: fleet.adapters.update(Adapter("x", "a", "/x/2")),
    "remove an adapter": lambda fleet: fleet.adapters.remove("a", "x"),
}


async def _call(fleet: Fleet, verb: str, outcome: list[object]) -> None:
    """Call the fleet on this loop and write down how that ended."""
    try:
        with anyio.fail_after(HANGS_S):
            await VERBS[verb](fleet)
        outcome[:] = ["returned"], ""
    except TimeoutError:
        outcome[:] = ["hung"], ""
    except Exception as exc:
        outcome[:] = [kind.__name__ for kind in type(exc).__mro__], str(exc)


async def _serve(verb: str) -> dict[str, object]:
    outcome: list[object] = []
    said: dict[str, object] = {}
    async with sim_fleet(
        "a", "b", engines=2, scheduler=Idle(), adapters=[Adapter("x", "a", "/x/1")]
    ) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        block = fleet.stream("a", (1, 2), LONG)
        stream = await block.__aenter__()
        OPEN.append((block, stream))
        tokens = [await anext(stream) for _ in range(10)]
        REQUESTS.append(stream.request.id)
        before = repr(fleet)
        other = threading.Thread(target=anyio.run, args=(partial(_call, fleet, verb, outcome),), daemon=True)
        other.start()
        while other.is_alive():  # noqa: ASYNC110 - it must not be told by the fleet
            await anyio.sleep(0.01)
        said["unchanged"] = repr(fleet) == before
        tokens += await stream.collect()
        said["exact"] = [token.id for token in tokens] == expected(stream.request)
        if verb != LEAVE:
            await block.__aexit__(None, None, None)
        try:
            done = await fleet.generate("a", (3,), SOME)
            said["serves"] = len(done.tokens) == 2
        except HotswapError as exc:
            said["serves"] = str(exc)
    return {"kinds": outcome[0], "message": outcome[1], **said}


def _main(verb: str) -> None:
    watch = threading.Timer(ENDS_S, os._exit, (2,))
    watch.daemon = True
    watch.start()
    sys.stdout.write(json.dumps(anyio.run(_serve, verb)) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1])
