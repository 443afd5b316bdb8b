"""A controller that kills itself in the middle of a stream: `python -m ... ADDRESS [attached]`."""

from __future__ import annotations

import os
import signal
import sys

import anyio
import ray

from tests.backends.ray.support import LONG, PROMPT, engine_on
from tests.runtime.support import Idle, sim_fleet


async def main(*, detached: bool) -> None:
    engine = engine_on("127.0.0.3", "kept", detached=detached)
    async with sim_fleet("a", engines=[engine], scheduler=Idle()) as fleet:
        await fleet.swap("kept", to="a")
        async with fleet.stream("a", PROMPT, LONG) as stream:
            async for token in stream:
                if token.index == 20:
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    anyio.run(lambda: main(detached="attached" not in sys.argv))
