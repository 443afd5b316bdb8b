"""The page of spans and metrics has the names that the code has, and those that a fleet records."""

from __future__ import annotations

import re
from dataclasses import fields

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from hotswap import Adapter, Sampling, SwapLimits, telemetry
from hotswap.offline.virtual_time import virtual_time
from tests.house.tree import ROOT
from tests.runtime.support import Idle, engine_of, sim_fleet
from tests.runtime.test_telemetry import Recorder, points

PAGE = (ROOT / "docs" / "telemetry.md").read_text("utf-8")
PHASES = [field.name.removesuffix("_s") for field in fields(SwapLimits)]


def named_in_the_page() -> set[str]:
    """The names of spans, attributes and metrics in the page."""
    return set(re.findall(r"`((?:gen_ai|hotswap|error)\.[a-z_.]+)`", PAGE)) - {
        "hotswap.stores",
        "hotswap.kernels",
        "hotswap.transports",
        "hotswap.unserved",
        "hotswap.vllm",
    }


def named_in_the_code() -> set[str]:
    constants = {name: value for name, value in vars(telemetry).items() if name.isupper()}
    names = {value for value in constants.values() if isinstance(value, str) and "." in value}
    names.remove(telemetry.SPAN_PHASE)
    return names | {telemetry.SPAN_PHASE.format(phase) for phase in PHASES}


def test_the_page_has_every_name_and_no_other() -> None:
    assert len(named_in_the_code()) > 60
    assert named_in_the_page() == named_in_the_code()


@virtual_time
async def test_what_a_fleet_records_is_in_the_page() -> None:
    reader, recorder = InMemoryMetricReader(), Recorder()
    engines = [engine_of("e0", max_adapters=2), engine_of("e1", max_adapters=2)]
    async with sim_fleet(
        "a",
        "b",
        engines=engines,
        scheduler=Idle(),
        adapters=[Adapter("sql", "a")],
        tracer_provider=recorder.provider,
        meter_provider=MeterProvider([reader]),
    ) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        async with fleet.stream(
            "a", (1, 2), Sampling(max_tokens=90, ignore_eos=True), adapter="sql"
        ) as stream:
            await anext(stream)
            other = "e1" if stream.hops[0].instance == "e0" else "e0"
            await fleet.migrate(stream.request.id, to=other)
            await fleet.swap(other, to="b")
            await stream.collect()
        await fleet.adapters.update(Adapter("sql", "a", "/another"))
        found = points(reader.get_metrics_data())
    spans = recorder.exporter.get_finished_spans()
    recorded = {span.name for span in spans if not span.name.startswith("text_completion ")}
    recorded |= {name for span in spans for name in span.attributes or ()}
    recorded |= set(found) | {name for of in found.values() for attributes, _ in of for name in attributes}
    assert len(recorded) > 50
    assert recorded <= named_in_the_page()
