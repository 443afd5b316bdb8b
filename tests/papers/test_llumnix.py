"""Sun et al., Llumnix, OSDI 2024: its measure and its rules on the testbed of the paper, by hand.

One A10 with LLaMA-7B holds 13,616 tokens of KV cache: 851 blocks of 16.
"""

from typing import Any

import pytest

from hotswap.policies import (
    Chain,
    Freeness,
    FreenessAutoscaler,
    FreenessRouter,
    VirtualUsageRescheduler,
    infaas_router,
)
from tests.policies.loads import fleet_of, loaded, moves, running, terminating
from tests.policies.views import empty, model, request, swaps

BLOCKS = 13_616 // 16


def a10(name: str, requests: int, held: int, **facts: Any) -> Any:
    return loaded(name, requests, free=BLOCKS - held, total=BLOCKS, **facts)


@pytest.mark.parametrize(
    ("facts", "paper", "artifact"),
    [
        # 20 requests hold 600 of 851 blocks; the artifact keeps 8 of them free.
        ({"requests": 20, "held": 600}, 251 / 20, 243 / 20),
        # One more waits for 64 blocks: its demand counts, its place in the batch only in the artifact.
        (
            {"requests": 21, "held": 600, "waiting": 1, "next_blocks": 64, "prefill": 1024},
            187 / 20,
            179 / 21,
        ),
        # Three more behind it, of 100 blocks together: nothing in the paper, all in the artifact.
        (
            {"requests": 24, "held": 600, "waiting": 4, "next_blocks": 64, "prefill": 2624},
            187 / 20,
            79 / 21,
        ),
        # One running request is of high priority: all but 1600 tokens, 751 blocks, are kept free.
        ({"requests": 20, "held": 600, "high": 1}, -500 / 20, -508 / 20),
        # Two of them share that, so it counts once.
        ({"requests": 20, "held": 600, "high": 2}, -500 / 20, -508 / 20),
    ],
)
def test_freeness(facts: dict[str, Any], paper: float, artifact: float) -> None:
    instance = a10("e0", **facts)
    assert Freeness().of(instance) == pytest.approx(paper)
    assert Freeness("artifact").of(instance) == pytest.approx(artifact)


def test_dispatch_sees_queues_as_load() -> None:
    """A queue makes an instance less free though what runs on it holds less."""
    blocked = a10("e0", 11, 500, waiting=1, next_blocks=360, prefill=5760)
    busy = a10("e1", 40, 800)
    for router in (FreenessRouter(), infaas_router()):
        assert router.route(request("a"), fleet_of([blocked, busy])) == "e1"


def test_a_long_prompt_that_memory_in_pieces_holds_up_gets_it_in_one() -> None:
    """Enough is free in the cluster, and not on any one instance, until a request has moved."""
    blocked = a10("e0", 7, 651, waiting=1, next_blocks=300, prefill=4800)
    other = a10("e1", 6, 551)
    requests = [running(f"r{n}", "e0", 1700 + 16 * n) for n in range(6)]
    waits = running("long", "e0", 4799, begun=False)
    view = fleet_of([blocked, other], [*requests, waits])
    assert moves(VirtualUsageRescheduler().plan(view)) == [("r0", "e1")]  # 107 blocks: 200 + 107 >= 300


def test_a_terminating_instance_drains_by_ordinary_moves() -> None:
    """Algorithm 1: a fake request of infinite demand, and nothing else, sends its requests away."""
    view = fleet_of([terminating(a10("e0", 1, 10)), a10("e1", 20, 600)], [running("r", "e0", 150)])
    assert moves(VirtualUsageRescheduler().plan(view)) == [("r", "e1")]


@pytest.mark.parametrize(
    ("rule", "held", "change"),
    [
        (FreenessAutoscaler(), 660, "up"),  # 191 / 20 = 9.55
        (FreenessAutoscaler(), 640, ""),
        (FreenessAutoscaler(low=5, high=55), 660, ""),  # the artifact's T = 5
        (FreenessAutoscaler(low=25, high=75), 400, "up"),  # T = 25: 451 / 20 = 22.55
    ],
)
def test_scaling_by_the_average(rule: FreenessAutoscaler, held: int, change: str) -> None:
    view = fleet_of([a10("e0", 20, held), a10("e1", 20, held), empty("e2")], models=[model("a", 40)])
    assert swaps(rule.plan(view)) == ([("e2", "a")] if change else [])


def test_scaling_down_terminates_the_one_with_the_fewest_and_moves_them() -> None:
    """Average 62.5: e0 goes, and what runs there goes to e1."""
    view = fleet_of(
        [a10("e0", 5, 551), a10("e1", 10, 201)],
        [running(f"r{n}", "e0", 1500) for n in range(5)],
        models=[model("a", 15)],
    )
    plan = Chain(FreenessAutoscaler(), VirtualUsageRescheduler()).plan(view)
    assert [type(action).__name__ for action in plan] == ["Unload", "Migrate"]
    assert moves(plan) == [("r0", "e1")]
