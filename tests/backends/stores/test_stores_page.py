"""The code and the commands of docs/stores.md run; commands print the keys of docs/stores-reference.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hotswap.backends.stores import TieredStore
from hotswap.cli import main

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "stores.md").read_text("utf-8")
REFERENCE = (DOCS / "stores-reference.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run_python(code: str) -> None:
    names: dict[str, object] = {}
    exec(compile(code, "stores.md", "exec"), names)
    if "main" not in names:
        assert isinstance(names["store"], TieredStore)


def test_the_blocks_run_in_their_order(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "far").mkdir()
    places = {
        "/var/cache/hotswap": str(tmp_path / "near"),
        "/dev/shm/hotswap": str(tmp_path / "shared"),
        "/models/llama": str(checkpoint),
        "/models/qwen": str(checkpoint),
        '"s3://weights", options={"region": "eu-central-1"}': f'"file://{tmp_path / "far"}"',
    }
    for written in places:
        assert written in PAGE
    for language, block in BLOCKS:
        for written, here in places.items():
            block = block.replace(written, here)
        if language == "python":
            run_python(block)
        else:
            for line in block.splitlines():
                assert main(shlex.split(line)[1:]) == 0, line
    said = capsys.readouterr().out
    assert re.search(r"^pinned \d", said, re.MULTILINE)  # where the prefetched model lies
    assert re.search(r"^<SharedStore .* shared$", said, re.MULTILINE)
    assert "qwen: removed" in said
    assert [*(tmp_path / "shared").glob("[!.]*")] == []
    assert (tmp_path / "far" / "llama" / "index.json").is_file()


def test_the_keys_are_those_of_the_commands(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`root`.*|`model`.*) \|$", REFERENCE, re.MULTILINE))
    root = str(tmp_path)
    commands = {
        "add": ["add", str(checkpoint), root, "--id", "m"],
        "ls": ["ls", root],
        "verify": ["verify", root],
        "bench": ["bench", root, "m", "--repeat", "1"],
        "rm": ["rm", root, "m"],
        "clear": ["clear", root],
    }
    assert set(rows) == set(commands)
    for name, words in commands.items():
        assert main(["store", *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        keys = list(told)
        for part in ("models", "methods"):
            keys += told[part][0] if part in told else []
        assert sorted(re.findall(r"`(\w+)`", rows[name])) == sorted(keys), name
