"""Importing a checkpoint into a store, in either layout.

In the layout `"checkpoint"` it is copied as it is (`sources.as_is`), without any tensor library. In the
layout `"modules"` the weights are stored as the module that will run them has them, after transformers has
renamed, merged and split the checkpoint's tensors, so that loading is copying. They are cut for the
tensor-parallel ranks asked for, and pass through memory in pieces. This is the one part of the stores that
needs torch, imported when it is called.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from hotswap.backends.fields import LARGEST
from hotswap.backends.hub import resolve
from hotswap.backends.stores.as_is import plan_as_is
from hotswap.backends.stores.checkpoint import (
    FETCH_AGAIN,
    Checkpoint,
    read_checkpoint,
    reading_source,
    weight_files,
)
from hotswap.backends.stores.fingerprint import ConversionOptions, Fingerprint
from hotswap.backends.stores.gguf import gguf_files
from hotswap.backends.stores.index import VERSION
from hotswap.backends.stores.layout import ALIGNMENT_BYTES, SOURCE_NAME, model_name
from hotswap.backends.stores.locks import LockWait
from hotswap.backends.stores.writer import Progress, WriteOptions, writing
from hotswap.checks import to_path
from hotswap.errors import BackendMissing, ConfigError, ShardCorrupt, StoreError
from hotswap.model import Layout, Manifest
from hotswap.request import ModelId

if TYPE_CHECKING:
    from hotswap.backends.stores.copying import Copy
    from hotswap.backends.stores.streaming import Blueprint
    from hotswap.backends.torch.quantize import Quantizer

__all__ = ["Progress", "convert", "layout_of"]


def convert(
    source: str | Path,
    root: str | Path,
    *,
    model_id: str,
    layout: Layout | None = None,
    dtype: str | None = None,
    world_size: int = 1,
    quantize: str | None = None,
    max_file_bytes: int = 4 << 30,
    memory_bytes: int = 2 << 30,
    replace_existing: bool = False,
    admit: Callable[[int], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    wait: LockWait | None = None,
) -> Manifest:
    """Import the checkpoint at `source` into the store at `root`, under `model_id`, and return its manifest.

    Blocking. `source` may be a name on the Hugging Face Hub (see `backends.hub`). `layout` is as in `Model`;
    `None` takes `"checkpoint"` for GGUF files and `"modules"` for others. The options of `"modules"`: `dtype`
    (for instance `"bfloat16"`) casts the weights, `None` keeps the checkpoint's own. `world_size` cuts them
    for so many tensor-parallel ranks, by the model's own plan.
    `quantize` names a scheme, `"fp8-e4m3"` or `"fp8-e4m3-channel"`, in which linear layers and experts are
    stored; the others stay as they are, see `hotswap.backends.torch.quantize`. `memory_bytes` limits the
    memory used beside mapped files; pieces are of some MiB, and few architectures need more.

    `admit` is called with the bytes that will be written, and may refuse them; an error of it or of
    `progress` ends the conversion, which leaves nothing behind. If the process is killed, the same call
    resumes after the last finished data file.

    A model in use is not replaced: before the first byte and before the last step, the conversion waits for
    the reads and pins of all processes, as long as `wait` allows (30 s by default).

    Raises:
        ShardMissing: there is no checkpoint at the source, or a part of it is missing.
        ShardCorrupt: a file of it is truncated or unreadable, or has weights that are not finite or cannot be
            quantized.
        UnsafeFile: it holds pickled weights only; or the store has something else than a model of that id.
        UnsupportedModel: transformers knows no causal language model of its kind, it is quantized, or it
            cannot be cut for `world_size` ranks; the message says what to do instead.
        TierFull: the disk has no room; other models are untouched.
        ConfigError: the model exists and `replace_existing` is false, there is no such layout, dtype or
            scheme, the layout has no such option, `max_file_bytes` are under 4096, `root` is a file, or
            `memory_bytes` are too few for a model that cannot be streamed.
        BackendMissing: torch or transformers are not installed.
        StoreBusy: the model to be replaced is in use; finished data files are kept for the next call.
        StoreError: the checkpoint cannot be read, or changed meanwhile, or writing failed.
    """
    root = to_path(ConfigError, "root", root)
    model_name(ModelId(model_id), root)
    source = resolve(source)
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}; give the number of ranks, 1 or more.")
    if max_file_bytes < ALIGNMENT_BYTES:
        raise ConfigError(f"max_file_bytes is {max_file_bytes}; give {ALIGNMENT_BYTES} or more.")
    layout = layout or layout_of(source)
    if layout not in get_args(Layout):
        raise ConfigError(f"There is no layout {layout!r}; give one of {', '.join(get_args(Layout))}.")
    job = _Job(
        model=ModelId(model_id),
        source=source,
        root=root,
        options=ConversionOptions(dtype=dtype, world_size=world_size, quantize=quantize, layout=layout),
        max_file_bytes=max_file_bytes,
        replace_existing=replace_existing,
        admit=admit,
        progress=progress,
        wait=wait or LockWait(),
    )
    job.tell_reading()
    return _copy_as_is(job) if layout == "checkpoint" else _convert_modules(job, memory_bytes)


def layout_of(source: Path) -> Layout:
    """Return the layout that a source is imported in where none is asked for. Blocking."""
    with reading_source(source):
        return "checkpoint" if gguf_files(source) else "modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The arguments of `convert`."""

    model: ModelId
    source: Path
    root: Path
    options: ConversionOptions
    max_file_bytes: int
    replace_existing: bool
    admit: Callable[[int], None] | None
    progress: Callable[[Progress], None] | None
    wait: LockWait

    def tell_reading(self) -> None:
        if self.progress is not None:
            self.progress(Progress(phase="read", done_bytes=0, total_bytes=0))

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.source, self.options, progress=self.tell_reading)

    def admit_bytes(self, manifest: Manifest) -> None:
        """Look at the facts of a model, which its index must be able to say, and ask for its bytes."""
        numbers = (manifest.max_context_tokens, manifest.kv_bytes_per_token, *manifest.eos_token_ids)
        if (largest := max(numbers)) >= LARGEST:
            raise ShardCorrupt(
                f"The config of {str(self.source)!r} leads to the number {largest}, of its context, its keys "
                f"and values or its end tokens, which no model has. {FETCH_AGAIN}"
            )
        if self.admit is not None:
            self.admit(manifest.buffer_bytes * manifest.world_size)

    def write_options(self, key: str, files: tuple[tuple[str, int], ...] = ()) -> WriteOptions:
        return WriteOptions(
            max_file_bytes=self.max_file_bytes,
            replace_existing=self.replace_existing,
            progress=self.progress,
            key=key,
            files=files,
            wait=self.wait,
        )

    def check_unchanged(self, fingerprint: Fingerprint) -> None:
        if change := fingerprint.difference(self.source):
            raise StoreError(
                f"The checkpoint at {str(self.source)!r} changed while it was imported: {change}. "
                "Import it again when it is complete."
            )


