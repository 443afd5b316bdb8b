"""Decode steps by graphs, with kernels interpreted and a graph that computes again on the same tensors.

What such a graph computes anew, a graph of CUDA has recorded; both read nothing but the tensors that a step
fills. So a number that stayed in the closure of the first step gives wrong tokens here as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hotswap import Sampling
from hotswap.backends.torch import TorchEngine, attention, decode_graphs, device_attention
from hotswap.backends.torch.decode_graphs import DecodeGraphs, graphs_for
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.step_options import GpuSteps, StepOptions
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

# One request goes from 256 keys to more.
LENGTHS, COUNT = (2, 250, 19), 8


class RepeatedGraph:
    """Repeats what it captured, and writes the result to where the first one was."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        self._compute, self._result = compute, torch.full_like(compute(), torch.nan)
        return self._result

    def replay(self) -> None:
        self._result.copy_(self._compute())


class FailingGraph:
    """Cannot capture, as where a model reads a tensor on the host."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        compute()
        raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        raise AssertionError("nothing was captured")


@pytest.fixture(autouse=True)
def _kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(KVCache, "in_place", False)
    device_attention.is_right.cache_clear()
    yield
    device_attention.is_right.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraphs]:
    """What engines make from now on."""
    found: list[DecodeGraphs] = []
    make = DecodeGraphs.__init__

    def record(self: DecodeGraphs, *given: object) -> None:
        make(self, *given)  # type: ignore[arg-type]  # as they are given
        found.append(self)

    monkeypatch.setattr(DecodeGraphs, "__init__", record)
    monkeypatch.setattr(decode_graphs, "_cuda_graphs", lambda: RepeatedGraph)
    return found


async def serve(
    architecture: str, lengths: Sequence[int] = LENGTHS, count: int = COUNT
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of an engine with clients that come and go, and those of `generate`."""
    random, model, store = Random(1), make_model(architecture), DictStore()
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
    expected = [generate(model, prompt, count) for prompt in prompts]
    card = store.add(architecture, model)
    plans = make_client_plans(random, architecture, prompts, [Sampling(max_tokens=count)] * len(prompts))
    async with TorchEngine(
        "e0",
        kv_tokens=480,
        kv_block_tokens=16,
        token_budget=48,
        max_requests=8,
        threads=1,
        gpu_steps="graphs",
    ) as engine:
        await engine.load(card, store)
        return await run_clients(engine, plans), expected


@pytest.mark.parametrize(
    ("architecture", "lengths", "count"), [("llama", LENGTHS, COUNT), ("gpt_oss", (2, 19), 8)]
)
async def test_tokens_equal_generate(
    architecture: str, lengths: Sequence[int], count: int, made: list[DecodeGraphs]
) -> None:
    received, expected = await serve(architecture, lengths, count)
    assert received == expected
    # How many steps have no part of a prompt depends on when requests come.
    assert sum(graphs.num_replayed for graphs in made) >= 2, "too few steps were run by graphs"


async def test_a_model_whose_steps_cannot_be_captured_is_served_launch_by_launch(
    made: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_graphs, "_cuda_graphs", lambda: FailingGraph)
    with caplog.at_level(logging.WARNING, "hotswap"):
        received, expected = await serve("llama", (2, 5), 4)
    assert received == expected
    assert sum("cannot be graphs" in record.getMessage() for record in caplog.records) == 1
    assert [graphs.num_replayed for graphs in made] == [0]


async def test_a_model_whose_layers_gather_after_a_failed_trial_is_served_without_graphs(
    made: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_right", lambda kind: False)
    received, expected = await serve("llama", (2, 5), 4)
    assert received == expected
    assert [graphs.num_replayed for graphs in made] == [0]


def test_no_graph_is_made_unless_asked_for(made: list[DecodeGraphs]) -> None:
    skeleton: Any = SimpleNamespace(module=torch.nn.Identity(), mixers=(), long_rope=None)
    cache = KVCache(4, 16, torch.device("cpu"), by_kernels=True)
    for gpu_steps in get_args(GpuSteps):
        found = graphs_for(skeleton, cache, StepOptions(16, invariant=False, gpu_steps=gpu_steps), 8)
        assert (found is not None) == (gpu_steps == "graphs")
    assert len(made) == 1
    skeleton.mixers = ("a layer with a state",)
    assert graphs_for(skeleton, cache, StepOptions(16, invariant=False, gpu_steps="graphs"), 8) is None


@pytest.mark.parametrize("most", [1, 5, 8, 64])
def test_steps_are_padded_to_few_sizes(most: int) -> None:
    sizes = [decode_graphs._rows(count, most) for count in range(1, most + 1)]
    assert all(count <= size <= most for count, size in enumerate(sizes, start=1))
    assert len(set(sizes)) <= 2 * most.bit_length()
    keys = [decode_graphs._keys(count) for count in range(1, 3000)]
    assert all(count <= size for count, size in enumerate(keys, start=1))
    assert len(set(keys)) == 5
