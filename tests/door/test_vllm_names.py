"""`/metrics` by vLLM's names says what the fleet's own names and its view say."""

from __future__ import annotations

from functools import partial

import anyio
from prometheus_client.parser import text_string_to_metric_families as parsed

from hotswap import Adapter, Fleet, ModelId, Sampling
from hotswap.door import PrometheusMetrics, create_app
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import client_of
from tests.runtime.support import Idle, engine_of, sim_fleet

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# What the Gateway API's inference extension, llm-d and Envoy's gateway read.
GATEWAYS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
}
TOGETHER = {
    "vllm:time_to_first_token_seconds": "gen_ai_server_time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds": "gen_ai_server_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "gen_ai_server_request_duration_seconds",
    "vllm:request_queue_time_seconds": "hotswap_queue_duration_seconds",
}


async def series_of(fleet: Fleet, metrics: PrometheusMetrics) -> Series:
    """All series of `/metrics`, each by its name and its labels, those of scopes left out."""
    async with client_of(create_app(fleet, metrics=metrics)) as client:
        text = (await client.get("/metrics")).text
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if "otel_scope" not in k))): (
            sample.value
        )
        for family in parsed(text)
        for sample in family.samples
    }


def summed(series: Series, name: str, **labels: str) -> float:
    """The sum of all series of a name that have some labels."""
    found = [
        value for (of, has), value in series.items() if of == name and labels.items() <= dict(has).items()
    ]
    assert found, name
    return sum(found)


@virtual_time
async def test_gauges_are_what_the_view_shows() -> None:
    metrics, engines = (
        PrometheusMetrics(vllm_names=True),
        [engine_of(f"e{n}", max_adapters=2) for n in range(2)],
    )
    async with sim_fleet(
        "a", "b", engines=engines, scheduler=Idle(), meter_provider=metrics.meter_provider
    ) as fleet:
        fleet.adapters.add(Adapter("x", "a"))
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        long = Sampling(max_tokens=400, ignore_eos=True)
        series, view = Series(), fleet.view()
        async with anyio.create_task_group() as tasks:
            for _ in range(20):  # of which 16 run
                tasks.start_soon(partial(fleet.generate, "a", [1] * 40, long, adapter="x"))
            tasks.start_soon(fleet.generate, "b", [1], long)
            await anyio.sleep(0.5)
            series, view = await series_of(fleet, metrics), fleet.view()
            tasks.cancel_scope.cancel()
        assert {name for name, _ in series} >= GATEWAYS
        by_model = {model: partial(summed, series, model_name=model) for model in ("a", "b")}
        for one in view.models:
            here = [instance for instance in view.instances if instance.model == one.id]
            running = by_model[one.id]("vllm:num_requests_running")
            assert running == sum(instance.num_running for instance in here)
            assert running + by_model[one.id]("vllm:num_requests_waiting") == one.num_requests
        assert by_model["a"]("vllm:num_requests_waiting") == 4.0
        assert by_model["b"]("vllm:num_requests_waiting") == 1.0
        blocks = sum(instance.num_kv_blocks for instance in view.instances)
        used = blocks - sum(instance.num_free_kv_blocks for instance in view.instances)
        assert 0.0 < by_model["a"]("vllm:kv_cache_usage_perc") == used / blocks
        assert summed(series, "vllm:cache_config_info", num_gpu_blocks=str(blocks), block_size="16") == 1.0
        names = {"max_lora": "4", "running_lora_adapters": "x", "waiting_lora_adapters": "x"}
        assert summed(series, "vllm:lora_requests_info", **names) > 0.0
        # A model without an instance has no KV blocks to be told of.
        assert not any(("model_name", "b") in has for of, has in series if of == "vllm:kv_cache_usage_perc")


@virtual_time
async def test_what_was_recorded_is_the_same_by_both_names() -> None:
    metrics = PrometheusMetrics(vllm_names=True)
    async with sim_fleet("a", "b", scheduler=Idle(), meter_provider=metrics.meter_provider) as fleet:
        for number, model in enumerate(("a", "b")):
            await fleet.swap(f"e{number}", to=model)
            for most in (3, 5):
                await fleet.generate(model, [1] * 10, Sampling(max_tokens=most, ignore_eos=True))
        with anyio.move_on_after(0.5):
            await fleet.generate("a", [1], Sampling(max_tokens=2000, ignore_eos=True))
        given = dict(fleet.num_tokens)
        series = await series_of(fleet, metrics)
    for name, own in TOGETHER.items():
        for ending in ("_sum", "_count"):
            for model in ("a", "b"):
                ours = summed(series, own + ending, gen_ai_request_model=model)
                assert summed(series, name + ending, model_name=model) == ours, name
                assert ours > 0.0 or ending == "_sum", name
        bounds = [dict(has)["le"] for of, has in series if of == f"{name}_bucket"]
        assert bounds
        assert summed(series, f"{name}_bucket", le="+Inf") == summed(series, f"{name}_count")
    for model in ("a", "b"):
        assert summed(series, "vllm:generation_tokens_total", model_name=model) == given[ModelId(model)]
    assert summed(series, "vllm:prompt_tokens_total", model_name="b") == 20.0
    assert summed(series, "vllm:request_generation_tokens_sum", model_name="b") == 8.0
    assert summed(series, "vllm:request_prompt_tokens_count", model_name="b") == 2.0
    assert summed(series, "vllm:request_success_total", model_name="a", finished_reason="length") == 2.0
    assert summed(series, "vllm:request_success_total", model_name="a", finished_reason="abort") == 1.0


@virtual_time
async def test_they_are_told_only_if_they_are_asked_for() -> None:
    metrics = PrometheusMetrics()
    async with sim_fleet("a", scheduler=Idle(), meter_provider=metrics.meter_provider) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.generate("a", [1], Sampling(max_tokens=2))
        assert not any(name.startswith("vllm:") for name, _ in await series_of(fleet, metrics))
