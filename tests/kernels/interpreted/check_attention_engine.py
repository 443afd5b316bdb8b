"""Engines whose attention is computed by the interpreted kernels of GPUs; run by `test_interpreted`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from hotswap import Sampling
from hotswap.backends.torch import TorchEngine, device_attention
from hotswap.backends.torch.compatibility import check_config
from hotswap.backends.torch.forward import Piece, assemble
from hotswap.backends.torch.gathered import Gathering
from hotswap.backends.torch.kv import KVCache
from hotswap.kernels.calls import Call
from tests.backends.torch.clients import make_client_plans, run_clients
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import VOCABULARY, generate, make_model

CPU = torch.device("cpu")
# A prompt of several chunks.
LENGTHS, COUNT = (2, 70), 6
# A request beyond one split of keys.
LONG = (2, 254)
KIND = device_attention.LayerKind(
    device=CPU,
    dtype=torch.float32,
    block_tokens=16,
    num_heads=4,
    kv_heads=2,
    key_dim=16,
    value_dim=16,
    softcap=None,
    has_sinks=False,
)


@pytest.fixture(autouse=True)
def _kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(KVCache, "in_place", False)
    device_attention.is_right.cache_clear()
    yield
    device_attention.is_right.cache_clear()


async def serve(
    architecture: str, lengths: Sequence[int] = LENGTHS
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of an engine, and those of `generate`."""
    random, model, store = Random(1), make_model(architecture), DictStore()
    prompts = [[random.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]
    expected = [generate(model, prompt, COUNT) for prompt in prompts]
    card = store.add(architecture, model)
    plans = make_client_plans(random, architecture, prompts, [Sampling(max_tokens=COUNT)] * len(prompts))
    async with TorchEngine(
        "e0",
        kv_tokens=320,
        kv_block_tokens=16,
        token_budget=48,
        max_requests=8,
        threads=1,
        gpu_steps="in_place",
    ) as engine:
        await engine.load(card, store)
        return await run_clients(engine, plans), expected


# Grouped heads; a cap and windows; sinks; values of another width than keys.
@pytest.mark.parametrize(
    ("architecture", "lengths"),
    [("llama", LONG), ("gemma2", LENGTHS), ("gpt_oss", LENGTHS), ("deepseek_v3", LENGTHS)],
)
async def test_tokens_equal_generate_and_nothing_is_gathered(
    architecture: str, lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New blocks hold NaN in keys and values, and nothing clears them."""
    store = DictStore()
    card = store.add(architecture, make_model(architecture))
    check_config((await store.manifest(card.id)).config)  # once per process, on a CPU, where it gathers
    empty, attend, error = KVCache._empty, Gathering.attend, device_attention._error
    in_trial: list[bool] = []

    def trial(*given: Any) -> float:
        in_trial.append(True)
        found = error(*given)
        in_trial.pop()
        return found

    def gathered(*given: Any) -> Any:
        assert in_trial, "a layer gathered its blocks"
        return attend(*given)

    monkeypatch.setattr(device_attention, "_error", trial)
    monkeypatch.setattr(Gathering, "attend", gathered)
    monkeypatch.setattr(KVCache, "_empty", lambda *given: empty(*given).fill_(torch.nan))
    monkeypatch.setattr(KVCache, "clear", lambda cache, blocks: None)
    received, expected = await serve(architecture, lengths)
    assert received == expected


def launches(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Make the kernel of attention fail, or compute something else."""
    launch = Call.launch

    def faulty(call: Call) -> Any:
        if "attend_kernel" not in call.kernel:
            return launch(call)
        if fault == "it cannot be built":
            raise RuntimeError("PassManager::run failed")
        done = launch(call)
        call.arguments[3].mul_(1.1)
        call.arguments[4].mul_(1.1)
        return done

    monkeypatch.setattr(Call, "launch", faulty)


@pytest.mark.parametrize(
    ("fault", "why"), [("it cannot be built", "PassManager"), ("it is wrong", "differs from PyTorch")]
)
async def test_a_kernel_that_fails_its_trial_is_not_used(
    fault: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launches(monkeypatch, fault)
    with caplog.at_level(logging.WARNING, "hotswap"):
        received, expected = await serve("llama")
    assert received == expected
    told = [record.getMessage() for record in caplog.records if "gathers KV blocks" in record.getMessage()]
    assert len(told) == 1, "it is tried once"
    assert why in told[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_sound_kernel_passes_its_trial(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    for kind in (KIND, replace(KIND, softcap=5.0, has_sinks=True, value_dim=24, num_heads=6)):
        assert device_attention.is_right(replace(kind, dtype=dtype)), caplog.text
    assert not device_attention.is_right(replace(KIND, dtype=torch.float64))


def test_a_step_sends_its_integers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of the size that its layers asked for before."""
    cache = KVCache(40, 16, CPU, by_kernels=True)
    cache.tile_rows.add(8)
    pieces = [Piece([1], 30, [3, 4], True), Piece([1] * 20, 5, [7, 8], True), Piece([1], 0, [9], True)]
    step = assemble(pieces, cache, invariant=False).step
    assert step.on_device is not None
    monkeypatch.setattr(device_attention, "send", None)  # nothing more is sent
    rows = step.on_device.rows(8)
    assert rows.tables.tolist() == [[3, 4], [7, 8], [9, 0]]
    assert rows.singles.tolist() == [[0, 0, 1], [2, 21, 1]]
    assert rows.tiles.tolist() == [[1, 1, 8], [1, 9, 8], [1, 17, 4]]
    assert (rows.is_padded, step.on_device.num_keys) == (False, 31)
    storages = {part.untyped_storage().data_ptr() for part in (rows.tables, rows.singles, rows.tiles)}
    storages |= {part.untyped_storage().data_ptr() for part in (step.blocks, step.offsets)}
    assert len(storages) == 1


def test_a_step_without_tiles_of_a_size_makes_them() -> None:
    """The first step of a model, whose layers have asked for none yet."""
    cache = KVCache(40, 16, CPU, by_kernels=True)
    for pieces in ([Piece([1], 30, [3, 4], True)], [Piece([1] * 9, 0, [5], True)], []):
        step = assemble(pieces, cache, invariant=False).step
        assert step.on_device is not None
        tiles = step.on_device.rows(8).tiles
        assert tiles.tolist() == ([[0, 0, 8], [0, 8, 1]] if pieces and len(pieces[0].tokens) > 1 else [])
