"""What `deploy/` names is there: metrics as a fleet exports them, fields of the file, commands and paths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotswap import Sampling, telemetry
from hotswap.config import FleetConfig, read_config
from hotswap.door import PrometheusMetrics
from hotswap.offline.virtual_time import virtual_time
from tests.house.tree import ROOT
from tests.runtime.support import Idle, engine_of, sim_fleet

DEPLOY = ROOT / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
RULES: dict[str, Any] = yaml.safe_load((DEPLOY / "alerts.yaml").read_text("utf-8"))
# Exported once they have happened, by the names of counters.
RARE = {telemetry.LOSSES, telemetry.RESTARTS, telemetry.CONTROL_ERRORS}


def expressions() -> list[str]:
    """All expressions of the board and the rules."""
    of_board = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    of_rules = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    return of_board + of_rules


def named(expression: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that an expression names."""
    labels = set[str]()
    for inside in re.findall(r"\{([^}]*)\}|by \(([^)]*)\)", expression):
        labels |= set(re.findall(r"([a-z_]+)(?=\s*(?:=|!|,|$))", inside[0] or inside[1]))
    plain = re.sub(r"\{[^}]*\}|by \([^)]*\)", "", expression)
    return set(re.findall(r"\b((?:hotswap|gen_ai)_[a-z_]+)", plain)), labels


@virtual_time
async def test_the_board_and_the_rules_name_what_a_fleet_exports() -> None:
    metrics = PrometheusMetrics()
    engines = [engine_of("e0"), engine_of("e1")]
    async with sim_fleet(
        "a", "b", engines=engines, scheduler=Idle(), meter_provider=metrics.meter_provider
    ) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        sampling = Sampling(max_tokens=90, ignore_eos=True)
        async with fleet.stream("a", (1, 2), sampling) as stream:
            await anext(stream)
            other = "e1" if stream.hops[0].instance == "e0" else "e0"
            await fleet.migrate(stream.request.id, to=other)
            await stream.collect()
        text = metrics.text(fleet).decode()
    exported = set(re.findall(r"^([a-z_]+)(?:\{| )", text, re.MULTILINE))
    exported |= {f"{name.replace('.', '_')}_total" for name in RARE}
    attributes = {
        value.replace(".", "_")
        for name, value in vars(telemetry).items()
        if name.isupper() and isinstance(value, str)
    }
    assert len(expressions()) > 20
    for expression in expressions():
        names, labels = named(expression)
        assert names, expression
        assert names <= exported, expression
        assert labels <= attributes | {"job", "le"}, expression


def test_every_rule_says_what_has_happened_and_how_bad_it_is() -> None:
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_file_of_the_page_is_a_fleet(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    assert read_config(file).door.host == "0.0.0.0"


def test_the_image_copies_what_there_is_and_runs_without_rights() -> None:
    lines = (DEPLOY / "Containerfile").read_text("utf-8").splitlines()
    copied = [
        name
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    assert all((ROOT / "constraints" / f"{variant}.txt").exists() for variant in ("cpu", "cuda"))
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001"]
    assert any(line.startswith("HEALTHCHECK ") for line in lines)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "hotswap.service").read_text("utf-8")
    (tmp_path / "hotswap.service").write_text(unit.replace("/opt/hotswap/bin/hotswap", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "hotswap.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_example_for_others_has_keys_for_clients_and_operators() -> None:
    """Without either, what it opens is open to all that reach it."""
    text = (ROOT / "docs/deploy.md").read_text("utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    door = FleetConfig.model_validate(tomllib.loads(example)).door
    assert door.host == "0.0.0.0"
    assert {key.admin for key in door.keys} == {False, True}
    assert "127.0.0.1" in (door.hosts or ()), "the health check of the container calls it so"
    # Secrets of the example are given to the container of the documentation, and of the file.
    secrets = {Path(key.secret).name for key in door.keys}
    for told in (text, (DEPLOY / "Containerfile").read_text("utf-8")):
        (command,) = re.findall(r"podman run .*", told)
        assert secrets == set(re.findall(r"--secret (\w+)", command))


def test_the_unit_checks_a_file_before_it_is_read_again() -> None:
    unit = (DEPLOY / "hotswap.service").read_text("utf-8")
    check = re.findall(r"^ExecStartPre=(.*)$", unit, re.MULTILINE)
    assert re.findall(r"^ExecReload=(.*)$", unit, re.MULTILINE) == [*check, "/bin/kill -HUP $MAINPID"]
