"""The flat layout of a model's weights: where each tensor of a module lies in one buffer.

The names are those of the *module*, after transformers has renamed, merged and split what the checkpoint
files hold, so that a buffer in this layout needs no arithmetic on its way to the parameters: each is a view.
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

from hotswap.errors import ShardCorrupt, ShardMissing, UnsafeFile, UnsupportedModel
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

# What CUDA allocations keep, and more than the cache line of any CPU.
ALIGNMENT_BYTES = 256


def layout(module: nn.Module) -> tuple[tuple[TensorSpec, ...], int]:
    """Return where each entry of `module.state_dict()` lies in a flat buffer, and the buffer's size in bytes.

    Tensors lie in the order of the state dict, each at a multiple of `ALIGNMENT_BYTES`. Names that are tied
    (one tensor under several names) carry one offset. Works on meta tensors too: only shapes are read.
    """
    return place(
        (name, tensor.dtype, tuple(tensor.shape), id(tensor)) for name, tensor in named_tensors(module)
    )


def place(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], Hashable]], *, rank: int = 0
) -> tuple[tuple[TensorSpec, ...], int]:
    """Return where tensors, given by name, dtype, shape and identity, lie one after the other, and their end.

    Each begins at a multiple of `ALIGNMENT_BYTES`; those of one identity are tied, and lie in one place.
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
    """Copy the tensors of `module` to their places in `flat`, a uint8 buffer laid out by `specs`.

    The padding between tensors is left as it is: start from zeros where the bytes are checksummed.
    """
    where = {spec.name: spec for spec in specs}
    views = Views(flat)
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            views.at(where[name]).copy_(tensor)


def recast(
    specs: Sequence[TensorSpec], source: torch.dtype, target: torch.dtype
) -> tuple[tuple[TensorSpec, ...], int]:
    """Return the layout in which tensors of dtype `source` are of dtype `target` instead, and its size.

    Tensors of other dtypes keep theirs: a model has its reasons.
    """

    def wanted(spec: TensorSpec) -> torch.dtype:
        return target if dtype_of(spec) is source else dtype_of(spec)

    # An empty tensor lies where the next one does, without being tied to it.
    places = ((spec, (spec.offset_bytes, spec.size_bytes)) for spec in specs)
    return place((spec.name, wanted(spec), spec.shape, where) for spec, where in places)


def convert(
    source: Tensor, source_specs: Sequence[TensorSpec], target: Tensor, target_specs: Sequence[TensorSpec]
) -> None:
    """Copy every tensor of the flat buffer `source` to its place and dtype in `target`."""
    here, there = Views(source), Views(target)
    for old, new in zip(source_specs, target_specs, strict=True):
        there.at(new).copy_(here.at(old))


class Views:
    """The tensors of a flat uint8 buffer, as views of it; nothing is copied.

    Models repeat a few layouts over and over: each is looked at once, and a tensor is then one call of torch.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat, self._size_bytes = flat, len(flat)
        self._layouts: dict[tuple[str, tuple[int, ...], tuple[int, ...]], _Layout] = {}
        self._bases: dict[torch.dtype, Tensor] = {}

    def at(self, spec: TensorSpec) -> Tensor:
        """Return the tensor that `spec` describes.

        Raises:
            ShardCorrupt: the spec contradicts itself or points outside the buffer.
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
                f"The stride of tensor {spec.name!r} leads out of it; convert the model again."
            )
        base = self._bases.get(dtype)
        if base is None:
            base = self._flat[: self._size_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
            self._bases[dtype] = base
        layout = base, int(base.storage_offset()), dtype.itemsize, count * dtype.itemsize
        self._layouts[spec.dtype, spec.shape, spec.stride] = layout
        return layout


# The whole buffer in a dtype, where it begins in its storage, the bytes of an item, and those of a tensor.
_Layout: TypeAlias = tuple[Tensor, int, int, int]


def tensor_at(flat: Tensor, spec: TensorSpec) -> Tensor:
    """Return one tensor of a flat buffer; see `Views.at`."""
    return Views(flat).at(spec)


def _last_element(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How far from the first element the last one is; -1 if they do not fit together."""
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

    Only safetensors are read, no code of the checkpoint is run, and nothing is fetched. `dtype=None` keeps
    the checkpoint's own. Blocks: call it in a worker thread.

    Raises:
        ShardMissing: the directory holds no config or no weights.
        UnsafeFile: it holds pickled weights alone.
        ShardCorrupt: a file cannot be read, or tensors that the architecture needs are missing from it.
        UnsupportedModel: it is not a causal language model that transformers knows, or it is quantised.
    """
    directory = Path(path)
    check_files(directory)
    try:
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
            "give a checkpoint whose architecture it knows."
        ) from exc
    except Exception as exc:  # safetensors raises an exception type of its own, transformers several
        raise ShardCorrupt(
            f"The weights in {str(directory)!r} cannot be read ({exc}); fetch them again."
        ) from exc
    module, info = cast("tuple[nn.Module, dict[str, Any]]", loaded)
    check_complete(directory, [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
    return module.eval().requires_grad_(False)


def check_complete(directory: Path, missing: Sequence[str]) -> None:
    """Raise `ShardCorrupt` if the checkpoint lacks tensors that the architecture has: those given."""
    if missing:
        raise ShardCorrupt(
            f"The weights in {str(directory)!r} lack {len(missing)} tensors of the right shape, "
            f"{min(missing)!r} among them; fetch them again."
        )


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the entries of the state dict; tied ones are one object."""
    # keep_vars: without it every name gets a fresh tensor, and ties could not be told by identity.
    state = cast("dict[str, Tensor]", module.state_dict(keep_vars=True))
    return list(state.items())


def check_files(directory: Path) -> None:
    """Refuse a directory without a config or safetensors, and quantised weights, as `load_checkpoint`."""
    config = directory / "config.json"
    if not config.is_file():
        raise ShardMissing(
            f"There is no config.json in {str(directory)!r}; give a Hugging Face model directory."
        )
    try:
        quantised = "quantization_config" in json.loads(config.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ShardCorrupt(f"{str(config)!r} is not JSON ({exc}); fetch it again.") from exc
    if quantised:
        raise UnsupportedModel(
            f"The checkpoint in {str(directory)!r} is quantised, which this engine cannot serve; "
            "give the original."
        )
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickles:
        raise UnsafeFile(
            f"{str(directory / pickles[0])!r} is a pickle, which could run code when read; "
            "convert it to safetensors where you trust it."
        )
    raise ShardMissing(f"There are no weights (*.safetensors) in {str(directory)!r}; fetch them.")


def check_world_size(manifest: Manifest, tp: int) -> None:
    """Raise `UnsupportedModel` if a model is not cut for as many tensor-parallel ranks as an engine has."""
    if manifest.world_size != tp:
        raise UnsupportedModel(
            f"Model {manifest.model!r} is cut for {manifest.world_size} tensor-parallel ranks and this "
            f"engine has {tp}; add it to the store with `hotswap store add --world-size {tp}`, or give the "
            f"engine tp={manifest.world_size}."
        )
