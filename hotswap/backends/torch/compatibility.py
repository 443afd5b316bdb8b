"""Checks from a model's config alone whether its architecture can be served exactly.

The check shrinks the config to a miniature model with random weights, and compares the logits of the model's
own attention with those of the engine, which cuts prompts into chunks and batches requests. It takes a
fraction of a second and needs no weights, so it runs before a checkpoint is read, converted or loaded.
"""

from __future__ import annotations

import json
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch

from hotswap.backends.torch.attention import IMPLEMENTATION, MaskPattern
from hotswap.backends.torch.config_text import canonical, parse_config
from hotswap.backends.torch.miniature import randomize, shrink
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.preflight import preflight, reference
from hotswap.backends.torch.step_options import StepOptions
from hotswap.backends.torch.weights import layout
from hotswap.errors import UnsupportedModel

__all__ = ["Verdict", "check_config"]

_MAX_BYTES = 256 << 20
_BLOCK_TOKENS = 16
_CPU = torch.device("cpu")


class Verdict(StrEnum):
    """The result of a check that does not refuse an architecture."""

    EXACT = "exact"
    UNKNOWN = "unknown"


def check_config(config_text: str) -> Verdict:
    """Return whether models with this `config.json` can be served exactly.

    Blocks for a fraction of a second. The result is cached per process.

    Returns:
        `EXACT`, or `UNKNOWN` if no miniature of the config runs: then a load decides, by checking the model
        itself.

    Raises:
        UnsupportedModel: they cannot; the message gives the reason.
        ShardCorrupt: the config is not a JSON object.
    """
    found = _cached_verdict(canonical(config_text))
    if not isinstance(found, Verdict):
        raise UnsupportedModel(found)
    return found


@lru_cache(maxsize=256)
def _cached_verdict(config_text: str) -> Verdict | str:
    """Return the verdict, or the reason for a refusal."""
    try:
        return _check_config(config_text)
    except UnsupportedModel as exc:
        return str(exc)


def _check_config(config_text: str) -> Verdict:
    config = parse_config(config_text)
    try:
        miniatures = list(shrink(config.to_dict()))
    except Exception:  # values of a wrong kind: building the model itself decides
        return Verdict.UNKNOWN
    for small in miniatures:
        try:
            skeleton = _make_miniature(small)
            reference(skeleton, _CPU)
        except Exception as exc:  # an inconsistent miniature fails with any error of its model's code
            if _names_engine_attention(exc):
                raise UnsupportedModel(
                    f"The {config.model_type!r} model has attention code of its own, which cannot be "
                    "replaced; serve it with another engine."
                ) from exc
            continue
        preflight(skeleton, _CPU, StepOptions(_BLOCK_TOKENS, invariant=True))
        return Verdict.EXACT
    return Verdict.UNKNOWN


def _make_miniature(small: dict[str, Any]) -> Skeleton:
    """Return the skeleton of a miniature with random weights."""
    skeleton = Skeleton(json.dumps(small, default=str), _CPU)
    specs, size_bytes = layout(skeleton.module)
    if size_bytes > _MAX_BYTES:
        raise UnsupportedModel(f"The miniature takes {size_bytes:,} bytes: one of its sizes was not reduced.")
    skeleton.bind(torch.zeros(size_bytes, dtype=torch.uint8), specs)
    randomize(skeleton.module)
    return skeleton


def _names_engine_attention(error: BaseException) -> bool:
    """Whether the message of an error names the engine's attention implementation or its mask type."""
    texts = (str(error), str(error.__cause__ or ""))
    return any(IMPLEMENTATION in text or MaskPattern.__name__ in text for text in texts)
