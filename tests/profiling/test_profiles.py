"""Latency models: they give the published points back, and a prompt costs the same however it is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.profiling import PROFILES

# Sun et al., Llumnix, OSDI 2024, figure 10, LLaMA-7B on an A10: seconds to compute a context again.
RECOMPUTE_S = {256: 0.058, 512: 0.110, 1024: 0.220, 2048: 0.436, 4096: 0.940, 8192: 1.995}


@pytest.mark.parametrize(("tokens", "seconds"), RECOMPUTE_S.items())
def test_recomputing_takes_what_llumnix_measured(tokens: int, seconds: float) -> None:
    device = PROFILES["a10-llama-7b-vllm-0.2"].device
    predicted = device.step_s(tokens=tokens, batch=1, context=0, prefill=tokens, prefill_squares=tokens**2)
    assert predicted == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_decoding_takes_what_llumnix_measured(batch: int) -> None:
    """Figure 10: 42.6 ms and 0.286 ms for each of a batch that holds 8192 tokens together."""
    device = PROFILES["a10-llama-7b-vllm-0.2"].device
    assert device.step_s(tokens=batch, batch=batch, context=8192) == pytest.approx(
        0.0426 + 0.000286 * batch, rel=0.02
    )


@pytest.mark.parametrize("name", PROFILES)
def test_weights_and_blocks_fit_the_device(name: str) -> None:
    profile = PROFILES[name]
    pool = profile.kv_blocks * 16 * profile.kv_bytes_per_token
    assert profile.kv_blocks > 100
    assert profile.weight_bytes + pool <= profile.device.memory_bytes
    assert profile.source
    assert profile.error


@pytest.mark.parametrize("name", PROFILES)
def test_more_work_takes_no_less_time(name: str) -> None:
    device = PROFILES[name].device
    decodes = [device.step_s(tokens=n, batch=n, context=500 * n) for n in (1, 4, 16, 64)]
    prefills = [
        device.step_s(tokens=n, batch=1, context=0, prefill=n, prefill_squares=n * n) for n in (16, 256, 4096)
    ]
    assert decodes == sorted(decodes)
    assert prefills == sorted(prefills)
    assert decodes[0] > 0


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=6))
def test_attention_within_a_prompt_is_the_same_however_it_is_cut(chunks: list[int]) -> None:
    device = PROFILES["h100-llama-3.1-8b"].device
    starts = [0, *itertools.accumulate(chunks)]
    squares = [count * (count + 2 * cached) for cached, count in zip(starts, chunks, strict=False)]
    assert sum(squares) == sum(chunks) ** 2
    bare = [device.step_s(tokens=n, batch=1, context=0, prefill=n) for n in chunks]
    whole = [
        device.step_s(tokens=n, batch=1, context=0, prefill=n, prefill_squares=square)
        for n, square in zip(chunks, squares, strict=True)
    ]
    assert sum(whole) - sum(bare) == pytest.approx(sum(chunks) ** 2 * device.prefill_square_s)
