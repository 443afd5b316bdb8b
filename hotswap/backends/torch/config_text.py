"""The texts of models' configs: read as transformers' config objects, compared, and refused."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, cast

from transformers import CONFIG_MAPPING

from hotswap.backends.torch.miniature import COUNTS
from hotswap.errors import ShardCorrupt, UnsupportedModel

__all__ = ["canonical", "parse_config", "row_wise_rope"]

# RoPE variants whose factors depend in transformers on the greatest position of the row. Those of `dynamic`
# do so only beyond `max_position_embeddings`, the longest text that is served.
_ROW_WISE_ROPE = frozenset({"longrope", "su"})

# More than any model has: so many modules would take hours and all memory before weights are found missing.
_MOST_LAYERS = 10_000

# Keys of a config without effect on the modules and their results.
_IMMATERIAL = frozenset(
    {"_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "torch_dtype"}
    | {"transformers_version", "use_cache"}
)


def _parsed(config_text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(config_text, object_hook=_special_float)
    except ValueError as exc:
        raise ShardCorrupt(
            f"The model's config is not JSON ({exc}); download or convert the model again."
        ) from exc
    if not isinstance(parsed, dict):
        raise ShardCorrupt("The model's config is not a JSON object; download or convert the model again.")
    return cast("dict[str, Any]", parsed)


def _special_float(parsed: dict[str, Any]) -> Any:
    """Return an infinity or a NaN from transformers' JSON form, and other objects unchanged."""
    return float(parsed["__float__"]) if parsed.keys() == {"__float__"} else parsed


@lru_cache(maxsize=256)
def canonical(config_text: str) -> str:
    """Return a normal form of a config: equal texts mean equal modules with equal results.

    Raises:
        ShardCorrupt: the config is not a JSON object.
    """
    parsed = _parsed(config_text)
    return json.dumps({k: v for k, v in parsed.items() if k not in _IMMATERIAL}, sort_keys=True)


def parse_config(config_text: str) -> Any:
    """Return transformers' config object for a `config.json`.

    Raises:
        UnsupportedModel: transformers does not have the architecture or refuses the config, or the weights
            are quantized.
        ShardCorrupt: the config is not a JSON object.
    """
    parsed = _parsed(config_text)
    kind = parsed.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"transformers has no model type {kind!r}, and code from checkpoints is never run; "
            "update transformers or choose another model."
        )
    if parsed.get("quantization_config") is not None:
        raise UnsupportedModel(f"The {kind!r} checkpoint is quantized; convert the original weights.")
    if (layers := _num_layers(parsed)) > _MOST_LAYERS:
        raise UnsupportedModel(
            f"The config of the {kind!r} model says that it has {layers:,} layers; fetch it again."
        )
    configs: Any = CONFIG_MAPPING
    try:
        config: Any = configs[kind].from_dict(parsed)
    except Exception as exc:  # config classes raise errors of their own types
        raise UnsupportedModel(
            f"transformers refuses the config of the {kind!r} model ({exc}); fetch it again, or serve the "
            "model with another engine."
        ) from exc
    return config


def _num_layers(node: object) -> int:
    """Return the greatest number of layers of a config, at any depth."""
    if not isinstance(node, dict):
        return 0
    values = cast("dict[str, object]", node)
    own = (value for name in COUNTS if type(value := values.get(name)) is int)
    return max((*own, *map(_num_layers, values.values())), default=0)


def row_wise_rope(config_text: str) -> str:
    """Return a RoPE variant of a config whose factors depend on the row; "" if it has none."""
    return min(_ropes(_parsed(config_text)) & _ROW_WISE_ROPE, default="")


def _ropes(node: object) -> set[str]:
    """Return all RoPE types of a config, at any depth: some configs have one per kind of layer."""
    found: set[str] = set()
    if isinstance(node, dict):
        for key, value in cast("dict[str, object]", node).items():
            if key in {"rope_type", "type"} and isinstance(value, str):
                found.add(value)
            found |= _ropes(value)
    return found
