"""A fleet's metrics by vLLM's names, which gateways look for; docs/telemetry.md has all of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from hotswap import Fleet, FleetView, ModelId
from hotswap import telemetry as tm

__all__ = ["vllm_families"]

_MODEL = "model_name"
_Totals = defaultdict[str, float]
# What vLLM calls the ends of requests; those that were refused are none.
_REASONS = {"stop": "stop", "length": "length", "left": "abort", "error": "error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renamed:
    """A histogram of OpenTelemetry's by the name that vLLM has for the same.

    Attributes:
        name: vLLM's.
        of: The name of the metric, as telemetry has it.
        unit: What Prometheus' exporter writes behind that name.
        only: The attribute, and its value, of what counts.
        help: What it is.
    """

    name: str
    of: str
    unit: str = "_seconds"
    only: tuple[str, str] | None = None
    help: str


_HISTOGRAMS = (
    _Renamed(name="time_to_first_token_seconds", of=tm.TTFT, help="Arrival to first token"),
    _Renamed(
        name="request_time_per_output_token_seconds",
        of=tm.TPOT,
        help="Mean time per output token after the first, of each request",
    ),
    _Renamed(name="e2e_request_latency_seconds", of=tm.REQUEST_SECONDS, help="Arrival to the end"),
    _Renamed(
        name="request_queue_time_seconds", of=tm.QUEUE_SECONDS, help="Arrival until a request first runs"
    ),
    _Renamed(
        name="request_prompt_tokens",
        of=tm.TOKEN_USAGE,
        unit="",
        only=(tm.TOKEN_TYPE, "input"),
        help="Tokens of prompts",
    ),
    _Renamed(
        name="request_generation_tokens",
        of=tm.TOKEN_USAGE,
        unit="",
        only=(tm.TOKEN_TYPE, "output"),
        help="Tokens of answers",
    ),
)


def vllm_families(families: Iterable[Metric], fleet: Fleet) -> list[Metric]:
    """Return metrics by vLLM's names: gauges of a fleet, and histograms and counters that it has recorded.

    Args:
        families: What a registry has collected; of several fleets the sums are told.
        fleet: What gauges are read from.
    """
    recorded, view = {family.name: family for family in families}, fleet.view()
    made = [
        *(
            _histogram(of, recorded[name])
            for of in _HISTOGRAMS
            if (name := _flat(of.of) + of.unit) in recorded
        ),
        *_prompt_tokens(recorded),
        *_ends(recorded),
        _by_model("generation_tokens", "Tokens that requests were given", fleet.num_tokens, counter=True),
        *_gauges(view),
        *_adapters(view, {one.version: one.id for one in fleet.adapters}),
    ]
    return [family for family in made if family.samples]


def _flat(name: str) -> str:
    """A name as Prometheus' exporter of OpenTelemetry writes it."""
    return name.replace(".", "_")


def _samples(
    family: Metric, ending: str, only: tuple[str, str] | None = None
) -> Iterator[tuple[Sample, str]]:
    """The samples of a family whose names end so, each with its model; those without one are left out."""
    for sample in family.samples:
        model = sample.labels.get(_flat(tm.MODEL))
        is_wanted = only is None or sample.labels.get(_flat(only[0])) == only[1]
        if sample.name == family.name + ending and model is not None and is_wanted:
            yield sample, model


def _histogram(of: _Renamed, family: Metric) -> Metric:
    made = Metric(f"vllm:{of.name}", of.help, "histogram")
    buckets = defaultdict[tuple[str, str], float](float)
    sums, counts = _Totals(float), _Totals(float)
    for sample, model in _samples(family, "_bucket", of.only):
        buckets[model, sample.labels["le"]] += sample.value
    for ending, total in (("_sum", sums), ("_count", counts)):
        for sample, model in _samples(family, ending, of.only):
            total[model] += sample.value
    for model in counts:
        for (whose, bound), value in buckets.items():
            if whose == model:
                made.add_sample(f"{made.name}_bucket", {_MODEL: model, "le": bound}, value)
        made.add_sample(f"{made.name}_count", {_MODEL: model}, counts[model])
        made.add_sample(f"{made.name}_sum", {_MODEL: model}, sums[model])
    return made


def _prompt_tokens(recorded: Mapping[str, Metric]) -> Iterator[Metric]:
    if (family := recorded.get(_flat(tm.TOKEN_USAGE))) is not None:
        tokens = _Totals(float)
        for sample, model in _samples(family, "_sum", (tm.TOKEN_TYPE, "input")):
            tokens[model] += sample.value
        yield _by_model("prompt_tokens", "Tokens of the prompts of requests that ended", tokens, counter=True)


def _ends(recorded: Mapping[str, Metric]) -> Iterator[Metric]:
    if (family := recorded.get(_flat(tm.REQUESTS))) is not None:
        ends = defaultdict[tuple[str, str], float](float)
        for sample, model in _samples(family, "_total"):
            reason = _REASONS.get(sample.labels.get(_flat(tm.REQUEST_OUTCOME), ""))
            if reason is not None:
                ends[model, reason] += sample.value
        made = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason", labels=(_MODEL, "finished_reason")
        )
        for labels, number in ends.items():
            made.add_metric(labels, number)
        yield made


def _gauges(view: FleetView) -> Iterator[Metric]:
    """What there is at this moment of each model, over all its instances."""
    running, blocks, used = _Totals(float), _Totals(float), _Totals(float)
    cache = GaugeMetricFamily(
        "vllm:cache_config_info", "KV blocks of a model", labels=(_MODEL, "block_size", "num_gpu_blocks")
    )
    block_tokens = dict[str, int]()
    for instance in view.instances:
        if (model := instance.model) is not None:
            running[model] += instance.num_running
            blocks[model] += instance.num_kv_blocks
            used[model] += instance.num_kv_blocks - instance.num_free_kv_blocks
            block_tokens[model] = instance.kv_block_tokens
    for name, number in blocks.items():
        if number:
            cache.add_metric((name, str(block_tokens[name]), f"{number:.0f}"), 1.0)
    waiting = {one.id: max(0.0, one.num_requests - running[one.id]) for one in view.models}
    usage = {name: used[name] / number for name, number in blocks.items() if number}
    yield _by_model(
        "num_requests_running", "Requests of batches", {one.id: running[one.id] for one in view.models}
    )
    yield _by_model("num_requests_waiting", "Requests that wait, in the fleet or in an engine", waiting)
    yield _by_model("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", usage)
    yield _by_model("gpu_cache_usage_perc", "The same by its earlier name", usage)
    yield cache


def _adapters(view: FleetView, ids: Mapping[str, str]) -> Iterator[Metric]:
    """Which adapters requests run and wait with: one series, whose value is the time."""

    def joined(asks: Callable[[int, int], bool]) -> str:
        found = (ids.get(one.id, one.id) for one in view.adapters if asks(one.num_running, one.num_waiting))
        return ",".join(sorted(set(found)))

    if most := sum(instance.max_adapters for instance in view.instances):
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        made = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that requests name", labels=labels)
        running = joined(lambda running, _: running > 0)
        made.add_metric((str(most), running, joined(lambda _, waiting: waiting > 0)), time.time_ns() / 1e9)
        yield made


def _by_model(
    name: str, help: str, values: Mapping[ModelId, float] | Mapping[str, float], *, counter: bool = False
) -> Metric:
    kind = CounterMetricFamily if counter else GaugeMetricFamily
    made = kind(f"vllm:{name}", help, labels=(_MODEL,))
    for model, value in values.items():
        made.add_metric((model,), value)
    return made
