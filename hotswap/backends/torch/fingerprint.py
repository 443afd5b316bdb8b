"""Identifiers of a model's stored bytes, and of all else that what it computes depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import torch

from hotswap.backends.torch.linear import products_of
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.versions import versions_of
from hotswap.model import Manifest

__all__ = ["compute_format", "computed_by", "fingerprint_of", "weights_key"]


def weights_key(manifest: Manifest) -> Hashable | None:
    """Return a key that identifies a model's weights; `None` if its store takes no checksums.

    The config is part of it: it decides which of the stored tensors the model has.
    """
    known = all(shard.checksum for shard in manifest.shards)
    return (manifest.model, manifest.shards, manifest.config) if known else None


def compute_format(skeleton: Skeleton) -> str:
    """Return everything but the weights that the bits of a bound model depend on.

    The dtype that it computes in, whether linear weights stay quantized, and on a CPU the products that its
    instructions and the limit of packed weights lead to.
    """
    parts = [str(skeleton.dtype), "quantized" if skeleton.fp8_linears else ""]
    parts.append(products_of(skeleton.linears) if skeleton.linears else "")
    return " ".join(part for part in parts if part)


def computed_by(device: torch.device) -> str:
    """Return what the bits of a bound model depend on beside the model: libraries and a device."""
    versions = versions_of("hotswap", "torch", "transformers", "triton", "numba", "llvmlite")
    if device.type != "cuda":
        return f"{versions} on {device.type} {torch.backends.cpu.get_cpu_capability()}"
    capability = torch.cuda.get_device_capability(device)
    return f"{versions} on {torch.cuda.get_device_name(device)} {capability}, CUDA {torch.version.cuda}"


def fingerprint_of(manifest: Manifest, compute_format: str) -> str:
    """Return a hash of the weights and their compute format; empty if the store takes no checksums."""
    if weights_key(manifest) is None:
        return ""
    shards = [(shard.rank, shard.size_bytes, shard.checksum) for shard in manifest.shards]
    return hashlib.blake2b(
        repr((compute_format, manifest.config, shards)).encode(), digest_size=16
    ).hexdigest()
