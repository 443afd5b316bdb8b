"""Processes that share KV blocks, led by lines on their standard input; see `test_shared_processes`.

Run as `python -m tests.backends.kv_stores.sharing DIRECTORY NUM_BLOCKS KIND`. It says a line for each of

    save NUMBER BLOCKS      put a prefix, saying how many of its tokens are stored
    find NUMBER BLOCKS      say how many of its tokens are found
    lease NUMBER BLOCKS     lease it, saying how many tokens are leased
    read                    read what was leased last, saying whether it is what was put
    release                 end all leases
    stop POINT              stop for ever at a point of the next put, saying "stopped"
    play SEED STEPS         save and lease at random, saying "played"
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
from anyio import to_thread

from hotswap.abc import KVLease, KVPages, KVPrefix, KVStore
from hotswap.backends.kv_stores import SharedKVStore, shared_log
from hotswap.backends.kv_stores.pages import PAGE_BYTES
from hotswap.backends.kv_stores.shared_directory import BlockFile, SharedDirectory
from hotswap.backends.kv_stores.shared_log import SharedLog
from tests.backends.kv_stores.blocks import layout

__all__ = ["BLOCK", "POINTS", "Process", "play", "prefix_of", "process", "read_of", "save_of"]

ROOT = Path(__file__).parents[3]
BLOCK = 2 * PAGE_BYTES + 100
SIZE = 3 * PAGE_BYTES  # which it takes
LAYOUT = replace(layout(BLOCK), computed_by="these tests")


def prefix_of(number: int, num_blocks: int) -> KVPrefix:
    """A prefix of whole blocks of four tokens."""
    return KVPrefix(LAYOUT, range(1000 * number, 1000 * number + 4 * num_blocks))


def content_of(prefix: KVPrefix, first: int, count: int) -> bytes:
    """Bytes that follow from all tokens up to the end of each block."""
    return b"".join((prefix.key(at) * (BLOCK // 32 + 1))[:BLOCK] for at in range(first, first + count))


async def save_of(store: KVStore, prefix: KVPrefix, *, step: int = 2) -> int:
    """Put what is missing of a prefix, and return how many of its tokens are stored then."""
    with store.put(prefix) as put:
        end = put.num_tokens // 4
        for at in range(put.first_block, end, step):
            count = min(step, end - at)
            data = memoryview(bytearray(content_of(prefix, at, count)))
            await put.write(KVPages(at, 4 * count, data))
        return put.num_tokens


async def read_of(lease: KVLease, prefix: KVPrefix) -> None:
    """Raise unless what is leased is what was put."""
    read = await lease.read(0, lease.num_tokens)
    assert bytes(read.data) == content_of(prefix, 0, lease.num_tokens // 4), "other bytes than were put"


async def play(store: KVStore, random: Random, num_steps: int) -> int:
    """Save, lease and read prefixes at random, some of which begin alike; return how often one was found."""
    num_found = 0
    with ExitStack() as leases:
        leased = list[tuple[KVLease, KVPrefix]]()
        for _ in range(num_steps):
            rest = prefix_of(random.randrange(1, 5), random.randrange(1, 6))
            prefix = KVPrefix(LAYOUT, (*prefix_of(0, 2).tokens, *rest.tokens))
            if random.random() < 0.5:
                await save_of(store, prefix)
            else:
                leased.append((leases.enter_context(store.lease(prefix)), prefix))
                num_found += leased[-1][0].num_tokens > 0
            for lease, of in leased:
                await read_of(lease, of)
            if len(leased) > 2:
                leased.pop(random.randrange(len(leased)))[0].release()
            view = store.view()
            assert view.capacity_bytes is not None
            assert view.used_bytes <= view.capacity_bytes, f"over full: {view}"
    return num_found


# ---------------------------------------------------------------------- stores with a fault


class LeasesForItself(SharedKVStore):
    """Leases are not seen by other processes."""

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[LeasesForItself]:
        async with super().__asynccontextmanager__():
            self._shared.directory.lease = _lease_nothing  # type: ignore[method-assign]
            yield self


class PublishesFirst(SharedKVStore):
    """Others are told of a block before it has its content."""

    late: Callable[[], None] | None = None

    async def fill(self, places: Any, data: memoryview) -> None:
        for at, place in enumerate(places):
            content = data[at * BLOCK : (at + 1) * BLOCK]
            place.crc, place.is_there = zlib.crc32(content), True
        self.late = partial(self._shared.directory.fill, list(places), data)

    @asynccontextmanager
    async def changing(self) -> AsyncGenerator[None]:
        async with super().changing():
            yield
        if self.late is not None:
            await to_thread.run_sync(self.late)


def _lease_nothing(number: int) -> None:
    return


KINDS = {kind.__name__: kind for kind in (SharedKVStore, LeasesForItself, PublishesFirst)}


# ---------------------------------------------------------------------- points at which one is killed


def _say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def _stop() -> None:
    _say("stopped")
    while True:
        signal.pause()


def _amid_content() -> None:
    write = SharedDirectory._write

    def half(self: SharedDirectory, number: int, data: memoryview) -> None:
        write(self, number, data[: len(data) // 2])
        _stop()

    SharedDirectory._write = half  # type: ignore[method-assign]


def _after_content() -> None:
    SharedLog.append = lambda self, ops: _stop()  # type: ignore[method-assign]


def _amid_log() -> None:
    def half(file: int, at: int, ops: Any) -> int:
        os.pwrite(file, b"\x50\0\0\0half of", at)
        _stop()
        return at

    shared_log._write = half


def _before_header() -> None:
    SharedLog._write_header = lambda self, *_: _stop()  # type: ignore[method-assign]


def _amid_eviction() -> None:
    free = SharedDirectory.free

    def once(self: SharedDirectory, number: int, as_number: int) -> None:
        free(self, number, as_number)
        _stop()

    SharedDirectory.free = once  # type: ignore[method-assign]


def _amid_put() -> None:
    fill = SharedDirectory.fill
    writes = list[int]()

    def second(self: SharedDirectory, blocks: list[BlockFile], data: memoryview) -> None:
        if writes:
            _stop()
        writes.append(1)
        fill(self, blocks, data)

    SharedDirectory.fill = second  # type: ignore[method-assign,assignment]


POINTS = {
    "content": _amid_content,
    "added": _after_content,
    "log": _amid_log,
    "header": _before_header,
    "eviction": _amid_eviction,
    "put": _amid_put,
}


# ---------------------------------------------------------------------- both ends


class Process:
    """The other end, for tests."""

    def __init__(self, directory: Path, num_blocks: int, kind: str) -> None:
        command = [sys.executable, "-m", "tests.backends.kv_stores.sharing", directory, num_blocks, kind]
        self._process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    async def said(self) -> str:
        """Wait for what it says next; "" once it has ended."""
        assert self._process.stdout is not None
        return (await to_thread.run_sync(self._process.stdout.readline)).strip()

    async def ask(self, line: str) -> str:
        """Have it do something, and return what it says."""
        self.tell(line)
        return await self.said()

    def kill(self) -> None:
        """Kill it, as the system does."""
        self._process.kill()
        self._process.wait()

    def leave(self) -> int:
        """Have it leave the store and end; return its status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        status = self._process.wait(60)
        self._process.stdout.close()
        return status


