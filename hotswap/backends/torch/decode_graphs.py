"""CUDA graphs of decode steps: all kernels of a step are launched by one call.

A decode step of a model of a billion weights launches hundreds of kernels, and the host takes longer to
launch them than the GPU to run them. A graph is captured for a number of rows and of keys; steps are padded.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from hotswap.backends.torch.attention import Step
from hotswap.backends.torch.batch import Batch
from hotswap.backends.torch.device_attention import DeviceRows
from hotswap.backends.torch.kv import KVCache, blocks_for
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.pieces import Piece
from hotswap.backends.torch.step_numbers import send
from hotswap.backends.torch.step_options import StepOptions

__all__ = ["CudaGraph", "DecodeGraphs", "Graph", "graphs_for"]

log = logging.getLogger("hotswap")

_FEWEST_KEYS: Final = 256
_MOST_GRAPHS: Final = 48  # each keeps the logits of its rows


class Graph(Protocol):
    """Launches that are recorded once and repeated on the same tensors."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Record what `compute` launches, without running it; return its result, which `replay` fills."""
        ...

    def replay(self) -> None:
        """Run what was recorded."""
        ...


class CudaGraph:
    """A graph of CUDA, whose memory comes from a pool that all graphs of one model share.

    They may share it, because none is replayed while the result of another is in use.

    Args:
        pool: The pool, from `torch.cuda.graph_pool_handle`.
    """

    def __init__(self, pool: Any) -> None:
        self._pool, self._graph = pool, torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        cuda: Any = torch.cuda  # not all of it is typed
        stream = cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads go on to allocate and copy, for loads and other engines.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def replay(self) -> None:
        self._graph.replay()


class DecodeGraphs:
    """Runs steps in which every request has one token by graphs.

    The first step of a number of rows and keys runs launch by launch, and builds the kernels; the second is
    captured. Numbers of rows are powers of two and halves between them, those of keys powers of two. If
    either fails, as where a layer gathers its blocks or reads on the host, all steps of the model run launch
    by launch from then on, and a warning says why.

    Not thread-safe: for the thread that runs the steps.

    Args:
        model: The modules.
        cache: Their KV cache, which attention reads in place.
        max_rows: The most requests of a step.

    Attributes:
        num_replayed: How many steps were run by a graph.
    """

    def __init__(self, model: nn.Module, cache: KVCache, max_rows: int) -> None:
        self._model, self._cache, self._max_rows = model, cache, max_rows
        self._make_graph = _cuda_graphs()
        self._steps: OrderedDict[tuple[int, int], _PaddedStep] = OrderedDict()
        self._is_off = False
        self.num_replayed = 0

    def logits(self, pieces: Sequence[Piece]) -> Tensor | None:
        """Return the logits of a step, `[pieces, vocabulary]`; `None` if no graph can run it.

        Valid until the next call.
        """
        if self._is_off or not pieces or not all(map(_is_decode, pieces)):
            return None
        size = _rows(len(pieces), self._max_rows), _keys(max(piece.end for piece in pieces))
        step = self._steps.pop(size, None)
        if step is None:
            step = _PaddedStep(self._model, self._cache, *size)
            if len(self._steps) >= _MOST_GRAPHS:
                self._steps.popitem(last=False)
        self._steps[size] = step
        step.fill(pieces)
        try:
            if not step.has_run:
                return step.run()[: len(pieces)]
            if not step.is_captured:
                step.capture(self._make_graph())
        except Exception as exc:  # of any layer, PyTorch or CUDA: the step is computed anew without a graph
            log.warning("The model's decode steps cannot be graphs, and are launched one by one: %r", exc)
            self._is_off = True
            self._steps.clear()
            return None
        self.num_replayed += 1
        return step.replay()[: len(pieces)]


