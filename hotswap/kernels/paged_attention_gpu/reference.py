"""Reference implementation of `paged_attention_gpu`: row by row, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotswap.kernels.paged_attention_gpu.call import Rows

__all__ = ["attend_reference"]


def attend_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the result of `attend` for the same arguments, on the CPU, as float64 `[T, heads, value_dim]`.

    `visible` is the mask that `Visible.of` takes, `[T, num_keys]`.
    """
    queries, keys, values, visible = (tensor.cpu() for tensor in (queries, keys, values, visible))
    out = torch.zeros(queries.shape[0], queries.shape[1], values.shape[3], dtype=torch.float64)
    group, block_tokens = queries.shape[1] // keys.shape[1], keys.shape[2]
    untyped: Any = [*rows.singles.cpu().unbind(), *rows.tiles.cpu().unbind()]
    for request, start, count in (tile.tolist() for tile in untyped):
        for row in range(start, start + count):
            positions = visible[row].nonzero()[:, 0]
            if not len(positions):
                continue
            blocks = rows.tables[request].cpu().long()[positions // block_tokens]
            key, value = (
                pool[blocks, :, positions % block_tokens].double().transpose(0, 1).repeat_interleave(group, 0)
                for pool in (keys, values)
            )
            scores = (key @ queries[row].double()[:, :, None])[:, :, 0] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.cpu().double()[:, None]], 1)
            weights = torch.softmax(scores, 1)[:, : len(positions)]
            out[row] = (weights[:, None] @ value)[:, 0]
    return out
