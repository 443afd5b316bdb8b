"""Identifiers of a model's stored bytes, and fingerprints of weights together with their compute format."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from hotswap.backends.torch.linear import products_of
from hotswap.backends.torch.modeling import Skeleton
from hotswap.model import Manifest

__all__ = ["compute_format", "fingerprint_of", "weights_key"]


def weights_key(manifest: Manifest) -> Hashable | None:
    """Return a key that identifies a model's stored bytes; `None` if its store takes no checksums."""
    return (manifest.model, manifest.shards) if all(shard.checksum for shard in manifest.shards) else None


def compute_format(skeleton: Skeleton) -> str:
    """Return everything but the weights that the bits of a bound model depend on.

    The dtype that it computes in, whether linear weights stay quantized, and on a CPU the products that its
    instructions and the limit of packed weights lead to.
    """
    parts = [str(skeleton.dtype), "quantized" if skeleton.fp8_linears else ""]
    parts.append(products_of(skeleton.linears) if skeleton.linears else "")
    return " ".join(part for part in parts if part)


def fingerprint_of(manifest: Manifest, compute_format: str) -> str:
    """Return a hash of the weights and their compute format; empty if the store takes no checksums."""
    if weights_key(manifest) is None:
        return ""
    shards = [(shard.rank, shard.size_bytes, shard.checksum) for shard in manifest.shards]
    return hashlib.blake2b(
        repr((compute_format, manifest.config, shards)).encode(), digest_size=16
    ).hexdigest()
