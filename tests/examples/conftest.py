"""The demo's checkpoints, trained once per test run however many processes it has."""

import os

import pytest
from filelock import FileLock

from examples.demo.checkpoints import Checkpoint, make_checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ...]:
    """Read them, and copy them before changing anything: every test sees the same directories."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # what the processes of one run have in common
    with FileLock(root / "checkpoints.lock"):
        return make_checkpoints(root / "checkpoints")
