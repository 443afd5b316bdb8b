"""Settings that every test runs under."""

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

# A test makes the models it needs: one that asks a hub for them fails, on every machine alike.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Test processes run beside each other: tensor threads of one that wait for those of another cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine may be slow at any moment, so an example has no deadline of its own; and a failure must be
# the same failure for everyone, so examples come from the test, not from chance.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that no process is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets PyTorch's number of threads until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
