"""What distinguishes loaded weights, and the way in which they are computed with, from any others."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from hotswap.backends.torch.modeling import Skeleton
from hotswap.model import Manifest

__all__ = ["fingerprint_of", "identity", "way_of"]


def identity(manifest: Manifest) -> Hashable | None:
    """Return what distinguishes a model's bytes from any others; `None` if its store takes no checksums."""
    return (manifest.model, manifest.shards) if all(shard.checksum for shard in manifest.shards) else None


def way_of(skeleton: Skeleton) -> str:
    """Say how the weights that are bound are computed with."""
    return f"{skeleton.dtype} codes" if skeleton.coded else str(skeleton.dtype)


def fingerprint_of(manifest: Manifest, way: str) -> str:
    """Return what stands for the weights and the way in which they are computed with."""
    if identity(manifest) is None:
        return ""
    shards = [(shard.rank, shard.size_bytes, shard.checksum) for shard in manifest.shards]
    return hashlib.blake2b(repr((way, manifest.config, shards)).encode(), digest_size=16).hexdigest()