@contextmanager
def process(directory: Path, num_blocks: int, kind: str = "SharedKVStore") -> Generator[Process]:
    """Another process with the store of a directory."""
    other = Process(directory, num_blocks, kind)
    try:
        yield other
    finally:
        other.kill()
        other.leave()


async def _run(directory: Path, num_blocks: int, kind: str) -> None:
    leased = list[tuple[KVLease, KVPrefix]]()
    async with KINDS[kind](directory, num_blocks * SIZE) as store:
        _say("open")
        while words := (await to_thread.run_sync(sys.stdin.readline)).split():
            match words:
                case ["save", number, count]:
                    _say(await save_of(store, prefix_of(int(number), int(count))))
                case ["find", number, count]:
                    _say(store.lookup(prefix_of(int(number), int(count))))
                case ["lease", number, count]:
                    prefix = prefix_of(int(number), int(count))
                    leased.append((store.lease(prefix), prefix))
                    _say(leased[-1][0].num_tokens)
                case ["read"]:
                    try:
                        await read_of(*leased[-1])
                    except Exception as exc:
                        _say(f"{type(exc).__name__}: {exc}")
                    else:
                        _say("same")
                case ["release"]:
                    while leased:
                        leased.pop()[0].release()
                    _say("released")
                case ["stop", point]:
                    POINTS[point]()
                    _say("ready")
                case ["play", seed, steps]:
                    await play(store, Random(seed), int(steps))
                    _say("played")
                case _:
                    raise AssertionError(words)


if __name__ == "__main__":
    directory, num_blocks, kind = sys.argv[1:]
    anyio.run(_run, Path(directory), int(num_blocks), kind)
