"""Memory shared by the engine's process and its ranks, without a name, so that it ends with the processes."""

from __future__ import annotations

import mmap
import os
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from hotswap.backends.memory import map_shared

__all__ = ["SharedMemory"]


class SharedMemory:
    """A mapped file without a name; its memory is freed when no process has it open or mapped.

    Attributes:
        tensor: The memory as uint8.
    """

    def __init__(self, memory: mmap.mmap, file: int, size_bytes: int) -> None:
        self.file, self.size_bytes = file, size_bytes
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]

    @classmethod
    def make(cls, size_bytes: int) -> Self:
        """Return new zeroed memory; pages are allocated when they are first written.

        Raises:
            MemoryError: there is not enough memory.
        """
        return cls(*map_shared(max(size_bytes, 1)), size_bytes)

    @classmethod
    def adopt(cls, file: int, size_bytes: int) -> Self:
        """Map the memory of another process by its file."""
        return cls(mmap.mmap(file, max(size_bytes, 1)), file, size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the mapping lasts as long as a reference to `tensor` exists."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
            self.tensor = torch.empty(0, dtype=torch.uint8)
