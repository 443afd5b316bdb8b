"""`hotswap least`: the fewest engines with which each scheduler that is named meets the targets."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from hotswap.commands.progress import Show
from hotswap.commands.simulate import DEFAULT, asked_cluster, asked_trace, check_scale
from hotswap.policies.by_name import router_named, scheduler_named
from hotswap.simulation.least import Fewest, fewest_engines
from hotswap.simulation.outcome import Slo

__all__ = ["COLUMNS", "least_of_all"]

COLUMNS = ("SCHEDULER", "ENGINES", "TRIED", "GAPS")


def least_of_all(
    arguments: argparse.Namespace, show: Show
) -> tuple[dict[str, object], list[tuple[str, ...]]]:
    """Search for every scheduler of the arguments; return the report, and rows for a table."""
    check_scale(arguments, "most")
    trace, slo = asked_trace(arguments), Slo(ttft_s=arguments.ttft, tpot_s=arguments.tpot)
    schedulers = arguments.scheduler or DEFAULT
    found: dict[str, Fewest] = {}
    for number, text in enumerate(schedulers):
        show(number, len(schedulers))
        found[text] = fewest_engines(
            trace,
            asked_cluster(arguments),
            router=router_named(arguments.router),
            scheduler=scheduler_named(text),
            slo=slo,
            share=arguments.share,
            warm_s=arguments.warm,
            most=arguments.most,
            guess=arguments.guess,
            interval_s=arguments.interval,
        )
    report: dict[str, object] = {
        "trace": {"name": trace.name, "num_requests": len(trace.requests), "models": trace.models},
        "slo": asdict(slo),
        "share": arguments.share,
        "searches": [
            {"scheduler": text, "engines": one.engines, "attainment": dict(one.attainment), "gaps": one.gaps}
            for text, one in found.items()
        ],
    }
    rows: list[tuple[str, ...]] = [
        (
            text,
            f"over {arguments.most}" if one.engines is None else str(one.engines),
            ", ".join(f"{number}: {met:.3f}" for number, met in one.attainment.items()),
            ", ".join(map(str, one.gaps)),
        )
        for text, one in found.items()
    ]
    return report, rows
