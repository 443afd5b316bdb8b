"""One GPU divided among engines that run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from hotswap.backends.process.engine import ProcessEngine
from hotswap.backends.process.mps import Mps
from hotswap.backends.process.serving import StoreMaker
from hotswap.checks import check_strings
from hotswap.engine import Engine
from hotswap.errors import ConfigError
from hotswap.hardware import parse_bytes

__all__ = ["Share", "ShareMaker", "partition"]


_MPS = Mps()


class ShareMaker(Protocol):
    """Makes an engine that keeps to its share, as `TorchEngine` does; importable, since it is pickled."""

    def __call__(self, id: str, /, *, device: str, memory_bytes: int) -> Engine:
        """Return the engine, for weights and KV blocks of at most `memory_bytes`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one engine has of a GPU.

    Attributes:
        id: The name of the engine.
        memory_bytes: Device memory for weights and KV blocks, as `SharingAdvisor.parts` gives it.
        threads_percent: The most of the multiprocessors that it uses at once; see `Mps`.
    """

    id: str
    memory_bytes: int | str
    threads_percent: float = 100.0


def partition(
    device: str,
    shares: Sequence[Share],
    make_engine: ShareMaker,
    make_store: StoreMaker | None = None,
    *,
    memory_bytes: int | str,
    reserved_bytes: int | str = "1 GiB",
    mps: Mps | None = _MPS,
) -> list[ProcessEngine]:
    """Return an engine of each share, all on one device, each in a process of its own.

    Args:
        device: The device, as `"cuda:0"`.
        shares: What each engine has.
        make_engine: Makes an engine of a share: `TorchEngine`, or a `functools.partial` of it.
        make_store: As of `ProcessEngine`.
        memory_bytes: The memory of the device.
        reserved_bytes: What the CUDA context and the activations of each process take beside its share.
        mps: Where the daemon of MPS is, by which kernels of the engines run together; `None` has them take
            turns. Its `threads_percent` is that of each share.

    Raises:
        ConfigError: the shares do not fit, or two have one name.
    """
    check_strings(ConfigError, device=device)
    total, reserved = parse_bytes(memory_bytes, "memory_bytes"), parse_bytes(reserved_bytes, "reserved_bytes")
    sizes = {share.id: parse_bytes(share.memory_bytes, f"memory_bytes of {share.id!r}") for share in shares}
    if len(sizes) < len(shares):
        raise ConfigError("Two shares have one id; give each engine a name of its own.")
    if (wanted := sum(sizes.values()) + reserved * len(sizes)) > total:
        parts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise ConfigError(
            f"The shares of {device} ({parts} bytes, and {reserved:,} for each process) are {wanted:,} "
            f"bytes, and the device has {total:,}; give smaller shares, or fewer."
        )
    return [
        ProcessEngine(
            share.id,
            partial(make_engine, share.id, device=device, memory_bytes=sizes[share.id]),
            make_store,
            mps=None if mps is None else replace(mps, threads_percent=share.threads_percent),
        )
        for share in shares
    ]
