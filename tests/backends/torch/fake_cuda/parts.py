"""The parts below an engine on a GPU: steps, adapters, FP8 weights, and copies of KV blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.peft import AdapterWeights, LowRank
from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.adapters.targets import targets
from hotswap.backends.torch.blocks import Copy
from hotswap.backends.torch.forward import Piece, assemble
from hotswap.backends.torch.fp8 import SCALE_SUFFIX, SCHEMES
from hotswap.backends.torch.fp8_linear import QuantizedWeights, linear_weights, prepare
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.weights import place
from hotswap.kernels.fp8_gemm import packed_width
from tests.backends.torch.fake_cuda.driver import DEVICE

__all__ = ["walk_parts"]

_BLOCK_TOKENS, _NUM_BLOCKS = 32, 512


def walk_parts(config: Any, *, fp8: bool) -> None:
    """Walk a model from its skeleton to copies of its KV blocks, with FP8 weights if asked to."""
    skeleton = Skeleton(json.dumps(config.to_dict()), DEVICE)
    for name, buffer in skeleton.module.named_buffers():
        assert buffer.device == DEVICE, name
    specs, size_bytes, quantized = _placed(skeleton, fp8=fp8)
    skeleton.bind(torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE), specs, quantized)
    prepare(skeleton.fp8_linears, skeleton.dtype)
    cache = KVCache(_NUM_BLOCKS, _BLOCK_TOKENS, DEVICE, by_kernels=True)
    cache.build_kernels()
    free = iter(range(1, _NUM_BLOCKS))
    prompts = [_piece(range(3, 103), 0, free), _piece(range(7, 40), 64, free)]
    decodes = [_piece([5], length, free) for length in (300, 200, 100, 40)]
    for pieces in (prompts, decodes, [*decodes, *prompts]):
        _step(skeleton, cache, pieces)
    for adapter in _adapters(skeleton):
        _step(skeleton, cache, [replace(piece, adapter=adapter) for piece in decodes])
    cache.clear([4, 5])
    cache.copy([Copy(1, 2, 7)])
    content = torch.empty(3 * cache.block_bytes, dtype=torch.uint8, device="cpu")
    cache.save([1, 2, 3], content)
    cache.restore([1, 2, 3], content)
    skeleton.unbind()


def _placed(skeleton: Skeleton, *, fp8: bool) -> tuple[Any, int, QuantizedWeights | None]:
    """Lay out the weights of a model in bf16, those of linear layers in FP8 if asked to."""
    scheme, items = SCHEMES["fp8-e4m3"], list[Any]()
    kept = {name for name in linear_weights(skeleton.module) if fp8 and "lm_head" not in name}
    kept &= skeleton.shapes.keys()
    for name, shape in skeleton.shapes.items():
        if name in kept:
            groups = (shape[0], scheme.num_groups(shape[1]))
            items.append((name, torch.int32, (shape[0], packed_width(shape[1])), name))
            items.append((name + SCALE_SUFFIX, torch.float32, groups, name + SCALE_SUFFIX))
        else:
            items.append((name, torch.bfloat16, shape, name))
    specs, size_bytes = place(items)
    bf16 = torch.bfloat16
    return specs, size_bytes, QuantizedWeights(frozenset(kept), scheme, bf16, bf16) if kept else None


def _piece(tokens: Sequence[int], start: int, free: Iterator[int]) -> Piece:
    count = -(-(start + len(tokens)) // _BLOCK_TOKENS)
    return Piece(list(tokens), start, [next(free) for _ in range(count)], True)


def _step(skeleton: Skeleton, cache: KVCache, pieces: Sequence[Piece]) -> None:
    batch = assemble(pieces, cache, invariant=False)
    logits = batch.logits(skeleton.module)
    assert logits.device == DEVICE
    assert logits.shape == (len(pieces), skeleton.num_logits)


def _adapters(skeleton: Skeleton) -> Iterator[AdapterSlot]:
    """Yield slots of two adapters, of two ranks."""
    found = {
        name: target
        for name, target in targets(skeleton.module, set()).items()
        if name.endswith(("q_proj", "v_proj", "o_proj", "c_attn", "query_key_value"))
    }
    if not found:
        return
    pool = PagedPool(found, num_ranks=128, dtype=torch.bfloat16, device=DEVICE)
    for rank in (8, 16):
        layers = {
            name: LowRank(
                down=torch.empty(rank, target.width_in, dtype=torch.bfloat16, device="cpu"),
                up=torch.empty(target.width_out, rank, dtype=torch.bfloat16, device="cpu").t(),
            )
            for name, target in found.items()
        }
        slot = pool.allocate(rank)
        assert slot is not None
        pool.put(slot, AdapterWeights(layers))
        yield slot
    pool.close()
