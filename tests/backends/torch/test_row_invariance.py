"""An engine says at its start if the products of this machine are not batch-invariant."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hotswap.backends.torch import TorchEngine, row_invariance
from hotswap.kernels import packed_linear


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a CPU for which hotswap has no kernel of linear layers."""
    monkeypatch.setattr(packed_linear, "supported", lambda dtype: False)
    row_invariance.warnings_of_products.cache_clear()
    yield
    row_invariance.warnings_of_products.cache_clear()


def varies(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum in another order from 32 rows on, as libraries do."""
    if hidden.shape[0] < 32 or hidden.dtype is torch.bfloat16:
        return hidden @ weight.t()
    half = weight.shape[1] // 2
    return hidden[:, half:] @ weight[:, half:].t() + hidden[:, :half] @ weight[:, :half].t()


async def test_a_machine_that_keeps_the_promise_gives_no_warning() -> None:
    async with TorchEngine("e0", threads=1) as engine:
        assert engine.status().warnings == ()


async def test_a_product_that_depends_on_other_rows_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_invariance, "invariant_linear", varies)
    with caplog.at_level(logging.WARNING, "hotswap"):
        async with TorchEngine("e0", threads=1) as engine:
            status = engine.status()
    assert any("float32 on this CPU depend on the other rows" in warning for warning in status.warnings)
    assert status.warnings[-1] in caplog.text


async def test_an_engine_that_promises_nothing_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_invariance, "invariant_linear", varies)
    async with TorchEngine("e0", threads=1, invariant=False) as engine:
        assert engine.status().warnings == ()


def test_a_kernel_of_hotswap_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "supported", lambda dtype: True)
    monkeypatch.setattr(row_invariance, "invariant_linear", varies)
    assert row_invariance.warnings_of_products() == ()
