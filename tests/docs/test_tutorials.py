"""The tutorials can be followed to the letter; excerpts are what their files have."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from examples.demo.checkpoints import Checkpoint
from tests.docs.pages import DOCS, blocks, excerpts
from tests.examples.conftest import checkpoints as checkpoints
from tests.house.tree import ROOT

PAGES = sorted(DOCS.rglob("*.md"))


def follow(place: Path, file: str) -> str:
    """Run a file of a tutorial as its reader does, in a directory of its own; return what it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(place)))}
    done = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, cwd=place, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_excerpt_is_in_its_file() -> None:
    found = [(page, source, code) for page in PAGES for source, code in excerpts(page)]
    assert len(found) > 3
    assert [
        f"{page.name}: {source}"
        for page, source, code in found
        if code not in (ROOT / source).read_text("utf-8")
    ] == []


def test_the_first_swap_goes_as_the_page_says(checkpoints: tuple[Checkpoint, ...], tmp_path: Path) -> None:
    (code,) = blocks("tutorials/first-swap.md", "python")
    alice, lincoln, _ = checkpoints
    code = code.replace("/tmp/models", str(alice.path.parent)).replace(
        "/tmp/hotswap", str(tmp_path / "store")
    )
    assert (alice.path.name, lincoln.path.name) == ("llama-alice", "qwen3-gettysburg")
    (tmp_path / "first_swap.py").write_text(code)
    text, _, rest = follow(tmp_path, "first_swap.py").partition("\nThe request ran on ")
    said = text.replace("[swap to lincoln]", "")
    assert said != text
    assert alice.continuation.startswith(said)
    hops, answer, *swaps = rest.splitlines()
    assert hops == "2 hops."
    assert lincoln.continuation.startswith(answer.removeprefix("Lincoln:"))
    assert [line.partition(",")[0] for line in swaps] == [
        "e0: None to alice",
        "e0: alice to lincoln",
        "e0: lincoln to alice",
        "e0: alice to lincoln",
    ]


@asynccontextmanager
async def service_of(code: str) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of the tutorial's service while it serves."""
    module = ModuleType("service")
    sys.modules["service"] = module  # where pydantic looks names up
    exec(compile(code, "service.py", "exec"), module.__dict__)
    app = module.app
    async with (
        module.lifespan(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
    ):
        yield client


async def test_the_service_answers_as_the_page_calls_it() -> None:
    service, _ = blocks("tutorials/fastapi.md", "python")
    async with service_of(service) as client:
        asked = await client.post("/ask", json={"model": "small", "prompt": [1, 2, 3]})
        assert (asked.status_code, len(asked.text.splitlines())) == (200, 16)
        body = {"model": "large", "prompt": [1, 2, 3], "max_tokens": 4}
        answer = (await client.post("/llm/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 4
        refused = await client.post("/ask", json={"model": "huge", "prompt": [1]})
        assert (refused.status_code, "'huge'" in refused.json()["error"]) == (400, True)
        assert (await client.get("/busy")).json() == {"small": 0, "large": 0}


async def test_the_service_answers_in_text_with_the_models_that_the_page_makes(
    checkpoints: tuple[Checkpoint, ...], tmp_path: Path
) -> None:
    service, real = blocks("tutorials/fastapi.md", "python")
    alice = checkpoints[0]
    code = f"{service}\n{real}".replace("/tmp/models", str(alice.path.parent))
    async with service_of(code.replace("/tmp/hotswap", str(tmp_path))) as client:
        body = {"model": "small", "prompt": "Alice was beginning to get", "max_tokens": 20}
        lines = (await client.post("/ask", json=body)).text.split("\n")[:20]
    assert alice.continuation.startswith("".join(line.partition(" ")[2] for line in lines))


def test_the_policy_is_compared_on_a_trace_in_azures_form(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots take matplotlib")
    convert, mine, compare = blocks("tutorials/policy.md", "python")
    made = io.StringIO()
    table = csv.writer(made)
    table.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
    table.writerows([f"2023-11-16 18:15:{n % 60:02}.6805900", 300 + n, 20 + n % 7] for n in range(60))
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(made.getvalue())
    for name, code in (("convert.py", convert), ("mine.py", mine), ("compare.py", compare)):
        (tmp_path / name).write_text(code)
    follow(tmp_path, "convert.py")
    assert (tmp_path / "azure.csv").read_text().splitlines()[2] == "1.0,301,21"
    *said, drawing = follow(tmp_path, "compare.py").splitlines()
    assert "report/" in drawing
    assert [line.partition(" ")[0] for line in said[::2]] == ["mine", "CostSwap"]
    assert all("of them in time" in line for line in said[1::2])
    assert {"latency.png", "residency-1.png"} <= {file.name for file in (tmp_path / "report").iterdir()}
