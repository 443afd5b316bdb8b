"""Settings that every test runs under."""

import gc
import os
import sys
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

# What makes PyTorch and hotswap, oneDNN, MKL and numba take a CPU for one with AVX2 and no wider vectors.
_AVX2_ALONE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests run as on a CPU without AVX-512."""
    parser.addoption(
        "--hide-avx512",
        action="store_true",
        help="run on an x86 CPU as if it had AVX2 and neither AVX-512 nor AMX",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide instructions, of this process and of those that tests start, before a library looks for them."""
    if config.getoption("--hide-avx512"):
        if "torch" in sys.modules:
            raise pytest.UsageError("torch was imported before --hide-avx512 could hide AVX-512 from it")
        os.environ.update(_AVX2_ALONE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that no process is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections, each of which would look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets PyTorch's number of threads until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
