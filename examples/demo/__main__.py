"""Three models on two engines, which swap them while they recite: `make demo`.

The first run trains the models and converts them, in a minute; later runs find them in `.cache/demo`. It
exits with status 1 if a character of any text was wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console

from examples.demo.checkpoints import Checkpoint, make_checkpoints
from examples.demo.fleet import fill_store, make_engines, make_fleet
from examples.demo.picture import WIDTH, save_picture
from examples.demo.play import Play
from examples.demo.report import print_report
from examples.demo.screen import Screen
from hotswap.testing import SpanRecorder

CACHE = Path(__file__).parents[2] / ".cache" / "demo"


async def perform(
    checkpoints: Sequence[Checkpoint], store: Path, *, console: Console, readers: int, crowd: int
) -> tuple[Play, SpanRecorder]:
    """Perform the play on a new fleet, and show it while it runs."""
    screen, spans, engines = Screen(console), SpanRecorder(), make_engines()
    fleet = make_fleet(engines, checkpoints, store, spans=spans, on_swap=screen.tell_swap)
    play = Play(
        fleet=fleet, engines=engines, checkpoints=checkpoints, tell=screen.tell, readers=readers, crowd=crowd
    )
    with screen.telling_of_kernels():
        async with fleet, anyio.create_task_group() as tasks:
            tasks.start_soon(screen.draw, play)
            await play.perform()
            tasks.cancel_scope.cancel()
    return play, spans


def run(cache: Path, *, console: Console, readers: int = 4, crowd: int = 24) -> int:
    """Run the demo from beginning to end; return its exit status."""
    checkpoints = make_checkpoints(cache / "checkpoints", console=console)
    store = cache / "store"
    fill_store(checkpoints, store, console=console)
    play, spans = anyio.run(
        lambda: perform(checkpoints, store, console=console, readers=readers, crowd=crowd)
    )
    print_report(console, play, spans)
    return 0 if play.passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models are kept between runs")
    parser.add_argument("--readers", type=int, default=4, help="requests at once in each act")
    parser.add_argument("--crowd", type=int, default=24, help="requests one after another in the last act")
    parser.add_argument("--picture", type=Path, help="write a picture of what is printed, as SVG")
    args = parser.parse_args()
    # A pipe has no width; the table of swaps needs this much.
    drawn = sys.stdout.isatty() and args.picture is None
    console = Console(
        width=None if drawn else WIDTH,
        force_terminal=None if drawn else False,
        record=args.picture is not None,
    )
    try:
        status = run(args.cache, console=console, readers=args.readers, crowd=args.crowd)
        if args.picture is not None:
            save_picture(console, args.picture)
        return status
    except KeyboardInterrupt:
        return 130  # what a shell calls a command that was interrupted


if __name__ == "__main__":
    sys.exit(main())
