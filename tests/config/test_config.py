"""What a file describes is made, and what is wrong with one is told by its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotswap import InstanceState
from hotswap.config import build, read_config, schema
from hotswap.errors import ConfigError
from hotswap.offline.virtual_time import virtual_time
from tests.door.support import client_of

WHOLE = """
[[engines]]
kind = "sim"
id = "gpu{n}"
count = 2
options = { kv_blocks = 64, max_adapters = 2 }

[[engines]]
path = "hotswap.backends.sim:SimEngine"
id = "own"

[[stores]]
kind = "sim"

[kv_store]
kind = "sim"
budget = "1 GiB"
write_through_s = 60

[[models]]
id = "a"
size = "1 MB"
aliases = ["gpt-4o"]
min_replicas = 1
reasoning_format = "think"
sampling = { temperature = 0.0 }

[[models]]
id = "b"
size = "1 MB"

[[adapters]]
id = "x"
model = "a"

[policy]
scheduler = "WeightedLoadSwap(t1=1, t2=8, b=2.0)"
router = "LeastLoadedRouter()"
interval_s = 0.5

[door]
port = 0
request_s = 60.0

[[door.keys]]
secret = "env:DOOR_TEST_KEY"
name = "clients"
models = ["a"]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOOR_TEST_KEY", "client-secret")
    path = tmp_path / "fleet.toml"
    path.write_text(WHOLE)
    return path


def test_what_a_file_describes_is_made(file: Path) -> None:
    serving = build(read_config(file))
    assert serving.aliases == (("gpt-4o", "a"),)
    assert serving.door.request_s == 60.0

    @virtual_time
    async def used() -> None:
        async with serving.fleet as fleet:
            assert [i.id for i in fleet.view().instances] == ["gpu0", "gpu1", "own"]
            assert [model.id for model in fleet.models] == ["a", "b"]
            assert [adapter.id for adapter in fleet.adapters] == ["x"]
            kept = fleet.view().kv_store
            assert kept is not None
            assert kept.capacity_bytes == 1 << 30
            await fleet.ready()
            assert any(i.state is InstanceState.SERVING and i.model == "a" for i in fleet.view().instances)
            async with client_of(serving.app) as client:
                assert (await client.get("/v1/models")).status_code == 401
                headers = {"authorization": "Bearer client-secret"}
                body = {"model": "a", "prompt": [1, 2], "max_tokens": 3}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                assert (
                    await client.get("/v1/models", headers={**headers, "host": "evil"})
                ).status_code == 421

    used()


@pytest.mark.parametrize(
    ("section", "tier", "capacity_bytes"),
    [
        ('budget = "64 MiB"', "host", 64 << 20),
        ('kind = "nvme"\nbudget = "1 GiB"\ndirectory = "."', "nvme", 1 << 30),
        ('kind = "shared"\nbudget = "1 GiB"\ndirectory = "shared"', "shared", 1 << 30),
        ('kind = "node"\nbudget = "1 GiB"\nlocal_budget = "64 MiB"', "node", 64 << 20),
        (
            'kind = "tiered"\nbudget = "64 MiB"\ndirectory = "."\ndisk_budget = "1 GiB"',
            "host+nvme",
            (1 << 30) + (56 << 20),
        ),
    ],
)
def test_kv_blocks_are_kept_where_a_file_says(
    file: Path, section: str, tier: str, capacity_bytes: int
) -> None:
    file.write_text(file.read_text().replace('kind = "sim"\nbudget = "1 GiB"', section))
    serving = build(read_config(file))

    @virtual_time
    async def looked_at() -> None:
        kept = serving.fleet.view().kv_store
        assert kept is not None
        assert (kept.tier, kept.capacity_bytes) == (tier, capacity_bytes)

    looked_at()


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('kind = "sim"\nid', 'kind = "what"\nid', r"engines\[0\].kind: "),
        ('id = "gpu{n}"', 'id = "gpu"', r"engines\[0\]: .*several engines need an id with \{n\}"),
        ("kv_blocks = 64", "what = 64", r"engines\[0\]: .*what"),
        ("hotswap.backends.sim:SimEngine", "hotswap.backends.sim:Nothing", r"engines\[1\]: .*has no Nothing"),
        ("min_replicas = 1", "min_replicas = -1", r"models\[0\]: "),
        ('size = "1 MB"\naliases', "what = 1\naliases", r"models\[0\].what: "),
        ("WeightedLoadSwap", "Nothing", "policy: .*Nothing"),
        ('kind = "sim"\n\n[kv_store', 'kind = "nvme"\n\n[kv_store', r"stores\[0\]: directory is missing"),
        ('budget = "1 GiB"', 'budget = "much"', "kv_store: capacity is 'much'"),
        ('kind = "sim"\nbudget', 'kind = "disk"\nbudget', "kv_store.kind: "),
        ('kind = "sim"\nbudget', 'kind = "nvme"\nbudget', "kv_store: directory is missing"),
        ('kind = "sim"\nbudget', 'kind = "shared"\nbudget', "kv_store: directory is missing"),
        ("write_through_s = 60", "write_through_s = 0", "kv_write_through_s is 0"),
        (
            'kind = "sim"\nbudget',
            'kind = "tiered"\ndirectory = "d"\nbudget',
            "kv_store: disk_budget is missing",
        ),
        ("env:DOOR_TEST_KEY", "env:NO_SUCH_KEY", r"door.keys\[0\]"),
        ("env:DOOR_TEST_KEY", "client-secret", r"door.keys\[0\].secret: "),
        ("port = 0", "port = 70000", "door.port: "),
        ("request_s = 60.0", "request_s = -1.0", "door: request_s is -1.0"),
        ('model = "a"', 'model = "zz"', "policy: Adapter 'x' is of model 'zz'"),
        ("[door]", "[dor]", "dor: "),
        ("[door]", "[telemetry]\notlp = 1\n[door]", "telemetry.otlp: "),
        (
            "[door]",
            "[telemetry]\notlp_metrics = true\n[door]",
            "telemetry: otlp_metrics takes an otlp_endpoint",
        ),
        ("[door]", "[door]\nmetrics = false\nvllm_metrics = true", "door: vllm_metrics takes metrics = true"),
        ("[door]", "[door", "is no TOML"),
    ],
)
def test_what_is_wrong_is_told_by_its_place(file: Path, old: str, new: str, place: str) -> None:
    assert old in WHOLE
    file.write_text(WHOLE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=place):
        build(read_config(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read"):
        read_config(tmp_path / "nothing.toml")


def test_the_schema_has_every_section() -> None:
    properties: dict[str, Any] = schema()["properties"]
    sections = {"engines", "stores", "kv_store", "models", "adapters", "policy", "door", "telemetry"}
    assert set(properties) == sections
