"""A second process that shares host memory, led by lines on its standard input; see `test_shared_processes`.

Run as `python -m tests.backends.stores.sharing ROOT DIRECTORY BUDGET WORK MODEL`. It says on standard output
its progress, and continues with the next line of its input:

    fill    prefetch the model, saying "reading" when the `STOP`-th read from the disk is due, and at the end
            "filled", with the bytes that it has read
    lend    lend the model's rank 0, saying "lent <tier>", and "same" at the end if nothing has changed in it
    pin     pin the model, saying "pinned"
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
from anyio import to_thread

from hotswap import ModelId
from hotswap.backends.stores import NvmeStore, SharedStore, TieredStore
from hotswap.backends.stores.files import FileCalls
from tests.backends.stores.models import UNIT

STOP = 2


class _Led(FileCalls):
    """Waits for a line before its `STOP`-th read."""

    def __init__(self) -> None:
        self._num_reads = 0
        self.num_bytes = 0

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._num_reads += 1
        if self._num_reads == STOP:
            _say("reading")
            sys.stdin.readline()
        self.num_bytes += len(buffer)
        return super().read(fd, buffer, offset)


def _say(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


async def _run(root: Path, directory: Path, budget: int, work: str, model: ModelId) -> None:
    led = _Led()
    disk = NvmeStore(root, chunk_bytes=UNIT, threads=1, calls=led if work == "fill" else FileCalls())
    async with TieredStore(SharedStore(directory, budget), disk) as store:
        if work == "fill":
            await store.prefetch(model)
            _say(f"filled {led.num_bytes}")
        elif work == "lend":
            async with store.lend(await store.manifest(model)) as buffer:
                assert buffer is not None
                before = bytes(buffer.data)
                _say(f"lent {buffer.tier}")
                await to_thread.run_sync(sys.stdin.readline)
                _say("same" if bytes(buffer.data) == before else "changed")
        else:
            store.pin(model)
            _say("pinned")
            await to_thread.run_sync(sys.stdin.readline)


if __name__ == "__main__":
    root, directory, budget, work, model = sys.argv[1:]
    anyio.run(_run, Path(root), Path(directory), int(budget), work, ModelId(model))
