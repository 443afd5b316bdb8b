"""Chance decides about no mixture of experts: sound ones load, and faults in them are found, in bf16 too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from hotswap.backends.torch import TorchEngine, attention, batch_invariant
from hotswap.backends.torch.compatibility import Verdict, check_config
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.preflight import preflight
from hotswap.backends.torch.step_options import StepOptions
from hotswap.backends.torch.weights import fill, layout
from hotswap.errors import UnsupportedModel
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.test_engine import ask, collect
from tests.backends.torch.zoo import COMMON, generate, make_model

NUM_SEEDS = {"deepseek_v3": 6, "gpt_oss": 20, "mixtral": 20, "qwen3_moe": 20}
MIXTURES = tuple(NUM_SEEDS)
CPU = torch.device("cpu")


def mixture(name: str, seed: int) -> Any:
    """Return a random model in bf16, whose routers have a bias if the architecture has one."""
    model = make_model(name, seed=seed, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(seed)
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith(("router.bias", "e_score_correction_bias")):
            tensor.data.copy_(torch.randn(tensor.shape, generator=random) / 2)
    return model


def bind(skeleton: Skeleton | None, model: Any) -> Skeleton:
    """Bind a skeleton, a new one without, to the weights of a model."""
    if skeleton is None:
        skeleton = Skeleton(json.dumps(model.config.to_dict()), CPU)
    specs, size_bytes = layout(model)
    flat = torch.zeros(size_bytes, dtype=torch.uint8)
    fill(flat, model, specs)
    skeleton.bind(flat, specs)
    return skeleton


def check(skeleton: Skeleton) -> None:
    preflight(skeleton, CPU, StepOptions(16, invariant=True))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_sound_mixture_in_bf16_loads_with_any_weights(name: str) -> None:
    skeleton = None
    for seed in range(NUM_SEEDS[name]):
        skeleton = bind(skeleton, mixture(name, seed))
        check(skeleton)


def attends_with_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.paged_attention

    def wrong(*args: Any, **named: Any) -> Any:
        return original(*args, **named | {"scaling": 1.5 * named["scaling"]})

    monkeypatch.setattr(attention, "paged_attention", wrong)


def exchanges_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped: Any = torch._grouped_mm
    original = batch_invariant._OURS[grouped]

    def wrong(left: Tensor, right: Tensor, **others: Any) -> Tensor | None:
        return original(left, right[[1, 0, *range(2, len(right))]], **others)

    monkeypatch.setitem(batch_invariant._OURS, grouped, wrong)


def forgets_the_bias_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    original = batch_invariant._OURS[torch.nn.functional.linear]

    def wrong(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        return original(hidden, weight, None if len(weight) == 4 else bias)

    monkeypatch.setitem(batch_invariant._OURS, torch.nn.functional.linear, wrong)


def forgets_the_bias_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No logit shows this fault while choices are held: only the scores do."""
    router: Any = modeling_deepseek_v3.DeepseekV3TopkRouter
    original = router.forward

    def wrong(self: Any, *args: Any) -> Any:
        bias = self.e_score_correction_bias
        kept = bias.clone()
        if attention.current() is not None:
            bias.zero_()
        try:
            return original(self, *args)
        finally:
            bias.copy_(kept)

    monkeypatch.setattr(router, "forward", wrong)


FAULTS: tuple[tuple[str, Callable[[pytest.MonkeyPatch], None]], ...] = (
    *((name, attends_with_a_wrong_scale) for name in MIXTURES),
    *((name, exchanges_experts) for name in MIXTURES),
    ("gpt_oss", forgets_the_bias_of_a_router),
    ("deepseek_v3", forgets_the_bias_of_a_choice),
)


@pytest.mark.parametrize(("name", "plant"), FAULTS)
def test_a_fault_in_a_mixture_in_bf16_is_found_with_any_weights(
    name: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    skeleton = None
    for seed in range(3):
        skeleton = bind(skeleton, mixture(name, seed))
        with pytest.raises(UnsupportedModel, match="differ"):
            check(skeleton)


# Rows of 37 and of 30 numbers are no multiple of 16 bytes, in bf16 or in fp32.
UNALIGNED: dict[str, Callable[[], Any]] = {
    "rows of experts": lambda: transformers.Qwen3MoeConfig(
        **COMMON, num_experts_per_tok=2, moe_intermediate_size=37, head_dim=32, num_experts=4
    ),
    "rows of hidden states": lambda: transformers.MixtralConfig(
        **{**COMMON, "hidden_size": 30, "head_dim": 16}, num_local_experts=4, num_experts_per_tok=2
    ),
}


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", UNALIGNED)
async def test_the_check_of_a_config_and_a_load_agree_on_unaligned_experts(
    what: str, dtype: torch.dtype, invariant: bool
) -> None:
    store, model = DictStore(), make_model(UNALIGNED[what](), dtype=dtype, sharpness=8.0)
    card = store.add("m", model)
    assert check_config(store.manifests["m"].config) is Verdict.EXACT
    async with TorchEngine("e0", kv_tokens=512, threads=1, invariant=invariant) as engine:
        await engine.load(card, store)
        prompt = [3, 1, 4, 1, 5, 9, 2, 6]
        found = await collect(engine, ask(prompt, max_tokens=12))
    if dtype is torch.float32:
        model.set_experts_implementation("eager")
        assert [token.id for token in found] == generate(model, prompt, 12)
