"""Ways for several models to share devices: what each costs in seconds and in money, as formulas.

Source: the multi-model serving post (temporal, overlapped and spatial sharing, adapter pools; its cost
model). Its formulas are images; what stands here is the reading of them that its numbers agree with. What is
ours says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, isfinite

from hotswap.errors import ConfigError
from hotswap.model import ModelCard
from hotswap.request import ModelId

__all__ = [
    "SharedModel",
    "SharingWay",
    "Switching",
    "overlapped_switch_s",
    "switch_penalty_usd_per_h",
    "switching",
]


class SharingWay(StrEnum):
    """How several models are served."""

    DEDICATED = "dedicated"
    ADAPTER_POOL = "adapter pool"
    SPATIAL = "spatial"
    OVERLAPPED = "temporal, overlapped"
    WARM = "temporal, warm"
    COLD = "temporal, cold"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedModel:
    """A model and its traffic.

    Attributes:
        card: Its sizes (`ModelCard.of`); `weight_bytes` and `kv_bytes_per_token` are what is read.
        requests_per_s: How many arrive, on average.
        tokens_in: Of a prompt, on average.
        tokens_out: Generated for a request, on average.
        base: The model that it is a low-rank variant of, if it is one; many may have the same.
        adapter_bytes: Of the adapter that makes it from its base (`ModelShape.adapter_bytes`).
    """

    card: ModelCard
    requests_per_s: float
    tokens_in: float
    tokens_out: float
    base: ModelId | None = None
    adapter_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "tokens_in", "tokens_out"):
            value = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise ConfigError(f"{name} of {self.card.id!r} is {value!r}; give 0 or more, finite.")
        if (self.adapter_bytes > 0) != (self.base is not None):
            raise ConfigError(
                f"adapter_bytes of {self.card.id!r} is {self.adapter_bytes!r} and its base {self.base!r}; "
                "give a variant both, and others neither."
            )


@dataclass(frozen=True, slots=True)
class Switching:
    """How often a device turns to another model, and what that adds to a request, on average.

    `lost_share` is the share of its time that it stands still for switches.
    """

    switches_per_s: float = 0.0
    added_s: float = 0.0
    lost_share: float = 0.0

    @property
    def mean_switch_s(self) -> float:
        """Seconds of a switch, on average; 0 if there are none."""
        return self.lost_share / self.switches_per_s if self.switches_per_s else 0.0


def overlapped_switch_s(transfer_s: float, *, lead_s: float, init_s: float) -> float:
    """Return how long a device stands still for a switch whose transfer began `lead_s` before.

    `max(0, transfer - lead) + init`: with enough lead the rest is making the model ready, about 200 ms.
    """
    return max(0.0, transfer_s - lead_s) + init_s


def switch_penalty_usd_per_h(
    switches_per_h: float, switch_s: float, *, tokens_per_s: float, usd_per_token: float
) -> float:
    """Return what switches cost in tokens that were not generated meanwhile.

    100 switches an hour of 2.5 s, at 3000 tokens/s and 0.003 USD for 1000 tokens, are 2.25 USD an hour.
    """
    return switches_per_h * switch_s * tokens_per_s * usd_per_token


def switching(
    rates: Sequence[float], switch_s: Sequence[float], service_s: Sequence[float], *, turn_s: float
) -> Switching:
    """Return how often one device switches between models whose requests arrive independently.

    Ours; the post takes the number of switches as given. Model *i* has the share *p* of all requests, `rate`
    of its own, a request of it takes *A* once it is served, and a switch to it *s*. Served as they come, a
    request needs a switch if the one before it was for another model, and waits for those of other models
    that are under way, each for half of what it takes:

        switches a second = sum rate (1 - p)        added = sum p ((1 - p) s + sum of others' rate A^2 / 2)

    which is right while requests seldom meet. Where it leaves less than `turn_s` between switches, or less
    than a request takes, models have turns of `turn_s` instead: a round is all turns and switches, a request
    that comes while its model is off waits half of that time, and one that does not end in a turn goes on in
    the next. It counts neither queueing behind requests of the same model nor what is computed again when a
    request goes on.

    Args:
        rates: Requests a second, for each model.
        switch_s: Seconds of a switch to each model.
        service_s: Seconds of a request of each model, once it is served.
        turn_s: The least time that a model keeps the device, over 0.
    """
    active = [each for each in zip(rates, switch_s, service_s, strict=True) if each[0] > 0]
    if len(active) < 2:
        return Switching()
    total = sum(rate for rate, _, _ in active)
    switches_per_s = sum(rate * (1 - rate / total) for rate, _, _ in active)
    lost_share = sum(rate * (1 - rate / total) * switch for rate, switch, _ in active)
    mean_s = sum(rate * service for rate, _, service in active) / total
    if switches_per_s * max(turn_s, mean_s) + lost_share > 1:
        return _in_turns(active, turn_s)
    under_way_s = [rate * service**2 / 2 for rate, _, service in active]
    met_s = sum(
        rate / total * (sum(under_way_s) - own_s)
        for (rate, _, _), own_s in zip(active, under_way_s, strict=True)
    )
    return Switching(switches_per_s, lost_share / total + met_s, lost_share)


def _in_turns(active: Sequence[tuple[float, float, float]], turn_s: float) -> Switching:
    total = sum(rate for rate, _, _ in active)
    all_switches_s = sum(switch for _, switch, _ in active)
    round_s = len(active) * turn_s + all_switches_s
    off_s = round_s - turn_s
    added_s = off_s**2 / (2 * round_s)
    for rate, _, service in active:
        # Ends of turns that a request meets: begun within one, wherever in it, or with one.
        within, with_one = service / turn_s, max(ceil(service / turn_s) - 1, 0)
        added_s += rate / total * off_s * (turn_s * within + off_s * with_one) / round_s
    return Switching(len(active) / round_s, added_s, all_switches_s / round_s)
