"""Which layers adapters may change is found out once, by what layers get in steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hotswap.backends.torch import SkeletonCache, TorchEngine, preflight
from hotswap.backends.torch.adapters.targets import observed
from hotswap.backends.torch.attention import Step, running
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.loader import LocalModel
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model


async def test_an_engine_that_finds_out_what_another_knows_takes_nothing_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both look into one cache, and the second begins its preflight when the first has ended its own."""
    store, skeletons, honest = DictStore(), SkeletonCache(), preflight.preflight
    card = store.add("m", make_model("llama"))
    seen: list[int] = []

    def make_engine(name: str) -> TorchEngine:
        return TorchEngine(name, kv_tokens=256, threads=1, skeletons=skeletons)

    async with make_engine("e0") as first, make_engine("e1") as second:
        await first.load(card, store)
        model = first._models.serving
        assert isinstance(model, LocalModel)

        def num_targets() -> int:
            model.skeleton.targets.clear()
            return len(model.targets())

        expected = num_targets()
        assert expected > 10

        def look(*arguments: Any, **named: Any) -> Any:
            seen.append(num_targets())
            layers = honest(*arguments, **named)
            seen.append(num_targets())
            return layers

        monkeypatch.setattr("hotswap.backends.torch.loader.preflight", look)
        skeletons.verified.clear()
        await second.load(card, store)
        assert seen == [expected, expected]
        assert num_targets() == expected


def test_only_layers_that_every_step_calls_with_all_its_rows_can_have_adapters() -> None:
    module = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("always", "some_rows", "sometimes", "never")})
    cache, zeros = KVCache(1, 16, torch.device("cpu")), torch.zeros(8, dtype=torch.long)
    with observed(module) as odd:
        for turn in range(2):
            with running(Step(cache=cache, blocks=zeros, offsets=zeros)):
                module["always"](torch.ones(1, 8, 4))
                module["some_rows"](torch.ones(8 - turn, 4))
                if turn:
                    module["sometimes"](torch.ones(8, 4))
    assert odd == {"some_rows", "sometimes", "never"}
