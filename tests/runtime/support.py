"""Small simulated fleets for the runtime's tests, and what must hold when they are idle again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio

from hotswap import Fleet, FleetView, InstanceState, Model, Request, Sampling
from hotswap.abc import Action, Engine, ModelCard, Scheduler
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore, sim_manifest
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap

__all__ = ["Idle", "engine_of", "expected", "idle", "models", "sim_fleet", "store_of"]

WEIGHT_BYTES = 1 << 20
PROFILE = DeviceProfile(
    memory_bytes=64 << 20, floor_s=0.01, base_s=0.001, token_s=1e-5, load_bytes_per_s=10 << 20, unload_s=0.02
)


class Idle(Scheduler):
    """Plans nothing: swaps happen by hand alone."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return ()


def models(*names: str, **fields: Any) -> list[Model]:
    return [Model(name, **fields) for name in names]


def store_of(*names: str, context: int = 4096) -> SimStore:
    return SimStore(
        [sim_manifest(name, WEIGHT_BYTES, max_context_tokens=context, eos_token_ids=(0,)) for name in names]
    )


def engine_of(name: str, **options: Any) -> SimEngine:
    return SimEngine(name, PROFILE, **{"kv_blocks": 512, "kv_block_tokens": 16, "max_requests": 8, **options})


def sim_fleet(
    *names: str,
    engines: Iterable[Engine] | int = 2,
    scheduler: Scheduler | None = None,
    **options: Any,
) -> Fleet:
    """A fleet of models `names` that swaps by weighted load unless told otherwise."""
    chosen = [engine_of(f"e{n}") for n in range(engines)] if isinstance(engines, int) else engines
    defaults: dict[str, Any] = {
        "store": store_of(*names),
        "models": models(*names),
        "router": LeastLoadedRouter(),
        "scheduler": scheduler or WeightedLoadSwap(t1=2, t2=8, b=1.5, patience_s=1.0, sigmas=0),
    }
    return Fleet(engines=chosen, **{**defaults, **options})


def expected(request: Request, *, context: int = 4096) -> list[int]:
    """The tokens of an undisturbed run."""
    card = ModelCard(
        id=request.model, weight_bytes=WEIGHT_BYTES, max_context_tokens=context, eos_token_ids=(0,)
    )
    return engine_of("oracle").expected_tokens(request, card)


async def read(fleet: Fleet, model: str, prompt: Sequence[int], sampling: Sampling) -> None:
    """Be a client: read a stream to its end and compare it with the undisturbed run."""
    async with fleet.stream(model, prompt, sampling) as stream:
        tokens = await stream.collect()
        assert [token.id for token in tokens] == expected(stream.request)
        assert [token.index for token in tokens] == list(range(len(tokens)))
        assert [token.finish_reason is not None for token in tokens] == [False] * (len(tokens) - 1) + [True]


def idle(fleet: Fleet) -> None:
    """Assert that every place, block and claim has been given back."""
    view = fleet.view()
    assert view.waiting == ()
    for instance in view.instances:
        assert instance.num_requests == instance.num_running == instance.num_waiting == 0, instance
        assert instance.num_free_kv_blocks == instance.num_kv_blocks, instance
        assert not instance.swapping
        assert instance.state in (InstanceState.EMPTY, InstanceState.SERVING, InstanceState.LOST), instance
    assert all(model.num_requests == 0 for model in view.models)


async def until(holds: Callable[[], bool], *, within_s: float = 600.0) -> None:
    """Let the simulated clock run until something holds."""
    with anyio.fail_after(within_s):
        while not holds():  # noqa: ASYNC110 - simulated time, and nothing to be told by
            await anyio.sleep(0.01)
