"""Which way of sharing devices suits given models and their traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf

from hotswap.errors import ConfigError
from hotswap.policies.planning.sharing import (
    SharedModel,
    SharingWay,
    Switching,
    overlapped_switch_s,
    switch_penalty_usd_per_h,
    switching,
)

__all__ = ["SharingAdvisor", "SharingReport", "WayReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayReport:
    """What one way of sharing needs, adds and costs.

    Attributes:
        way: Which way.
        obstacle: Why it cannot be done; empty if it can.
        device_bytes: Needed on the devices of the largest instance: weights, adapters and KV cache.
        host_bytes: Needed in host memory.
        num_instances: Of the given size.
        switch_s: How long an instance stands still for the longest switch.
        switches_per_h: Expected.
        added_s: Expected to be added to a request, beside the same request alone on its model's device.
        load: Share of an instance's time that work and switches take; over 1 it cannot keep up.
        usd_per_h: Devices, and tokens lost to switches.
    """

    way: SharingWay
    obstacle: str = ""
    device_bytes: int = 0
    host_bytes: int = 0
    num_instances: int = 1
    switch_s: float = 0.0
    switches_per_h: float = 0.0
    added_s: float = 0.0
    load: float = 0.0
    usd_per_h: float = 0.0

    def __str__(self) -> str:
        if self.obstacle:
            return f"{self.way:<22}not possible: {self.obstacle}"
        return (
            f"{self.way:<22}{self.device_bytes / 1e9:9.1f} GB{self.host_bytes / 1e9:9.1f} GB"
            f"{self.switch_s:9.3f} s{self.switches_per_h:9.1f}/h{self.added_s:9.3f} s"
            f"{self.load:8.0%}{self.usd_per_h:10.2f} USD/h"
        )


@dataclass(frozen=True, slots=True)
class SharingReport:
    """Every way, those with the least trouble first. `str` is a table."""

    ways: tuple[WayReport, ...]

    def way(self, way: SharingWay) -> WayReport:
        """Return what is said of one way."""
        return next(report for report in self.ways if report.way is way)

    def best(self, *, max_added_s: float = inf) -> WayReport | None:
        """Return the cheapest way that can be done and adds no more than `max_added_s`; `None` if none does.

        Of equal costs the one that adds less wins, then the one that comes first.
        """
        able = [w for w in self.ways if not w.obstacle and w.added_s <= max_added_s]
        return min(able, key=lambda w: (w.usd_per_h, w.added_s), default=None)

    def __str__(self) -> str:
        head = f"{'way':<22}{'devices':>12}{'host':>12}{'switch':>11}{'switches':>11}{'added':>11}"
        best = self.best()
        last = "nothing can be done" if best is None else f"cheapest: {best.way}"
        return "\n".join([f"{head}{'load':>8}{'cost':>16}", *map(str, self.ways), last])


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingAdvisor:
    """Says of every way to share one instance whether memory allows it, what it adds, and what it costs.

    Source: the multi-model serving post, its five ways and its cost model,

        USD per hour = devices * price + switches per hour * seconds each * tokens/s * USD per token

    with `hotswap.policies.planning.sharing` for the parts. Sizes are those of the models themselves (manifest
    and shape), never guessed from names. A switch takes

        cold         weights / disk_bytes_per_s + weights / link_bytes_per_s + init_s
        warm         weights / link_bytes_per_s + init_s
        overlapped   max(0, weights / link_bytes_per_s - lead_s) + init_s, and room for both models
        adapter      adapter / link_bytes_per_s

    **Readings.** The post gives the 200 ms of making a model ready (`init_s`) for overlapped switches alone,
    where they are all that is left; they belong to the others too, which hide them in seconds. Its penalty
    is in lost tokens; the GPU's own price is in the first term already.

    **Ours:** the number of switches and what they add (`switching`); KV cache by Little's law, for as many
    requests as are under way on average, one of each model at least; `load`; of adapters the most popular
    stay where not all fit; models side by side slow each other while both have requests (of independent
    ones, *a* on average, none is under way for the share exp(-a) of the time), and for `load` all the time;
    and the baseline, an instance for each model.

    Attributes:
        memory_bytes: Of all devices of one instance, what the engine may use.
        host_bytes: Host memory for weights.
        num_devices: Of one instance.
        link_bytes_per_s: From host memory to the devices of an instance, all together.
        disk_bytes_per_s: From disk to host memory.
        init_s: Seconds to make a loaded model ready.
        lead_s: How long before a switch an overlapped transfer begins.
        turn_s: The least time that a model keeps an instance to itself.
        tokens_per_s: Generated by a busy instance.
        prefill_tokens_per_s: Prompt tokens computed by a busy instance.
        tpot_s: Seconds between two tokens of a request.
        contention: How many times longer work takes with another model on the device.
        adapter_slowdown: How many times longer it takes with many adapters in a batch.
        usd_per_device_h: Price of a device.
        usd_per_token: What a generated token is worth.
    """

    memory_bytes: int
    host_bytes: int
    num_devices: int = 1
    link_bytes_per_s: float = 55e9
    disk_bytes_per_s: float = 7e9
    init_s: float = 0.2
    lead_s: float = 4.0
    turn_s: float = 4.0
    tokens_per_s: float = 3000.0
    prefill_tokens_per_s: float = 20_000.0
    tpot_s: float = 0.03
    contention: float = 1.8
    adapter_slowdown: float = 1.09
    usd_per_device_h: float = 2.25
    usd_per_token: float = 3e-6

    def __post_init__(self) -> None:
        over_zero = ("memory_bytes", "num_devices", "link_bytes_per_s", "disk_bytes_per_s")
        for name in (*over_zero, "tokens_per_s", "prefill_tokens_per_s", "turn_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give a number over 0.")
        seconds = ("init_s", "lead_s", "tpot_s")
        for name in (*seconds, "host_bytes", "usd_per_device_h", "usd_per_token"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give 0 or more.")
        for name in ("contention", "adapter_slowdown"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give a factor of 1 or more.")

    def advise(self, models: Sequence[SharedModel]) -> SharingReport:
        """Return what is to be said of every way for these models.

        Raises:
            ConfigError: there are no models.
        """
        if not models:
            raise ConfigError("There is nothing to advise on; give at least one SharedModel.")
        return SharingReport(
            (
                self._dedicated(models),
                self._adapter_pool(models),
                self._spatial(models),
                self._temporal(SharingWay.OVERLAPPED, models),
                self._temporal(SharingWay.WARM, models),
                self._temporal(SharingWay.COLD, models),
            )
        )

    # ------------------------------------------------------------------ the ways

    def _dedicated(self, models: Sequence[SharedModel]) -> WayReport:
        return self._report(
            SharingWay.DEDICATED,
            device_bytes=max(m.card.weight_bytes + self._kv_bytes(m) for m in models),
            num_instances=len(models),
            load=max(map(self._work, models)),
        )

    def _temporal(self, way: SharingWay, models: Sequence[SharedModel]) -> WayReport:
        weights = sorted((m.card.weight_bytes for m in models), reverse=True)
        device_bytes = max(m.card.weight_bytes + self._kv_bytes(m) for m in models)
        if way is SharingWay.OVERLAPPED:
            device_bytes = max(device_bytes, sum(weights[:2]) + max(map(self._kv_bytes, models)))
        switch_s = [self._switch_s(way, m.card.weight_bytes) for m in models]
        switches = switching(
            [m.requests_per_s for m in models], switch_s, list(map(self._alone_s, models)), turn_s=self.turn_s
        )
        return self._report(
            way,
            device_bytes=device_bytes,
            host_bytes=0 if way is SharingWay.COLD else sum(weights),
            switch_s=max(switch_s) if len(models) > 1 else 0.0,
            switches=switches,
            load=sum(map(self._work, models)) + switches.lost_share,
        )

    def _spatial(self, models: Sequence[SharedModel]) -> WayReport:
        contention = self.contention if len(models) > 1 else 1.0
        return self._report(
            SharingWay.SPATIAL,
            device_bytes=sum(m.card.weight_bytes + self._kv_bytes(m) for m in models),
            switches=Switching(added_s=(contention - 1) * self._beside_s(models)),
            load=sum(map(self._work, models)) * contention,
        )

    def _adapter_pool(self, models: Sequence[SharedModel]) -> WayReport:
        way = SharingWay.ADAPTER_POOL
        variants = [m for m in models if m.base is not None]
        if not variants or len({m.base or m.card.id for m in models}) > 1:
            return WayReport(way=way, obstacle="the models are no variants of one base")
        fixed_bytes = max(m.card.weight_bytes for m in models) + sum(map(self._kv_bytes, models))
        adapter_bytes = max(m.adapter_bytes for m in variants)
        num_held = min(max((self.memory_bytes - fixed_bytes) // adapter_bytes, 1), len(variants))
        total = sum(m.requests_per_s for m in models)
        by_rate = sorted((m.requests_per_s for m in variants), reverse=True)
        missed_per_s = sum(by_rate[num_held:])
        switch_s = adapter_bytes / self.link_bytes_per_s
        waited_s = missed_per_s * switch_s
        slower_s = (self.adapter_slowdown - 1) * self._mean(self._alone_s, models)
        return self._report(
            way,
            device_bytes=fixed_bytes + num_held * adapter_bytes,
            host_bytes=sum(m.adapter_bytes for m in variants),
            switch_s=switch_s,
            switches=Switching(missed_per_s, slower_s + (waited_s / total if total else 0.0), waited_s),
            load=sum(map(self._work, models)) * self.adapter_slowdown + waited_s,
        )

    # ------------------------------------------------------------------ their parts

    def _report(
        self,
        way: SharingWay,
        *,
        device_bytes: int,
        load: float,
        host_bytes: int = 0,
        num_instances: int = 1,
        switch_s: float = 0.0,
        switches: Switching | None = None,
    ) -> WayReport:
        switches = switches or Switching()
        switches_per_h = 3600 * switches.switches_per_s
        penalty = switch_penalty_usd_per_h(
            switches_per_h,
            switches.mean_switch_s,
            tokens_per_s=self.tokens_per_s,
            usd_per_token=self.usd_per_token,
        )
        return WayReport(
            way=way,
            obstacle=self._obstacle(device_bytes, host_bytes, load),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            num_instances=num_instances,
            switch_s=switch_s,
            switches_per_h=switches_per_h,
            added_s=switches.added_s,
            load=load,
            usd_per_h=num_instances * self.num_devices * self.usd_per_device_h + penalty,
        )

    def _obstacle(self, device_bytes: int, host_bytes: int, load: float) -> str:
        if device_bytes > self.memory_bytes:
            return f"{_gb(device_bytes)} of {_gb(self.memory_bytes)} device memory"
        if host_bytes > self.host_bytes:
            return f"{_gb(host_bytes)} of {_gb(self.host_bytes)} host memory"
        return f"{load:.0%} of an instance's time" if load > 1 else ""

    def _switch_s(self, way: SharingWay, weight_bytes: int) -> float:
        transfer_s = weight_bytes / self.link_bytes_per_s
        if way is SharingWay.OVERLAPPED:
            return overlapped_switch_s(transfer_s, lead_s=self.lead_s, init_s=self.init_s)
        read_s = weight_bytes / self.disk_bytes_per_s if way is SharingWay.COLD else 0.0
        return read_s + transfer_s + self.init_s

    def _alone_s(self, model: SharedModel) -> float:
        """Return how long a request takes with the device to its model's own batch."""
        return model.tokens_in / self.prefill_tokens_per_s + model.tokens_out * self.tpot_s

    def _beside_s(self, models: Sequence[SharedModel]) -> float:
        """Return how long requests of another model are under way during a request, on average."""
        under_way = sum(m.requests_per_s * self._alone_s(m) for m in models)

        def beside_s(model: SharedModel) -> float:
            alone_s = self._alone_s(model)
            return alone_s * (1 - exp(model.requests_per_s * alone_s - under_way))

        return self._mean(beside_s, models)

    def _work(self, model: SharedModel) -> float:
        """Return the share of an instance's time that the model's requests take."""
        seconds = model.tokens_in / self.prefill_tokens_per_s + model.tokens_out / self.tokens_per_s
        return model.requests_per_s * seconds

    def _kv_bytes(self, model: SharedModel) -> int:
        """Return what the KV cache takes: requests under way, each half generated; one whole at least."""
        under_way = model.requests_per_s * self._alone_s(model)
        num_tokens = under_way * (model.tokens_in + model.tokens_out / 2)
        return int(model.card.kv_bytes_per_token * max(num_tokens, model.tokens_in + model.tokens_out))

    def _mean(self, seconds: Callable[[SharedModel], float], models: Sequence[SharedModel]) -> float:
        """Return the mean over requests."""
        total = sum(m.requests_per_s for m in models)
        return sum(m.requests_per_s * seconds(m) for m in models) / total if total else 0.0


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
