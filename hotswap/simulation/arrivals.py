"""Traces in which each model has arrivals of its own: its rate, its burstiness, its hours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from hotswap.errors import ConfigError
from hotswap.offline.workloads import Lengths
from hotswap.simulation.trace import Trace, generate

__all__ = ["Arrivals", "generate_each"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests for one model arrive.

    Attributes:
        rate_per_s: Requests a second, where `parts` has a 1.
        cv: The coefficient of variation of the gaps: 1 is a Poisson process, over 1 bursts.
        parts: What the rate is multiplied by in each of so many equal parts of the trace: `(1, 0, 0, 5)` is a
            pause of two quarters and then a rush. Parts are independent of each other.
    """

    rate_per_s: float
    cv: float = 1.0
    parts: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not (self.parts and all(part >= 0 and isfinite(part) for part in self.parts) and any(self.parts)):
            raise ConfigError(
                f"parts is {self.parts!r}; give finite numbers of 0 or more, one of them over 0."
            )


def generate_each(
    seed: int,
    arrivals: Mapping[str, Arrivals],
    *,
    seconds: float,
    prompt_tokens: Lengths | None = None,
    output_tokens: Lengths | None = None,
    name: str = "",
) -> Trace:
    """Return `seconds` seconds of requests, those of each model by its own process; lengths as of `generate`.

    Raises:
        ConfigError: there is no model, or a number is not over 0.
    """
    if not arrivals:
        raise ConfigError("There are no models; give arrivals for one or more.")
    parts: list[Trace] = []
    for number, (model, process) in enumerate(arrivals.items()):
        length_s = seconds / len(process.parts)
        for part, factor in enumerate(process.parts):
            if factor:
                made = generate(
                    seed * 1_000_003 + number * 1009 + part,
                    models={model: 1.0},
                    rate_per_s=process.rate_per_s * factor,
                    seconds=length_s,
                    cv=process.cv,
                    prompt_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                )
                parts.append(made.after(part * length_s))
    merged = parts[0].merge(*parts[1:])
    return Trace(merged.requests, name or f"{len(arrivals)} models, {seconds:g} s")
