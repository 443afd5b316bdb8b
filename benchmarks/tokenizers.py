"""A tokenizer of the size that models have, trained in seconds on the source code of this environment."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from hotswap.backends.tokenizer import HfTokenizer

__all__ = ["END", "source_code", "train"]

END = 0
"""Its end token."""

_FOLDERS = ("", "site-packages/torch", "site-packages/transformers")


@cache
def train(size: int) -> HfTokenizer:
    """Return a byte-level BPE tokenizer of `size` tokens, as those of Llama 3 and Qwen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return HfTokenizer(tokenizer)


def source_code(num_characters: int) -> str:
    """Return so many characters of source code."""
    parts: list[str] = []
    for text in _texts():
        parts.append(text)
        num_characters -= len(text)
        if num_characters <= 0:
            break
    return "".join(parts)[: num_characters or None]


def _texts() -> Iterator[str]:
    home = Path(sysconfig.get_path("stdlib"))
    for folder in _FOLDERS:
        for path in sorted((home / folder).rglob("*.py")):
            if folder or "site-packages" not in path.parts:
                yield path.read_text(encoding="utf-8", errors="ignore")
