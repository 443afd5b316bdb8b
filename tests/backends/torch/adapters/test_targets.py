"""The layers that can have adapters are found once, by the rows they get in steps."""

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


async def test_a_repeated_preflight_does_not_change_the_targets_of_another_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both share a skeleton cache, and the second runs its preflight after the first has finished."""
    store, skeletons, original = DictStore(), SkeletonCache(), preflight.preflight
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
            layers = original(*arguments, **named)
            seen.append(num_targets())
            return layers

        monkeypatch.setattr("hotswap.backends.torch.loader.preflight", look)
        skeletons.verified.clear()
        await second.load(card, store)
        assert seen == [expected, expected]
        assert num_targets() == expected


def test_only_layers_that_get_all_rows_of_every_step_can_have_adapters() -> None:
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
