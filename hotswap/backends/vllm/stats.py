"""What the scheduler of a vLLM core says after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.vllm.names import named

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """The last word of one core's scheduler: of its own, not of the process-wide registry that vLLM keeps.

    Nothing is said while nothing runs, so the figures are those of the last step.

    Attributes:
        num_running: Requests in its batch.
        num_waiting: Requests in its queue.
        kv_usage: The share of KV blocks that requests hold, 0 to 1.
        num_preempted: How often a request gave its blocks up.
        num_steps: Steps that were reported.
        notifier: Told of each step; that of the engine whose model the core serves.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preempted: int = 0
    num_steps: int = 0
    notifier: StatusNotifier = field(default_factory=StatusNotifier)

    def logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """Return what vLLM calls after each step."""
        base: Any = named("vllm.v1.metrics.loggers:StatLoggerBase")
        stats = self

        class Logger(base):  # type: ignore[misc]  # vLLM is untyped here
            """Notes what it is told."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """Nothing of either is needed."""

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
                **_: Any,
            ) -> None:
                stats.note(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Nothing is logged."""

        return Logger(vllm_config, engine_index)

    def note(self, scheduler: Any, iteration: Any) -> None:
        """Note a step."""
        self.num_steps += 1
        if scheduler is not None:
            self.num_running = int(scheduler.num_running_reqs)
            self.num_waiting = int(scheduler.num_waiting_reqs)
            self.kv_usage = float(scheduler.kv_cache_usage)
        if iteration is not None:
            self.num_preempted += int(getattr(iteration, "num_preempted_reqs", 0))
        self.notifier.load_changed()
