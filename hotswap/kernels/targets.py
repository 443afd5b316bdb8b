"""The kinds of GPU that kernels are built for, what they can do, and which one a device is."""

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

# Imports triton, and so is imported when it is first wanted.
_TRIAL: Final = "hotswap.kernels.trial"


@dataclass(frozen=True, slots=True)
class Target:
    """What a kernel may count on.

    Attributes:
        name: As compilers call it, `sm_90` or `gfx942`.
        shared_bytes: The most shared memory that one program may take.
        warp_lanes: Lanes that run in step.
        wide_mma: The instruction of tensor cores that takes its left operand from many warps, or from memory
            of their own, and so wants the weights on the left; empty where there is none.
        mma: The instruction that Triton multiplies matrices with otherwise; empty where it reaches no
            tensor cores.
        flushes_subnormals: Whether matrix products take 16-bit subnormals for zeros.
    """

    name: str
    shared_bytes: int
    mma: str
    wide_mma: str = ""
    warp_lanes: int = 32
    flushes_subnormals: bool = False

    @property
    def is_amd(self) -> bool:
        """Whether it is one of AMD's, which have no asynchronous copies to shared memory that Triton uses."""
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
    """Return the target that programs for `name` are like: itself, or the next older one of NVIDIA's.

    `None` for a GPU that is older than all of these, or one of AMD's that is not among them.
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
        name: As its maker calls it; tables are kept by it.
        target: What it is built for; `None` where no kernel is.
        num_units: How many programs it begins at once: streaming multiprocessors, compute units.
    """

    name: str
    target: Target | None
    num_units: int


@cache
def device_of(device: torch.device) -> Device:
    """Return what a torch device is; asked of the driver once."""
    if device.type != "cuda":
        return Device(device.type, None, 1)
    cuda: Any = torch.cuda
    found: Any = cuda.get_device_properties(device)
    arch = f"sm_{found.major}{found.minor}"
    if torch.version.hip:
        arch = str(found.gcnArchName).partition(":")[0]
    return Device(str(found.name), target_of(arch), int(found.multi_processor_count))


def runs_triton(device: torch.device) -> bool:
    """Whether kernels can be launched there: a GPU with a target, or a CPU under Triton's interpreter.

    The first call for a GPU compiles and launches a kernel, so make it where it may block.
    """
    if not _has_triton():
        return False
    if device.type == "cuda":
        return device_of(device).target is not None and _launches(device)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _launches(device: torch.device) -> bool:
    """Whether a kernel can be compiled: Triton asks for a C compiler and for what the driver comes with.

    Triton comes with PyTorch's wheels for CUDA, and so is found on machines that have neither.
    """
    try:
        import_module(_TRIAL).launch(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as exc:  # of Triton, of a compiler, of a linker: whatever is missing
        text = "no kernel can be launched on %s, PyTorch computes instead: %s: %s"
        log.warning(text, device, type(exc).__name__, exc)
        return False
    return True


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
