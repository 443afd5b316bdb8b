"""Real traces as loads of a fleet: the part that a seed takes, the device, and the targets of requests.

The folder has tables with the columns of `hotswap.simulation.Trace.read`:

    azure_llm_2023_conv.csv.gz           Azure's conversations (Patel et al., Splitwise, ISCA 2024)
    azure_llm_2023_code.csv.gz           Azure's completions of code, likewise
    mooncake_conversation.csv.gz         Mooncake's (Qin et al., FAST 2025), with `prefix_blocks_512`
    servegen_4models_60rps_20min.csv.gz  from the clients of ServeGen (arXiv:2505.09999), with `tenant`

`arrival_s` of Azure's is the seconds since the first row of its file, to a tenth of a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random

from hotswap.backends.sim import DeviceProfile
from hotswap.offline.workloads import zipf_mix
from hotswap.simulation import Cluster, Served, Trace, TraceRequest

__all__ = ["LOADS", "Load", "Target"]

AZURE = "azure_llm_2023_conv.csv.gz"
AZURE_CODE = "azure_llm_2023_code.csv.gz"
MOONCAKE = "mooncake_conversation.csv.gz"
SERVEGEN = "servegen_4models_60rps_20min.csv.gz"
# Of the clock of Mooncake's trace.
TICK_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target of a request: its first token within `ttft_s`, each other within `tpot_s` in the mean.

    Both are those of Aegaeon (SOSP 2025). A long prompt may take `idle_factor` times as long as on an idle
    engine, if that is more.
    """

    ttft_s: float = 10.0
    idle_factor: float = 5.0
    tpot_s: float = 0.1

    def met(self, request: Served, cluster: Cluster) -> bool:
        """Whether a request met the target and ended without an error."""
        idle_s = idle_ttft_s(cluster.measured.device, cluster.token_budget, request.prompt_tokens)
        ttft_s = max(self.ttft_s, self.idle_factor * idle_s)
        return not request.error and request.ttft_s <= ttft_s and request.tpot_s <= self.tpot_s


@lru_cache(maxsize=100_000)
def idle_ttft_s(device: DeviceProfile, token_budget: int, prompt_tokens: int) -> float:
    """Return how long a prompt takes on an engine that does nothing else."""
    seconds = 0.0
    for cached in range(0, prompt_tokens, token_budget):
        count = min(token_budget, prompt_tokens - cached)
        prefill = count if prompt_tokens - cached > 1 else 0  # a last token alone is computed as a decode
        seconds += device.step_s(
            tokens=count,
            batch=1,
            context=cached,
            prefill=prefill,
            prefill_squares=prefill * (count + 2 * cached),
        )
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A part of a trace for every seed, and the engines that serve it.

    Attributes:
        what: Description in a sentence.
        file: The table of the folder.
        cluster: The engines, except their number. All weights lie in host memory from the beginning.
        take: What a seed takes of the table.
        warm_s: Requests that arrive before are served, and not counted.
        most: The most engines that are tried.
        guess: The number of engines that is tried first.
        target: The target of its requests.
        columns: As of `Trace.read`.
        interval_s: Seconds between plans.
        patience_s: How long a model without a replica is kept waiting by weighted loads; where there are
            several, chosen on seeds that are not reported.
    """

    what: str
    file: str
    cluster: Cluster
    take: Callable[[Trace, Random], Trace]
    warm_s: float
    most: int
    guess: int
    target: Target = Target()
    columns: tuple[tuple[str, str], ...] = ()
    interval_s: float = 0.5
    patience_s: float = 6.0

    def trace(self, folder: Path, seed: int) -> Trace:
        """Return what a seed takes."""
        whole = _read(folder / self.file, self.columns)
        fitting = [r for r in whole.requests if r.prompt_tokens + r.output_tokens <= self.most_tokens]
        return self.take(Trace(tuple(fitting), whole.name), Random(seed))

    @property
    def most_tokens(self) -> int:
        """The longest request that an engine holds; longer ones are left out for all policies."""
        kv_tokens = 16 * self.cluster.measured.kv_blocks
        return min(kv_tokens, self.cluster.max_context_tokens) - 1


@lru_cache(maxsize=4)
def _read(path: Path, columns: tuple[tuple[str, str], ...]) -> Trace:
    return Trace.read(path, columns=dict(columns))


def _window(trace: Trace, random: Random, seconds: float, *, of: tuple[float, float] = (0.0, 1.0)) -> Trace:
    """So many seconds from a random moment on, in a part of the trace."""
    first_s, last_s = (share * trace.seconds for share in of)
    return trace.window(random.uniform(first_s, last_s - seconds), seconds)


def _azure_models(trace: Trace, random: Random) -> Trace:
    """Six minutes, each request for one of 32 models by Zipf's law."""
    shares = zipf_mix([f"m{number}" for number in range(32)], exponent=1.0)
    names = random.choices(list(shares), list(shares.values()), k=len(trace.requests))
    requests = (replace(r, model=name) for r, name in zip(trace.requests, names, strict=True))
    return _window(Trace(tuple(requests), trace.name), random, 360.0)


