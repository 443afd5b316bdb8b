"""`hotswap top` in a terminal of its own, over a server that comes and goes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyte
import pytest
from rich.console import Console

from hotswap import Fleet, Sampling
from hotswap.backends.sim import DeviceProfile, SimEngine
from hotswap.commands.top_feed import Feed, FleetPicture
from hotswap.commands.top_screen import Size, drawn, shares
from hotswap.door import ApiKey, create_app, listen
from tests.runtime.support import Idle, engine_of, models, sim_fleet, store_of

ROOT = Path(__file__).parents[1]
KEY = "the-key-of-an-operator"
PATIENCE_S = 40.0
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202emodel\x9b31m"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "hotswap.cli", "top", "--interval", "0.1", *words]


async def run(*words: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run it where there is no terminal."""
    return await anyio.run_process(
        command(*words), check=False, cwd=ROOT, stdin=subprocess.DEVNULL, env={**os.environ, **variables}
    )


class Terminal:
    """A program in a terminal, and what can be read there."""

    def __init__(self, process: subprocess.Popen[bytes], leader: int, width: int, height: int) -> None:
        self.process, self._leader = process, leader
        self._screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> Sequence[str]:
        """The lines, without spaces at their ends."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def until(self, holds: Callable[[str], bool]) -> None:
        """Read until something holds of the text."""
        with anyio.move_on_after(PATIENCE_S):
            while not holds(self.text):
                await anyio.wait_readable(self._leader)
                self._stream.feed(os.read(self._leader, 65_536))
            return
        raise AssertionError(f"It does not come to hold of:\n{self.text}")

    def press(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def resize(self, width: int, height: int) -> None:
        self._screen.resize(height, width)
        self._screen.reset()
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    async def ended(self) -> int:
        """Read to the end of the program, and return its status."""
        with anyio.fail_after(PATIENCE_S):
            while True:
                await anyio.wait_readable(self._leader)
                try:
                    data = os.read(self._leader, 65_536)
                except OSError:  # Linux's way to say that the other end is closed
                    break
                if not data:
                    break
                self._stream.feed(data)
            return await anyio.to_thread.run_sync(self.process.wait)


@asynccontextmanager
async def terminal(*words: str, width: int = 80, height: int = 24) -> AsyncGenerator[Terminal]:
    """Run it in a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(  # noqa: ASYNC220 - anyio's takes no session, and starts no slower
        command(*words),
        cwd=ROOT,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        env={**given, "TERM": "xterm-256color"},
    )
    os.close(follower)
    try:
        yield Terminal(process, leader, width, height)
    finally:
        process.kill()
        process.wait()
        os.close(leader)


@asynccontextmanager
async def server(fleet: Fleet, *, key: str = "", port: int = 0) -> AsyncGenerator[str]:
    keys = [ApiKey(secret=key, admin=True)] if key else []
    async with fleet, listen(create_app(fleet, keys=keys), port=port) as taken:
        yield f"http://127.0.0.1:{taken}"


async def test_a_fleet_shows_as_it_changes_and_q_leaves_the_terminal_as_it_was() -> None:
    slow = DeviceProfile(load_bytes_per_s=(1 << 20) / 600, memory_bytes=64 << 20)  # a load takes ten minutes
    engines = [engine_of("e0"), SimEngine("e1", slow, kv_blocks=512)]
    fleet = sim_fleet("llama", "qwen", engines=engines, scheduler=Idle())
    async with server(fleet) as url, terminal(url) as seen, anyio.create_task_group() as tasks:
        await seen.until(lambda text: "0 of 2 serve" in text and "q quits" in text)
        await fleet.swap("e0", to="llama", reason="to see it")
        await seen.until(lambda text: "1 of 2 serve" in text and "to see it" in text)
        tasks.start_soon(lambda: fleet.swap("e1", to="qwen"))
        await seen.until(lambda text: "loading" in text)
        tasks.start_soon(fleet.generate, "qwen", [1], Sampling(max_tokens=4))
        tasks.start_soon(fleet.generate, "llama", [1], Sampling(max_tokens=3000, ignore_eos=True))
        await seen.until(lambda text: "1 running · 1 waiting" in text)
        engines[0].lose("its cable was pulled", for_good=True)
        await seen.until(lambda text: "its cable was pulled" in text)
        seen.press("q")
        assert await seen.ended() == 0
        tasks.cancel_scope.cancel()


async def test_it_fits_the_window_whatever_its_size() -> None:
    names = [f"model-{n:03d}" for n in range(90)]
    fleet = sim_fleet(*names, engines=40, scheduler=Idle())
    async with server(fleet) as url, terminal(url) as seen:
        for n in range(15):
            await fleet.swap(f"e{n}", to=names[n])
        await seen.until(lambda text: "15 of 40 serve" in text and "q quits" in text)
        assert seen.lines[0].startswith("hotswap")
        assert seen.lines[-1].startswith("q quits")
        for head in ("INSTANCE", "MODEL", "TIME", "more"):
            assert head in seen.text
        for width, height in ((120, 40), (60, 15), (80, 24)):
            seen.resize(width, height)
            await seen.until(lambda text: text.endswith("q quits") and text.startswith("hotswap"))
        seen.process.send_signal(signal.SIGTERM)
        assert await seen.ended() == 0


