"""The exactness tests can fail: they detect each of these mistakes, injected into the engine."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from hotswap import Sampling
from hotswap.backends.torch import TorchEngine, admission, attention, batcher, blocks, engine, forward, kv
from hotswap.errors import InstanceLost, UnsupportedModel
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

Plant = Callable[[pytest.MonkeyPatch], None]


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    original = attention.MaskPattern.visible

    def visible(self: Any, positions: Tensor, num_keys: int) -> Tensor:
        mask: Tensor = original(self, positions, num_keys)
        oldest = mask & ~torch.cat([torch.zeros_like(mask[..., :1]), mask[..., :-1]], -1)
        wrong: Tensor = mask & ~(oldest & (mask.sum(-1, keepdim=True) > 23))
        return wrong

    patch.setattr(attention.MaskPattern, "visible", visible)


def own_key_dropped_while_decoding(patch: pytest.MonkeyPatch) -> None:
    original = attention.MaskPattern.visible

    def visible(self: Any, positions: Tensor, num_keys: int) -> Tensor:
        mask: Tensor = original(self, positions, num_keys)
        keys = torch.arange(num_keys)
        own = keys == positions[:, None]
        wrong: Tensor = mask & ~(own & (keys > 30)) if _is_of_decodes(positions) else mask
        return wrong

    patch.setattr(attention.MaskPattern, "visible", visible)


def _is_of_decodes(positions: Tensor) -> bool:
    return len(positions) == 1 or bool((positions.diff() != 1).any())


def keys_one_slot_late(patch: pytest.MonkeyPatch) -> None:
    original = kv.KVCache.write

    def write(self: Any, layer: int, key: Tensor, value: Tensor, blocks: Tensor, offsets: Tensor) -> None:
        late = torch.where(blocks > 12, (offsets + 1) % self.block_tokens, offsets)
        original(self, layer, key, value, blocks, late)

    patch.setattr(kv.KVCache, "write", write)


def blocks_given_twice(patch: pytest.MonkeyPatch) -> None:
    original = blocks.BlockPool.allocate

    def allocate(self: Any, count: int) -> list[int]:
        taken = original(self, count)
        return [1 if count == 1 else block for block in taken]

    patch.setattr(blocks.BlockPool, "allocate", allocate)


def blocks_kept_after_preemption(patch: pytest.MonkeyPatch) -> None:
    allocate_all, release_all = batcher.Batcher._allocate_all, batcher.Batcher._release

    def release(self: Any, sequence: Any) -> None:
        num_computed = sequence.num_computed
        release_all(self, sequence)
        sequence.num_computed = num_computed  # as if the keys were still there

    def allocate(self: Any, sequence: Any) -> bool:
        num_computed = sequence.num_computed
        allocated = allocate_all(self, sequence)
        sequence.num_computed = max(num_computed, sequence.num_computed)
        return allocated

    patch.setattr(batcher.Batcher, "_release", release)
    patch.setattr(batcher.Batcher, "_allocate_all", allocate)


def last_token_lost_on_resuming(patch: pytest.MonkeyPatch) -> None:
    original = admission.to_sequence

    def to_sequence(request: Any, ticket: int, model: Any, adapter: Any, **given: Any) -> Any:
        sequence = original(request, ticket, model, adapter, **given)
        if request.generated:
            sequence.tokens[-1] = sequence.tokens[0]
        return sequence

    patch.setattr(engine, "to_sequence", to_sequence)


def positions_by_chunk(patch: pytest.MonkeyPatch) -> None:
    original = forward.assemble

    def assemble(pieces: Any, cache: Any, **least: Any) -> Any:
        batch = original(pieces, cache, **least)
        start, paged = 0, batch.step.paged
        assert paged is not None
        for positions in paged.parts:
            end = start + len(positions)
            if len(positions) > 40:  # longer than the pieces of the preflight
                batch.positions[0, start:end] -= batch.positions[0, start].clone()
            start = end
        return batch

    patch.setattr(forward, "assemble", assemble)


def padding_of_a_batch_attended_to(patch: pytest.MonkeyPatch) -> None:
    original = attention.MaskPattern.visible

    def visible(self: Any, positions: Tensor, num_keys: int) -> Tensor:
        mask: Tensor = original(self, positions, num_keys)
        wrong: Tensor = mask | (torch.arange(num_keys) >= num_keys - 1) & _is_of_decodes(positions)
        return wrong

    patch.setattr(attention.MaskPattern, "visible", visible)


FAULTS: dict[Plant, str] = {
    window_off_by_one: "mistral",
    own_key_dropped_while_decoding: "llama",
    keys_one_slot_late: "llama",
    blocks_given_twice: "llama",
    blocks_kept_after_preemption: "llama",
    last_token_lost_on_resuming: "llama",
    positions_by_chunk: "llama",
    padding_of_a_batch_attended_to: "llama",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
async def test_an_injected_fault_is_detected(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _is_exact(FAULTS[plant]), "without the fault"
    plant(monkeypatch)
    assert not await _is_exact(FAULTS[plant])


async def _is_exact(architecture: str) -> bool:
    random = Random(1)
    model = make_model(architecture)
    prompts = [
        [random.randrange(2, VOCABULARY) for _ in range(length)] for length in (2, 17, 33, 40, 60, 130)
    ]
    expected = [generate(model, prompt, 50) for prompt in prompts]
    store = DictStore()
    card = store.add("m", model)
    samplings = [Sampling(max_tokens=50)] * len(prompts)
    async with TorchEngine(
        "e0", kv_tokens=208, kv_block_tokens=16, token_budget=48, max_requests=8, threads=1
    ) as exact:
        try:
            await exact.load(card, store)
            return await run_clients(exact, make_client_plans(random, "m", prompts, samplings)) == expected
        except* (UnsupportedModel, InstanceLost):
            pass
    return False
