"""The worker's background work, and the references that are gone when it reports a detached model."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hotswap import Sampling
from hotswap.backends.torch.batcher import Batcher
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.budget import TokenBudget
from hotswap.backends.torch.forward import Forward, Work
from hotswap.backends.torch.runner import Report, Runner
from hotswap.backends.torch.sampling import Sampler
from hotswap.backends.torch.sequence import Sequence
from hotswap.backends.torch.worker import Pieces, Worker
from tests.patience import PATIENCE_S


class Chores(Forward):
    """A model with endless background work; records the number of requests during each piece."""

    def __init__(self) -> None:
        self.num_blocks, self.size_bytes = 64, 0
        self.batcher = Batcher(BlockPool(64), block_tokens=16, token_budget=32, max_requests=4)
        self.seen: set[int] = set()
        self._num_sampling = 0

    def submit(self, work: Work) -> None:
        self._num_sampling = sum(piece.samples for piece in work.pieces)

    def result(self) -> Tensor:
        return torch.zeros(self._num_sampling, 8)

    def do_background_work(self) -> bool:
        self.seen.add(len(self.batcher.running) + len(self.batcher.waiting))
        return True


@pytest.mark.parametrize("is_timed", [False, True])
def test_background_work_waits_for_requests_only_if_steps_are_timed(is_timed: bool) -> None:
    forward, ended, done = Chores(), threading.Event(), threading.Event()

    def publish(report: Report) -> None:
        if any(sampled.finish_reason for sampled in report.sampled):
            done.set()

    budget = TokenBudget(1.0, min_tokens=8, max_tokens=32) if is_timed else None
    worker = Worker("test", threads=1, publish=publish, ended=lambda error: ended.set())
    worker.attach(Runner(forward, forward.batcher, budget))
    worker.add(Sequence(1, [1, 2, 3], 3, 60, Sampler(Sampling(), (), ())))
    assert done.wait(PATIENCE_S)
    while 0 not in forward.seen:  # background work continues after the request
        assert not ended.is_set()
    worker.stop()
    worker.join()
    assert forward.seen == ({0} if is_timed else {0, 1})


@dataclass
class Idle:
    """A job that ends at once and has a reference to its runner, like a copy of KV blocks."""

    runner: Runner

    def begin(self, runner: Runner, sequences: object) -> Pieces:
        yield from ()

    def end(self, error: Exception | None) -> None: ...

    def drop(self) -> None: ...


def test_no_reference_to_the_model_is_left_when_detach_reports() -> None:
    """Also after jobs that were queued together with it: the next model may need the memory at once."""
    forward, attached, go_on = Chores(), threading.Event(), threading.Event()
    gone: list[bool] = []
    told = threading.Event()

    def publish(report: Report) -> None:
        attached.set()
        go_on.wait(PATIENCE_S)

    def done() -> None:
        gone.append(watched() is None)
        told.set()

    worker = Worker("test", threads=1, publish=publish, ended=lambda error: None)
    runner = Runner(forward, forward.batcher, None)
    watched = weakref.ref(runner)
    worker.attach(runner)
    assert attached.wait(PATIENCE_S)
    worker.submit(Idle(runner))
    worker.detach(done)
    del runner
    go_on.set()
    assert told.wait(PATIENCE_S)
    worker.stop()
    worker.join()
    assert gone == [True]
