"""Whether an architecture can be served exactly, told from its config alone.

The config is shrunk to a miniature with random weights, which is computed by the model's own attention and by
the engine's, cut into chunks and mixed with others. It takes a fraction of a second and no weights, so that
the answer is there before a checkpoint is read, converted or swapped in.
"""

from __future__ import annotations

import json
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch

from hotswap.backends.torch.attention import IMPLEMENTATION, MaskPattern
from hotswap.backends.torch.miniature import enliven, shrink
from hotswap.backends.torch.modeling import Skeleton, canonical, parse_config
from hotswap.backends.torch.preflight import preflight, reference
from hotswap.backends.torch.weights import layout
from hotswap.errors import UnsupportedModel

__all__ = ["Verdict", "examine"]

_MAX_BYTES = 256 << 20
_BLOCK_TOKENS = 16
_CPU = torch.device("cpu")


class Verdict(StrEnum):
    """What an examination found, where it found nothing against serving the architecture."""

    EXACT = "exact"
    UNKNOWN = "unknown"


def examine(config_text: str) -> Verdict:
    """Say whether models with this `config.json` can be served exactly.

    Blocks for a fraction of a second the first time, and not again.

    `UNKNOWN` means that no miniature of the config could be made to run: then a load, which looks at the
    model itself, decides.

    Raises:
        UnsupportedModel: they cannot; the message says why.
        ShardCorrupt: the config is no JSON object.
    """
    found = _examined(canonical(config_text))
    if not isinstance(found, Verdict):
        raise UnsupportedModel(found)
    return found


@lru_cache(maxsize=256)
def _examined(config_text: str) -> Verdict | str:
    """The verdict, or why there is none: a text always gives the same, so a process finds it once."""
    try:
        return _examine(config_text)
    except UnsupportedModel as exc:
        return str(exc)


def _examine(config_text: str) -> Verdict:
    config = parse_config(config_text)
    for small in shrink(config.to_dict()):
        try:
            skeleton = _alive(small)
            reference(skeleton, _CPU)
        except (
            Exception
        ) as exc:  # a miniature that contradicts itself fails in as many ways as there are models
            if _is_about_ours(exc):
                raise UnsupportedModel(
                    f"The {config.model_type!r} model has attention code of its own, which cannot be "
                    "replaced; serve it with another engine."
                ) from exc
            continue
        preflight(skeleton, _CPU, block_tokens=_BLOCK_TOKENS, invariant=True)
        return Verdict.EXACT
    return Verdict.UNKNOWN


def _alive(small: dict[str, Any]) -> Skeleton:
    """The skeleton of a miniature, with weights."""
    skeleton = Skeleton(json.dumps(small, default=str), _CPU)
    specs, size_bytes = layout(skeleton.module)
    if size_bytes > _MAX_BYTES:
        raise UnsupportedModel(f"The miniature takes {size_bytes:,} bytes: a size of it is not known.")
    skeleton.bind(torch.zeros(size_bytes, dtype=torch.uint8), specs)
    enliven(skeleton.module)
    return skeleton


def _is_about_ours(error: BaseException) -> bool:
    """Whether it names what only an engine's attention brings along."""
    texts = (str(error), str(error.__cause__ or ""))
    return any(IMPLEMENTATION in text or MaskPattern.__name__ in text for text in texts)
