"""GPU architectures that kernels are built for, their limits, and the architecture of a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

__all__ = ["TARGETS", "Device", "Target", "device_of", "runs_triton", "target_of"]

log = logging.getLogger("hotswap")

# Imports triton, so it is imported on first use.
_TRIAL: Final = "hotswap.kernels.trial"


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture and its limits.

    Attributes:
        name: The name that compilers use, `sm_90` or `gfx942`.
        shared_bytes: Maximum shared memory of one program.
        warp_lanes: Lanes of a warp or wavefront.
        wide_mma: The tensor-core instruction of warp groups (Hopper, Blackwell), which is faster with the
            weights as the left operand; empty where there is none.
        mma: The tensor-core instruction of single warps; empty where Triton uses no tensor cores.
        flushes_subnormals: Whether matrix products treat 16-bit subnormals as zero.
    """

    name: str
    shared_bytes: int
    mma: str
    wide_mma: str = ""
    warp_lanes: int = 32
    flushes_subnormals: bool = False

    @property
    def is_amd(self) -> bool:
        """Whether this is an AMD GPU. Triton uses no asynchronous copies to shared memory there."""
        return self.name.startswith("gfx")


TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (
        Target("sm_70", 98_304, ""),
        Target("sm_75", 65_536, ""),
        Target("sm_80", 166_912, "HMMA"),
        Target("sm_86", 101_376, "HMMA"),
        Target("sm_89", 101_376, "HMMA"),
        Target("sm_90", 232_448, "HMMA", wide_mma="HGMMA"),
        Target("sm_100", 232_448, "HMMA", wide_mma="UTCHMMA"),
        Target("sm_120", 101_376, "HMMA"),
        Target("gfx90a", 65_536, "mfma", warp_lanes=64, flushes_subnormals=True),
        Target("gfx942", 65_536, "mfma", warp_lanes=64),
        Target("gfx950", 163_840, "mfma", warp_lanes=64),
    )
}


def target_of(name: str) -> Target | None:
    """Return the target of an architecture: itself, or the next older NVIDIA architecture in `TARGETS`.

    `None` for an NVIDIA GPU older than all targets, and for an AMD GPU that is not a target.
    """
    if name in TARGETS or not name.startswith("sm_"):
        return TARGETS.get(name)
    number = int("".join(filter(str.isdigit, name)))
    known = [int(other.removeprefix("sm_")) for other in TARGETS if other.startswith("sm_")]
    older = max((other for other in known if other <= number), default=None)
    return None if older is None else TARGETS[f"sm_{older}"]


@dataclass(frozen=True, slots=True)
class Device:
    """A device that kernels run on.

    Attributes:
        name: The product name; the key of tuning tables.
        target: Its architecture; `None` where no kernel runs.
        num_units: Number of streaming multiprocessors or compute units.
    """

    name: str
    target: Target | None
    num_units: int


@cache
def device_of(device: torch.device) -> Device:
    """Return the description of a torch device; the driver is queried once per device."""
    if device.type != "cuda":
        return Device(device.type, None, 1)
    cuda: Any = torch.cuda
    found: Any = cuda.get_device_properties(device)
    arch = f"sm_{found.major}{found.minor}"
    if torch.version.hip:
        arch = str(found.gcnArchName).partition(":")[0]
    return Device(str(found.name), target_of(arch), int(found.multi_processor_count))


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: a GPU with a target, or a CPU under Triton's interpreter.

    The first call for a GPU compiles and launches a kernel, and blocks meanwhile.
    """
    if not _has_triton():
        return False
    if device.type == "cuda":
        return device_of(device).target is not None and _launches(device)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _launches(device: torch.device) -> bool:
    """Whether a kernel can be compiled and launched: Triton needs a C compiler and files of the driver.

    PyTorch's CUDA wheels install Triton also on machines without these.
    """
    try:
        import_module(_TRIAL).launch(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as exc:  # errors of Triton, the compiler or the linker
        text = "no Triton kernel can be launched on %s, PyTorch operators are used instead: %s: %s"
        log.warning(text, device, type(exc).__name__, exc)
        return False
    return True


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
