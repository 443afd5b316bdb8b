"""The phases of swaps between two models that are resident on the host tier, on a CPU engine.

Two series: growing bytes in the same number of tensors, and growing numbers of tensors in the same bytes. The
engine's memory holds one model, so that nothing can be preloaded: the load is in the phase of that name.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Summary
from benchmarks.table import show

__all__ = ["Spec", "measure", "show_report", "write_pair"]

_LAYERS_OF_BYTES = 4
_LAYERS = (2, 8, 32, 128)
_VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class Spec:
    """A Llama of about so many bytes in so many layers: the width of its feed-forward part gives the size."""

    layers: int
    size_bytes: int

    @property
    def hidden_size(self) -> int:
        return 256

    @property
    def intermediate_size(self) -> int:
        attention = 3 * self.hidden_size**2  # q and o whole, k and v a half each
        values = self.size_bytes // (2 * self.layers) - attention
        return max(16, values // (3 * self.hidden_size) // 16 * 16)


def measure(directory: Path, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return, for every model, the seconds in each phase of its swaps; a process of its own for each."""
    if not sizes:
        return {"skipped": "it was not asked for"}
    by_bytes = [_measure(directory, Spec(_LAYERS_OF_BYTES, size), repeats) for size in sizes]
    by_tensors = [_measure(directory, Spec(layers, min(sizes)), repeats) for layers in _LAYERS]
    return {"by_bytes": by_bytes, "by_tensors": by_tensors}


def show_report(report: dict[str, Any]) -> None:
    """Print the table of `measure`."""
    if "skipped" in report:
        return print(f"not measured: swaps of resident models: {report['skipped']}")
    rows = []
    for entry in (*report["by_bytes"], *report["by_tensors"]):
        if "error" in entry:
            rows.append(
                [f"{entry['size_bytes'] / 1e9:g} GB, {entry['layers']} layers", entry["error"], "", ""]
            )
        else:
            name = f"{entry['bytes'] / 1e9:.2f} GB in {entry['num_tensors']} tensors"
            load, preload = Summary.of(entry["load_s"]), statistics.median(entry["preload_s"])
            downtime = Summary.of(entry["downtime_s"])
            rows.append([name, load.format(4), f"{preload:.4f}", downtime.format(4)])
    return show(
        "swap of a resident model on a CPU engine", ("", "load s [min-max]", "preload s", "downtime s"), rows
    )


def _measure(directory: Path, spec: Spec, repeats: int) -> dict[str, Any]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    request = json.dumps({**asdict(spec), "directory": str(directory), "repeats": repeats})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.resident", request],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if done.returncode:
        return {**asdict(spec), "error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**asdict(spec), **answer}


# --------------------------------------------------------------------------------------- the child's process


def write_pair(spec: Spec, directory: Path) -> Path:
    """Write a store with two models of the same bytes, the second by links to the first."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from hotswap.backends.stores.convert import convert

    config: Any = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        module: Any = transformers.LlamaForCausalLM(config)
    checkpoint, root = directory / "checkpoint", directory / "store"
    config.save_pretrained(checkpoint)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    del tensors
    convert(checkpoint, root, model_id="a")
    shutil.copytree(root / "a", root / "b", copy_function=os.link)
    return root


async def _swap(root: Path, repeats: int) -> dict[str, Any]:
    """Swap back and forth; the first swap to each model builds its modules, and is not counted."""
    from benchmarks.by_hand import ByHand
    from hotswap import Fleet, Model, ModelId
    from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
    from hotswap.backends.torch import TorchEngine
    from hotswap.policies import LeastLoadedRouter

    disk = NvmeStore(root)
    manifest = await disk.manifest(ModelId("a"))
    store = TieredStore(PinnedStore(3 * manifest.buffer_bytes), disk)
    engine = TorchEngine("e0", kv_tokens=64, memory_bytes=manifest.buffer_bytes * 5 // 4 + (1 << 20))
    fleet = Fleet(
        engines=[engine],
        store=store,
        models=[Model("a"), Model("b")],
        router=LeastLoadedRouter(),
        scheduler=ByHand(),
    )
    async with fleet:
        for model in ("a", "b"):
            await store.prefetch(ModelId(model))
            await fleet.swap("e0", to=model)
        records = [await fleet.swap("e0", to="ab"[turn % 2]) for turn in range(repeats)]
    return {
        "bytes": manifest.weight_bytes,
        "num_tensors": len(manifest.tensors),
        "tier": records[-1].tier,
        "loaded_bytes": records[-1].loaded_bytes,
        **{f"{phase}_s": [r.phase_s(phase) for r in records] for phase in ("preload", "unload", "load")},
        "downtime_s": [record.downtime_s for record in records],
        "swap_s": [record.seconds for record in records],
    }


def _main(request: dict[str, Any]) -> None:
    import anyio

    root = write_pair(Spec(request["layers"], request["size_bytes"]), Path(request["directory"]))
    print(json.dumps(anyio.run(_swap, root, request["repeats"])))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
