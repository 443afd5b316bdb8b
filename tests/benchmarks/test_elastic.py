"""The benchmark of memory that follows load, on a minute of it."""

from __future__ import annotations

from benchmarks import elastic


def test_memory_that_follows_load_serves_more_in_time_and_refuses_nothing() -> None:
    trace = elastic.trace_of(1, 2.5, seconds=60.0)
    played = {system: elastic.play(trace, system) for system in elastic.SYSTEMS}
    assert played["planned"]["on_time"] > played["fixed"]["on_time"]
    assert {name: figures["num_refused_late"] for name, figures in played.items()} == dict.fromkeys(played, 0)
