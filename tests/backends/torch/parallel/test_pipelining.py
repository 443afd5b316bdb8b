"""Several batches in flight change no token, and have equal sizes."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from hotswap import Sampling
from hotswap.backends.torch import attention
from hotswap.backends.torch.batcher import Batcher
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.forward import Forward, LocalForward, Work
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.recurrent import SnapshotPool, StatePool
from hotswap.backends.torch.recurrent.mixers import attach
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.sampling import Sampler
from hotswap.backends.torch.sequence import Sequence
from tests.backends.torch.hybrids import make_hybrid
from tests.backends.torch.parallel.support import make_prompts
from tests.backends.torch.zoo import generate, make_model

BLOCK = 16
NUM_TOKENS = 40
NUM_SNAPSHOTS = 3


class Pipeline(Forward):
    """Computes a step only when its result is requested, so that several are in flight, as with stages."""

    def __init__(self, forward: LocalForward, depth: int) -> None:
        self.num_blocks, self.size_bytes, self.depth = forward.num_blocks, forward.size_bytes, depth
        self.keeps_states = forward.keeps_states
        self.works: list[Work] = []
        self.under_way: list[int] = []
        self._forward = forward
        self._queue: deque[Work] = deque()

    def submit(self, work: Work) -> None:
        self._queue.append(work)
        self.works.append(work)
        assert len(self._queue) <= self.depth

    def result(self) -> Tensor:
        self.under_way.append(len(self._queue))
        self._forward.submit(self._queue.popleft())
        return self._forward.result()


@pytest.fixture(scope="module")
def model() -> Any:
    attention.register()
    return make_model("llama")


@pytest.fixture(scope="module")
def hybrid() -> Any:
    attention.register()
    made = make_hybrid("qwen3_5")
    assert attach(made)
    return made


def make_runner(
    model: Any, depth: int, *, num_blocks: int, budget: int = 32, keeps_states: bool = False
) -> tuple[Runner, Pipeline]:
    model.set_attn_implementation(attention.IMPLEMENTATION)
    cache = KVCache(num_blocks, BLOCK, torch.device("cpu"))
    states = StatePool(8 + NUM_SNAPSHOTS, torch.device("cpu")) if keeps_states else None
    pipeline = Pipeline(LocalForward(model, cache, invariant=True, states=states), depth)
    batcher = Batcher(
        BlockPool(num_blocks),
        block_tokens=BLOCK,
        token_budget=budget,
        max_requests=8,
        num_batches=depth,
        snapshots=SnapshotPool(range(8, 8 + NUM_SNAPSHOTS)) if keeps_states else None,
    )
    return Runner(pipeline, batcher), pipeline


def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    model.set_attn_implementation("eager")
    return [generate(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 9), (2, 9), (4, 9), (2, 64)])
def test_tokens_are_those_of_lone_runs(model: Any, depth: int, num_blocks: int) -> None:
    check_tokens(model, depth, num_blocks=num_blocks)


def test_tokens_are_those_of_lone_runs_with_recurrent_states(hybrid: Any) -> None:
    """Slots and snapshots are reallocated while steps that use them are in flight."""
    runner = check_tokens(hybrid, 2, num_blocks=9, keeps_states=True)
    assert runner.batcher.num_reused_tokens, "the test must begin requests with snapshots"


@torch.inference_mode()
def check_tokens(model: Any, depth: int, *, num_blocks: int, keeps_states: bool = False) -> Runner:
    prompts = make_prompts(depth, 3, 17, 40, 5, 90)
    wanted = expected(model, prompts)
    runner, _ = make_runner(model, depth, num_blocks=num_blocks, keeps_states=keeps_states)
    waiting = [
        Sequence(at, list(prompt), len(prompt), len(prompt) + NUM_TOKENS, Sampler(Sampling(), (), ()))
        for at, prompt in enumerate(prompts)
    ]
    sequences, random = list(waiting), Random(depth)
    told: dict[int, list[int]] = {at: [] for at in range(len(prompts))}
    while waiting or not runner.idle:
        if waiting and (runner.idle or random.random() < 0.5):
            runner.batcher.add(waiting.pop(0))
        for sampled in runner.step().sampled:
            assert sampled.index == len(told[sampled.ticket]), "each position once, in order"
            told[sampled.ticket].append(sampled.token)
    assert list(told.values()) == wanted
    assert runner.batcher.blocks.num_free == num_blocks
    assert all(sequence.blocks == [] for sequence in sequences)
    if num_blocks == 9:
        assert runner.batcher.num_preempted, "the test must preempt"
    return runner


@torch.inference_mode()
def test_removing_a_request_with_a_batch_in_flight_does_not_affect_others(model: Any) -> None:
    prompts = make_prompts(9, 20, 30, 40)
    wanted = expected(model, prompts)
    runner, _ = make_runner(model, 2, num_blocks=12)
    sequences = [
        Sequence(at, list(prompt), len(prompt), len(prompt) + NUM_TOKENS, Sampler(Sampling(), (), ()))
        for at, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        runner.batcher.add(sequence)
    for _ in range(6):
        runner.step()
    runner.batcher.remove(sequences[1])
    while not runner.idle:
        runner.step()
    for at in (0, 2):
        assert sequences[at].tokens[len(prompts[at]) :] == wanted[at]
    assert runner.batcher.blocks.num_free == 12


@torch.inference_mode()
def test_batches_in_flight_have_equal_sizes(model: Any) -> None:
    """While there is a backlog every batch fills its share of the budget, and every stage has a batch."""
    runner, pipeline = make_runner(model, 2, num_blocks=64, budget=32)
    for at, prompt in enumerate(make_prompts(1, *[60] * 8)):
        length = len(prompt) + NUM_TOKENS
        runner.batcher.add(Sequence(at, prompt, len(prompt), length, Sampler(Sampling(), (), ())))
    while runner.batcher.waiting or any(s.num_computed < s.num_prompt for s in runner.batcher.running):
        runner.step()
    sizes = [sum(len(piece.tokens) for piece in work.pieces) for work in pipeline.works[:-2]]
    assert set(sizes) == {16}
    assert set(pipeline.under_way[:-1]) == {2}
    begun = len(pipeline.works)
    for _ in range(8):
        runner.step()
    decodes = [len(work.pieces) for work in pipeline.works[begun:]]
    assert set(decodes) == {4}, "eight decodes are two batches of four"
    while not runner.idle:
        runner.step()
