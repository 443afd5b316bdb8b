"""A fleet belongs to one event loop: called from another it says so at once, and goes on undisturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hotswap import Sampling
from hotswap.errors import ConfigError
from hotswap.offline import virtual_time
from tests.runtime.other_loop import VERBS
from tests.runtime.support import sim_fleet

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("verb", VERBS)
def test_a_call_from_another_event_loop_is_refused_at_once_and_disturbs_nothing(verb: str) -> None:
    command = [sys.executable, "-m", "tests.runtime.other_loop", verb]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"the fleet did not end: {done.stderr[-2000:]}"
    said = json.loads(done.stdout)
    assert {"WrongLoop", "ConfigError"} <= set(said["kinds"]), said
    assert "loop" in said["message"]
    assert (said["unchanged"], said["exact"], said["serves"]) == (True, True, True)


def test_an_event_loop_of_another_kind_is_refused_before_anything_starts() -> None:
    """As trio's: a coroutine is run by hand here, where no loop of asyncio runs."""
    fleet = sim_fleet("llama")
    with pytest.raises(ConfigError, match="A fleet runs on asyncio alone"):
        fleet.__aenter__().send(None)

    async def serve() -> int:
        async with fleet:
            return len((await fleet.generate("llama", [1, 2], Sampling(max_tokens=3))).tokens)

    assert virtual_time.run(serve) == 3
