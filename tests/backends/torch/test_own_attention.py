"""Models with attention code of their own are served as exactly as those that call the interface."""

from __future__ import annotations

import pytest
import torch
import transformers

from hotswap.backends.torch import attention
from hotswap.backends.torch.attention import Step, running
from hotswap.backends.torch.compatibility import check_config
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.own_attention import with_bias
from hotswap.errors import UnsupportedModel
from tests.backends.torch.exactness import assert_equals_generate
from tests.backends.torch.zoo import OWN_ATTENTION, make_model

# Where tokens vary enough to show a mistake.
SHARPNESS = {"bloom": 24.0, "openai-gpt": 64.0}


@pytest.mark.parametrize("name", OWN_ATTENTION)
async def test_tokens_equal_generate(name: str) -> None:
    await assert_equals_generate(name, make_model(OWN_ATTENTION[name](), sharpness=SHARPNESS.get(name, 16.0)))


# A bias, and windows of some layers.
@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
async def test_tokens_equal_generate_on_devices_that_gather_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "in_place", False)
    monkeypatch.setattr(attention, "attend", None)
    await assert_equals_generate(name, make_model(OWN_ATTENTION[name](), sharpness=SHARPNESS.get(name, 16.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bias_is_exact_at_any_position_in_any_dtype(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 255, 256, 257, 1001, 40_000, 65_535])
    slopes = torch.tensor([0.5, 0.0625])
    zeros = torch.zeros(1, 2, len(positions), 16, dtype=dtype)
    none = torch.zeros(0, dtype=torch.long)
    step = Step(cache=KVCache(1, 16, torch.device("cpu")), blocks=none, offsets=none, positions=positions)
    with running(step):
        query, key = with_bias(zeros, zeros, slopes)
    products = (query.double() @ key.double().transpose(-1, -2))[0, :, 0]
    assert torch.equal(products, slopes.double()[:, None] * positions)


def test_a_bias_that_transformers_computes_in_two_ways_is_refused_with_the_reason() -> None:
    config = transformers.FalconConfig(alibi=True, new_decoder_architecture=True)
    with pytest.raises(UnsupportedModel, match="ALiBi"):
        check_config(config.to_json_string())
