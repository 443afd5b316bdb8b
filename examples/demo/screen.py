"""Shows the fleet while it runs: drawn on a terminal, printed line by line elsewhere."""

import logging
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.demo.play import Play
from examples.demo.recital import Recital
from hotswap import FleetView, InstanceState, InstanceView, SwapRecord

__all__ = ["Screen", "color_of", "recitations", "short"]

FRAME_S: Final = 0.1
NUM_LINES: Final = 5
NUM_STREAMS: Final = 8
BAR_CELLS: Final = 12
COLORS: Final = {"llama": "cyan", "qwen3": "yellow", "mistral": "magenta"}
STATES: Final = {
    InstanceState.EMPTY: "dim",
    InstanceState.LOADING: "blue",
    InstanceState.SERVING: "green",
    InstanceState.DRAINING: "yellow",
    InstanceState.LOST: "bold red",
}


def color_of(model: str | None) -> str:
    """The color of a model."""
    return COLORS.get(short(model), "dim")


def short(model: str | None) -> str:
    """The first part of a model's name, for narrow columns."""
    return (model or "empty").partition("-")[0]


def recitations(number: int) -> str:
    """A number of recitations, as text."""
    return f"{number} recitation{'' if number == 1 else 's'}"


class _Teller(logging.Handler):
    """Shows what is logged as an event."""

    def __init__(self, screen: "Screen") -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.tell(record.getMessage())


class Screen:
    """Shows a play: `tell` and `tell_swap` add events, `draw` draws them and the fleet."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: deque[str] = deque(maxlen=NUM_LINES)

    def tell(self, line: str) -> None:
        """Add an event."""
        self._lines.append(line)
        if not self._console.is_terminal:
            self._console.print(line, highlight=False, soft_wrap=True)

    def tell_swap(self, record: SwapRecord) -> None:
        """Add a swap as an event."""
        evicted = f", {recitations(record.num_evicted)} moved on" if record.num_evicted else ""
        self.tell(
            f"  {record.instance}: {short(record.model_before)} → {short(record.model)} {record.outcome} "
            f"in {record.seconds * 1e3:.0f} ms{evicted}"
        )

    @contextmanager
    def telling_of_kernels(self) -> Generator[None]:
        """Tell when kernels are compiled: the first load on a machine takes longer by that."""
        log, handler = logging.getLogger("hotswap.kernels"), _Teller(self)
        level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)

    async def draw(self, play: Play) -> None:
        """Draw ten frames a second until cancelled, then clear them; return at once without a terminal."""
        if not self._console.is_terminal:
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(self._frame(play), refresh=True)
                await anyio.sleep(FRAME_S)

    def _frame(self, play: Play) -> RenderableType:
        """Draw the fleet as it is now."""
        view = play.fleet.view()
        return Group(
            Panel(Group(_instances(view), _waiting(view)), title="fleet", title_align="left"),
            Panel(
                Group(*_streams(play.recitals)), title="streams", title_align="left", height=NUM_STREAMS + 2
            ),
            Panel(Text("\n".join(self._lines)), title="events", title_align="left", height=NUM_LINES + 2),
        )


def _instances(view: FleetView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column, cells in (
        ("", 2),
        ("state", 8),
        ("model", 17),
        ("KV blocks", BAR_CELLS + 5),
        ("weights in", 10),
    ):
        table.add_column(column, no_wrap=True, min_width=cells)
    table.add_column("requests", no_wrap=True)
    for instance in view.instances:
        table.add_row(
            instance.id,
            Text(instance.state, STATES[instance.state]),
            _model(instance),
            _kv_use(instance),
            (view.store.tier_of(instance.model) or "") if instance.model else "",
            Text("●" * instance.num_requests, color_of(instance.model)),
        )
    return table


def _model(instance: InstanceView) -> Text:
    text = Text(short(instance.model), color_of(instance.model))
    if instance.target is not None:
        text.append(" → ", "dim").append(short(instance.target), color_of(instance.target))
    return text


def _kv_use(instance: InstanceView) -> Text:
    if not instance.num_kv_blocks:
        return Text("")
    use = 1 - instance.num_free_kv_blocks / instance.num_kv_blocks
    full = round(use * BAR_CELLS)
    return Text("█" * full, "green").append("░" * (BAR_CELLS - full), "dim").append(f" {use:4.0%}")


def _waiting(view: FleetView) -> Text:
    text = Text("\nqueue  ", "dim")
    for waiting in view.waiting:
        text.append("● ", color_of(waiting.model))
    return text


def _streams(recitals: list[Recital]) -> Iterator[Text]:
    """The last words of every recitation that runs, the oldest first."""
    for recital in [recital for recital in recitals if recital.pieces and not recital.ended][:NUM_STREAMS]:
        words = " ".join(recital.text[-80:].split())[-64:]
        seams = f" {len(recital.seams)}×moved " if recital.seams else ""
        yield (
            Text(f"{recital.hops[-1].instance} ", "dim", no_wrap=True, overflow="crop")
            .append(f"…{words}", color_of(recital.checkpoint.name))
            .append(seams, "bold")
        )
