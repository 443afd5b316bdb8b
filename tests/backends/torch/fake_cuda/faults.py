"""Faults that a walk must find, each planted for the length of a block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from hotswap.backends.torch import buffers, device_attention, gathered, sampling
from hotswap.backends.torch.batch import Batch
from hotswap.backends.torch.buffers import FlatBuffers
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.largest_step import LargestStep
from hotswap.backends.torch.recurrent import StatePool
from hotswap.kernels.kv_blocks import gather
from hotswap.kernels.kv_blocks import launch as kv_launch
from tests.backends.torch.fake_cuda.driver import Stream

__all__ = ["planted"]

_ANY: dict[str, Any] = {
    "segment": gathered.Segment,
    "numbers": device_attention.Numbers,
    "batch": Batch,
    "sampling": sampling,
}
_copy: Any = vars(buffers)["_copy"]
_logits, _indices, _rows = Batch.logits, gathered.Segment.block_indices, device_attention.Numbers.rows


def planted(fault: str) -> AbstractContextManager[object]:
    """Plant a fault within the block."""
    owner, name, faulty = _FAULTS[fault]
    return patch.object(owner, name, faulty)


def _reads(batch: Any, *given: Any) -> Tensor:
    assert int(batch.positions.max()) >= 0
    return _logits(batch, *given)


def _tables_on_host(numbers: Any, sent: Any, *given: Any, **more: Any) -> Any:
    return _rows(numbers, {**sent, "tables": sent["tables"].cpu()}, *given, **more)


def _cut_by_row(weights: Tensor, samplings: Any, space: Any) -> None:
    for row, chosen in zip(weights, samplings, strict=True):
        cast("Any", sampling)._cut_row(row, chosen, space)


def _cut_and_read(weights: Tensor, samplings: Any, space: Any) -> None:
    sampling.read([weights.amax(-1)])


def _copy_without_wait(chunk: Any, flat: Tensor) -> None:
    target = flat[chunk.offset_bytes : chunk.offset_bytes + chunk.data.nbytes]
    target.copy_(torch.frombuffer(chunk.data, dtype=torch.uint8), non_blocking=True)


def _copy_views_without_wait(chunk: Any, flat: Tensor) -> None:
    if chunk.data.readonly:
        target = flat[chunk.offset_bytes : chunk.offset_bytes + chunk.data.nbytes]
        target.copy_(buffers.in_place(chunk.data), non_blocking=True)
    else:
        _copy(chunk, flat)


def _save_without_wait(cache: Any, blocks: Any, out: Tensor) -> None:
    staging = torch.empty(len(out), dtype=torch.uint8, device=cache.device)
    gather(cache._table(), blocks, staging)
    out.copy_(staging, non_blocking=True)


def _copy_and_read(states: Any, copies: Any) -> None:
    for copy in copies:
        assert all(int(state[copy.source].sum()) >= 0 for state in states.tensors)


def _release_nothing(buffers: Any, buffer: Tensor) -> None:
    vars(buffers).setdefault("forgotten", []).append(buffer)


_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a step reads a value": (Batch, "logits", _reads),
    "an index stays on the host": (
        gathered.Segment,
        "block_indices",
        lambda segment, heads: _indices(segment, heads).cpu(),
    ),
    "block tables stay on the host": (device_attention.Numbers, "rows", _tables_on_host),
    "a kernel gets an argument on the host": (
        kv_launch,
        "_sent",
        lambda blocks, device: torch.tensor(blocks, dtype=torch.int32),
    ),
    "sampling reads the thresholds of a row": (sampling, "_cut", _cut_by_row),
    "sampling waits for the device twice": (sampling, "_cut", _cut_and_read),
    "penalties stay on the host": (
        sampling,
        "to_device",
        lambda numbers, device: torch.as_tensor(numbers, device="cpu"),
    ),
    "a chunk is reused before its copy has ended": (buffers, "_copy", _copy_without_wait),
    "a read-only chunk is reused before its copy has ended": (buffers, "_copy", _copy_views_without_wait),
    "a copy does not wait for steps under way": (Stream, "wait_stream", lambda *_: None),
    "KV blocks leave before their copy has ended": (KVCache, "save_staged", _save_without_wait),
    "snapshots of states are read": (StatePool, "copy", _copy_and_read),
    "KV blocks take the memory of steps": (LargestStep, "size_bytes", lambda *_: 0),
    "an unload keeps the weights": (FlatBuffers, "release", _release_nothing),
}
