"""The reports of a vLLM core's scheduler after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.vllm.names import named

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """The last report of one core's scheduler, without vLLM's process-wide metrics registry.

    There is no report while no request runs, so the figures are those of the last step.

    Attributes:
        num_running: Requests in its batch.
        num_waiting: Requests in its queue.
        kv_usage: The share of KV blocks that requests hold, 0 to 1.
        num_preempted: How often a request was preempted.
        num_steps: How many steps were reported.
        notifier: Told of each step; that of the engine whose model the core serves.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preempted: int = 0
    num_steps: int = 0
    notifier: StatusNotifier = field(default_factory=StatusNotifier)

    def logger_class(self) -> Any:
        """Return a class of stat loggers, of which vLLM makes one and calls it after each step.

        It stands in for the logger that vLLM makes otherwise, beside any of another kind: that takes the
        metrics of all other engines out of the process's registry, and an error in it ends vLLM's client.
        """
        base: Any = named("vllm.v1.metrics.loggers:PrometheusStatLogger")
        stats = self

        class Logger(base):  # type: ignore[misc]  # vLLM is untyped here
            """Passes reports to `Stats`, and registers no metrics."""

            def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
                """Keep nothing of the arguments."""

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
                **_: Any,
            ) -> None:
                stats.note(scheduler_stats, iteration_stats)

            def record_admission_rejection(self, reason: str) -> None:
                """Do nothing: hotswap admits requests itself."""

            def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
                """Do nothing: hotswap knows which cores sleep."""

            def log_metrics_info(self, type: str, config_obj: Any) -> None:
                """Register nothing."""

            def log_engine_initialized(self) -> None:
                """Log nothing."""

        return Logger

    def note(self, scheduler: Any, iteration: Any) -> None:
        """Note the report of a step."""
        self.num_steps += 1
        if scheduler is not None:
            self.num_running = int(scheduler.num_running_reqs)
            self.num_waiting = int(scheduler.num_waiting_reqs)
            self.kv_usage = float(scheduler.kv_cache_usage)
        if iteration is not None:
            self.num_preempted += int(getattr(iteration, "num_preempted_reqs", 0))
        self.notifier.load_changed()