async def test_it_goes_on_after_a_restart_of_its_server() -> None:
    first = sim_fleet("llama", engines=1, scheduler=Idle())
    second = sim_fleet("qwen", engines=3, scheduler=Idle())
    async with AsyncExitStack() as stack:
        async with server(first) as url:
            seen = await stack.enter_async_context(terminal(url))
            await seen.until(lambda text: "0 of 1 serve" in text)
            await first.close_gracefully()
            await seen.until(lambda text: "closing" in text)
        await seen.until(lambda text: "connection lost" in text and "llama" in text)
        async with server(second, port=int(url.rpartition(":")[2])):
            await seen.until(lambda text: "0 of 3 serve" in text and "lost" not in text)
            assert "llama" not in seen.text
            seen.press("q")
            assert await seen.ended() == 0


async def test_errors_say_what_to_do() -> None:
    fleet = sim_fleet("llama", engines=1, scheduler=Idle())
    async with server(fleet, key=KEY) as url:
        for words in ((url,), (url, "--key", "the-key-of-a-stranger")):
            done = await run(*words, HOTSWAP_KEY="")
            assert (done.returncode, done.stdout) == (2, b"")
            assert b"refuses the key" in done.stderr
            assert b"--key" in done.stderr
        done = await run(url, "--key", "env:THE_KEY", THE_KEY=KEY)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"llama" in done.stdout
        assert (await run(url, HOTSWAP_KEY=KEY)).returncode == 0
    for words, told in (
        ((url,), b"does not answer"),
        (("ftp://x",), b"no address"),
        (("http://x:y",), b"no address"),
        ((url, "--key", "env:NONE_OF_THESE"), b"NONE_OF_THESE"),
        ((url, "--interval", "0"), b"--interval"),
    ):
        done = await run(*words)
        assert done.returncode == 2
        assert told in done.stderr
        assert b"Traceback" not in done.stderr


async def test_without_a_terminal_it_is_printed_once_and_whole() -> None:
    names = [f"model-{n:03d}" for n in range(60)]
    fleet = sim_fleet(*names, engines=30, scheduler=Idle())
    async with server(fleet) as url:
        await fleet.swap("e7", to="model-042")
        done = await run(f"{url}/ui")
        text = done.stdout.decode()
        assert done.returncode == 0
        assert "\x1b" not in text
        assert all(name in text for name in (*names, "e7", "e29"))
        told = json.loads((await run(url, "--json")).stdout)
        assert {row["id"]: row["model"] for row in told["instances"]}["e7"] == "model-042"


def test_names_cannot_control_a_terminal() -> None:
    row: dict[str, Any] = {
        "id": HOSTILE,
        "state": "SERVING",
        "model": HOSTILE,
        "target": None,
        "swapping": False,
    }
    row |= {"draining": False, "lost_because": "", "num_requests": 0, "max_requests": 1, "num_kv_blocks": 0}
    row |= {"num_free_kv_blocks": 0, "weight_bytes": 0, "memory_bytes": 0}
    model = {"id": HOSTILE, "num_running": 0, "num_waiting": 0, "oldest_waiting_s": None, "weight_bytes": 0}
    swap = {
        "instance": HOSTILE,
        "model_before": HOSTILE,
        "model": HOSTILE,
        "reason": HOSTILE,
        "error": HOSTILE,
    }
    picture = FleetPicture(
        now_s=0.0,
        is_open=True,
        num_running=0,
        num_waiting=0,
        tokens_per_s=0.0,
        instances=[row],
        models=[{**model, "tiers": {HOSTILE: 1}}],
        tiers=[{"name": HOSTILE, "node": "", "used_bytes": 1, "capacity_bytes": 2, "queued_bytes": 0}],
        swaps=[{**swap, "started_s": 0.0, "seconds": 1.0, "outcome": "done"}],
    )
    console = Console(width=200, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(drawn(picture, HOSTILE, Size(200)))
    text = captured.get()
    assert "model" in text
    assert [char for char in text if not char.isprintable() and char != "\n"] == []


@pytest.mark.parametrize(
    ("wanted", "lines", "given"),
    [
        ([3, 3, 3], 9, [3, 3, 3]),
        ([1, 90, 2], 10, [1, 7, 2]),
        ([40, 90, 12], 12, [4, 4, 4]),
        ([5, 5, 5], 1, [1, 0, 0]),
        ([5, 5], 0, [0, 0]),
    ],
)
def test_lines_are_shared_out_fairly_and_wholly(wanted: list[int], lines: int, given: list[int]) -> None:
    assert shares(wanted, lines) == given


async def test_tokens_a_second_are_those_that_were_given() -> None:
    fleet = sim_fleet("llama", engines=1, scheduler=Idle(), store=store_of("llama"), models=models("llama"))
    async with server(fleet) as url:
        await fleet.swap("e0", to="llama")
        feed = Feed(url, "")
        await anyio.to_thread.run_sync(feed.look)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.generate, "llama", [1], Sampling(max_tokens=3000, ignore_eos=True))
            with anyio.fail_after(PATIENCE_S):
                while not (picture := await anyio.to_thread.run_sync(feed.look)).rates:  # noqa: ASYNC110
                    await anyio.sleep(0.3)  # the server looks at its fleet four times a second
            assert set(picture.rates) == {"llama"}
            assert picture.tokens_per_s == picture.rates["llama"] > 0.0
            tasks.cancel_scope.cancel()
        feed.close()
