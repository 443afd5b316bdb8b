"""Of every layout each kind of engine says whether it reads it, and if not, what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hotswap import ModelId
from hotswap.abc import ModelCard
from hotswap.backends.layouts import require_gguf, require_modules, require_tensors
from hotswap.errors import UnsupportedModel

M = ModelId("m")
CHECKS: dict[str, Callable[[ModelCard], None]] = {
    "torch": lambda card: require_modules(M, card),
    "vllm": lambda card: require_tensors(M, card),
    "llamacpp": lambda card: require_gguf("e0", M, card),
}
CARDS = {
    "modules": ModelCard(id=M, weight_bytes=1, max_context_tokens=1),
    "checkpoint": ModelCard(id=M, weight_bytes=1, max_context_tokens=1, layout="checkpoint"),
    "gguf": ModelCard(id=M, weight_bytes=1, max_context_tokens=1, layout="checkpoint", is_gguf=True),
}
SERVED = {("torch", "modules"), ("vllm", "modules"), ("vllm", "checkpoint"), ("llamacpp", "gguf")}


@pytest.mark.parametrize("engine", CHECKS)
@pytest.mark.parametrize("kept", CARDS)
def test_an_engine_takes_the_layouts_that_it_reads_and_no_other(engine: str, kept: str) -> None:
    if (engine, kept) in SERVED:
        CHECKS[engine](CARDS[kept])
    else:
        with pytest.raises(UnsupportedModel, match="import"):
            CHECKS[engine](CARDS[kept])
