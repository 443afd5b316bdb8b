"""The tutorial of docs/simulation.md, followed to the letter: its files, its commands, its Python."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.house.tree import ROOT

TEXT = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The code blocks of a language, without the indentation of a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in body.splitlines()) for indent, body in found]


def follow(place: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(place)))}
    done = subprocess.run(words, capture_output=True, text=True, cwd=place, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    mine, from_python, *_ = blocks("python")
    _, beside, *_ = blocks("sh")
    (tmp_path / "mine.py").write_text(mine)
    _, *words = shlex.split(beside.replace("\\\n", " "))
    printed = follow(tmp_path, sys.executable, "-m", "hotswap.cli", *words)
    _, *rows, foot = printed.splitlines()
    assert [row.partition("(")[0] for row in rows] == ["mine.py:LongestWaitFirst", "WeightedLoadSwap"]
    assert foot.startswith("ATTAINMENT: the share of requests with TTFT up to 10 s (--ttft)")
    drawn = {file.name for file in (tmp_path / "report").glob("*.png")}
    assert {"latency.png", "residency-1.png", "residency-2.png", "memory-2.png"} <= drawn
    (tmp_path / "again.py").write_text(from_python.replace("seconds=300", "seconds=30"))
    follow(tmp_path, sys.executable, "again.py")
    assert (tmp_path / "report" / "residency-3.png").is_file()


def test_its_policy_is_of_twenty_lines() -> None:
    assert len(blocks("python")[0].splitlines()) <= 24
