"""Log-probabilities that an engine tells, beside those that transformers computes of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hotswap import AdapterId, ModelId, PromptLogprobs, Request, RequestId, Sampling, Token
from hotswap.abc import Engine

# In fp32. Logits of these sharpened models have values of about ten.
TOLERANCE = 1e-4

LOGPROBS = Sampling(ignore_eos=True, logprobs=3, prompt_logprobs=2)


def reference(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Row *n*: transformers' log-probabilities of the token after `tokens[: n + 1]`."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.float().log_softmax(-1)


def check(model: Any, prompt: Sequence[int], told: Sequence[PromptLogprobs], tokens: Sequence[Token]) -> None:
    """Compare all that is told with transformers, which gets the same tokens."""
    ids = [*prompt, *(token.id for token in tokens)]
    rows = reference(model, ids)
    assert [entry.id for entry in told] == list(prompt)
    assert (told[0].logprob, told[0].top_logprobs) == (None, ())
    entries: list[PromptLogprobs | Token] = [*told[1:], *tokens]
    for position, entry in enumerate(entries, start=1):
        row = rows[position - 1]
        assert entry.logprob == pytest.approx(float(row[ids[position]]), abs=TOLERANCE)
        most = row.topk(len(entry.top_logprobs)).values.tolist()
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(most, abs=TOLERANCE)
        for top in entry.top_logprobs:
            assert top.logprob == pytest.approx(float(row[top.id]), abs=TOLERANCE)
    assert {len(entry.top_logprobs) for entry in told[1:]} <= {2}
    assert {len(token.top_logprobs) for token in tokens} == {3}


async def check_engine(
    engine: Engine,
    model: Any,
    name: str,
    prompt: Sequence[int],
    sampling: Sampling,
    adapter: str | None = None,
) -> None:
    """Have an engine continue a prompt, and compare what it tells with transformers' `model`."""
    request = Request(
        id=RequestId("r"),
        model=ModelId(name),
        prompt=tuple(prompt),
        sampling=sampling,
        adapter=None if adapter is None else AdapterId(adapter),
    )
    async with engine.stream(request) as stream:
        tokens = await stream.collect()
    check(model, prompt, stream.prompt_logprobs, tokens)
