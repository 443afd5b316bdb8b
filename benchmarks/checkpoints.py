"""Checkpoints of random bytes in a few shapes, the same tensors written in every contestant's format."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.timed_run import SAFETENSORS, Source, digest_of, raw_bytes
from hotswap import ModelId
from hotswap.abc import Manifest, TensorSpec
from hotswap.backends.stores.convert import convert
from hotswap.backends.stores.writer import write_model

__all__ = ["SHAPES", "Shape", "write"]

_ALIGNMENT_BYTES = 256  # of a tensor in the flat buffer
_ITEM_BYTES = 2  # bfloat16
_FINITE = 0xBFFF_BFFF_BFFF_BFFF - (1 << 64)  # without the highest bit of four exponents
_HIDDEN = (2048, 1024, 512, 256, 128, 64)
_SHARE_OF_LAYERS = 0.6

Shape = str
SHAPES: dict[Shape, str] = {
    "one": "one big tensor",
    "llama": "the tensors of a Llama",
    "many": "ten thousand small tensors",
    "as_is": "a Llama's checkpoint as it is",
}
_MANY = 10_000


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        size = _ITEM_BYTES
        for length in self.shape:
            size *= length
        return size


def write(directory: Path, shape: Shape, size_bytes: int, *, seed: int, peers_python: Path | None) -> Source:
    """Write a checkpoint of `size_bytes` (rounded down to 128) in every format, and return where it lies.

    `peers_python` writes the formats that need a library of the peers' environment, `None` leaves them out.
    """
    directory.mkdir(parents=True)
    entries = _entries(shape, size_bytes // 128 * 128 // _ITEM_BYTES)
    tensors = _random(entries, seed)
    save_file(tensors, directory / SAFETENSORS)
    whole = _import(directory) if shape == "as_is" else _write_store(directory, entries, tensors)
    source = Source(
        directory=directory,
        payload_bytes=sum(entry.size_bytes for entry in entries),
        buffer_bytes=whole.buffer_bytes,
        digest=digest_of(tensors),
    )
    places = [(s.name, s.dtype, s.shape, s.offset_bytes, s.size_bytes) for s in whole.tensors]
    (directory / "places.json").write_text(json.dumps(places))
    torch.save(tensors, source.pickle)
    if peers_python is not None:
        _write_tensorizer(source, peers_python)
    _sync(directory)
    return source


def _write_store(directory: Path, entries: list[_Entry], tensors: dict[str, Tensor]) -> Manifest:
    specs, buffer_bytes = _specs(entries)
    manifest = Manifest(
        model=ModelId(directory.name), shards=(), buffer_bytes=buffer_bytes, tensors=specs, config="{}"
    )
    return write_model(directory.parent / "store", manifest, [_pieces(specs, tensors, buffer_bytes)])


def _import(directory: Path) -> Manifest:
    """Import the safetensors file, in the layout that keeps a checkpoint as it is."""
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return convert(directory, directory.parent / "store", model_id=directory.name, layout="checkpoint")


def _entries(shape: Shape, num_values: int) -> list[_Entry]:
    if shape == "one":
        return [_Entry("weight", (num_values // 64, 64))]
    if shape == "many":
        number = min(_MANY, num_values // 64)
        rest = num_values - number * (num_values // number)
        lengths = [num_values // number] * number
        lengths[-1] += rest
        return [_Entry(f"block.{i}.weight", (length,)) for i, length in enumerate(lengths)]
    return _llama(num_values)


def _llama(num_values: int) -> list[_Entry]:
    """Layers of a Llama with grouped-query attention; embedding and head share what the layers leave."""
    layer: list[_Entry] = []
    for hidden in _HIDDEN:
        layer = list(_layer(hidden))
        layer_values = sum(entry.size_bytes for entry in layer) // _ITEM_BYTES
        num_layers = int(num_values * _SHARE_OF_LAYERS) // layer_values
        if num_layers >= 2:
            break
    else:
        raise ValueError(
            f"{num_values * _ITEM_BYTES} bytes are too few for a Llama; give a megabyte or more."
        )
    entries = [
        _Entry(f"model.layers.{i}.{entry.name}", entry.shape) for i in range(num_layers) for entry in layer
    ]
    rest = num_values - num_layers * layer_values - hidden
    rows = rest // 2 // hidden
    return [
        _Entry("model.embed_tokens.weight", (rows, hidden)),
        *entries,
        _Entry("model.norm.weight", (hidden,)),
        _Entry("lm_head.weight", (rest - rows * hidden,)),
    ]


def _layer(hidden: int) -> Iterator[_Entry]:
    narrow, wide = hidden // 4, hidden * 4
    for name, rows in (("q", hidden), ("k", narrow), ("v", narrow), ("o", hidden)):
        yield _Entry(f"self_attn.{name}_proj.weight", (rows, hidden))
    yield _Entry("mlp.gate_proj.weight", (wide, hidden))
    yield _Entry("mlp.up_proj.weight", (wide, hidden))
    yield _Entry("mlp.down_proj.weight", (hidden, wide))
    yield _Entry("input_layernorm.weight", (hidden,))
    yield _Entry("post_attention_layernorm.weight", (hidden,))


def _random(entries: list[_Entry], seed: int) -> dict[str, Tensor]:
    """Tensors of random bits that are finite numbers, each with memory of its own, as a model has them."""
    seeds = count(seed)
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        generator = torch.Generator().manual_seed(next(seeds))
        words = torch.empty(-(-entry.size_bytes // 8), dtype=torch.int64).random_(generator=generator)
        words &= _FINITE
        raw = words.view(torch.uint8)[: entry.size_bytes]
        whole = raw if raw.untyped_storage().nbytes() == len(raw) else raw.clone()
        tensors[entry.name] = whole.view(torch.bfloat16).view(entry.shape)
    return tensors


def _specs(entries: list[_Entry]) -> tuple[tuple[TensorSpec, ...], int]:
    specs: list[TensorSpec] = []
    end = 0
    for entry in entries:
        specs.append(
            TensorSpec(
                name=entry.name,
                dtype="bfloat16",
                shape=entry.shape,
                offset_bytes=end,
                size_bytes=entry.size_bytes,
            )
        )
        end += -(-entry.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(specs), end


def _pieces(
    specs: tuple[TensorSpec, ...], tensors: dict[str, Tensor], buffer_bytes: int
) -> Iterator[memoryview]:
    """The flat buffer in order, zeros between the tensors."""
    end = 0
    for spec in specs:
        yield memoryview(bytes(spec.offset_bytes - end))
        yield raw_bytes(tensors[spec.name])
        end = spec.offset_bytes + spec.size_bytes
    yield memoryview(bytes(buffer_bytes - end))


def _write_tensorizer(source: Source, peers_python: Path) -> None:
    """Convert in the peers' environment; without the library there is no file, and its contestant fails."""
    module = "benchmarks.peers.tensorizer_reader"
    subprocess.run(
        [str(peers_python), "-m", module, str(source.safetensors), str(source.tensorizer)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        check=False,
    )


def _sync(directory: Path) -> None:
    """Write everything out, so that no write-back runs beside the measurement."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
