"""The requests of Llumnix's figures: lengths to the token as its artifact drew them, arrivals by seed.

The artifact (branch osdi24ae) seeds numpy's legacy generator with 0xCADE, draws ten thousand lengths of
prompts, as many of outputs, and then the gaps. Its lengths are the same in every run, and so they are here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from hotswap.simulation import Trace, TraceRequest

__all__ = ["MEANS", "NUM_REQUESTS", "START_S", "lengths", "with_priorities", "workload"]

MEANS = {"S": 128, "M": 256, "L": 512}
NUM_REQUESTS = 10_000
# When the first request comes: instances are there by then, as they were in the paper.
START_S = 10.0
_SEED = 0xCADE
_MOST_TOKENS = 6144
_EXPONENTS = {128: 2.0, 256: 1.5, 512: 1.15}


@cache
def lengths(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return tokens of prompts and of outputs of a workload such as `"S-L"`, in the artifact's order."""
    random = np.random.RandomState(_SEED)
    prompts, outputs = (_drawn(MEANS[kind], random) for kind in name.split("-"))
    return prompts, outputs


def workload(name: str, rate_per_s: float, seed: int, *, cv: float = 1.0) -> Trace:
    """Return the ten thousand requests of a workload at a rate.

    Arrivals are Poisson, or with a `cv` other than 1 gaps are Gamma-distributed. Those of seed 0 are the ones
    that the artifact draws after its lengths, in every run alike; other seeds draw their own.
    """
    prompts, outputs = lengths(name)
    random = np.random.RandomState(_SEED if seed == 0 else seed)
    if seed == 0:
        for kind in name.split("-"):
            _drawn(MEANS[kind], random)
    shape = 1 / cv**2
    gaps = (
        random.exponential(1 / rate_per_s, NUM_REQUESTS)
        if cv == 1
        else random.gamma(shape, 1 / (shape * rate_per_s), NUM_REQUESTS)
    )
    at_s = START_S + np.concatenate(([0.0], np.cumsum(gaps[:-1])))
    requests = (
        TraceRequest(arrive_s=float(time_s), prompt_tokens=prompt, output_tokens=output)
        for time_s, prompt, output in zip(at_s, prompts, outputs, strict=True)
    )
    return Trace(tuple(requests), name)


def with_priorities(trace: Trace, share: float, seed: int) -> Trace:
    """Return the same requests, this share of them of high priority."""
    high = np.random.RandomState(seed + 1000).random_sample(len(trace.requests)) < share
    requests = (
        replace(request, priority=int(is_high)) for request, is_high in zip(trace.requests, high, strict=True)
    )
    return Trace(tuple(requests), trace.name)


def _drawn(mean: int, random: Any) -> tuple[int, ...]:
    """Draw ranks from a truncated power law, scale them to the mean, round up, and cut what is too long."""
    ranks = np.arange(1, 2 * mean)
    weights = ranks ** -_EXPONENTS[mean]
    drawn = random.choice(ranks, size=NUM_REQUESTS, p=weights / weights.sum())
    scaled = np.ceil(drawn * (mean / np.mean(drawn))).astype(int)
    return tuple(int(tokens) for tokens in np.minimum(scaled, _MOST_TOKENS))
