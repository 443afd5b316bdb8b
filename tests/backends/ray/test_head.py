"""What goes on while the head of a cluster is lost; the cluster is one of its own, in another process."""

from __future__ import annotations

import subprocess
import sys

from anyio import to_thread

from tests.house.tree import ROOT


async def test_requests_swaps_and_moves_go_on_without_the_head_and_starts_end_in_errors() -> None:
    command = [sys.executable, "-m", "tests.backends.ray.headless"]
    ran = await to_thread.run_sync(
        lambda: subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
