"""Attention of a layer over KV blocks, beside gathered blocks and PyTorch's over contiguous keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.session import Session, relative_error
from benchmarks.table import show
from hotswap.backends.torch.device_attention import DeviceRows, attend_on_device, numbers_of
from hotswap.backends.torch.gathered import Gathering, Heads
from hotswap.backends.torch.kv import KVCache, LayerShape
from hotswap.backends.torch.mask_pattern import MaskPattern
from hotswap.backends.torch.pieces import Piece
from hotswap.backends.torch.step_numbers import send

__all__ = ["run"]

# Query heads, KV heads and their width in a Llama of 8B, and tokens of a block.
HEADS, KV_HEADS, DIM, BLOCK_TOKENS = 32, 8, 128, 32
# Requests, the tokens before their rows, and the rows of each.
DECODES = tuple((count, length - 1, 1) for length in (512, 4096, 16_384) for count in (1, 8, 32, 64))
PREFILLS = ((1, 4096, 512),)
# Weights and results are rounded to 16 bits.
BOUND = 1e-2


def run(session: Session) -> None:
    """Measure microseconds of a layer, without the mask, which is made once a step."""
    found, lines = list[dict[str, float | str]](), list[list[str]]()
    for case in ((2, 39, 1), (1, 30, 5)) if session.is_dry else (*DECODES, *PREFILLS):
        if session.remaining_s < 20 and not session.is_dry:
            session.report.setdefault("left_out", []).append(f"attention of {case}")
            continue
        requests, before, rows = case
        name = f"{requests} x {rows} rows behind {before}"
        figures = _Case(session, *case).times(name)
        found.append({"case": name, **figures})
        ours = figures["us"]
        lines.append(
            [
                name,
                f"{ours:.1f}",
                f"{figures['gathered_us'] / ours:.2f}",
                f"{figures['sdpa_us'] / ours:.2f}",
                f"{100 * figures['limit_us'] / ours:.0f}%",
                f"{figures['mask_us']:.1f}",
            ]
        )
        session.free()
    session.report["attention"] = found
    head = ("attention of a layer", "us", "gathered takes times", "PyTorch's takes times", "of the limit")
    show(f"{HEADS} heads, {KV_HEADS} KV heads of {DIM}", (*head, "us of the mask"), lines)


class _Case:
    """A step of equal requests, with so many layers in turns that no cache holds their keys."""

    def __init__(self, session: Session, requests: int, before: int, rows: int) -> None:
        heads, kv_heads, dim, tokens = (
            (4, 2, 16, 8) if session.is_dry else (HEADS, KV_HEADS, DIM, BLOCK_TOKENS)
        )
        self.session, self.before, self.rows, self.requests = session, before, rows, requests
        end = before + rows
        width = -(-end // tokens)
        self.key_bytes = 2 * requests * end * kv_heads * dim * session.dtype.itemsize
        num_layers = session.copies(self.key_bytes)
        shape = LayerShape(kv_heads, dim, dim, session.dtype)
        self.cache = KVCache(requests * width, tokens, session.device, (shape,) * num_layers)
        for pool in self.cache.tensors:
            pool.normal_()
        blocks = (1 + torch.randperm(requests * width)).view(requests, width)
        self.pieces = [Piece([0] * rows, before, table.tolist(), True) for table in blocks]
        self.starts = list(accumulate([rows] * (requests - 1), initial=0))
        self.heads = Heads(heads, kv_heads, dim**-0.5, None, None)
        self.query = torch.randn(1, requests * rows, heads, dim, device=session.device)
        self.query = self.query.to(session.dtype).transpose(1, 2)
        self.blocks, self.end = blocks.to(session.device), end
        self.layers = range(num_layers)

    def times(self, name: str) -> dict[str, float]:
        """Return the microseconds of each method, once its results are compared."""
        session, pattern = self.session, MaskPattern(lambda batch, head, query, key: key <= query)
        step = self._rows()
        gathering = Gathering(self.pieces, self.starts, self.cache)

        def ours(layer: int) -> Tensor:
            return attend_on_device(self.cache, layer, step, self.heads, self.query, pattern)

        def gathered(layer: int) -> Tensor:
            return gathering.attend(layer, self.heads, self.query, pattern.hidden)

        found, right = ours(0), gathered(0)
        self._compare(name, found, right)
        figures = {"us": self._time(ours), "gathered_us": self._time(gathered)}
        contiguous = [self._contiguous(layer) for layer in self.layers]

        def peer(layer: int) -> Tensor:
            return self._sdpa(*contiguous[layer])

        # Of PyTorch's the rows of a request are the next to last dimension.
        rows = peer(0).permute(0, 2, 1, 3).reshape(right.shape)
        self._compare(f"{name}, PyTorch's", rows, right)
        figures["sdpa_us"] = self._time(peer)
        figures["mask_us"] = session.replayed([lambda: self._mask(step)]).median
        products = 4 * self.rows * (self.before + self.rows / 2) * self.requests * self.heads.num_heads
        by_products = products * self.query.shape[3] / session.flops
        figures["limit_us"] = 1e6 * max(self.key_bytes / session.bytes_per_s, by_products)
        return figures

    def _rows(self) -> DeviceRows:
        numbers = numbers_of(self.pieces, self.starts, self.cache)
        positions = [at for piece in self.pieces for at in range(piece.start, piece.end)]
        sent = send({"positions": positions}, numbers.ints, self.session.device)
        return numbers.rows(sent, sent["positions"], is_padded=False)

    @staticmethod
    def _mask(step: DeviceRows) -> None:
        pattern = MaskPattern(lambda batch, head, query, key: key <= query)
        pattern.words(step.positions, step.num_keys)

    def _contiguous(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[requests, KV heads, tokens, width]`; all heads where rows are many."""
        keys, values = (
            pool[self.blocks].transpose(1, 2).flatten(2, 3)[:, :, : self.end].contiguous()
            for pool in self.cache.pools(layer)
        )
        if self.rows == 1:
            return keys, values
        group = self.heads.group
        return keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)

    def _sdpa(self, keys: Tensor, values: Tensor) -> Tensor:
        heads = self.query.shape[1]
        query = self.query[0].view(heads, self.requests, self.rows, -1).transpose(0, 1)
        if self.rows == 1:
            return functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        mask = causal_lower_right(self.rows, self.end)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    def _compare(self, name: str, found: Tensor, right: Tensor) -> None:
        error = relative_error(found, right)
        if not error <= BOUND:
            self.session.report.setdefault("faults", []).append(f"attention of {name}: error {error:.2e}")

    def _time(self, method: Callable[[int], Tensor]) -> float:
        return self.session.replayed([partial(method, layer) for layer in self.layers]).median
