"""Formulas for methods by which several models share devices: seconds of switches, and their cost.

Source: the multi-model serving post (temporal, overlapped and spatial sharing, adapter pools; its cost
model). Its formulas are images; these are the readings that agree with its numbers. Formulas of ours say so.
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
    "SharingMethod",
    "Switching",
    "overlapped_switch_s",
    "switch_penalty_usd_per_h",
    "switching",
]


class SharingMethod(StrEnum):
    """The methods of serving several models on shared devices."""

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
        card: Its sizes (`ModelCard.of`), of which `weight_bytes` and `kv_bytes_per_token` are used.
        requests_per_s: The mean rate of requests.
        tokens_in: The mean length of a prompt.
        tokens_out: The mean number of generated tokens.
        base: The model that it is a low-rank variant of, if it is one.
        adapter_bytes: The size of the adapter that makes it from its base (`ModelShape.adapter_bytes`).
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
                "give both to a variant, and neither to other models."
            )


@dataclass(frozen=True, slots=True)
class Switching:
    """The mean rate of a device's switches, and the mean latency that they add to a request.

    `lost_share` is the share of the device's time that switches take.
    """

    switches_per_s: float = 0.0
    added_s: float = 0.0
    lost_share: float = 0.0

    @property
    def mean_switch_s(self) -> float:
        """The mean seconds of a switch; 0 if there are none."""
        return self.lost_share / self.switches_per_s if self.switches_per_s else 0.0


def overlapped_switch_s(transfer_s: float, *, lead_s: float, init_s: float) -> float:
    """Return the seconds of a switch whose transfer began `lead_s` before it.

    `max(0, transfer - lead) + init`: with enough lead only making the model ready is left, about 200 ms.
    """
    return max(0.0, transfer_s - lead_s) + init_s


def switch_penalty_usd_per_h(
    switches_per_h: float, switch_s: float, *, tokens_per_s: float, usd_per_token: float
) -> float:
    """Return the cost of switches: the value of the tokens that are not generated meanwhile.

    100 switches an hour of 2.5 s, at 3000 tokens/s and 0.003 USD for 1000 tokens, are 2.25 USD an hour.
    """
    return switches_per_h * switch_s * tokens_per_s * usd_per_token


def switching(
    rates: Sequence[float], switch_s: Sequence[float], service_s: Sequence[float], *, turn_s: float
) -> Switching:
    """Return how often one device switches between models whose requests arrive independently.

    Ours; the post takes the number of switches as given. Model *i* has a `rate` of requests, which is the
    share *p* of all; a request of it takes *A* seconds once it is served, and a switch to it *s*. Served in
    order of arrival, a request needs a switch if the request before it was for another model. It waits for
    running requests of other models, each for half of its time:

        switches a second = sum rate (1 - p)        added = sum p ((1 - p) s + sum of others' rate A^2 / 2)

    which holds while requests seldom overlap. If it leaves less than `turn_s`, or less than the time of a
    request, between switches, models have turns of `turn_s` instead. A round is all turns and switches. A
    request that comes while its model is off waits half of that time, and one that does not end in a turn
    continues in the next. Queueing behind requests of the same model and tokens that are computed again when
    a request continues are left out.

    Args:
        rates: Requests per second of each model.
        switch_s: Seconds of a switch to each model.
        service_s: Seconds of a request of each model, once it is served.
        turn_s: The least time for which a model keeps the device, over 0.
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
    half_waits_s = [rate * service**2 / 2 for rate, _, service in active]
    overlap_s = sum(
        rate / total * (sum(half_waits_s) - own_wait_s)
        for (rate, _, _), own_wait_s in zip(active, half_waits_s, strict=True)
    )
    return Switching(switches_per_s, lost_share / total + overlap_s, lost_share)


def _in_turns(active: Sequence[tuple[float, float, float]], turn_s: float) -> Switching:
    total = sum(rate for rate, _, _ in active)
    all_switches_s = sum(switch for _, switch, _ in active)
    round_s = len(active) * turn_s + all_switches_s
    off_s = round_s - turn_s
    added_s = off_s**2 / (2 * round_s)
    for rate, _, service in active:
        # The ends of turns during a request: begun at a random moment of a turn, or with a turn.
        within, with_turn = service / turn_s, max(ceil(service / turn_s) - 1, 0)
        added_s += rate / total * off_s * (turn_s * within + off_s * with_turn) / round_s
    return Switching(len(active) / round_s, added_s, all_switches_s / round_s)
