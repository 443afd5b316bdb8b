"""`ResizeJob`: resizes the KV pool of an engine on its thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from hotswap.backends.torch.runner import Report, Runner
from hotswap.backends.torch.sequence import Sequence
from hotswap.backends.torch.worker import Job, Pieces

__all__ = ["ResizeJob"]


class ResizeJob(Job):
    """Brings the pool of the attached runner to a size, between two steps.

    Args:
        num_blocks: The size.
        post: Calls a function on the engine's event loop.
        publish: Called with the counters before the end is told, so that no status is older than it.

    Attributes:
        reached: The size reached; `None` if the runner was detached before.
        ended: Set on the event loop.
    """

    def __init__(
        self, num_blocks: int, post: Callable[..., None], publish: Callable[[Report], object]
    ) -> None:
        self.reached: int | None = None
        self.ended = anyio.Event()
        self._num_blocks, self._post, self._publish = num_blocks, post, publish

    def begin(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        """See `Job`."""
        self.reached = runner.batcher.resize(self._num_blocks)
        self._publish(runner.report())
        yield from ()

    def end(self, error: Exception | None) -> None:
        """See `Job`."""
        self._post(self.ended.set)

    def drop(self) -> None:
        """See `Job`."""
        self.end(None)
