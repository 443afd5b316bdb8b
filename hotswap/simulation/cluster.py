"""What is simulated: engines of one profile, and the store behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hotswap.backends.sim import SimEngine, SimNodes, SimStore, sim_manifest
from hotswap.backends.sim.batcher import Batching
from hotswap.backends.sim.load import Reporting
from hotswap.checks import check_choice, check_counts, check_positive, check_required_seconds
from hotswap.device_budget import DeviceBudget
from hotswap.errors import ConfigError
from hotswap.profiling.profiles import PROFILES, Profile
from hotswap.store import WeightStore
from hotswap.view import TierView

__all__ = ["Cluster"]

_E = TypeVar("_E", bound=SimEngine)

# Of simulated reads, whose content is real and takes memory.
_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated: so many engines of one profile, and a store behind them.

    Attributes:
        num_engines: Instances, `e0` and so on.
        num_nodes: Nodes that they are spread over evenly, `n0` with the first of them and so on. Each has a
            host tier and a disk of its own, with every model on it, and what its engines read at once shares
            their bandwidth, a model that several want being read once. 0 is one store for all, from which
            each reads as if alone.
        profile: Their device and the size of every model; a name of `PROFILES` will do.
        host_bytes: Room of the host tier (of each node) for weights; `None` is without bound, 0 none.
        host_bytes_per_s: What the host tier reads at.
        disk_bytes_per_s: What the disk that holds every model reads at.
        token_budget: Tokens of a step.
        max_requests: Sequences of a batch.
        batching: Prefill chunks beside decodes, or as old engines did, whole prompts before them.
        watermark: The share of KV blocks that an admission leaves free; of `"prefill_first"` alone.
        prefix_reuse: Whether engines compute what prompts begin with once, while they have room to keep it.
        reporting: Whether views have the load of engines as it is, or `"by_step"`: as each has reported it,
            which it makes up when it has planned a step and sends when that has ended.
        max_adapters: Adapters that an engine holds at once.
        min_replicas: The least number of replicas of every model.
        max_context_tokens: The longest request.
        losses: When which engine is lost: pairs of seconds and its id. A fleet brings it back.
        engines_per_device: So many engines share the memory of as many and lend each other KV blocks.
        kv_floor: The share of its own KV blocks that an engine lends to none, where engines share memory.
    """

    num_engines: int = 4
    num_nodes: int = 0
    profile: Profile | str = "h100-llama-3.1-8b"
    host_bytes: int | None = None
    host_bytes_per_s: float = 50e9
    disk_bytes_per_s: float = 5e9
    token_budget: int = 2048
    max_requests: int = 256
    batching: Batching = "mixed"
    watermark: float = 0.0
    prefix_reuse: bool = False
    reporting: Reporting = "live"
    max_adapters: int = 8
    min_replicas: int = 0
    max_context_tokens: int = 131_072
    losses: tuple[tuple[float, str], ...] = field(default=())
    engines_per_device: int = 1
    kv_floor: float = 0.25

    def __post_init__(self) -> None:
        counts = ("num_engines", "token_budget", "max_requests", "max_context_tokens", "engines_per_device")
        check_counts(ConfigError, 1, **{name: getattr(self, name) for name in counts})
        check_counts(ConfigError, 0, max_adapters=self.max_adapters, host_bytes=self.host_bytes or 0)
        rates = {name: getattr(self, name) for name in ("host_bytes_per_s", "disk_bytes_per_s")}
        check_positive(ConfigError, **rates)
        for at_s, engine in self.losses:
            check_required_seconds(ConfigError, **{f"The time of the loss of {engine!r}": at_s})
        if self.num_nodes < 0 or (self.num_nodes and self.num_engines % self.num_nodes):
            raise ConfigError(
                f"num_nodes is {self.num_nodes!r}; give 0, or what divides {self.num_engines} engines."
            )
        if isinstance(self.profile, str) and self.profile not in PROFILES:
            raise ConfigError(f"There is no profile {self.profile!r}; there are {', '.join(PROFILES)}.")
        engines = {f"e{number}" for number in range(self.num_engines)}
        check_choice(ConfigError, ("mixed", "prefill_first"), batching=self.batching)
        check_choice(ConfigError, ("live", "by_step"), reporting=self.reporting)
        if not 0 < self.kv_floor <= 1:
            raise ConfigError(f"kv_floor is {self.kv_floor!r}; give a share over 0, at most 1.")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark!r}; give a share of all blocks, 0 to below 1.")
        if unknown := sorted({engine for _, engine in self.losses} - engines):
            raise ConfigError(
                f"losses name {', '.join(unknown)}; the engines are e0 to e{self.num_engines - 1}."
            )

    @property
    def measured(self) -> Profile:
        """The profile itself."""
        return PROFILES[self.profile] if isinstance(self.profile, str) else self.profile

    def engines(self, kind: type[_E]) -> list[_E]:
        """Return new engines."""
        profile, sharing = self.measured, self.engines_per_device
        block_bytes = 16 * profile.kv_bytes_per_token
        floor = max(1, int(self.kv_floor * profile.kv_blocks))
        budgets = [
            DeviceBudget(
                sharing * (profile.weight_bytes + profile.kv_blocks * block_bytes), name=f"d{number}"
            )
            for number in range(-(-self.num_engines // sharing) if sharing > 1 else 0)
        ]
        return [
            kind(
                f"e{number}",
                profile.device,
                kv_blocks=sharing * profile.kv_blocks - (sharing - 1) * floor,
                max_requests=self.max_requests,
                token_budget=self.token_budget,
                max_adapters=self.max_adapters,
                batching=self.batching,
                watermark=self.watermark,
                node=f"n{number * self.num_nodes // self.num_engines}" if self.num_nodes else "",
                prefix_reuse=self.prefix_reuse,
                reporting=self.reporting,
                device_budget=budgets[number // sharing] if budgets else None,
                floor_bytes=profile.weight_bytes + floor * block_bytes,
            )
            for number in range(self.num_engines)
        ]

    def store(self, models: Sequence[str]) -> WeightStore:
        """Return a new store with the models on its disk (of each node), and none in host memory."""
        if not self.num_nodes:
            return self._store(models, "")
        return SimNodes({f"n{node}": self._store(models, f"n{node}") for node in range(self.num_nodes)})

    def _store(self, models: Sequence[str], node: str) -> SimStore:
        profile = self.measured
        facts = {
            "max_context_tokens": self.max_context_tokens,
            "kv_bytes_per_token": profile.kv_bytes_per_token,
        }
        host = TierView(
            name="host", bytes_per_s=self.host_bytes_per_s, capacity_bytes=self.host_bytes, node=node
        )
        return SimStore(
            [sim_manifest(model, profile.weight_bytes, **facts) for model in models],
            home=TierView(name="disk", bytes_per_s=self.disk_bytes_per_s, node=node),
            cache=None if self.host_bytes == 0 else host,
            chunk_bytes=_CHUNK_BYTES,
            shared=bool(node),
        )
