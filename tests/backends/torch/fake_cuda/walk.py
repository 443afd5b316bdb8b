"""Walks the CUDA path of an engine with tensors that have a shape and a device and no values.

In a process of its own: it replaces parts of `torch.cuda`. Writes what it walked as JSON. It fails where a
step reads a value on the host, where tensors of two devices meet, and where a kernel gets an argument on the
host.

    python -m tests.backends.torch.fake_cuda.walk GUARD FAULT KIND...    (FAULT is "" for none)

A kind is an architecture, and "+fp8" or "+gathered": without the kernels of attention.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch._subclasses.fake_tensor as fakes
from torch import Tensor

from hotswap.backends.torch import attention, device_attention, gathered
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.peft import AdapterWeights, LowRank
from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.adapters.targets import targets
from hotswap.backends.torch.batch import Batch
from hotswap.backends.torch.blocks import Copy
from hotswap.backends.torch.forward import Piece, assemble
from hotswap.backends.torch.fp8 import SCALE_SUFFIX, SCHEMES
from hotswap.backends.torch.fp8_linear import QuantizedWeights, linear_weights, prepare
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.weights import place
from hotswap.kernels import calls
from hotswap.kernels import targets as kernel_targets
from hotswap.kernels.fp8_gemm import packed_width
from hotswap.kernels.kv_blocks import launch as kv_launch
from tests.backends.torch.zoo import CONFIGS

DEVICE = torch.device("cuda:0")
BLOCK_TOKENS, NUM_BLOCKS = 32, 512

PROPERTIES = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100", multi_processor_count=132, gcnArchName="", total_memory=80 << 30
)
_launches: Counter[str] = Counter()


def _launch(call: calls.Call) -> None:
    """Stand for the launch of a kernel: its tensors must be on the device."""
    for argument in call.arguments:
        if isinstance(argument, Tensor) and argument.device != DEVICE:
            raise AssertionError(f"{call.kernel} gets an argument on {argument.device}.")
    _launches[call.kernel.partition(":")[2]] += 1


class _Relaunched:
    """Stands for a repeated launch."""

    def __init__(self, call: calls.Call, program: object, num_tensors: int) -> None:
        self._call = call

    def launch(self, *tensors: Tensor) -> None:
        _launch(calls.Call(self._call.kernel, self._call.grid, tensors, {}))


def _stand_in() -> None:
    """Replace what needs a driver: properties, launches, pinned memory and addresses."""
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: PROPERTIES
    cuda.get_device_capability = lambda device=None: (PROPERTIES.major, PROPERTIES.minor)
    cuda.device = lambda device: nullcontext()
    vars(fakes)["CONSTANT_NUMEL_LIMIT"] = 0  # small tensors that are made of numbers have no values either
    call_class: Any = calls.Call
    call_class.launch = _launch
    for module in [module for name, module in sys.modules.items() if name.startswith("hotswap")]:
        if getattr(module, "Relaunch", None) is calls.Relaunch:
            vars(module)["Relaunch"] = _Relaunched
    vars(kernel_targets)["_launches"] = lambda device: True
    tensors: Any = Tensor
    tensors.pin_memory = lambda self, *_: self
    address = tensors.data_ptr
    tensors.data_ptr = lambda self: 256 if isinstance(self, fakes.FakeTensor) else address(self)


def _plant(fault: str) -> None:
    """Plant a fault that a walk must find."""
    if fault == "a value is read on the host":
        batches: Any = Batch
        logits = batches.logits

        def reading(batch: Any, *given: Any) -> Tensor:
            assert int(batch.positions.max()) >= 0
            found: Tensor = logits(batch, *given)
            return found

        batches.logits = reading
    elif fault == "an index stays on the host":
        segments: Any = gathered.Segment
        indices = segments.block_indices
        segments.block_indices = lambda segment, heads: indices(segment, heads).cpu()
    elif fault == "block tables stay on the host":
        numbers: Any = device_attention.Numbers
        rows = numbers.rows

        def on_host(given: Any, sent: Any, *others: Any, **more: Any) -> Any:
            return rows(given, {**sent, "tables": sent["tables"].cpu()}, *others, **more)

        numbers.rows = on_host
    elif fault == "a kernel gets an argument on the host":
        vars(kv_launch)["_sent"] = lambda blocks, device: torch.tensor(blocks, dtype=torch.int32)
    elif fault:
        raise ValueError(fault)


def _walk(kind: str, *, fp8: bool, gathers: bool) -> dict[str, int]:
    """Walk a model from its skeleton to copies of its KV blocks; return the number of launches by kernel."""
    _launches.clear()
    vars(attention)["is_right"] = lambda kind: not gathers  # a trial compares values
    config = CONFIGS[kind]()
    skeleton = Skeleton(json.dumps(config.to_dict()), DEVICE)
    for name, buffer in skeleton.module.named_buffers():
        assert buffer.device == DEVICE, name
    specs, size_bytes, quantized = _placed(skeleton, fp8=fp8)
    skeleton.bind(torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE), specs, quantized)
    prepare(skeleton.fp8_linears, skeleton.dtype)
    cache = KVCache(NUM_BLOCKS, BLOCK_TOKENS, DEVICE, by_kernels=True)
    cache.build_kernels()
    free = iter(range(1, NUM_BLOCKS))
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
    return dict(_launches)


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
    count = -(-(start + len(tokens)) // BLOCK_TOKENS)
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
        if name.endswith(("q_proj", "v_proj", "o_proj", "c_attn"))
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


def main() -> None:
    """Walk the kinds of models that are named, with a fault if one is."""
    _, guard, fault, *kinds = sys.argv
    ctypes.CDLL(guard)
    _stand_in()
    _plant(fault)
    walked: dict[str, dict[str, int]] = {}
    with fakes.FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        for kind in kinds:
            name, _, format = kind.partition("+")
            walked[kind] = _walk(name, fp8=format == "fp8", gathers=format == "gathered")
    sys.stdout.write(json.dumps(walked))


if __name__ == "__main__":
    main()
