"""Shares of a GPU through NVIDIA's Multi-Process Service: kernels of several processes run together."""

from __future__ import annotations

import logging
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hotswap.errors import ConfigError, InstanceLost
from hotswap.hardware import parse_bytes
from hotswap.worker_threads import run_in_thread

__all__ = ["Mps"]

log = logging.getLogger("hotswap")

_PROGRAM: Final = "nvidia-cuda-mps-control"
_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mps:
    """A share of a GPU for a `ProcessEngine`; what was run of it on a GPU says `docs/remote.md`.

    Source: NVIDIA, "Multi-Process Service", sections on environment variables and provisioning. The limit of
    threads is one of the GPU's multiprocessors; the sum over processes may exceed 100. Memory is divided by
    the engines' own `memory_bytes`; `memory_bytes` here has the driver refuse what goes beyond it.

    Attributes:
        threads_percent: The most of the GPU's multiprocessors that kernels of the process use at once.
        memory_bytes: The most device memory that the process can allocate; `None` for no limit.
        device: The number of the GPU as the process sees it, for that limit.
        pipe_directory: Where the daemon is reached; one for all processes that share a GPU.
        log_directory: Where a daemon that is started writes its log.
    """

    threads_percent: float = 100.0
    memory_bytes: int | str | None = None
    device: int = 0
    pipe_directory: Path = Path("/tmp/nvidia-mps")  # NVIDIA's default
    log_directory: Path = Path("/tmp/nvidia-log")
    _size: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if not 0 < self.threads_percent <= 100:
            raise ConfigError(
                f"threads_percent is {self.threads_percent!r}; give more than 0 and at most 100."
            )
        if self.memory_bytes is not None:
            object.__setattr__(self, "_size", parse_bytes(self.memory_bytes, "memory_bytes"))

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process with this share."""
        env = {
            **self._directories,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{self.threads_percent:g}",
        }
        if self._size is not None:
            env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{self.device}={self._size >> 20}M"
        return env

    async def start(self) -> None:
        """Start the daemon unless it runs.

        A daemon that was started stays, since other processes may use it: `echo quit |
        nvidia-cuda-mps-control` ends it.

        Raises:
            InstanceLost: there is no such program, or it fails, with what it says.
        """
        if await self._call((), b"get_server_list\n") is None:
            return
        await run_in_thread(self._make_directories)
        if (failure := await self._call(("-d",))) is not None:
            if await self._call((), b"get_server_list\n") is None:
                return  # another process has started it meanwhile
            raise InstanceLost(
                f"The daemon of MPS cannot be started ({failure}); start it, or leave `mps` out."
            )
        log.info("The daemon of MPS was started, at %s.", self.pipe_directory)

    def _make_directories(self) -> None:
        for directory in (self.pipe_directory, self.log_directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def _directories(self) -> dict[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_directory),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log_directory),
        }

    async def _call(self, arguments: tuple[str, ...], commands: bytes = b"") -> str | None:
        """Run the daemon's program; return why it failed, `None` if it did not."""
        try:
            with anyio.fail_after(_LIMIT_S):
                # A daemon would keep a pipe open, so its output goes nowhere.
                ran = await anyio.run_process(
                    [_PROGRAM, *arguments],
                    input=commands,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, **self._directories},
                    check=False,
                )
        except FileNotFoundError:
            return f"there is no program {_PROGRAM!r}"
        except TimeoutError:
            return f"it did not answer in {_LIMIT_S:g} s"
        except OSError as exc:
            return str(exc)
        return None if ran.returncode == 0 else f"exit code {ran.returncode}"
