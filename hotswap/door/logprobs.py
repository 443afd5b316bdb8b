"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hotswap import Token

__all__ = ["chat_logprobs", "legacy_logprobs"]

# JSON has no infinity; this is what OpenAI's API gives for what cannot come.
_LEAST = -9999.0


def legacy_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """Return those of tokens in the form of completions; `offset` is where their text begins."""
    offsets = list[int]()
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {_name(top.id, top.text): _finite(top.logprob) for top in token.top_logprobs} for token in tokens
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return those of tokens in the form of chats."""
    return {
        "content": [
            {
                **_entry(token.text, token.logprob),
                "top_logprobs": [_entry(_name(top.id, top.text), top.logprob) for top in token.top_logprobs],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _entry(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _name(id: int, text: str) -> str:
    """How a token is called: by its text, or by its id where a model has no tokenizer."""
    return text or f"token_id:{id}"


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else _LEAST
