"""What a simulated engine tells of its load: as it is, or as its last report has it."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from hotswap.backends.sim.batcher import Batcher
from hotswap.request import RequestId
from hotswap.view import EngineStatus

__all__ = ["Load", "Reporting", "Reports"]

Reporting: TypeAlias = Literal["live", "by_step"]


class Load(NamedTuple):
    """What of an `EngineStatus` changes from step to step."""

    num_running: int = 0
    num_waiting: int = 0
    num_prefill_tokens: int = 0
    num_free_blocks: int = 0
    num_next_blocks: int = 0
    preempted: tuple[RequestId, ...] = ()

    @classmethod
    def of(cls, batcher: Batcher, *, decoding: bool = False, num_taken: int = 0) -> Load:
        """Return that of a batcher, less more blocks; with `decoding` no prompt of who runs is left."""
        return cls(
            len(batcher.running),
            len(batcher.waiting),
            batcher.num_prefill_tokens(running=not decoding),
            batcher.num_free_blocks - num_taken,
            batcher.num_next_blocks,
            batcher.preempted,
        )

    def shown(self, view: EngineStatus) -> EngineStatus:
        """Return a view with this load; without a pool there are no free blocks."""
        return view.updated(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_prefill_tokens=self.num_prefill_tokens,
            num_free_kv_blocks=self.num_free_blocks if view.num_kv_blocks else 0,
            num_next_kv_blocks=self.num_next_blocks,
            preempted=self.preempted,
        )


class Reports:
    """Keeps what an engine that reports by step has reported; one that is live reports nothing.

    A report is made when a step has been planned, and told when it has ended: until then the one before is.
    Of whole prompts that the step computes nothing is left.
    An engine with nothing to do reports at once.

    Attributes:
        told: What there is to see now; `None` is the load itself.
        coming: What the step under way will have reported.
    """

    def __init__(self, reporting: Reporting, batcher: Batcher) -> None:
        self.by_step = reporting == "by_step"
        self.told: Load | None = Load.of(batcher) if self.by_step else None
        self.coming: Load | None = None
        self._batcher = batcher

    def begin(self, *, idle: bool) -> None:
        """Note that a step was planned, or that there is none."""
        if self.by_step:
            self.coming = Load.of(self._batcher, decoding=self._batcher.prefills_first)
            if idle:
                self.told = self.coming

    def end(self) -> None:
        """Note that the step has ended; what it did is in the next report."""
        if self.by_step:
            self.told = self.coming
