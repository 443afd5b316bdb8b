"""Identifiers of a model's stored bytes, and fingerprints of weights together with their compute format."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from hotswap.backends.torch.modeling import Skeleton
from hotswap.model import Manifest

__all__ = ["compute_format", "fingerprint_of", "weights_key"]


def weights_key(manifest: Manifest) -> Hashable | None:
    """Return a key that identifies a model's stored bytes; `None` if its store takes no checksums."""
    return (manifest.model, manifest.shards) if all(shard.checksum for shard in manifest.shards) else None


def compute_format(skeleton: Skeleton) -> str:
    """Return the dtype that a bound model computes in, marked if linear weights stay quantized."""
    return f"{skeleton.dtype} quantized" if skeleton.fp8_linears else str(skeleton.dtype)


def fingerprint_of(manifest: Manifest, compute_format: str) -> str:
    """Return a hash of the weights and their compute format; empty if the store takes no checksums."""
    if weights_key(manifest) is None:
        return ""
    shards = [(shard.rank, shard.size_bytes, shard.checksum) for shard in manifest.shards]
    return hashlib.blake2b(
        repr((compute_format, manifest.config, shards)).encode(), digest_size=16
    ).hexdigest()
