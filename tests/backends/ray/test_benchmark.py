"""The benchmark of tokens from actors, in small: both ways carry every token, with all figures."""

from __future__ import annotations

from benchmarks import ray_tokens
from tests.backends.ray.local_cluster import LocalCluster


async def test_tokens_of_a_link_are_set_beside_those_of_a_generator(cluster: LocalCluster) -> None:
    settings = ray_tokens.Settings(streams=(2, 3), tokens=5, repeats=2)
    report = await ray_tokens.measure_connected(settings)
    for name in ("remote", "ray_generator"):
        assert {streams: len(found) for streams, found in report["cpu_us_per_token"][name].items()} == {
            "2": 2,
            "3": 2,
        }
    assert report["p99_s"].keys() == {"2", "3"}
    assert len(ray_tokens.rows(report)) == 8
