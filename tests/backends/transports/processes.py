"""Processes at the other end of a link, and what a process has open."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
from anyio import to_thread

ROOT = Path(__file__).parents[3]
SELF = Path("/proc/self")


@asynccontextmanager
async def run_module(name: str, *arguments: str) -> AsyncGenerator[subprocess.Popen[str]]:
    """A process that runs a module beside this one, and is killed in the end."""
    process = subprocess.Popen(  # noqa: ASYNC220  # to start one takes a moment only
        [sys.executable, "-m", f"tests.backends.transports.{name}", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(process.communicate)


async def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await to_thread.run_sync(process.stdout.readline)).strip()


def open_files(of: Path = SELF) -> list[str]:
    """The open files of a process, sockets and pipes without their numbers."""
    found: list[str] = []
    for file in (of / "fd").iterdir():
        try:
            found.append(str(file.readlink()).split(":[")[0])
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sorted(found)


def num_mapped() -> int:
    return (SELF / "maps").read_text().count("memfd:hotswap")


@contextmanager
def nothing_stays() -> Generator[None]:
    gc.collect()
    before, mapped = open_files(), num_mapped()
    yield
    gc.collect()  # tracebacks of errors that were expected hold payloads
    assert open_files() == before
    assert num_mapped() == mapped