def _azure(trace: Trace, random: Random) -> Trace:
    """Five minutes."""
    return _window(trace, random, 300.0)


def _mooncake(trace: Trace, random: Random) -> Trace:
    """Three minutes of each half of the hour, laid over each other.

    The trace's clock ticks every three seconds; where in them a request came is drawn.
    """
    halves = [_window(trace, random, 180.0, of=of) for of in ((0.0, 0.5), (0.5, 1.0))]
    requests = (request for half in halves for request in half.requests)
    return Trace.of(
        (replace(r, arrive_s=r.arrive_s + random.uniform(0.0, TICK_S)) for r in requests), trace.name
    )


def _tenants(share: float, seconds: float) -> Callable[[Trace, Random], Trace]:
    """So many seconds, each request with this chance."""

    def take(trace: Trace, random: Random) -> Trace:
        inside = _window(trace, random, seconds)
        kept = (request for request in inside.requests if random.random() < share)
        return Trace(tuple(replace(r, model=r.model.replace("/", "-")) for r in kept), trace.name)

    return take


def _adapters(trace: Trace, random: Random) -> Trace:
    """The same, with every tenant an adapter of one model."""
    taken = _tenants(0.5, 240.0)(trace, random)
    return Trace(tuple(_with_adapter(request) for request in taken.requests), trace.name)


def _with_adapter(request: TraceRequest) -> TraceRequest:
    return replace(request, adapter=request.model, model="m")


# Disks as fast as host memory: fleets have loaded every model before.
_H100 = Cluster(profile="h100-llama-3.1-8b", disk_bytes_per_s=50e9, max_requests=64)
# A step of 512 tokens takes it less than half of the target between two tokens. A prompt of 100,000 tokens,
# of which there is one or another, keeps those behind it waiting for most of a minute, whatever the policy.
_L40S = replace(_H100, profile="l40s-llama-3.1-8b", token_budget=512, max_context_tokens=32_768)

LOADS: Mapping[str, Load] = {
    "servegen-models": Load(
        what="ServeGen's tenants, each with a model of its own: an eighth of the requests of four minutes",
        file=SERVEGEN,
        columns=(("model", "tenant"),),
        cluster=_L40S,
        take=_tenants(1 / 8, 240.0),
        warm_s=60.0,
        most=24,
        guess=12,
    ),
    "azure-models": Load(
        what="Azure's conversations, each request for one of 32 models by Zipf's law: six minutes",
        file=AZURE,
        cluster=_H100,
        take=_azure_models,
        warm_s=60.0,
        most=32,
        guess=5,
        patience_s=4.0,
    ),
    "mooncake": Load(
        what="Mooncake's conversations to one model: three minutes of each half of it, one over the other",
        file=MOONCAKE,
        cluster=Cluster(
            profile="4xh100-llama-3.1-70b",
            disk_bytes_per_s=50e9,
            token_budget=1024,
            max_requests=64,
            prefix_reuse=True,
        ),
        take=_mooncake,
        warm_s=60.0,
        most=32,
        guess=11,
    ),
    "servegen-adapters": Load(
        what="ServeGen's tenants, each with an adapter of one model: half of the requests of four minutes",
        file=SERVEGEN,
        columns=(("model", "tenant"),),
        cluster=_L40S,
        take=_adapters,
        warm_s=60.0,
        most=32,
        guess=8,
    ),
    "azure": Load(
        what="Azure's conversations to one model: five minutes",
        file=AZURE,
        cluster=Cluster(profile="a10-llama-7b", disk_bytes_per_s=50e9, token_budget=512, max_requests=64),
        take=_azure,
        warm_s=60.0,
        most=32,
        guess=11,
        interval_s=0.2,
    ),
}
