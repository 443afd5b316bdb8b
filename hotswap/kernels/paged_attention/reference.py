"""Reference implementation of `attend`: row by row, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotswap.kernels.paged_attention.call import Rows, Seen

__all__ = ["attend_reference"]


def attend_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    seen: Seen,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the result of `attend` for the same arguments, as float64 `[T, heads, value_dim]`."""
    out = torch.zeros(queries.shape[0], queries.shape[1], values.shape[3], dtype=torch.float64)
    group = queries.shape[1] // keys.shape[1]
    untyped: Any = rows.tiles
    tiles: list[list[int]] = untyped.tolist()
    for request, start, count in tiles:
        blocks = rows.tables[request].long()
        key, value = (
            pool[blocks].double().transpose(0, 1).flatten(1, 2).repeat_interleave(group, 0)
            for pool in (keys, values)
        )
        for row in range(start, start + count):
            at = int(rows.order[row])
            visible = torch.arange(int(seen.firsts[row]), int(seen.lasts[row]))
            if seen.hidden is not None:
                visible = visible[seen.hidden[row, visible] == 0]
            scores = (key[:, visible] @ queries[at].double()[:, :, None])[:, :, 0] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = torch.softmax(scores, 1)[:, : len(visible)]
            out[at] = (weights[:, None] @ value[:, visible])[:, 0]
    return out
