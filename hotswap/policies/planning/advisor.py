"""Comparing methods of sharing devices for given models and their traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf

from hotswap.errors import ConfigError
from hotswap.policies.planning.sharing import (
    SharedModel,
    SharingMethod,
    Switching,
    overlapped_switch_s,
    switch_penalty_usd_per_h,
    switching,
)

__all__ = ["MethodReport", "SharingAdvisor", "SharingReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodReport:
    """The memory, latency and cost of one method of sharing.

    Attributes:
        method: The method.
        obstacle: Why the method is not possible; empty if it is.
        device_bytes: Bytes on the devices of the largest instance: weights, adapters and KV cache.
        host_bytes: Bytes of host memory.
        num_instances: Instances of the given size.
        switch_s: Seconds for which the longest switch stops an instance.
        switches_per_h: The expected number of switches per hour.
        added_s: The expected latency that sharing adds to a request.
        load: The share of an instance's time that requests and switches take; over 1 it cannot keep up.
        usd_per_h: The cost of devices, and of tokens lost to switches.
    """

    method: SharingMethod
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
            return f"{self.method:<22}not possible: {self.obstacle}"
        return (
            f"{self.method:<22}{self.device_bytes / 1e9:9.1f} GB{self.host_bytes / 1e9:9.1f} GB"
            f"{self.switch_s:9.3f} s{self.switches_per_h:9.1f}/h{self.added_s:9.3f} s"
            f"{self.load:8.0%}{self.usd_per_h:10.2f} USD/h"
        )


@dataclass(frozen=True, slots=True)
class SharingReport:
    """The reports of all methods, from the simplest to the most costly switches. `str` is a table."""

    methods: tuple[MethodReport, ...]

    def method(self, method: SharingMethod) -> MethodReport:
        """Return the report of one method."""
        return next(report for report in self.methods if report.method is method)

    def best(self, *, max_added_s: float = inf) -> MethodReport | None:
        """Return the cheapest possible method that adds at most `max_added_s`; `None` if there is none.

        Of equal costs the one that adds less wins, then the earlier one.
        """
        able = [w for w in self.methods if not w.obstacle and w.added_s <= max_added_s]
        return min(able, key=lambda w: (w.usd_per_h, w.added_s), default=None)

    def __str__(self) -> str:
        head = f"{'method':<22}{'devices':>12}{'host':>12}{'switch':>11}{'switches':>11}{'added':>11}"
        best = self.best()
        last = "no method is possible" if best is None else f"cheapest: {best.method}"
        return "\n".join([f"{head}{'load':>8}{'cost':>16}", *map(str, self.methods), last])


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingAdvisor:
    """Compares the methods of sharing one instance: whether each is possible, what it adds, what it costs.

    Source: the multi-model serving post, its five methods and its cost model,

        USD per hour = devices * price + switches per hour * seconds each * tokens/s * USD per token

    with the parts from `hotswap.policies.planning.sharing`. Sizes are those of the models themselves
    (manifest and shape), never guessed from names. A switch takes

        cold         weights / disk_bytes_per_s + weights / link_bytes_per_s + init_s
        warm         weights / link_bytes_per_s + init_s
        overlapped   max(0, weights / link_bytes_per_s - lead_s) + init_s, and room for both models
        adapter      adapter / link_bytes_per_s

    **Readings.** The post gives the 200 ms of making a model ready (`init_s`) for overlapped switches alone,
    where nothing else is left; the other methods have them too, hidden in seconds. Its penalty is in lost
    tokens; the price of the GPU is in the first term already.

    **Ours:** the number of switches and the latency that they add (`switching`); the KV cache by Little's
    law, for the average number of concurrent requests, and at least one of each model; `load`; the most
    popular adapters stay where not all fit; models side by side slow each other down while both have requests
    (of independent requests, *a* on average, none is running for the share exp(-a) of the time), and for
    `load` at all times; and the baseline of one instance for each model.

    Attributes:
        memory_bytes: Device memory of one instance that the engine may use.
        host_bytes: Host memory for weights.
        num_devices: Devices of one instance.
        link_bytes_per_s: Bandwidth from host memory to all devices of an instance together.
        disk_bytes_per_s: Bandwidth from disk to host memory.
        init_s: Seconds to make a loaded model ready.
        lead_s: Seconds before a switch at which an overlapped transfer begins.
        turn_s: The least time for which a model keeps an instance.
        tokens_per_s: Tokens that a busy instance generates per second.
        prefill_tokens_per_s: Prompt tokens that a busy instance computes per second.
        tpot_s: Seconds between two tokens of a request.
        contention: The factor by which another model on the device slows requests down.
        adapter_slowdown: The factor by which many adapters in a batch slow requests down.
        usd_per_device_h: Price of a device per hour.
        usd_per_token: Value of a generated token.
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
        """Return the reports of all methods for these models.

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
                self._temporal(SharingMethod.OVERLAPPED, models),
                self._temporal(SharingMethod.WARM, models),
                self._temporal(SharingMethod.COLD, models),
            )
        )

    # ------------------------------------------------------------------ the methods

    def _dedicated(self, models: Sequence[SharedModel]) -> MethodReport:
        return self._report(
            SharingMethod.DEDICATED,
            device_bytes=max(m.card.weight_bytes + self._kv_bytes(m) for m in models),
            num_instances=len(models),
            load=max(map(self._work, models)),
        )

    def _temporal(self, method: SharingMethod, models: Sequence[SharedModel]) -> MethodReport:
        weights = sorted((m.card.weight_bytes for m in models), reverse=True)
        device_bytes = max(m.card.weight_bytes + self._kv_bytes(m) for m in models)
        if method is SharingMethod.OVERLAPPED:
            device_bytes = max(device_bytes, sum(weights[:2]) + max(map(self._kv_bytes, models)))
        switch_s = [self._switch_s(method, m.card.weight_bytes) for m in models]
        switches = switching(
            [m.requests_per_s for m in models], switch_s, list(map(self._alone_s, models)), turn_s=self.turn_s
        )
        return self._report(
            method,
            device_bytes=device_bytes,
            host_bytes=0 if method is SharingMethod.COLD else sum(weights),
            switch_s=max(switch_s) if len(models) > 1 else 0.0,
            switches=switches,
            load=sum(map(self._work, models)) + switches.lost_share,
        )

    def _spatial(self, models: Sequence[SharedModel]) -> MethodReport:
        contention = self.contention if len(models) > 1 else 1.0
        return self._report(
            SharingMethod.SPATIAL,
            device_bytes=sum(m.card.weight_bytes + self._kv_bytes(m) for m in models),
            switches=Switching(added_s=(contention - 1) * self._beside_s(models)),
            load=sum(map(self._work, models)) * contention,
        )

    def _adapter_pool(self, models: Sequence[SharedModel]) -> MethodReport:
        method = SharingMethod.ADAPTER_POOL
        variants = [m for m in models if m.base is not None]
        if not variants or len({m.base or m.card.id for m in models}) > 1:
            return MethodReport(method=method, obstacle="the models are not variants of one base")
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
            method,
            device_bytes=fixed_bytes + num_held * adapter_bytes,
            host_bytes=sum(m.adapter_bytes for m in variants),
            switch_s=switch_s,
            switches=Switching(missed_per_s, slower_s + (waited_s / total if total else 0.0), waited_s),
            load=sum(map(self._work, models)) * self.adapter_slowdown + waited_s,
        )

    # ------------------------------------------------------------------ the parts of a report

    def _report(
        self,
        method: SharingMethod,
        *,
        device_bytes: int,
        load: float,
        host_bytes: int = 0,
        num_instances: int = 1,
        switch_s: float = 0.0,
        switches: Switching | None = None,
    ) -> MethodReport:
        switches = switches or Switching()
        switches_per_h = 3600 * switches.switches_per_s
        penalty = switch_penalty_usd_per_h(
            switches_per_h,
            switches.mean_switch_s,
            tokens_per_s=self.tokens_per_s,
            usd_per_token=self.usd_per_token,
        )
        return MethodReport(
            method=method,
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

    def _switch_s(self, method: SharingMethod, weight_bytes: int) -> float:
        transfer_s = weight_bytes / self.link_bytes_per_s
        if method is SharingMethod.OVERLAPPED:
            return overlapped_switch_s(transfer_s, lead_s=self.lead_s, init_s=self.init_s)
        read_s = weight_bytes / self.disk_bytes_per_s if method is SharingMethod.COLD else 0.0
        return read_s + transfer_s + self.init_s

    def _alone_s(self, model: SharedModel) -> float:
        """Return the seconds of a request on a device that serves its model alone."""
        return model.tokens_in / self.prefill_tokens_per_s + model.tokens_out * self.tpot_s

    def _beside_s(self, models: Sequence[SharedModel]) -> float:
        """Return the mean seconds of a request during which another model has requests too."""
        concurrent = sum(m.requests_per_s * self._alone_s(m) for m in models)

        def beside_s(model: SharedModel) -> float:
            alone_s = self._alone_s(model)
            return alone_s * (1 - exp(model.requests_per_s * alone_s - concurrent))

        return self._mean(beside_s, models)

    def _work(self, model: SharedModel) -> float:
        """Return the share of an instance's time that the model's requests take."""
        seconds = model.tokens_in / self.prefill_tokens_per_s + model.tokens_out / self.tokens_per_s
        return model.requests_per_s * seconds

    def _kv_bytes(self, model: SharedModel) -> int:
        """Return the bytes of KV cache: concurrent requests, each half generated; at least one whole."""
        concurrent = model.requests_per_s * self._alone_s(model)
        num_tokens = concurrent * (model.tokens_in + model.tokens_out / 2)
        return int(model.card.kv_bytes_per_token * max(num_tokens, model.tokens_in + model.tokens_out))

    def _mean(self, seconds: Callable[[SharedModel], float], models: Sequence[SharedModel]) -> float:
        """Return the mean over all requests."""
        total = sum(m.requests_per_s for m in models)
        return sum(m.requests_per_s * seconds(m) for m in models) / total if total else 0.0


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
