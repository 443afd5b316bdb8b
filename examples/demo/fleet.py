"""Three models, two engines: the fleet of the demo, and its checkpoints converted into its store."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from examples.demo.checkpoints import Checkpoint
from hotswap import Fleet, Model, SwapRecord
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap
from hotswap.testing import SpanRecorder

# The first engine fits one model beside its KV blocks, so it must unload before it loads. The second fits
# two, and can load the next model while it serves the current one.
KV_BYTES: Final = "6 MiB"
MEMORY: Final = {"e0": "10 MiB", "e1": "16 MiB"}
# Two of the three models fit into host memory; the third is read from disk.
HOST_BYTES: Final = "6 MiB"


def make_engines() -> list[TorchEngine]:
    """Return two engines on one device."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    skeletons = SkeletonCache()
    return [
        TorchEngine(id, device=device, kv_bytes=KV_BYTES, memory_bytes=memory, threads=1, skeletons=skeletons)
        for id, memory in MEMORY.items()
    ]


def make_fleet(
    engines: Sequence[TorchEngine],
    checkpoints: Sequence[Checkpoint],
    store: Path,
    *,
    spans: SpanRecorder,
    on_swap: Callable[[SwapRecord], None],
) -> Fleet:
    """Return the fleet; only its sizes and intervals are special to the demo."""
    return Fleet(
        engines=engines,
        store=TieredStore(PinnedStore(HOST_BYTES), NvmeStore(store)),
        models=[Model(checkpoint.name, checkpoint.path) for checkpoint in checkpoints],
        router=LeastLoadedRouter(),
        scheduler=WeightedLoadSwap(t1=1, t2=8, b=2.0, patience_s=1.0, sigmas=0),
        interval_s=0.25,
        on_swap=on_swap,
        tracer_provider=spans.tracer_provider,
    )


def fill_store(checkpoints: Sequence[Checkpoint], store: Path, *, console: Console) -> None:
    """Convert the checkpoints that the store lacks or has an older version of, with a progress bar."""
    transformers.logging.disable_progress_bar()  # ours is enough
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as progress:
        for checkpoint in checkpoints:
            _fill(checkpoint, store, progress)


def _fill(checkpoint: Checkpoint, store: Path, progress: Progress) -> None:
    size_bytes = (checkpoint.path / "model.safetensors").stat().st_size
    task = progress.add_task(checkpoint.name, total=size_bytes, state="converting")
    state = "in the store already"
    if not _is_stored(checkpoint, store):
        convert(
            checkpoint.path,
            store,
            model_id=checkpoint.name,
            replace_existing=True,
            progress=lambda now: progress.update(
                task, completed=now.done_bytes, total=now.total_bytes or size_bytes
            ),
        )
        state = "converted"
    progress.update(task, completed=progress.tasks[task].total, state=state)


def _is_stored(checkpoint: Checkpoint, store: Path) -> bool:
    index, weights = store / checkpoint.name / "index.json", checkpoint.path / "model.safetensors"
    return index.exists() and index.stat().st_mtime >= weights.stat().st_mtime