class _PaddedStep:
    """A step of a fixed number of rows and keys, whose numbers stay in one place on the device.

    Padding rows are of token 0 at position 0 and write to block 0, which no request has.
    """

    def __init__(self, model: nn.Module, cache: KVCache, num_rows: int, num_keys: int) -> None:
        self._model, self._cache = model, cache
        self._num_rows, self._num_keys = num_rows, num_keys
        self._width = blocks_for(num_keys, cache.block_tokens)
        self._sent: Mapping[str, Tensor] = {}
        self._graph: Graph | None = None
        self._logits: Tensor | None = None
        self.has_run = False

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Send the numbers of the pieces to where the step reads them."""
        size, padding = self._cache.block_tokens, [0] * (self._num_rows - len(pieces))
        longs = {
            "ids": [piece.tokens[0] for piece in pieces] + padding,
            "positions": [piece.start for piece in pieces] + padding,
            "blocks": [piece.blocks[piece.start // size] for piece in pieces] + padding,
            "offsets": [piece.start % size for piece in pieces] + padding,
            "keep": list(range(self._num_rows)),
        }
        tables = list[int]()
        for piece in pieces:
            blocks = piece.blocks[: blocks_for(piece.end, size)]
            tables += blocks
            tables += [0] * (self._width - len(blocks))
        tables += [0] * (self._width * len(padding))
        singles = [number for row in range(len(pieces)) for number in (row, row, 1)]
        ints = {"tables": tables, "singles": singles + 3 * padding}
        sent = send(longs, ints, self._cache.device)
        if not self._sent:
            self._sent = sent
            return
        for name, numbers in sent.items():
            if name != "keep":
                self._sent[name].copy_(numbers)

    def run(self) -> Tensor:
        """Compute the logits of all rows, launch by launch."""
        self.has_run = True
        return self._compute()

    def capture(self, graph: Graph) -> None:
        """Record the step."""
        self._logits = graph.capture(self._compute)
        self._graph = graph

    def replay(self) -> Tensor:
        """Compute the logits of all rows by the graph."""
        assert self._graph is not None, "it was captured"
        assert self._logits is not None, "it was captured"
        self._graph.replay()
        return self._logits

    def _compute(self) -> Tensor:
        sent = self._sent
        rows = DeviceRows(
            tables=sent["tables"].view(self._num_rows, self._width),
            singles=sent["singles"].view(-1, 3),
            positions=sent["positions"],
            num_keys=self._num_keys,
            is_padded=True,
            spans=(),
            tiles=dict.fromkeys(self._cache.tile_rows, sent["singles"].view(-1, 3)[:0]),
        )
        batch = Batch(
            ids=sent["ids"][None],
            positions=sent["positions"][None],
            keep=sent["keep"],
            num_kept=self._num_rows,
            step=Step(
                cache=self._cache,
                blocks=sent["blocks"],
                offsets=sent["offsets"],
                on_device=rows,
                positions=sent["positions"],
            ),
        )
        return batch.logits(self._model)


def graphs_for(
    skeleton: Skeleton, cache: KVCache, steps: StepOptions, max_requests: int
) -> DecodeGraphs | None:
    """Return what runs the decode steps of a model by graphs; `None` if nothing is to."""
    if steps.gpu_steps != "graphs" or not cache.has_kernels:
        return None
    if skeleton.mixers or skeleton.long_rope:  # steps that have more than these numbers
        return None
    return DecodeGraphs(skeleton.module, cache, max_requests)


def _is_decode(piece: Piece) -> bool:
    return len(piece.tokens) == 1 and piece.samples and piece.adapter is None and not piece.num_scored


def _rows(count: int, most: int) -> int:
    """Return the least number that graphs have: 1, 2, 3, 4, 6, 8, 12, ..., and the most."""
    power = 1 << (count - 1).bit_length()
    return min(most, power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power)


def _keys(count: int) -> int:
    return max(_FEWEST_KEYS, 1 << (count - 1).bit_length())


def _cuda_graphs() -> Callable[[], Graph]:
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
