"""The sizes of a model's adapters and KV cache, from its shape and never from its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from hotswap.errors import ConfigError
from hotswap.model import Manifest

__all__ = ["ATTENTION", "ModelShape"]

ATTENTION = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a decoder that determine the sizes of adapters and KV cache.

    Attributes:
        hidden_size: The width of the residual stream.
        num_layers: The number of attention layers, all of one shape.
        num_heads: The number of query heads.
        num_kv_heads: The number of key and value heads; fewer than `num_heads` with grouped queries.
        head_dim: The width of one head.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give 1 or more.")

    @classmethod
    def of(cls, manifest: Manifest) -> ModelShape:
        """Read the shape from a manifest's config.

        Raises:
            ConfigError: the config is missing, or names its sizes differently.
        """
        config = _config(manifest)
        sizes = {
            name: config.get(name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        }
        missing = [name for name, size in sizes.items() if not isinstance(size, int)]
        if missing:
            raise ConfigError(
                f"The config of {manifest.model!r} has no {missing[0]}; make a ModelShape by hand."
            )
        hidden_size, num_layers, num_heads = (cast("int", size) for size in sizes.values())
        num_kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
        return cls(
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads if isinstance(num_kv_heads, int) else num_heads,
            head_dim=head_dim if isinstance(head_dim, int) else hidden_size // num_heads,
        )

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return `(d_in, d_out)` of each projection of an attention layer, by name."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q": (self.hidden_size, q_size),
            "k": (self.hidden_size, kv_size),
            "v": (self.hidden_size, kv_size),
            "o": (q_size, self.hidden_size),
        }

    def adapter_bytes(
        self, rank: int, *, targets: tuple[str, ...] = ATTENTION, bytes_per_weight: int = 2
    ) -> int:
        """Return the size of a low-rank adapter on these projections of every layer.

        One of a projection from `d_in` to `d_out` has A of `rank * d_in` and B of `d_out * rank` weights.

        Raises:
            ConfigError: a target is none of q, k, v and o, or the rank is under 1.
        """
        projections = self.projections()
        if rank < 1:
            raise ConfigError(f"rank is {rank!r}; give 1 or more.")
        if unknown := sorted(set(targets) - set(projections)):
            raise ConfigError(f"targets name {unknown[0]!r}; give some of {', '.join(projections)}.")
        each = sum(sum(projections[target]) for target in targets)
        return rank * each * self.num_layers * bytes_per_weight

    def kv_bytes_per_token(self, *, bytes_per_value: int = 2) -> int:
        """Return the bytes of one token in the KV cache: a key and a value of each layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def _config(manifest: Manifest) -> Mapping[str, object]:
    try:
        config: object = json.loads(manifest.config)
    except ValueError as exc:
        raise ConfigError(
            f"The manifest of {manifest.model!r} has no config; make a ModelShape by hand."
        ) from exc
    if not isinstance(config, dict):
        raise ConfigError(f"The config of {manifest.model!r} is no JSON object; make a ModelShape by hand.")
    return cast("Mapping[str, object]", config)
