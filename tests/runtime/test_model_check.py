"""An engine that says beforehand that it cannot serve a model is never asked to."""

from __future__ import annotations

from pathlib import Path
from random import Random

import anyio
import pytest

from hotswap import Fleet, Model, ModelId, Sampling
from hotswap.abc import ModelCard, WeightStore, WrapperEngine
from hotswap.backends.sim import SimEngine
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from hotswap.errors import SwapFailed, UnsupportedModel
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import LeastLoadedRouter
from hotswap.testing import chaotic_engine
from tests.backends.stores.checkpoints import gguf_bytes, write_checkpoint
from tests.runtime.support import PROFILE, Idle, idle, read, sim_fleet

SOME = Sampling(max_tokens=5, ignore_eos=True)


class Choosy(SimEngine):
    """Refuses model b."""

    def check_model(self, model: ModelCard) -> None:
        if model.id == "b":
            raise UnsupportedModel("Model 'b' is not for this engine; take another.")


class Trying(SimEngine):
    """Finds out by trying that it cannot serve model b, with as much room for a preload as there is."""

    num_trials = 0

    async def try_model(self, model: ModelCard, store: WeightStore) -> None:
        await store.manifest(model.id)
        await anyio.sleep(60)  # longer than a preflight may take
        self.num_trials += 1
        if model.id == "b":
            raise UnsupportedModel("Model 'b' has no kernel; take another.")


def trying(name: str) -> Trying:
    return Trying(name, PROFILE, kv_blocks=512, kv_block_tokens=16, max_requests=8)


def choosy(name: str) -> Choosy:
    return Choosy(name, PROFILE, kv_blocks=512, kv_block_tokens=16, max_requests=8)


def willing(name: str) -> SimEngine:
    return SimEngine(name, PROFILE, kv_blocks=512, kv_block_tokens=16, max_requests=8)


@virtual_time
async def test_schedulers_plan_no_swap_to_an_engine_that_refuses_the_model() -> None:
    async with sim_fleet("a", "b", engines=[choosy("e0"), willing("e1"), choosy("e2")]) as fleet:
        for number in range(6):
            await read(fleet, "ab"[number % 2], (1, number), SOME)
        view = fleet.view()
        assert [instance.cooling_down for instance in view.instances] == [("b",), (), ("b",)]
        assert all(model.num_failed_loads == 0 for model in view.models)
        idle(fleet)


@virtual_time
async def test_a_wrapped_engine_is_asked_too() -> None:
    """Also below chaos and below several wrappers; a wrapper of an engine without a check refuses none."""
    wrapped = [chaotic_engine(choosy("e0"), Random(1)), WrapperEngine(WrapperEngine(choosy("e1")))]
    async with sim_fleet("a", "b", engines=[*wrapped, WrapperEngine(willing("e2"))]) as fleet:
        assert [instance.cooling_down for instance in fleet.view().instances] == [("b",), ("b",), ()]
        await read(fleet, "b", (1, 2), SOME)
        with pytest.raises(SwapFailed, match="not for this engine") as caught:
            await fleet.swap("e1", to="b")
        assert caught.value.phase == "preflight"


@virtual_time
async def test_a_swap_by_hand_is_refused_while_the_old_model_serves() -> None:
    async with sim_fleet("a", "b", engines=[choosy("e0")], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(SwapFailed, match="not for this engine") as caught:
            await fleet.swap("e0", to="b")
        assert caught.value.phase == "preflight"
        assert fleet.view().instances[0].hosted == "a"
        await read(fleet, "a", (1, 2), SOME)


@virtual_time
async def test_a_request_that_every_engine_refuses_ends_at_once() -> None:
    async with sim_fleet("a", "b", engines=[choosy("e0"), choosy("e1")]) as fleet:
        with pytest.raises(UnsupportedModel, match="not for this engine"):
            await fleet.generate("b", (1, 2), SOME)
        await fleet.add(willing("e2"))
        await read(fleet, "b", (1, 2), SOME)


@virtual_time
async def test_a_trial_that_fails_leaves_the_old_model_serving_and_its_requests_alone() -> None:
    engine = trying("e0")
    async with sim_fleet("a", "b", engines=[WrapperEngine(engine)], scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with fleet.stream("a", (1, 2), Sampling(max_tokens=50, ignore_eos=True)) as tokens:
            await anext(tokens)
            with pytest.raises(SwapFailed, match="no kernel") as caught:
                await fleet.swap("e0", to="b")
            assert len([token async for token in tokens]) == 49
        assert caught.value.phase == "preflight"
        assert fleet.swaps[-1].num_evicted == 0
        assert engine.num_trials == 2
        assert fleet.view().instances[0].cooling_down == ("b",)


@virtual_time
async def test_a_request_that_waits_ends_once_every_engine_has_tried_and_refused() -> None:
    async with sim_fleet("a", "b", engines=[trying("e0"), choosy("e1"), trying("e2")]) as fleet:
        with pytest.raises(UnsupportedModel, match=r"no kernel|not for this engine"):
            await fleet.generate("b", (1, 2), SOME)
        await read(fleet, "a", (1, 2), SOME)
        idle(fleet)


@pytest.mark.parametrize(("kind", "remedy"), [("gguf", "LlamaCppEngine"), ("fp8", "layout='modules'")])
async def test_torch_refuses_a_checkpoint_as_it_is_before_a_swap(
    tmp_path: Path, kind: str, remedy: str
) -> None:
    if kind == "gguf":
        source = tmp_path / "m.gguf"
        source.write_bytes(gguf_bytes())
    else:
        source = write_checkpoint(tmp_path / "source", {"w": ("F8_E4M3", (4, 4))})
    convert(source, tmp_path / "root", model_id="m", layout="checkpoint")
    store, engine = NvmeStore(tmp_path / "root"), TorchEngine("e0", device="cpu")
    async with Fleet(
        engines=[engine], store=store, models=[Model("m")], router=LeastLoadedRouter(), scheduler=Idle()
    ) as fleet:
        with pytest.raises(UnsupportedModel, match=remedy):
            await fleet.generate("m", (1, 2), SOME)
        with pytest.raises(SwapFailed, match=remedy) as caught:
            await fleet.swap("e0", to="m")
        assert caught.value.phase == "preflight"
        card = ModelCard.of(Model("m"), await store.manifest(ModelId("m")))
        with pytest.raises(UnsupportedModel, match=remedy):
            await engine.load(card, store)
