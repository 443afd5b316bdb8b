"""The paged KV cache: the tensors of the blocks.

Blocks are append-only: a slot is written once, by the request to which the block was allocated, so shared
slots never change. Block 0 is never allocated; padding rows of a batch write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import gcd, lcm, prod
from typing import Final

import torch
from torch import Tensor

from hotswap.backends import memory
from hotswap.backends.torch import device_pages
from hotswap.backends.torch.blocks import Copy
from hotswap.backends.torch.buffers import host_bytes
from hotswap.backends.torch.device_pages import PagedRange, PageDriver
from hotswap.backends.torch.recurrent.states import StateShape
from hotswap.kernels import paged_attention_gpu
from hotswap.kernels.kv_blocks import BlockTable, gather, scatter
from hotswap.kernels.paged_attention import DTYPES, append, compile_for
from hotswap.kernels.targets import runs_triton

__all__ = ["KVCache", "LayerShape", "blocks_for", "bytes_per_token", "head_block_indices", "state_bytes"]

_NO_BLOCK: Final = -1


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a request keeps in one layer: a KV cache entry for each token, and states of fixed size.

    Attributes:
        kv_heads: The keys and values of a token; 0 in a layer without attention.
        key_dim: The width of a key.
        value_dim: The width of a value.
        dtype: Their dtype.
        states: The recurrent states of a request.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    states: tuple[StateShape, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """The size of keys and values together."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """The size of the states of one request."""
        return sum(state.size_bytes for state in self.states)


def bytes_per_token(layers: Sequence[LayerShape]) -> int:
    """Return the KV cache bytes of one token in all layers."""
    return sum(layer.bytes_per_token for layer in layers)


def state_bytes(layers: Sequence[LayerShape]) -> int:
    """Return the bytes of the recurrent states of one request in all layers."""
    return sum(layer.state_bytes for layer in layers)


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Return the number of blocks for `num_tokens`."""
    return -(-num_tokens // block_tokens)


def head_block_indices(table: Tensor, heads: int) -> Tensor:
    """Return the index of each head's part of the blocks of a table `[n, num_blocks]`.

    The result is `[n * heads * num_blocks]`, into a pool viewed as `[(num_blocks + 1) * heads, ...]`.
    """
    each = torch.arange(heads, device=table.device)[None, :, None]
    return (table[:, None, :] * heads + each).reshape(-1)


class KVCache:
    """Keys and values of every layer, head-major: `[num_blocks + 1, kv_heads, block_tokens, dim]`.

    Kernels of attention read them in place. Without kernels the head-major layout makes the gather of a batch
    one `index_select` of long rows, contiguous per request and head. Neighbouring layers of equal shape are
    one tensor, so that an operation on a block is one call for all of them.

    Args:
        num_blocks: The number of blocks, without block 0.
        block_tokens: Tokens per block.
        device: The device of the tensors.
        layers: The shapes of the layers. Without them each layer's tensors are allocated at its first write,
            in the shape that is written, so that no config is parsed for head counts and widths.
        first_layer: The index of the first of `layers`, for a pipeline stage.
        by_kernels: Whether attention on a GPU may read the blocks by Triton kernels.
        is_elastic: Whether memory of blocks comes by `populate` and goes by `discard`. On a CPU pages are
            small then: a huge page that is allocated or returned takes the blocks around with it.

    Attributes:
        group_blocks: How many blocks have their memory together, from block 0 on; 1 on a CPU, and in a cache
            that is not elastic.
    """

    is_local = True

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        device: torch.device,
        layers: Sequence[LayerShape] = (),
        *,
        first_layer: int = 0,
        by_kernels: bool = False,
        is_elastic: bool = False,
    ) -> None:
        self._by_kernels, self._is_elastic = by_kernels, is_elastic
        self._driver = device_pages.driver_for(device) if is_elastic else None
        self._ranges: list[tuple[PagedRange, int, int]] = []  # with layers, and the bytes of a layer's group
        self.group_blocks = 1 if self._driver is None else _group_blocks(layers, block_tokens, self._driver)
        self.num_blocks, self.block_tokens, self.device = num_blocks, block_tokens, device
        # The numbers of rows of a tile that layers have asked for; see `device_attention`.
        self.tile_rows: set[int] = set()
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        # The same by their first layer, `[layers, num_blocks + 1, kv_heads, block_tokens, dim]`.
        self._stacks: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        self._scratch: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._blocks: BlockTable | None = None
        self._make(first_layer, layers)
        if self._driver is None:
            self._clear_first()

    @property
    def in_place(self) -> bool:
        """Whether attention reads the blocks in place on a CPU, without a gather."""
        return self.device.type == "cpu"

    @property
    def has_kernels(self) -> bool:
        """Whether there are Triton kernels to read the blocks in place; each kind of layer has a trial."""
        return self._by_kernels and not self.in_place and paged_attention_gpu.has_kernels(self.device)

    @property
    def _begins_zeroed(self) -> bool:
        """Whether newly allocated memory is zeroed."""
        return self.device.type == "cpu"

    @property
    def layers(self) -> dict[int, LayerShape]:
        """The shape of each layer seen so far."""
        return {
            index: LayerShape(keys.shape[1], keys.shape[3], self._values[index].shape[3], keys.dtype)
            for index, keys in self._keys.items()
        }

    @property
    def size_bytes(self) -> int:
        """The size of all blocks; scratch memory, which is bounded by a batch, is not counted."""
        return sum(stack.nbytes for stack in self._all())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the blocks."""
        return tuple(self._all())

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero the values of newly allocated blocks.

        A masked key has weight zero, and zero times a NaN left by an earlier request would be a NaN.
        """
        if not blocks:
            return
        for values in self._stacks[1].values():
            values.index_fill_(1, self._index(blocks), 0)

    def populate(self, groups: Iterable[int]) -> None:
        """Have memory for groups of blocks; on a CPU they take it when they are written.

        Raises:
            OutOfMemory: the device has not so much; the groups have none then.
        """
        if self._driver is None:
            return
        wanted = list(groups)
        try:
            for group, (pages, layers, size) in product(wanted, self._ranges):
                for layer in range(layers):
                    pages.map(self._offset(pages, layers, layer, group, size), size)
        except BaseException:
            self._unmap(wanted)
            raise
        if 0 in wanted:
            self._clear_first()

    def discard(self, runs: Iterable[range]) -> None:
        """Return the memory of runs of consecutive blocks to the system.

        On a CPU as far as it is whole pages: the blocks read zeros from now on, and take memory again when
        they are written. On a GPU the runs are of whole groups, which must not be read until `populate`.
        """
        if self._driver is not None:
            groups = {block // self.group_blocks for run in runs for block in run}
            self._driver.wait()  # for steps that may still read them
            self._unmap(groups)
            return
        if not self.in_place:
            return
        for address, size_bytes in self._places(runs):
            memory.discard(address, size_bytes)

    def allocate(self, runs: Iterable[range]) -> None:
        """Allocate the memory of runs of blocks on a CPU, as the first write does. Blocking, thread-safe.

        A huge page takes milliseconds, and a block has a part of one in each layer's keys and values.
        """
        if not self.in_place:
            return
        for address, size_bytes in self._places(runs):
            memory.allocate_pages(address, size_bytes)

    def _places(self, runs: Iterable[range]) -> Iterator[tuple[int, int]]:
        """Yield the address and the size of each run in the keys and in the values of each layer."""
        for run, stack in product(runs, self._all()):
            size = stack[0, 0].nbytes
            for layer in stack:
                yield layer.data_ptr() + run.start * size, len(run) * size

    def _unmap(self, groups: Iterable[int]) -> None:
        for group, (pages, layers, size) in product(groups, self._ranges):
            for layer in range(layers):
                pages.unmap(self._offset(pages, layers, layer, group, size))

    def _offset(self, pages: PagedRange, layers: int, layer: int, group: int, size: int) -> int:
        return layer * (pages.size_bytes // layers) + group * size

    def _clear_first(self) -> None:
        """Zero the values of block 0, which padding reads."""
        if not self._begins_zeroed:
            for stack in self._stacks[1].values():
                stack[:, 0] = 0

    def copy(self, copies: Sequence[Copy]) -> None:
        """Make copies between blocks, in order; the slots after the copied ones are cleared."""
        for copy in copies:
            num_tokens = copy.num_tokens
            for stack in self._all():
                stack[:, copy.target, :, :num_tokens] = stack[:, copy.source, :, :num_tokens]
                stack[:, copy.target, :, num_tokens:] = 0

    def save(self, blocks: Sequence[int], out: Tensor) -> None:
        """Copy blocks, all layers of each, to host memory: `out` is uint8, `block_bytes` per block.

        Thread-safe. Runs on the calling thread only: PyTorch's thread pool would compete with steps.
        """
        if not len(out):  # no layer has attention
            return
        if self.device.type != "cpu":
            self.save_staged(blocks, out)
            return
        for stack, part in self._parts(out, len(blocks)):
            for content, block in zip(part.numpy(), blocks, strict=True):
                content[:] = stack.numpy()[:, block]

    def restore(self, blocks: Sequence[int], data: Tensor) -> None:
        """Fill blocks that no request reads yet with data that `save` wrote. Thread-safe, like `save`."""
        if not len(data):
            return
        if self.device.type != "cpu":
            self.restore_staged(blocks, data)
            return
        for stack, part in self._parts(data, len(blocks)):
            for content, block in zip(part.numpy(), blocks, strict=True):
                stack.numpy()[:, block] = content

    @torch.inference_mode()
    def save_staged(self, blocks: Sequence[int], out: Tensor) -> None:
        """Save through a staging buffer on the device: one kernel launch for all layers, and one copy.

        In inference mode on any thread: PyTorch lets no other mode write to a tensor of the engine's thread.
        """
        if self.block_bytes:
            staging = torch.empty(len(out), dtype=torch.uint8, device=self.device)
            gather(self._table(), blocks, staging)
            out.copy_(staging)

    @torch.inference_mode()
    def restore_staged(self, blocks: Sequence[int], data: Tensor) -> None:
        """Restore through a staging buffer on the device; `data` may be overwritten when this returns.

        In inference mode, like `save_staged`.
        """
        if self.block_bytes:
            scatter(self._table(), blocks, data.to(self.device))

    def build_kernels(self) -> None:
        """Compile the kernels that read and copy blocks, so that no request waits for it. Blocking."""
        if self.in_place:
            for dtype in {layer.dtype for layer in self.layers.values()} & DTYPES:
                compile_for(dtype)
        if self.block_bytes and runs_triton(self.device):
            staging = torch.empty(self.block_bytes, dtype=torch.uint8, device=self.device)
            gather(self._table(), (_NO_BLOCK,), staging)
            scatter(self._table(), (_NO_BLOCK,), staging)

    def _table(self) -> BlockTable:
        """Return the tensors of all layers, in the order in which `save` writes them."""
        if self._blocks is None:
            layers = [stack[layer] for stack in self._all() for layer in range(len(stack))]
            self._blocks = BlockTable([layer for layer in layers if layer.numel()])
        return self._blocks

    def _parts(self, data: Tensor, num_blocks: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each stack as bytes `[layers, blocks, bytes]`, with its part of `data`, blocks first."""
        rows, at = data.view(max(1, num_blocks), -1), 0
        for stack in self._all():
            pool = stack.flatten(2).view(torch.uint8)
            layers, _, size = pool.shape
            yield pool, rows[:, at : at + layers * size].view(len(rows), layers, size)
            at += layers * size

    @property
    def block_bytes(self) -> int:
        """The size of one block in all layers."""
        return sum(stack[:, 0].numel() * stack.itemsize for stack in self._all())

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self.device)

    def _all(self) -> Iterator[Tensor]:
        """Yield all stacks: those of keys in the order of layers, then those of values."""
        for stacks in self._stacks:
            for layer in sorted(stacks):
                yield stacks[layer]

    def write(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        *,
        by_kernel: bool = False,
    ) -> None:
        """Append keys and values `[1, kv_heads, T, dim]`: row *i* to slot `offsets[i]` of `blocks[i]`.

        `by_kernel` uses the Triton kernel, one launch for both.
        """
        if layer not in self._keys:
            shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
            self._make(layer, [shape])
            if not self._begins_zeroed:
                for pools in (self._keys, self._values):
                    pools[layer].zero_()
        keys, values = self.pools(layer)
        if by_kernel and key.dtype is value.dtype is keys.dtype and key.stride(3) == value.stride(3) == 1:
            paged_attention_gpu.append(key[0], value[0], keys, values, blocks, offsets)
            return
        for rows, pool in ((key[0], keys), (value[0], values)):
            if self.in_place and pool.dtype in DTYPES:
                append(rows, pool, blocks, offsets)
            else:
                pool[blocks, :, offsets] = rows.transpose(0, 1)

    def pools(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the tensors of a layer's keys and of its values."""
        return self._keys[layer], self._values[layer]

    def gather(self, layer: int, lines: Tensor, num_requests: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[n, kv_heads, m * block_tokens, dim]` of blocks (`head_block_indices`).

        Both are in scratch memory that the next call overwrites: new pages would cost ten times the copy.
        """
        keys = self._take("keys", self._keys[layer], lines)
        values = self._take("values", self._values[layer], lines)
        heads = self._keys[layer].shape[1]
        return keys.view(num_requests, heads, -1, keys.shape[1]), values.view(
            num_requests, heads, -1, values.shape[1]
        )

    def _take(self, name: str, pool: Tensor, index: Tensor) -> Tensor:
        """Return `[tokens, dim]` of the indexed rows, concatenated."""
        _, _, tokens, dim = pool.shape
        lines = pool.view(-1, tokens * dim)
        out = self._scratch_lines(name, len(index), lines)
        torch.index_select(lines, 0, index, out=out)
        return out.view(-1, dim)

    def _scratch_lines(self, name: str, count: int, like: Tensor) -> Tensor:
        key = (name, like.shape[1], like.dtype)
        scratch = self._scratch.get(key)
        if scratch is None or len(scratch) < count:
            size = max(64, count + count // 2)
            scratch = self._scratch[key] = torch.empty(
                size, like.shape[1], dtype=like.dtype, device=like.device
            )
        return scratch[:count]

    def _make(self, first: int, layers: Sequence[LayerShape]) -> None:
        self._blocks = None
        sides = (
            (self._keys, [(layer.kv_heads, layer.key_dim, layer.dtype) for layer in layers]),
            (self._values, [(layer.kv_heads, layer.value_dim, layer.dtype) for layer in layers]),
        )
        for (pools, shapes), stacks in zip(sides, self._stacks, strict=True):
            at = first
            for (heads, dim, dtype), alike in groupby(shapes):
                shape = (len(list(alike)), self.num_blocks + 1, heads, self.block_tokens, dim)
                stacks[at] = self._empty(shape, dtype)
                pools.update(enumerate(stacks[at], start=at))
                at += shape[0]

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate without writing: blocks are cleared on allocation, and writing gigabytes delays a swap."""
        if self._driver is not None:
            return self._addresses(shape, dtype)
        if self._begins_zeroed:
            return host_bytes(prod(shape) * dtype.itemsize, huge=not self._is_elastic).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _addresses(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Reserve addresses: the groups of each layer begin on a granule, and have no memory yet."""
        assert self._driver is not None, "the cache is elastic"
        layers, blocks, *entry = shape
        num_groups = -(-blocks // self.group_blocks)
        size = self.group_blocks * prod(entry) * dtype.itemsize
        if not size:  # of layers without attention
            return torch.empty(shape, dtype=dtype, device=self.device)
        pages = PagedRange(self._driver, layers * num_groups * size)
        self._ranges.append((pages, layers, size))
        return pages.tensor().view(dtype).view(layers, -1, *entry)[:, :blocks]


def _group_blocks(layers: Sequence[LayerShape], block_tokens: int, driver: PageDriver) -> int:
    """Return of how many blocks the memory is whole granules, in every layer."""
    sizes = {
        block_tokens * layer.kv_heads * dim * layer.dtype.itemsize
        for layer in layers
        for dim in (layer.key_dim, layer.value_dim)
    } - {0}
    return lcm(*(driver.granule_bytes // gcd(driver.granule_bytes, size) for size in sizes))
