"""The load of a simulated engine, as it is or as the last step has reported it."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from hotswap.backends.sim.batcher import Batcher
from hotswap.request import RequestId
from hotswap.view import EngineStatus

__all__ = ["Load", "Reporting", "Reports"]

Reporting: TypeAlias = Literal["live", "by_step"]


class Load(NamedTuple):
    """The fields of an `EngineStatus` that change from step to step."""

    num_running: int = 0
    num_waiting: int = 0
    num_prefill_tokens: int = 0
    num_free_blocks: int = 0
    num_next_blocks: int = 0
    preempted: tuple[RequestId, ...] = ()

    @classmethod
    def of(cls, batcher: Batcher, *, decoding: bool = False, num_taken: int = 0) -> Load:
        """Return the load of a batcher.

        Args:
            batcher: The batcher.
            decoding: Whether the prompts of all running sequences are computed.
            num_taken: Blocks that the steps since have taken.
        """
        return cls(
            len(batcher.running),
            len(batcher.waiting),
            batcher.num_prefill_tokens(running=not decoding),
            batcher.num_free_blocks - num_taken,
            batcher.num_next_blocks,
            batcher.preempted,
        )

    def added_to(self, status: EngineStatus) -> EngineStatus:
        """Return a status with this load; without a pool there are no free blocks."""
        return status.updated(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_prefill_tokens=self.num_prefill_tokens,
            num_free_kv_blocks=self.num_free_blocks if status.num_kv_blocks else 0,
            num_next_kv_blocks=self.num_next_blocks,
            preempted=self.preempted,
        )


class Reports:
    """The reports of an engine that reports by step; an engine with live status has none.

    A report is made when a step is planned, and published when the step has ended. It counts no token of
    prompts that the step computes to their end. An engine without requests reports at once.

    Attributes:
        told: The last report; `None` if the status has the load as it is.
        coming: The report of the step under way.
    """

    def __init__(self, reporting: Reporting, batcher: Batcher) -> None:
        self.by_step = reporting == "by_step"
        self.told: Load | None = Load.of(batcher) if self.by_step else None
        self.coming: Load | None = None
        self._batcher = batcher

    def begin(self, *, idle: bool) -> None:
        """Make the report of a step that was planned; `idle` if there is none to run."""
        if self.by_step:
            self.coming = Load.of(self._batcher, decoding=self._batcher.prefills_first)
            if idle:
                self.told = self.coming

    def end(self) -> None:
        """Publish the report of the step that has ended."""
        if self.by_step:
            self.told = self.coming
