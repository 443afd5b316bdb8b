"""In fp32 greedy tokens equal transformers' own `generate` for every architecture, under random clients."""

from __future__ import annotations

import pytest

from hotswap.backends.torch import attention
from hotswap.backends.torch.kv import KVCache
from tests.backends.torch.exactness import assert_equals_generate
from tests.backends.torch.zoo import CONFIGS, make_model


@pytest.mark.parametrize("architecture", CONFIGS)
async def test_tokens_equal_generate(architecture: str) -> None:
    await assert_equals_generate(architecture, make_model(architecture))


# With a window, a cap, sinks, and values of another width than keys.
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
async def test_tokens_equal_generate_on_devices_that_gather_blocks(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These devices have no kernel that reads blocks in place."""
    monkeypatch.setattr(KVCache, "in_place", False)
    monkeypatch.setattr(attention, "attend", None)
    await assert_equals_generate(architecture, make_model(architecture))
