"""`hotswap top`: a fleet in a terminal, drawn in place until `q`; printed once where there is no terminal."""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType

from hotswap.commands.outcome import say
from hotswap.commands.top_feed import Feed, FleetPicture, ServerLost, key_of
from hotswap.errors import BackendMissing, ConfigError

try:
    import termios
    import tty

    from rich.console import Console
    from rich.live import Live

    from hotswap.commands.top_screen import Size, drawn
except ModuleNotFoundError as exc:  # termios is of Unix
    raise BackendMissing(f"There is no {exc.name} here: pip install 'hotswap[top]', on Unix.") from exc

__all__ = ["top"]

# The columns of a snapshot that goes to no terminal, unless the variable COLUMNS says otherwise.
SNAPSHOT_COLUMNS = 140


def top(arguments: Namespace) -> None:
    """Show a fleet until `q` or a signal.

    A server that goes is waited for; the last picture stays meanwhile.

    Raises:
        ConfigError: the server does not answer at first, or refuses the key.
    """
    if not 0.1 <= arguments.interval <= 3600.0:
        raise ConfigError(f"--interval is {arguments.interval:g}; give 0.1 s to an hour.")
    feed = Feed(arguments.url, key_of(arguments.key))
    try:
        picture = feed.look()
        if sys.stdin.isatty() and sys.stdout.isatty() and not arguments.json:
            return Watch(feed, picture, arguments.interval).run()
        threading.Event().wait(arguments.interval)  # the rate of tokens needs two looks
        picture = feed.look()
        if arguments.json:
            say(json.dumps(asdict(picture), indent=2))
        else:
            width = int(os.environ.get("COLUMNS") or SNAPSHOT_COLUMNS)
            console = Console(width=width, force_terminal=False, highlight=False)
            with console.capture() as captured:
                console.print(drawn(picture, feed.url, Size(width)))
            say(captured.get().rstrip("\n"))
    finally:
        feed.close()


class Watch:
    """Draws a fleet again whenever there is news, the window has another size, or a key is pressed.

    One thread asks the server, so that keys are answered while it does not.

    Args:
        feed: Asks the server.
        first: What it said.
        interval_s: Seconds between two looks.
    """

    def __init__(self, feed: Feed, first: FleetPicture, interval_s: float) -> None:
        self._feed, self._interval_s = feed, interval_s
        self._picture, self._notice = first, ""
        self._news = queue.SimpleQueue[FleetPicture | ConfigError]()
        self._ends = threading.Event()

    def run(self) -> None:
        """Draw until `q`, Ctrl-C or SIGTERM.

        Raises:
            ConfigError: the server refuses the key, which it took before.
        """
        with waking() as (wake, woken), raw_keys():
            asking = threading.Thread(target=self._ask, args=(wake,), daemon=True)
            asking.start()
            try:
                with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
                    self._draw_until_quit(live, woken)
            finally:
                self._ends.set()
                asking.join(timeout=0.5)  # it may wait for the server, and holds nothing

    def _draw_until_quit(self, live: Live, woken: int) -> None:
        stdin = sys.stdin.fileno()
        while True:
            width, height = shutil.get_terminal_size()
            live.console.size = width, height
            live.update(drawn(self._picture, self._feed.url, Size(width, height), self._notice), refresh=True)
            ready, _, _ = select.select([stdin, woken], [], [])
            if stdin in ready and os.read(stdin, 64)[:1] in (b"q", b"Q", b"\x03", b"\x04", b""):
                return
            if woken in ready and bytes([signal.SIGTERM]) in os.read(woken, 64):
                return
            self._take_news()

    def _take_news(self) -> None:
        while not self._news.empty():
            found = self._news.get()
            if isinstance(found, FleetPicture):
                self._picture, self._notice = found, ""
            elif isinstance(found, ServerLost):
                self._notice = "connection lost, trying again"
            else:
                raise found

    def _ask(self, wake: int) -> None:
        """Ask the server until the end; what it says, or that it says nothing, is news."""
        while not self._ends.wait(self._interval_s):
            try:
                self._news.put(self._feed.look())
            except ConfigError as exc:
                self._news.put(exc)
            if not self._ends.is_set():
                os.write(wake, b"\0")


@contextmanager
def waking() -> Generator[tuple[int, int]]:
    """Lend the ends of a pipe into which signals write their numbers; a new size of the window, too."""

    def note(_number: int, _frame: FrameType | None) -> None:
        """Leave it to the pipe."""

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = {number: signal.signal(number, note) for number in (signal.SIGWINCH, signal.SIGTERM)}
    old = signal.set_wakeup_fd(wake)
    try:
        yield wake, woken
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(woken)


@contextmanager
def raw_keys() -> Generator[None]:
    """Have keys come as they are pressed, and unseen, while the block runs."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
