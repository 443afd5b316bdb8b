"""Converting a Hugging Face directory into the layout that is fast to load.

The weights are stored as the module that will run them has them, after transformers has renamed, merged and
split the checkpoint's tensors, so that loading is copying. They are cut for the tensor-parallel ranks asked
for, and pass through memory in pieces. This is the one part of the stores that needs torch, imported when it
is called.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hotswap.backends.stores.checkpoint import Checkpoint, read_checkpoint
from hotswap.backends.stores.fingerprint import ConversionOptions, Fingerprint
from hotswap.backends.stores.index import VERSION
from hotswap.backends.stores.layout import SOURCE_NAME, model_name
from hotswap.backends.stores.writer import Progress, WriteOptions, writing
from hotswap.errors import BackendMissing, ConfigError, StoreError
from hotswap.model import Manifest
from hotswap.request import ModelId

if TYPE_CHECKING:
    from hotswap.backends.stores.copying import Copy
    from hotswap.backends.stores.streaming import Blueprint
    from hotswap.backends.torch.quantize import Quantizer

__all__ = ["Progress", "convert"]


def convert(
    source: str | Path,
    root: str | Path,
    *,
    model_id: str,
    dtype: str | None = None,
    world_size: int = 1,
    quantize: str | None = None,
    max_file_bytes: int = 4 << 30,
    memory_bytes: int = 2 << 30,
    replace_existing: bool = False,
    admit: Callable[[int], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Convert the checkpoint at `source` into the store at `root`, under `model_id`, and return its manifest.

    Blocking. `dtype` (for instance `"bfloat16"`) casts the weights, `None` keeps the checkpoint's own.
    `world_size` cuts them for so many tensor-parallel ranks, by the model's own plan. `quantize` names a
    scheme, `"fp8-e4m3"` or `"fp8-e4m3-channel"`, in which linear layers and experts are stored; the others
    stay as they are, see `hotswap.backends.torch.quantize`. `memory_bytes` limits the memory used beside
    mapped files; pieces are of some MiB, and few architectures need more.

    `admit` is called with the bytes that will be written, and may refuse them; an error of it or of
    `progress` ends the conversion, which leaves nothing behind. If the process is killed, the same call
    resumes after the last finished data file.

    Raises:
        ShardMissing: there is no checkpoint at the source, or a part of it is missing.
        ShardCorrupt: a file of it is truncated or unreadable, or has weights that are not finite or cannot be
            quantized.
        UnsafeFile: it holds pickled weights only.
        UnsupportedModel: transformers knows no causal language model of its kind, it is quantized, or it
            cannot be cut for `world_size` ranks.
        TierFull: the disk has no room; other models are untouched.
        ConfigError: the model exists and `replace_existing` is false, there is no such dtype or
            scheme, or `memory_bytes` are too few for a model that cannot be streamed.
        BackendMissing: torch or transformers are not installed.
        StoreError: the checkpoint changed meanwhile, or writing failed.
    """
    source, root = Path(source), Path(root)
    model_name(ModelId(model_id), root)
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}; give the number of ranks, 1 or more.")
    checkpoint = read_checkpoint(source)
    options = ConversionOptions(dtype=dtype, world_size=world_size, quantize=quantize)

    def tell_reading() -> None:
        if progress is not None:
            progress(Progress(phase="read", done_bytes=0, total_bytes=0))

    tell_reading()
    fingerprint = Fingerprint.of(source, options, progress=tell_reading)
    with _open(source, dtype, memory_bytes) as blueprint:
        copy, quantizer = _plan(blueprint, world_size, quantize, where=str(source))
        manifest = _manifest(ModelId(model_id), checkpoint, copy, quantizer)
        if admit is not None:
            admit(manifest.buffer_bytes * world_size)
        writing_options = WriteOptions(
            max_file_bytes=max_file_bytes,
            replace_existing=replace_existing,
            progress=progress,
            key=_key(source, manifest, max_file_bytes, quantizer),
        )
        side_files = {**checkpoint.side_files, SOURCE_NAME: fingerprint.dump()}
        with writing(root, manifest, side_files=side_files, options=writing_options) as writer:
            copy.run(writer.ranks)
            if change := fingerprint.difference(source):
                raise StoreError(
                    f"The checkpoint at {str(source)!r} changed while it was converted: {change}. "
                    "Convert it again when it is complete."
                )
    return writer.manifest


def _open(source: Path, dtype: str | None, memory_bytes: int) -> AbstractContextManager[Blueprint]:
    try:
        import torch

        from hotswap.backends.stores import streaming
    except ImportError as exc:
        raise BackendMissing(
            "Conversion needs torch and transformers: pip install 'hotswap[torch]'."
        ) from exc
    wanted = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(wanted, torch.dtype):
        raise ConfigError(f"{dtype!r} is no dtype of torch; give one like 'bfloat16' or 'float32'.")
    return streaming.open_checkpoint(source, wanted, memory_bytes=memory_bytes)


def _plan(
    blueprint: Blueprint, world_size: int, quantize: str | None, *, where: str
) -> tuple[Copy, Quantizer | None]:
    from hotswap.backends.stores.copying import Copy
    from hotswap.backends.torch.quantize import Quantizer

    quantizer = None if quantize is None else Quantizer(quantize, blueprint.module)
    return Copy(blueprint, world_size, quantizer, where=where), quantizer


def _manifest(model: ModelId, checkpoint: Checkpoint, copy: Copy, quantizer: Quantizer | None) -> Manifest:
    # A model without quantized tensors is not a quantized model.
    quantized = quantizer if quantizer is not None and quantizer.names else None
    return Manifest(
        model=model,
        shards=(),
        buffer_bytes=copy.buffer_bytes,
        tensors=copy.tensors,
        world_size=copy.world_size,
        architecture=checkpoint.architecture,
        config=checkpoint.config,
        eos_token_ids=checkpoint.eos_token_ids,
        max_context_tokens=checkpoint.max_context_tokens,
        kv_bytes_per_token=checkpoint.kv_bytes_per_token(copy.item_bytes),
        quantization=quantized.scheme.name if quantized else "",
        unquantized_dtype=str(quantized.dtype).removeprefix("torch.") if quantized else "",
    )


def _key(source: Path, manifest: Manifest, max_file_bytes: int, quantizer: Quantizer | None) -> str:
    """A digest of everything that the output depends on.

    The weight files count by size and time: reading them would take as long as converting.
    """
    stats = [(path.name, path.stat()) for path in sorted(source.glob("*.safetensors"))]
    facts = {
        "version": VERSION,
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "manifest": asdict(manifest),
        "max_file_bytes": max_file_bytes,
        "transform": None if quantizer is None else quantizer.key,
        "libraries": _versions(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _versions() -> list[str]:
    import torch
    import transformers

    return [torch.__version__, transformers.__version__]