def _copy_as_is(job: _Job) -> Manifest:
    options = job.options
    if options.dtype or options.quantize or options.world_size != 1:
        raise ConfigError(
            "The layout 'checkpoint' keeps weights as they are: it takes no dtype, quantize or world_size. "
            "Leave them out, or take the layout 'modules'."
        )
    with reading_source(job.source):
        plan = plan_as_is(job.model, job.source)
    fingerprint = job.fingerprint()
    job.admit_bytes(plan.manifest)
    key = _key(job, plan.manifest, None)
    side_files = {**plan.side_files, SOURCE_NAME: fingerprint.dump()}
    written = job.write_options(key, plan.files)
    with writing(job.root, plan.manifest, side_files=side_files, options=written) as writer:
        plan.copy(writer.ranks[0])
        job.check_unchanged(fingerprint)
    return writer.manifest


def _convert_modules(job: _Job, memory_bytes: int) -> Manifest:
    with reading_source(job.source):
        checkpoint = read_checkpoint(job.source)
    fingerprint = job.fingerprint()
    with _open(job.source, job.options.dtype, memory_bytes) as blueprint:
        copy, quantizer = _plan(
            blueprint, job.options.world_size, job.options.quantize, where=str(job.source)
        )
        manifest = _manifest(job.model, checkpoint, copy, quantizer)
        job.admit_bytes(manifest)
        key = _key(job, manifest, None if quantizer is None else quantizer.key, _versions())
        side_files = {**checkpoint.side_files, SOURCE_NAME: fingerprint.dump()}
        with writing(job.root, manifest, side_files=side_files, options=job.write_options(key)) as writer:
            copy.run(writer.ranks)
            job.check_unchanged(fingerprint)
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


def _key(job: _Job, manifest: Manifest, transform: str | None, libraries: Sequence[str] = ()) -> str:
    """A digest of everything that the output depends on.

    The weight files count by size and time: reading them would take as long as converting.
    """
    stats = [(path.name, path.stat()) for path in weight_files(job.source)]
    facts = {
        "version": VERSION,
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "manifest": asdict(manifest),
        "max_file_bytes": job.max_file_bytes,
        "transform": transform,
        "libraries": list(libraries),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _versions() -> list[str]:
    import torch
    import transformers

    return [torch.__version__, transformers.__version__]
