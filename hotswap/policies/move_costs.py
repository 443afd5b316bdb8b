"""The cost of moving a request, learned from past moves: as tokens, or with its KV blocks."""

from __future__ import annotations

from hotswap.action import MigrationMethod, MigrationRecord
from hotswap.argument_kinds import check_arguments
from hotswap.errors import ConfigError
from hotswap.migration import MoveChoice, Mover, MoveView
from hotswap.policies.linear_fit import LinearFit

__all__ = ["MoveCosts"]


@check_arguments
class MoveCosts(Mover):
    """Chooses the quickest method to move a request, or lets the request end where it is if that is sooner.

    As tokens, a move takes `a * (t_in + t_out) + b` seconds (ServerlessLLM: Fu et al., OSDI 2024, section
    5.2). With KV blocks, it takes their bytes over the link's bandwidth and a constant (Llumnix: Sun et al.,
    arXiv:2406.03243, section 4.2). Both lines are fitted to the records of moves, and so are the pauses at
    their end, which are the expected downtimes.

    Args:
        token_s: Seconds of prefill per token.
        byte_s: Seconds per byte of KV blocks.
        start_s: Seconds that every move takes besides.
        pause_s: Seconds that a client waits at the end of a move.
        tpot_s: Seconds per decoded token.
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
            "tokens": LinearFit(token_s, start_s, span=1024.0),
            "kv": LinearFit(byte_s, start_s, span=float(1 << 26)),
        }
        self._pauses = {
            "tokens": LinearFit(0.0, pause_s, span=1024.0),
            "kv": LinearFit(0.0, pause_s, span=1024.0),
        }

    def choose(self, move: MoveView) -> MoveChoice:
        seconds = {"tokens": self._seconds["tokens"].at(move.num_tokens)}
        if move.kv_possible:
            seconds["kv"] = self._seconds["kv"].at(move.num_tokens * move.kv_bytes_per_token)
        method: MigrationMethod = "kv" if seconds.get("kv", float("inf")) <= seconds["tokens"] else "tokens"
        if move.num_remaining * self.tpot_s <= seconds[method]:
            return MoveChoice("wait")
        return MoveChoice(method, self._pauses[method].at(move.num_tokens))

    def learn(self, record: MigrationRecord) -> None:
        if record.outcome != "done":
            return
        amount = record.copied_bytes if record.method == "kv" else record.num_tokens
        self._seconds[record.method].learn(amount, record.seconds)
        self._pauses[record.method].learn(record.num_tokens, record.downtime_s)

    @property
    def errors(self) -> dict[str, float]:
        """The mean relative error of recent expected pauses, by method."""
        return {method: line.mean_error for method, line in self._pauses.items()}

    def __repr__(self) -> str:
        methods = ", ".join(
            f"{method}: {line.intercept:.3g} s + {line.slope:.3g} s each"
            for method, line in self._seconds.items()
        )
        return f"<MoveCosts [{methods}]>"
