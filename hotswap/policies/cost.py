"""What moves cost: how long each way takes a request, by what was seen of moves so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotswap.action import MigrationRecord, MigrationWay
from hotswap.errors import ConfigError
from hotswap.migration import MoveChoice, Mover, MoveView

__all__ = ["Line", "MoveCosts"]


@dataclass(slots=True)
class Line:
    """`slope * x + intercept`, fitted by least squares in which older points count less and less.

    Begins as given, as if it had been seen at `x` of 0 and `span`. Neither coefficient is ever below zero:
    nothing takes less time for being more.

    Attributes:
        slope: Seconds for one more.
        intercept: Seconds for none.
        span: How far apart the two points lie that it begins with.
        memory: What share of a point's weight is left when the next comes.
        mean_error: How far off it was, relative, on points it had not seen yet; the mean of recent ones.
    """

    slope: float
    intercept: float
    span: float = 1.0
    memory: float = 0.95
    mean_error: float = 0.0
    _sums: list[float] = field(default_factory=list[float], repr=False)

    def __post_init__(self) -> None:
        if not (self.slope >= 0 and self.intercept >= 0 and self.span > 0 and 0 < self.memory < 1):
            raise ConfigError(f"{self!r} is no line of costs; give numbers of 0 and more.")
        self._sums = [0.0] * 5
        for x in (0.0, self.span):
            self._add(x, self.slope * x + self.intercept)

    def at(self, x: float) -> float:
        """Return what is expected at `x`."""
        return self.slope * x + self.intercept

    def learn(self, x: float, seconds: float) -> None:
        """See what it was."""
        if seconds > 0:
            error = abs(self.at(x) - seconds) / seconds
            self.mean_error += (1 - self.memory) * (error - self.mean_error)
        self._add(x, seconds)
        n, sx, sy, sxx, sxy = self._sums
        spread = n * sxx - sx * sx
        slope = (n * sxy - sx * sy) / spread if spread > 1e-12 * n * sxx else 0.0
        self.slope = max(0.0, slope)
        self.intercept = max(0.0, (sy - self.slope * sx) / n)
        if self.intercept == 0.0 and sxx > 0:
            self.slope = max(0.0, sxy / sxx)

    def _add(self, x: float, y: float) -> None:
        new = (1.0, x, y, x * x, x * y)
        self._sums = [self.memory * old + more for old, more in zip(self._sums, new, strict=True)]


class MoveCosts(Mover):
    """Moves a request by the way that is over soonest, or lets it end where it is if that is sooner still.

    As tokens, a move takes `a * (t_in + t_out) + b` seconds (ServerlessLLM: Fu et al., OSDI 2024, section
    5.2); with KV blocks, their bytes over the link's bandwidth and a constant (Llumnix: Sun et al.,
    arXiv:2406.03243, section 4.2). Both are fitted to the records of moves, and so are the pauses that they
    end with, which is what it says it expects.

    Args:
        token_s: Seconds of a prefill for each token.
        byte_s: Seconds for each byte of KV blocks.
        start_s: Seconds that any move takes.
        pause_s: Seconds that a client waits at the end of it.
        tpot_s: Seconds for each token that a request decodes.
    """

    def __init__(
        self,
        *,
        token_s: float = 1e-4,
        byte_s: float = 1e-9,
        start_s: float = 0.02,
        pause_s: float = 0.05,
        tpot_s: float = 0.03,
    ) -> None:
        if not tpot_s >= 0:
            raise ConfigError(f"tpot_s is {tpot_s!r}; give 0 or more seconds.")
        self.tpot_s = tpot_s
        self._seconds = {
            "tokens": Line(token_s, start_s, span=1024.0),
            "kv": Line(byte_s, start_s, span=float(1 << 26)),
        }
        self._pauses = {"tokens": Line(0.0, pause_s, span=1024.0), "kv": Line(0.0, pause_s, span=1024.0)}

    def choose(self, move: MoveView) -> MoveChoice:
        seconds = {"tokens": self._seconds["tokens"].at(move.num_tokens)}
        if move.kv_possible:
            seconds["kv"] = self._seconds["kv"].at(move.num_tokens * move.kv_bytes_per_token)
        way: MigrationWay = "kv" if seconds.get("kv", float("inf")) <= seconds["tokens"] else "tokens"
        if move.num_remaining * self.tpot_s <= seconds[way]:
            return MoveChoice("wait")
        return MoveChoice(way, self._pauses[way].at(move.num_tokens))

    def learn(self, record: MigrationRecord) -> None:
        if record.outcome != "done":
            return
        amount = record.copied_bytes if record.way == "kv" else record.num_tokens
        self._seconds[record.way].learn(amount, record.seconds)
        self._pauses[record.way].learn(record.num_tokens, record.downtime_s)

    @property
    def errors(self) -> dict[str, float]:
        """How far off the pauses it expected were of late, relative, by way."""
        return {way: line.mean_error for way, line in self._pauses.items()}

    def __repr__(self) -> str:
        ways = ", ".join(
            f"{way}: {line.intercept:.3g} s + {line.slope:.3g} s each" for way, line in self._seconds.items()
        )
        return f"<MoveCosts [{ways}]>"
