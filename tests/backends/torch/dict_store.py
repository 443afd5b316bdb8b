"""A weight store in memory: manifests and flat buffers in dicts, made from modules."""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from anyio.lowlevel import checkpoint
from torch import Tensor

from hotswap import Model, ModelId, StoreView
from hotswap.abc import HostChunk, Manifest, ModelCard, Shard, WeightStore
from hotswap.backends.torch.weights import fill, layout
from hotswap.errors import ShardMissing

_CHUNK_BYTES = 1 << 18


@dataclass
class DictStore(WeightStore):
    """Lends chunks of buffers in memory; `on_chunk` is called before each, for observation or errors."""

    manifests: dict[str, Manifest] = field(default_factory=dict[str, Manifest])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    on_chunk: Callable[[str, int], None] = lambda model, index: None
    num_lent: int = 0

    def add(self, name: str, module: Any, **changes: Any) -> ModelCard:
        """Add a model and return its card; `changes` replace fields of the manifest."""
        specs, size_bytes = layout(module)
        flat = torch.zeros(size_bytes, dtype=torch.uint8)
        fill(flat, module, specs)
        eos = module.config.eos_token_id
        manifest = Manifest(
            model=ModelId(name),
            shards=(
                Shard(
                    model=ModelId(name),
                    rank=0,
                    file="weights-0.bin",
                    file_offset_bytes=0,
                    buffer_offset_bytes=0,
                    size_bytes=size_bytes,
                    checksum=f"test:{zlib.crc32(flat.numpy().tobytes()):08x}",
                ),
            ),
            buffer_bytes=size_bytes,
            tensors=specs,
            architecture=type(module).__name__,
            config=json.dumps(module.config.to_dict()),
            eos_token_ids=() if eos is None else tuple([eos] if isinstance(eos, int) else eos),
            max_context_tokens=getattr(module.config, "max_position_embeddings", 1024),
        )
        self.manifests[name] = replace(manifest, **changes)
        self.buffers[name] = flat
        return self.card(name)

    def card(self, name: str) -> ModelCard:
        """Return the card of an added model."""
        return ModelCard.of(Model(name), self.manifests[name])

    async def manifest(self, model: ModelId) -> Manifest:
        await checkpoint()
        if model not in self.manifests:
            raise ShardMissing(f"No model {model!r} in the dict; add it.")
        return self.manifests[model]

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        self.num_lent += 1
        try:
            yield self._chunks(shard)
        finally:
            self.num_lent -= 1

    async def _chunks(self, shard: Shard) -> AsyncIterator[HostChunk]:
        data = memoryview(self.buffers[shard.model].numpy().data)
        for index, at in enumerate(range(0, len(data), _CHUNK_BYTES)):
            self.on_chunk(shard.model, index)
            await checkpoint()
            # Every other chunk is read-only, like one of a mapped file.
            lent = data[at : at + _CHUNK_BYTES]
            yield HostChunk(offset_bytes=at, data=lent.toreadonly() if index % 2 else lent, tier="dict")

    def view(self) -> StoreView:
        return StoreView()
