"""What is left of a GPU's memory for KV blocks, and the step that is measured before they take it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotswap.backends.torch.forward import MAX_SCORED_ROWS
from hotswap.backends.torch.kv import LayerShape, bytes_per_token
from hotswap.backends.torch.largest_step import largest_step, measure_step_bytes
from hotswap.backends.torch.loading import KVBudget
from hotswap.backends.torch.preflight import preflight
from hotswap.backends.torch.step_options import StepOptions
from tests.backends.torch.hybrids import make_hybrid
from tests.backends.torch.test_routing import bind
from tests.backends.torch.zoo import make_model

CPU = torch.device("cpu")
LAYERS = (LayerShape(2, 16, 16, torch.float32),) * 3
BLOCK_BYTES = 16 * bytes_per_token(LAYERS)


@given(tokens=st.integers(1, 4096), requests=st.integers(1, 300), context=st.integers(1, 5000))
def test_the_step_has_as_many_tokens_and_requests_as_a_step_can_have(
    tokens: int, requests: int, context: int
) -> None:
    tokens = max(tokens, requests)
    pieces = largest_step(StepOptions(16, False, "gathered", tokens, requests), context)
    assert len(pieces) == requests
    assert all(piece.end == context and len(piece.blocks) * 16 >= context for piece in pieces)
    assert sum(len(piece.tokens) for piece in pieces) == min(tokens, requests - 1 + context)
    assert pieces[-1].num_kept == min(MAX_SCORED_ROWS + 1, len(pieces[-1].tokens))


@given(room_bytes=st.integers(0, 1 << 28), own_bytes=st.integers(0, 1 << 28))
def test_blocks_leave_room_for_a_preload_or_half_of_the_memory(room_bytes: int, own_bytes: int) -> None:
    budget = KVBudget(None, None, 16, 1 << 20)
    taken_bytes = budget.num_blocks(LAYERS, 1 << 20, room_bytes, own_bytes) * BLOCK_BYTES
    left_bytes = room_bytes - taken_bytes
    least_bytes = min(own_bytes, room_bytes // 2)
    assert least_bytes <= left_bytes < max(least_bytes, BLOCK_BYTES) + BLOCK_BYTES
    assert budget.most_tokens is None


@given(size_bytes=st.integers(BLOCK_BYTES, 1 << 28), cut=st.integers(1, 2))
def test_the_blocks_of_all_ranks_have_the_size_that_was_given(size_bytes: int, cut: int) -> None:
    part = KVBudget(None, size_bytes, 16, 1 << 20).of_ranks(LAYERS)
    for layers in (LAYERS[:cut], LAYERS[cut:]):
        taken_bytes = part.num_blocks(layers, 1 << 20, 1 << 30) * BLOCK_BYTES
        assert size_bytes - BLOCK_BYTES < taken_bytes <= size_bytes


@pytest.mark.parametrize("make", [lambda: make_model("llama"), lambda: make_hybrid("lfm2")])
def test_the_step_runs_with_the_blocks_and_states_of_one_request(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton, steps = bind(None, make()), StepOptions(16, False, "gathered", 48, 6)
    layers = preflight(skeleton, CPU, steps)
    allocated = iter((100, 350))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    assert measure_step_bytes(skeleton, CPU, layers, steps, 64) == 250
