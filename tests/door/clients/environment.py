"""The programs that tests of clients run, which `make door-env` installs; else the tests are skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.house.tree import ROOT

__all__ = ["needs_npm_client", "needs_schemathesis", "node_modules", "schemathesis"]

_ENVIRONMENT = ROOT / ".cache" / "door-env"


def node_modules() -> Path:
    """Where the npm client is installed."""
    return _ENVIRONMENT / "node_modules"


def schemathesis() -> Path:
    """The command of schemathesis."""
    return _ENVIRONMENT / "bin" / "st"


needs_npm_client = pytest.mark.skipif(
    shutil.which("node") is None or not (node_modules() / "openai").exists(),
    reason="needs node and OpenAI's client of npm: `make door-env`",
)
needs_schemathesis = pytest.mark.skipif(
    not schemathesis().exists(), reason="needs schemathesis: `make door-env`"
)
