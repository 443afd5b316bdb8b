"""Memory that the engine's process and its ranks share: nameless, so that nothing outlives the processes."""

from __future__ import annotations

import mmap
import os
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from hotswap.backends.memory import nameless_file

__all__ = ["SharedMemory"]


class SharedMemory:
    """A file without a name, mapped; its pages go with the last process that has it open or mapped."""

    def __init__(self, file: int, size_bytes: int) -> None:
        self.file, self.size_bytes = file, size_bytes
        memory = mmap.mmap(file, max(size_bytes, 1))
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]

    @classmethod
    def make(cls, size_bytes: int) -> Self:
        """Return new memory, all zeros; pages exist once they are written to.

        Raises:
            MemoryError: there is no room for it.
        """
        try:
            file = nameless_file()
            try:
                os.ftruncate(file, max(size_bytes, 1))
                return cls(file, size_bytes)
            except BaseException:
                os.close(file)
                raise
        except (OSError, ValueError) as exc:
            raise MemoryError(f"There is no room for {size_bytes:,} bytes of shared memory.") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it; the mapping lasts as long as somebody looks at `tensor`."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
            self.tensor = torch.empty(0, dtype=torch.uint8)
