"""The flat layout of a model's weights: the offset of each tensor of a module in one buffer.

Names and shapes are those of the *module*, after transformers has renamed, merged and split the checkpoint's
tensors. So no conversion is needed at load: each parameter is a view of the buffer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Sequence
from operator import mul
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hotswap.backends.quantized import check_left_over, check_plain
from hotswap.backends.stores.checkpoint import check_no_pickles
from hotswap.backends.torch.default_dtype import own_default_dtype
from hotswap.errors import ShardCorrupt, ShardMissing, UnsupportedModel
from hotswap.model import Manifest, TensorSpec

__all__ = [
    "ALIGNMENT_BYTES",
    "Views",
    "check_complete",
    "check_files",
    "check_world_size",
    "convert",
    "dtype_of",
    "fill",
    "layout",
    "load_checkpoint",
    "named_tensors",
    "place",
    "recast",
    "tensor_at",
]

# The alignment of CUDA allocations; more than the cache line of any CPU.
ALIGNMENT_BYTES = 256


def layout(module: nn.Module) -> tuple[tuple[TensorSpec, ...], int]:
    """Return the layout of `module.state_dict()` in a flat buffer, and the buffer's size in bytes.

    Tensors are in the order of the state dict, each at a multiple of `ALIGNMENT_BYTES`. Tied names (one
    tensor under several names) have one offset. Works on meta tensors too: only shapes are read.
    """
    return place(
        (name, tensor.dtype, tuple(tensor.shape), id(tensor)) for name, tensor in named_tensors(module)
    )


def place(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], Hashable]], *, rank: int = 0
) -> tuple[tuple[TensorSpec, ...], int]:
    """Return a layout of consecutive tensors, given by name, dtype, shape and identity, and its size.

    Each begins at a multiple of `ALIGNMENT_BYTES`; tensors with one identity are tied and have one offset.
    """
    specs: list[TensorSpec] = []
    placed: dict[Hashable, int] = {}
    end = 0
    for name, dtype, shape, identity in tensors:
        size = math.prod(shape) * dtype.itemsize
        if identity not in placed:
            placed[identity] = end
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        specs.append(
            TensorSpec(
                name=name,
                dtype=str(dtype).removeprefix("torch."),
                shape=shape,
                offset_bytes=placed[identity],
                size_bytes=size,
                rank=rank,
            )
        )
    return tuple(specs), end


def fill(flat: Tensor, module: nn.Module, specs: tuple[TensorSpec, ...]) -> None:
    """Copy the tensors of `module` into `flat`, a uint8 buffer with the layout `specs`.

    The padding between tensors is not written: start from zeros if the bytes are checksummed.
    """
    where = {spec.name: spec for spec in specs}
    views = Views(flat)
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            views.at(where[name]).copy_(tensor)


def recast(
    specs: Sequence[TensorSpec], source: torch.dtype, target: torch.dtype
) -> tuple[tuple[TensorSpec, ...], int]:
    """Return the layout in which tensors of dtype `source` have dtype `target` instead, and its size.

    Tensors of other dtypes keep theirs, such as norms that a model keeps in fp32.
    """

    def wanted(spec: TensorSpec) -> torch.dtype:
        return target if dtype_of(spec) is source else dtype_of(spec)

    # An empty tensor has the offset of the next one without being tied to it.
    identified = ((spec, (spec.offset_bytes, spec.size_bytes)) for spec in specs)
    return place((spec.name, wanted(spec), spec.shape, identity) for spec, identity in identified)


def convert(
    source: Tensor, source_specs: Sequence[TensorSpec], target: Tensor, target_specs: Sequence[TensorSpec]
) -> None:
    """Copy every tensor of the flat buffer `source` into `target`, converted to the dtype there."""
    here, there = Views(source), Views(target)
    for old, new in zip(source_specs, target_specs, strict=True):
        there.at(new).copy_(here.at(old))


class Views:
    """The tensors of a flat uint8 buffer, as views of it; nothing is copied.

    Models repeat a few shapes: each is checked once, and a tensor is then one call of torch.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat, self._size_bytes = flat, len(flat)
        self._layouts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], _Layout] = {}
        self._bases: dict[torch.dtype, Tensor] = {}

    def at(self, spec: TensorSpec) -> Tensor:
        """Return the tensor that `spec` describes.

        Raises:
            ShardCorrupt: the spec is inconsistent or points outside the buffer.
        """
        shape, stride, start = spec.shape, spec.stride, spec.offset_bytes
        base, first, item_bytes, size_bytes = self._layouts.get((spec.dtype, shape, stride)) or self._layout(
            spec
        )
        end = start + size_bytes
        if spec.size_bytes != size_bytes or not 0 <= start <= end <= self._size_bytes or start % item_bytes:
            raise ShardCorrupt(
                f"Tensor {spec.name!r} ({spec.dtype} {list(shape)}) claims bytes {start} to "
                f"{start + spec.size_bytes} of a buffer of {self._size_bytes}; convert the model again."
            )
        return base.as_strided(shape, stride, first + start // item_bytes)

    def _layout(self, spec: TensorSpec) -> _Layout:
        dtype, count = dtype_of(spec), math.prod(spec.shape)
        if count and not 0 <= _last_element(spec.shape, spec.stride) < count:
            raise ShardCorrupt(
                f"The stride of tensor {spec.name!r} leads outside it; convert the model again."
            )
        base = self._bases.get(dtype)
        if base is None:
            base = self._flat[: self._size_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
            self._bases[dtype] = base
        layout = base, int(base.storage_offset()), dtype.itemsize, count * dtype.itemsize
        self._layouts[spec.dtype, spec.shape, spec.stride] = layout
        return layout


# The buffer viewed in a dtype, its offset in its storage, the bytes of an item, and the bytes of the tensor.
_Layout: TypeAlias = tuple[Tensor, int, int, int]


def tensor_at(flat: Tensor, spec: TensorSpec) -> Tensor:
    """Return one tensor of a flat buffer; see `Views.at`."""
    return Views(flat).at(spec)


def _last_element(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the distance of the last element from the first; -1 if shape and stride do not match."""
    if len(shape) != len(stride):
        return -1
    steps: Iterable[int] = map(mul, shape, stride)
    return sum(steps) - sum(stride)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the torch dtype of a spec.

    Raises:
        ShardCorrupt: there is no such dtype.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ShardCorrupt(
            f"Tensor {spec.name!r} has the unknown dtype {spec.dtype!r}; convert the model again."
        )
    return dtype


def load_checkpoint(path: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the causal language model of a local Hugging Face directory, in evaluation mode on the CPU.

    Only safetensors are read, no code of the checkpoint is run, and nothing is downloaded. Blocking: call it
    in a worker thread.

    Args:
        path: The directory.
        dtype: The dtype of the weights; `None` keeps the checkpoint's own.

    Raises:
        ShardMissing: the directory has no config or no weights.
        UnsafeFile: it has pickled weights only.
        ShardCorrupt: a file cannot be read, or tensors of the architecture are missing.
        UnsupportedModel: transformers has no causal language model for it, or it is quantized.
    """
    directory = Path(path)
    check_files(directory)
    try:
        with own_default_dtype():
            loaded = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportUnknownMemberType] (untyped there)
                directory,
                dtype="auto" if dtype is None else dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (ValueError, KeyError, ImportError) as exc:
        raise UnsupportedModel(
            f"transformers has no causal language model for {str(directory)!r} ({exc}); "
            "give a checkpoint of an architecture that transformers supports."
        ) from exc
    except Exception as exc:  # safetensors and transformers raise several types
        raise ShardCorrupt(
            f"The weights in {str(directory)!r} cannot be read ({exc}); fetch them again."
        ) from exc
    module, info = cast("tuple[nn.Module, dict[str, Any]]", loaded)
    check_left_over(directory, map(str, info["unexpected_keys"]))
    check_complete(directory, [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
    return module.eval().requires_grad_(False)


def check_complete(directory: Path, missing: Sequence[str]) -> None:
    """Raise `ShardCorrupt` if `missing`, the tensors that a checkpoint lacks, is not empty."""
    if missing:
        raise ShardCorrupt(
            f"The weights in {str(directory)!r} lack {len(missing)} tensors of the right shape, "
            f"{min(missing)!r} among them; fetch them again."
        )


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the entries of the state dict; tied tensors are one object."""
    # keep_vars: without it every name gets a new tensor object, and ties cannot be seen.
    state = cast("dict[str, Tensor]", module.state_dict(keep_vars=True))
    return list(state.items())


def check_files(directory: Path) -> None:
    """Raise the errors of `load_checkpoint` for missing or unsafe files and quantized weights."""
    config = directory / "config.json"
    if not config.is_file():
        raise ShardMissing(
            f"There is no config.json in {str(directory)!r}; give a Hugging Face model directory."
        )
    try:
        parsed: object = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ShardCorrupt(f"{str(config)!r} is not JSON ({exc}); fetch it again.") from exc
    check_plain(directory, cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {})
    if any(directory.glob("*.safetensors")):
        return
    check_no_pickles(directory)
    raise ShardMissing(f"There are no weights (*.safetensors) in {str(directory)!r}; fetch them.")


def check_world_size(manifest: Manifest, tp: int) -> None:
    """Raise `UnsupportedModel` unless a model is sharded for `tp` tensor-parallel ranks."""
    if manifest.world_size != tp:
        raise UnsupportedModel(
            f"Model {manifest.model!r} is sharded for {manifest.world_size} tensor-parallel ranks and this "
            f"engine has {tp}; add it to the store with `hotswap store add --world-size {tp}`, or give the "
            f"engine tp={manifest.world_size}."
        )
