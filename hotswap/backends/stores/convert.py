"""Conversion: a Hugging Face directory in, the loading-optimised layout out.

The weights are baked in the layout of the module that will run them, after transformers has renamed, merged
and split what the checkpoint holds, so that loading is copying. This is the one part of the stores that
needs torch, which it imports when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hotswap.backends.stores.checkpoint import Checkpoint, read_checkpoint
from hotswap.backends.stores.layout import DTYPE_BYTES, check_file_name
from hotswap.backends.stores.writer import Progress, write_model
from hotswap.errors import BackendMissing, ConfigError
from hotswap.model import Manifest, TensorSpec
from hotswap.request import ModelId

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Progress", "convert"]


def convert(
    source: str | Path,
    root: str | Path,
    *,
    model_id: str,
    dtype: str | None = None,
    max_file_bytes: int = 4 << 30,
    replace_existing: bool = False,
    admit: Callable[[int], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Convert the checkpoint at `source` into the store at `root`, under `model_id`, and return its manifest.

    Blocking, and holds the checkpoint in memory once. `dtype` (for instance `"bfloat16"`) casts the weights,
    `None` keeps the checkpoint's own. `admit` is told the bytes that will be written and may refuse them;
    what it or `progress` raises ends the conversion, which leaves nothing behind.

    Raises:
        ShardMissing: there is no checkpoint at the source, or a part of it is missing.
        ShardCorrupt: a file of it is truncated or unreadable.
        UnsafeFile: it holds pickled weights only.
        UnsupportedModel: transformers knows no causal language model of its kind, or it is quantised.
        TierFull: the disk has no room; what was there before is untouched.
        ConfigError: the model is there already and `replace_existing` is false, or there is no such dtype.
        BackendMissing: torch or transformers are not installed.
    """
    source, root = Path(source), Path(root)
    check_file_name(model_id, root)
    checkpoint = read_checkpoint(source)
    if progress is not None:
        progress(Progress(phase="read", done_bytes=0, total_bytes=0))
    module, tensors, buffer_bytes = _load(source, dtype)
    manifest = _manifest(ModelId(model_id), checkpoint, tensors, buffer_bytes)
    if admit is not None:
        admit(buffer_bytes)
    return write_model(
        root,
        manifest,
        [_pieces(module, tensors, buffer_bytes)],
        side_files=checkpoint.side_files,
        max_file_bytes=max_file_bytes,
        replace_existing=replace_existing,
        progress=progress,
    )


def _load(source: Path, dtype: str | None) -> tuple[nn.Module, tuple[TensorSpec, ...], int]:
    try:
        import torch

        from hotswap.backends.torch import weights
    except ImportError as exc:
        raise BackendMissing(
            "Conversion needs torch and transformers: pip install 'hotswap[torch]'."
        ) from exc
    wanted = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(wanted, torch.dtype):
        raise ConfigError(f"{dtype!r} is no dtype of torch; give one like 'bfloat16' or 'float32'.")
    module = weights.load_checkpoint(source, wanted)
    tensors, buffer_bytes = weights.layout(module)
    return module, tensors, buffer_bytes


def _manifest(
    model: ModelId, checkpoint: Checkpoint, tensors: tuple[TensorSpec, ...], buffer_bytes: int
) -> Manifest:
    item_bytes = DTYPE_BYTES[max(tensors, key=lambda t: t.size_bytes).dtype] if tensors else 0
    return Manifest(
        model=model,
        shards=(),
        buffer_bytes=buffer_bytes,
        tensors=tensors,
        architecture=checkpoint.architecture,
        config=checkpoint.config,
        eos_token_ids=checkpoint.eos_token_ids,
        max_context_tokens=checkpoint.max_context_tokens,
        kv_bytes_per_token=checkpoint.kv_bytes_per_token(item_bytes),
    )


def _pieces(module: nn.Module, tensors: tuple[TensorSpec, ...], buffer_bytes: int) -> Iterator[memoryview]:
    """The flat buffer in order, tensor by tensor and zeros between, never whole in memory a second time."""
    values: dict[str, Tensor] = module.state_dict(keep_vars=True)
    end = 0
    for tensor in sorted(tensors, key=lambda t: (t.offset_bytes, -t.size_bytes)):
        if tensor.offset_bytes < end or not tensor.size_bytes:  # a tied name, or an empty tensor
            continue
        yield memoryview(bytes(tensor.offset_bytes - end))
        yield _bytes_of(values[tensor.name])
        end = tensor.offset_bytes + tensor.size_bytes
    yield memoryview(bytes(buffer_bytes - end))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return cast("memoryview", cast("Any", flat.numpy()).data)
