"""Finding out that a checkpoint is quantized, or generates no text, before its weights are read as plain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from hotswap.backends.fields import parse_object
from hotswap.errors import UnsupportedModel

__all__ = ["PLAIN_DTYPES", "check_left_over", "check_plain", "check_plain_dtype", "sections_of"]

PLAIN_DTYPES: Final = frozenset(("F16", "BF16", "F32", "F64"))
_SECTIONS: Final = ("quantization_config", "compression_config", "quantization")
_PACKED: Final = re.compile(
    r"scale|zero_?point|qweight|qzeros|g_idx|absmax|quant_(state|map)|SCB$|weight_(packed|shape|format)$"
)
_NOT_GENERATING: Final = re.compile(
    r"For(MaskedLM|PreTraining|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)$"
)
_ENCODERS: Final = re.compile(r"(Bert|Roberta|Electra|MPNet|Deberta|DebertaV2|Albert|ModernBert)Model$")


def check_plain(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that says that it is quantized, or that it is no language model. Blocking.

    A section that is `null` says nothing.

    Raises:
        UnsupportedModel: naming what says so, and what to do instead.
        ShardCorrupt: a file that tells of quantization is no JSON object.
    """
    for section, found in sections_of(config):
        method = cast("Mapping[str, Any]", found).get("quant_method") if isinstance(found, dict) else None
        raise _quantized(directory, f"{section!r} of its config" + (f" is {method!r}" if method else ""))
    path = directory / "hf_quant_config.json"
    if path.is_file():
        told = parse_object(path.read_bytes(), path, remedy="Fetch the checkpoint again.").get("quantization")
        algorithm = cast("Mapping[str, Any]", told).get("quant_algo") if isinstance(told, dict) else told
        if algorithm:
            raise _quantized(directory, f"its hf_quant_config.json says {algorithm!r}")
    if (directory / "quantize_config.json").is_file():
        raise _quantized(directory, "it has a quantize_config.json")
    architectures: object = config.get("architectures")
    for name in cast("list[object]", architectures) if isinstance(architectures, list) else []:
        if _NOT_GENERATING.search(str(name)) or _ENCODERS.search(str(name)):
            raise UnsupportedModel(
                f"The checkpoint in {str(directory)!r} is a {name}, which generates no text; give one of a "
                "causal language model."
            )


def sections_of(config: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the sections of a config that tell of quantization, with their names; `null` tells nothing."""
    text: object = config.get("text_config")
    empty: dict[str, Any] = {}
    parts = (config, cast("dict[str, Any]", text) if isinstance(text, dict) else empty)
    return [(name, part[name]) for name in _SECTIONS for part in parts if part.get(name) is not None]


def check_left_over(directory: Path, names: Iterable[str]) -> None:
    """Refuse tensors that no layer takes and that scale or unpack others.

    Raises:
        UnsupportedModel: naming one of them.
    """
    for name in sorted(names):
        if _PACKED.search(name):
            raise _quantized(directory, f"it has the tensor {name!r}, which no layer takes")


def check_plain_dtype(directory: Path, name: str, dtype: str) -> None:
    """Refuse a tensor of integers or 8 bits for a floating-point parameter; `dtype` is safetensors' name.

    Raises:
        UnsupportedModel: naming it.
    """
    if dtype not in PLAIN_DTYPES:
        raise _quantized(
            directory, f"its tensor {name!r} is of dtype {dtype}, for a floating-point parameter"
        )


def _quantized(directory: Path, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The checkpoint in {str(directory)!r} is quantized ({why}), and the layout 'modules' takes plain "
        "weights. Import it as it is, by `Model(..., layout='checkpoint')` or `hotswap store add --layout "
        "checkpoint`, for a VllmEngine; or give the original, or a GGUF file for a LlamaCppEngine."
    )
