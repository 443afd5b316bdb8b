"""Tiny GGUF models, made by script, and a store that lends them by path."""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from anyio.lowlevel import checkpoint

from hotswap import Model, ModelId, StoreView
from hotswap.abc import HostChunk, Manifest, ModelCard, Shard, WeightStore
from hotswap.errors import ShardMissing

VOCABULARY, CONTEXT, END = 128, 1024, 2
_WIDTH, _INNER, _LAYERS, _HEADS, _KV_HEADS = 256, 256, 2, 8, 4
_Q4_K_BYTES, _Q4_K_WEIGHTS = 144, 256


def write_gguf(path: Path, *, seed: int, kind: str = "F16") -> Path:
    """Write a llama model of random weights in a GGUF type: F32, F16, Q8_0 or Q4_K."""
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(seed)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(VOCABULARY)
    add_vocabulary(writer, VOCABULARY)
    kv_width = _WIDTH // _HEADS * _KV_HEADS
    shapes = {"token_embd": (VOCABULARY, _WIDTH), "output": (VOCABULARY, _WIDTH)}
    norms = ["output_norm"]
    for layer in range(_LAYERS):
        block = f"blk.{layer}."
        norms += [block + "attn_norm", block + "ffn_norm"]
        shapes |= {block + "attn_q": (_WIDTH, _WIDTH), block + "attn_output": (_WIDTH, _WIDTH)}
        shapes |= {block + "attn_k": (kv_width, _WIDTH), block + "attn_v": (kv_width, _WIDTH)}
        shapes |= {block + "ffn_gate": (_INNER, _WIDTH), block + "ffn_up": (_INNER, _WIDTH)}
        shapes |= {block + "ffn_down": (_WIDTH, _INNER)}
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))
    for name, shape in shapes.items():
        size = 1.0 if name == "token_embd" else 2 * shape[1] ** -0.5
        add_tensor(writer, f"{name}.weight", shape, size, kind, random)
    write(writer)
    return path


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a vocabulary of words, byte tokens among them, whose end token is `END`."""
    num_bytes = 60  # of characters that take several
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{0xC0 + byte:02X}>" for byte in range(num_bytes))]
    tokens += [f"▁w{number}" for number in range(size - len(tokens))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * num_bytes
    kinds += [gguf.TokenType.NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_unk_token_id(0)


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    shape: tuple[int, int],
    size: float,
    kind: str,
    random: np.random.Generator,
) -> None:
    """Add a tensor of random weights of a size."""
    quantization = gguf.GGMLQuantizationType[kind]
    if kind == "Q4_K":  # which `gguf` cannot write: blocks of random quantized values
        writer.add_tensor(name, _q4_k(shape, size, random), raw_dtype=quantization)
        return
    weights = (random.normal(size=shape) * size).astype(np.float32)
    if kind == "F32":
        writer.add_tensor(name, weights)
    else:
        writer.add_tensor(name, gguf.quants.quantize(weights, quantization), raw_dtype=quantization)


def _q4_k(shape: tuple[int, int], size: float, random: np.random.Generator) -> Any:
    """Return super-blocks of Q4_K: two scales, 12 bytes of 6-bit scales and minima, 128 bytes of values."""
    num_blocks = shape[0] * shape[1] // _Q4_K_WEIGHTS
    blocks = np.zeros((num_blocks, _Q4_K_BYTES), np.uint8)
    sub_scale = 32
    scale = np.float16(size / 4.6 / sub_scale)  # the values 0 to 15 have a standard deviation of 4.6
    blocks[:, 0:2] = np.full((num_blocks, 1), scale, np.float16).view(np.uint8)
    blocks[:, 2:4] = np.full((num_blocks, 1), np.float16(scale * 7.5), np.float16).view(np.uint8)
    blocks[:, 4:12] = sub_scale  # the low six bits of the first four scales and minima
    blocks[:, 12:16] = (sub_scale & 15) | ((sub_scale & 15) << 4)  # the low four bits of the others
    blocks[:, 4:12] |= (sub_scale >> 4) << 6  # and their high two
    blocks[:, 16:] = random.integers(0, 256, size=(num_blocks, 128))
    return blocks.reshape(shape[0], -1)


def write(writer: gguf.GGUFWriter) -> None:
    """Write the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass
class GgufStore(WeightStore):
    """Holds GGUF files where they are, by the names of models; lends them by path, or in chunks."""

    files: dict[str, Path] = field(default_factory=dict[str, Path])
    num_lent: int = 0

    async def manifest(self, model: ModelId) -> Manifest:
        await checkpoint()
        if model not in self.files:
            raise ShardMissing(f"No model {model!r} in the store; add its file.")
        data = self.files[model].read_bytes()
        shard = Shard(
            model=model,
            rank=0,
            file=self.files[model].name,
            file_offset_bytes=0,
            buffer_offset_bytes=0,
            size_bytes=len(data),
            checksum=f"test:{zlib.crc32(data):08x}",
        )
        return Manifest(
            model=model,
            shards=(shard,),
            buffer_bytes=len(data),
            layout="checkpoint",
            config=json.dumps({"vocab_size": VOCABULARY}),
            eos_token_ids=(END,),
            max_context_tokens=CONTEXT,
        )

    async def card(self, model: str) -> ModelCard:
        """Return the card of a model."""
        return ModelCard.of(Model(model), await self.manifest(ModelId(model)))

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        yield self._chunks(self.files[shard.model].read_bytes())

    async def _chunks(self, data: bytes) -> AsyncIterator[HostChunk]:
        for at in range(0, len(data), 1 << 18):
            await checkpoint()
            yield HostChunk(offset_bytes=at, data=memoryview(data)[at : at + (1 << 18)], tier="files")

    @asynccontextmanager
    async def lend_files(self, manifest: Manifest) -> AsyncGenerator[tuple[Path, ...]]:
        await checkpoint()
        self.num_lent += 1
        try:
            yield (self.files[manifest.model],)
        finally:
            self.num_lent -= 1

    def view(self) -> StoreView:
        return StoreView()
