"""`ElasticMemory`: what moves, from where to where, and what stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from hotswap import FleetView, InstanceId, InstanceState, InstanceView, ModelId
from hotswap.abc import Action, Resize, Scheduler, Swap
from hotswap.errors import ConfigError
from hotswap.policies import ElasticMemory, KeepAsIs
from hotswap.testing.strategies import fleet_views


def pool(
    name: str, blocks: int, *, used: int, running: int = 0, waiting: int = 0, **fields: Any
) -> InstanceView:
    """An instance with a floor of 100 KV blocks that may have 900, each waiting request in want of 10."""
    told = {
        "least_kv_blocks": 100,
        "most_kv_blocks": 900,
        "kv_block_bytes": 1 << 20,
        "device_budget": "d0",
        "num_next_kv_blocks": 10 if waiting else 0,
    }
    return InstanceView(
        id=InstanceId(name),
        state=InstanceState.SERVING,
        model=ModelId("m"),
        num_kv_blocks=blocks,
        num_free_kv_blocks=blocks - used,
        num_running=running,
        num_waiting=waiting,
        **{**told, **fields},
    )


def planned(*instances: InstanceView, scheduler: Scheduler | None = None) -> dict[str, int]:
    actions = (scheduler or ElasticMemory(KeepAsIs())).plan(FleetView(now_s=1.0, instances=instances))
    return {action.instance: action.kv_blocks for action in actions if isinstance(action, Resize)}


def test_a_busy_instance_gives_what_is_above_its_share_to_one_whose_queue_is_short() -> None:
    """Both want more than half of 1,000, so each is to have half; a quarter moves at once."""
    busy = pool("e0", 900, used=900, running=90, waiting=50)
    short = pool("e1", 100, used=95, running=9, waiting=60)
    assert planned(busy, short) == {"e0": 650, "e1": 350}
    at_once = ElasticMemory(KeepAsIs(), most_part=1.0)
    assert planned(busy, short, scheduler=at_once) == {"e0": 500, "e1": 500}


def test_one_that_wants_less_than_half_gets_what_it_wants() -> None:
    busy = pool("e0", 900, used=900, running=90, waiting=50)
    short = pool("e1", 100, used=95, running=9, waiting=10)  # 95, one more for each of 9, and 10 times 11
    assert planned(busy, short) == {"e0": 786, "e1": 214}


def test_those_that_give_come_first() -> None:
    short, busy = pool("a", 100, used=95, running=9, waiting=60), pool("b", 900, used=900, running=90)
    assert list(planned(short, busy)) == ["b", "a"]


@pytest.mark.parametrize(
    "instances",
    [
        (pool("e0", 500, used=500, running=50), pool("e1", 500, used=100, running=10)),
        (
            pool("e0", 500, used=500, running=50, waiting=90),
            pool("e1", 500, used=495, running=50, waiting=90),
        ),
        (pool("e0", 900, used=900, running=90, waiting=9),),
        (
            pool("e0", 900, used=900, running=90),
            pool("e1", 100, used=95, running=9, waiting=60, device_budget="d1"),
        ),
        (
            pool("e0", 900, used=900, running=90, swapping=True),
            pool("e1", 100, used=95, running=9, waiting=60),
        ),
        (
            pool("e0", 900, used=900, running=90, most_kv_blocks=0, device_budget=""),
            pool("e1", 100, used=95, running=9, waiting=60),
        ),
        (
            pool("e0", 510, used=510, running=51, waiting=90),
            pool("e1", 490, used=485, running=49, waiting=90),
        ),
    ],
    ids=["none is short", "halves", "alone", "two devices", "swapping", "fixed", "a little"],
)
def test_nothing_moves(instances: tuple[InstanceView, ...]) -> None:
    assert planned(*instances) == {}


def test_what_the_other_scheduler_swaps_keeps_its_memory() -> None:
    class Swaps(Scheduler):
        def plan(self, fleet: FleetView) -> Sequence[Action]:
            return [Swap(instance=InstanceId("e0"), model=ModelId("n"))]

    busy, short = pool("e0", 900, used=900, running=90), pool("e1", 100, used=95, running=9, waiting=60)
    scheduler = ElasticMemory(Swaps())
    assert planned(busy, short, scheduler=scheduler) == {}
    assert len(scheduler.plan(FleetView(now_s=1.0, instances=(busy, short)))) == 1


@given(fleet_views())
def test_no_more_is_taken_than_given_and_only_those_in_want_take(fleet: FleetView) -> None:
    grown_bytes: Counter[tuple[str, str]] = Counter()
    for resize in ElasticMemory(KeepAsIs(), least_part=0.0, most_part=1.0).plan(fleet):
        assert isinstance(resize, Resize)
        instance = fleet.instance(resize.instance)
        more = resize.kv_blocks - instance.num_kv_blocks
        grown_bytes[instance.node, instance.device_budget] += more * instance.kv_block_bytes
        if more > 0:
            assert instance.num_next_kv_blocks > instance.num_free_kv_blocks
    assert max(grown_bytes.values(), default=0) <= 0


@pytest.mark.parametrize(
    "fields", [{"least_part": -0.1}, {"most_part": 1.1}, {"least_part": 0.5}, {"most_part": 0.0}]
)
def test_parts_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="least_part"):
        ElasticMemory(KeepAsIs(), **fields)
