"""`hotswap serve`, as a process: it listens, and on SIGTERM ends in order and in time."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from hotswap.cli import main
from tests.house.tree import ROOT
from tests.patience import PATIENCE_S
from tests.runtime import alphabet

SIMULATED = """
[[engines]]
kind = "sim"
[[stores]]
kind = "sim"
[[models]]
id = "small"
size = "1 MB"
[door]
port = 0
grace_s = 1.0
"""


@pytest.fixture(autouse=True)
def _as_logged_before() -> Generator[None]:
    """`main` sets what is logged, for a process that is its own."""
    log = logging.getLogger("hotswap")
    level = log.level
    yield
    log.setLevel(level)


@contextmanager
def serving(*arguments: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A process of `hotswap serve`, and its address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hotswap.cli", "serve", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            yield process, _address(process.stderr)
        finally:
            process.kill()


def _address(lines: IO[str]) -> str:
    for line in lines:
        if found := re.search(r"at (http://\S+)/v1", line):
            return found[1]
    raise AssertionError("the server has told no address")


def post(url: str, body: object) -> IO[bytes]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    answer: IO[bytes] = urllib.request.urlopen(request, timeout=PATIENCE_S)
    return answer


def test_a_file_is_served_until_a_signal_and_streams_end_in_time(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(SIMULATED)
    with serving(str(file)) as (process, url):
        body = {"model": "small", "prompt": [1, 2], "max_tokens": 3}
        with post(f"{url}/v1/completions", body) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        long = {**body, "max_tokens": 10_000, "min_tokens": 10_000, "logprobs": 0, "stream": True}
        with (
            post(f"{url}/v1/completions", long) as stream,
            urllib.request.urlopen(f"{url}/admin/events?after=0", timeout=PATIENCE_S) as events,
        ):
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            told = stream.read()
            assert b'"code":"shutting_down"' in told or told.endswith(b"data: [DONE]\n\n")
            assert b"event: swap_ended" in events.read()
        assert process.wait(PATIENCE_S) == 0
        assert time.monotonic() - began_s < 30.0  # the grace is 1 s, and the machine may be busy


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(SIMULATED.replace("grace_s = 1.0", "grace_s = 10_000"))
    with serving(str(file)) as (process, url):
        long = {"model": "small", "prompt": [1, 2], "max_tokens": 10_000, "logprobs": 0, "stream": True}
        with post(f"{url}/v1/completions", {**long, "min_tokens": 10_000}) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert any(line.startswith("Closing") for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_file_is_read_again_on_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(SIMULATED)

    def told(process: subprocess.Popen[str], *changes: tuple[str, str]) -> list[str]:
        text = SIMULATED
        for old, new in changes:
            text = text.replace(old, new)
        file.write_text(text)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        lines = list[str]()
        while not lines or not lines[-1].startswith(("Applied", "Not applied")):
            lines.append(process.stderr.readline().strip())
        return lines

    with serving(str(file)) as (process, url):
        applied = told(process, ('size = "1 MB"', 'size = "1 MB"\naliases = ["gpt-4o"]'))
        assert applied[-2].endswith(f"INFO {file} has changed: model 'small': aliases changed.")
        assert applied[-1] == "Applied: model 'small': aliases changed."
        with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["small", "gpt-4o"]
        assert "is no TOML" in told(process, ("[[stores]]", "[[stores]"))[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_directory_is_served_by_its_name(tmp_path: Path) -> None:
    source = alphabet.checkpoint(tmp_path / "alphabet")
    with serving(str(source), "--store", str(tmp_path / "store"), "--port", "0") as (process, url):
        body = {"model": "alphabet", "messages": [{"role": "user", "content": "Go."}], "temperature": 0}
        with post(f"{url}/v1/chat/completions", body) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "abcdefghijklmnopqrstuvwxyz"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(SIMULATED)
    assert main(["config", "check", str(file)]) == 0
    assert "1 EMPTY" in capsys.readouterr().out
    file.write_text(SIMULATED.replace("port", "prot"))
    assert main(["config", "check", str(file)]) == 2
    assert "door.prot" in capsys.readouterr().err
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "FleetConfig"


def test_a_file_is_given_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "fleet.toml", "other"]) == 2
    assert "give it alone" in capsys.readouterr().err


def test_without_a_source_the_file_of_the_directory_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve"]) == 2
    assert "nothing to serve" in capsys.readouterr().err
    (tmp_path / "fleet.toml").write_text(SIMULATED.replace("port", "prot"))
    assert main(["serve"]) == 2
    assert "door.prot" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_that_there_is_not_ends_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(SIMULATED)
    assert main(["serve", str(file), f"--port={port}"]) == 2
    told = capsys.readouterr().err
    assert f"port is {port}" in told
    assert "hotswap serves" not in told


def test_a_port_in_use_ends_by_a_plain_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(SIMULATED)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(file), f"--port={port}"]) == 2
    assert f"127.0.0.1 port {port} cannot be listened on" in capsys.readouterr().err
