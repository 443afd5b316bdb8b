"""Requests that no engine could serve are refused, and none of them causes a swap.

HOTSWAP_REQUESTS=100000 python -m pytest tests/door/test_hopeless.py        more of them
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import anyio

from hotswap.door import create_app
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import Caller
from tests.runtime.support import engine_of, idle, sim_fleet

NUM_REQUESTS = int(os.environ.get("HOTSWAP_REQUESTS", "2000"))
VOCABULARY = 32_000

# Each makes a good request hopeless; the fleet would load `a` for one that is not.
SPOIL: list[Callable[[Random], dict[str, Any]]] = [
    lambda chance: {"model": f"m{chance.random()}"},
    lambda chance: {"model": f"a:{chance.random()}"},
    lambda chance: {"adapter": "none"},
    lambda chance: {"prompt": []},
    lambda chance: {"prompt": "text for a model without a tokenizer"},
    lambda chance: {"prompt": [1] * chance.randint(4096, 9000)},
    lambda chance: {"prompt": [1] * chance.randint(1025, 2000)},
    lambda chance: {"max_tokens": chance.randint(1025, 3000)},
    lambda chance: {"prompt": [1, chance.randint(2**31, 2**40)]},
    lambda chance: {"prompt": [[1], "text"]},
    lambda chance: {"stop": ["text"]},
    lambda chance: {"stop": ["x"] * 200},
    lambda chance: {"temperature": chance.choice([-1.0, 1e9, "1", True])},
    lambda chance: {"top_p": chance.choice([0, 2, -1])},
    lambda chance: {"n": chance.choice([0, 129, -1, 2])},
    lambda chance: {"logprobs": chance.choice([-1, 21, 1.5])},
    lambda chance: {"logit_bias": {str(chance.random()): 1.0}},
    lambda chance: {"priority": 5000},
    lambda chance: {"timeout_s": -chance.random()},
    lambda chance: {"json_schema": {}},
    lambda chance: {"response_format": {"type": "json_schema"}},
    lambda chance: {"regex": "x" * (1 << 18)},
    lambda chance: {f"f{chance.random()}": 1},
]


@virtual_time
async def test_hopeless_requests_cause_no_swap() -> None:
    chance, statuses = Random(5), Counter[int]()
    engines = [engine_of(name, kv_blocks=64) for name in ("e0", "e1")]
    async with sim_fleet("a", "b", engines=engines) as fleet:
        app = create_app(fleet)
        for _ in range(NUM_REQUESTS):
            body = {"model": "a", "prompt": [1, 2], "max_tokens": 4, "temperature": 0}
            body |= chance.choice(SPOIL)(chance) | {"stream": chance.random() < 0.5}
            caller = Caller(app, "/v1/completions", body)
            await caller()
            await anyio.sleep(0.01)  # plans are made meanwhile
            status = caller.sent[0]["status"]
            statuses[status] += 1
            assert status in (400, 404), (body, caller.text)
            assert json.loads(caller.text)["error"]["code"]
        assert fleet.swaps == ()
        assert all(instance.model is None for instance in fleet.view().instances)
        idle(fleet)
    assert statuses.keys() == {400, 404}
