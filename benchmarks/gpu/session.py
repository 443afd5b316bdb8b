"""A run: its device, its clock, how much time is left, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.measure import Summary

__all__ = ["Session", "relative_error"]

_REPLAYS = 7
_LEAST_CALLS = 8
# What a GPU is taken to do until `ceilings` has measured it; of an H200.
_BYTES_PER_S, _FLOPS = 4.3e12, 790e12


@dataclass
class Session:
    """One run.

    Attributes:
        device: What is measured.
        is_dry: Whether it is a CPU that interprets the kernels, and figures mean nothing.
        ends_at: When nothing more may begin, by `time.perf_counter`.
        dtype: Of activations.
        l2_bytes: Of the cache that weights must not stay in.
        num_units: Of the device.
        bytes_per_s: That its memory moves, read and written.
        flops: Of matrix products in `dtype`.
        report: All that was found.
    """

    device: torch.device
    is_dry: bool
    ends_at: float
    dtype: torch.dtype = torch.bfloat16
    l2_bytes: int = 1 << 16
    num_units: int = 4
    bytes_per_s: float = _BYTES_PER_S
    flops: float = _FLOPS
    report: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def remaining_s(self) -> float:
        """Seconds until nothing more may begin."""
        return self.ends_at - time.perf_counter()

    def copies(self, size_bytes: int) -> int:
        """How many copies of weights to take in turns, so that none is still in the cache."""
        return 1 if self.is_dry else max(2, -(-3 * self.l2_bytes // max(1, size_bytes)))

    def replayed(self, calls: Sequence[Callable[[], object]]) -> Summary:
        """Microseconds of a call, when all are replayed one after the other from a captured graph.

        So what a launch costs the host is left out, as it is where an engine captures its steps.
        """
        if self.is_dry:
            return Summary.of([1e6 * self.wall_s(calls[0])])
        many = [calls[index % len(calls)] for index in range(max(len(calls), _LEAST_CALLS))]
        cuda: Any = torch.cuda  # not all of it is typed
        stream, graph = cuda.Stream(), cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # kernels are built, and memory is taken
                call()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for call in many:
                    call()
            graph.replay()
            figures = [self._replay_ms(graph) for _ in range(_REPLAYS)]
        return Summary.of([1e3 * figure / len(many) for figure in figures])

    def wall_s(self, call: Callable[[], object]) -> float:
        """Seconds of a call, until the device has done what it asked for."""
        self.wait()
        began_s = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began_s

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Return unused memory to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @staticmethod
    def _replay_ms(graph: Any) -> float:
        cuda: Any = torch.cuda
        began, ended = (cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    """How far a result is off, as a share of all of it; infinite where there is a NaN."""
    off = float((found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-300))
    return off if off == off else float("inf")
