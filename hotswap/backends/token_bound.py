"""How long a text a token can stand for, by what a `tokenizer.json` does with texts.

So a text of many megabytes is refused without encoding it. A tokenizer that may drop parts of a text, or has
one token for unknown text of any length, has no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

from tokenizers import Tokenizer, models, pre_tokenizers

__all__ = ["most_characters"]

# What leaves no fewer characters than it gets.
_KEEPING = frozenset({"ByteLevel", "Lowercase", "NFD", "NFKD", "Prepend"})
# A composed character stands for at most four others: Unicode Standard Annex 15.
_COMPOSING = frozenset({"NFC", "NFKC"})
_COMPOSED = 4
_SPLITTING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
# Ids may have gaps; with more of them the bound is not looked for.
_MOST_GAPS = 16


def most_characters(tokenizer: Tokenizer) -> int | None:
    """Return the most characters of a text that can become one token; `None` if nothing bounds them.

    It goes through the vocabulary, tens of milliseconds in which other threads run.
    """
    steps, splits = list(_parts(tokenizer.normalizer)), list(_parts(tokenizer.pre_tokenizer))
    factor = 1
    for step in steps:
        if step["type"] in _COMPOSING:
            factor *= _COMPOSED
        elif step["type"] not in _KEEPING and not _replaces_by_as_much(step):
            return None
    if any(split["type"] not in _SPLITTING or split.get("behavior") == "Removed" for split in splits):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it stands for the blanks beside it, too
    in_bytes = any(part["type"] == "ByteLevel" for part in (*steps, *splits))
    longest = _longest(tokenizer) if _has_all_bytes(tokenizer, in_bytes=in_bytes) else None
    return None if longest is None else factor * max(longest, *(len(token.content) for token in added), 1)


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield what a normalizer or a pre-tokenizer consists of, as `tokenizer.json` writes it."""
    waiting: list[dict[str, Any]] = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting += part.get("normalizers") or part.get("pretokenizers") or []
        else:
            yield part


def _replaces_by_as_much(step: dict[str, Any]) -> bool:
    """Whether a step replaces a text by one that is at least as long."""
    if step["type"] != "Replace":
        return False
    replaced = cast("dict[str, str]", step["pattern"]).get("String")
    return replaced is not None and 0 < len(replaced) <= len(step["content"])


def _has_all_bytes(tokenizer: Tokenizer, *, in_bytes: bool) -> bool:
    """Whether each byte has a token, so that none is dropped and none becomes a part of an unknown token."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if in_bytes:
        pieces = pre_tokenizers.ByteLevel.alphabet()
    elif model.byte_fallback:
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return False
    return all(tokenizer.token_to_id(piece) is not None for piece in pieces)


def _longest(tokenizer: Tokenizer) -> int | None:
    """Return the length of the longest token, added ones aside; where texts are bytes, in bytes."""
    model = tokenizer.model
    left, longest = tokenizer.get_vocab_size(with_added_tokens=False), 1
    for id in range(_MOST_GAPS * left):
        piece = model.id_to_token(id)
        if piece is not None:
            longest, left = max(longest, len(piece)), left - 1
        if not left:
            return longest
    return None
