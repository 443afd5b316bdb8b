"""What a model is to the fleet, and what its weights are to a store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hotswap.errors import ConfigError
from hotswap.request import AdapterId, ModelId

__all__ = ["Adapter", "HostBuffer", "HostChunk", "Manifest", "Model", "ModelCard", "Shard", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the user registers it: a name, where its checkpoint lies, and what is expected of it.

    `source` is a local Hugging Face directory (or whatever the store understands); `None` when the store
    already holds the model under its id. `min_replicas` is the floor that the shipped schedulers keep and
    restore. `weight` is the weight *w* of the swap policy: twice the value for half the throughput.
    `max_context_tokens` shortens the model's own context.
    """

    id: str
    source: str | Path | None = None
    min_replicas: int = 0
    weight: float = 1.0
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.id or "/" in self.id or "\\" in self.id or self.id in {".", ".."}:
            raise ConfigError(
                f"Model id {self.id!r} names a directory in stores; use letters, digits, '.', '_', '-'."
            )
        if self.min_replicas < 0:
            raise ConfigError(f"min_replicas of {self.id!r} is {self.min_replicas}; it must be 0 or more.")
        if not self.weight > 0:
            raise ConfigError(f"weight of {self.id!r} is {self.weight}; it must be over 0.")
        if self.max_context_tokens is not None and self.max_context_tokens < 1:
            raise ConfigError(
                f"max_context_tokens of {self.id!r} is {self.max_context_tokens}; give 1 or more."
            )


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter as the user registers it: a name, the model it was trained on, and where it lies.

    Requests for `model` name it by `id`; another model may have one of the same name. `source` is a local
    directory in PEFT's format (or whatever the engine understands). `epoch` counts its versions; a fleet sets
    it.
    """

    id: str
    model: str
    source: str | Path | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if not self.id:
            raise ConfigError(f"An adapter of model {self.model!r} has an empty id; give it a name.")
        if re.search(r"@\d+$", self.id):
            raise ConfigError(f"Adapter {self.id!r} has the name of a version of another; give it another.")
        if self.epoch < 0:
            raise ConfigError(f"epoch of adapter {self.id!r} is {self.epoch}; give 0 or more.")

    @property
    def version(self) -> AdapterId:
        """Stands for these very weights, held by engines and carried by requests: `id`, or `id@epoch`."""
        return AdapterId(f"{self.id}@{self.epoch}" if self.epoch else self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one named tensor, or the part of it that a tensor-parallel rank has, lies in the rank's buffer.

    Tied names carry the same offset, and their bytes exist once. `stride` counts elements, as torch does;
    left out, it is that of row-major order. `checksum` is `"<algorithm>:<hex>"` over the tensor's bytes,
    empty where nobody has taken it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    stride: tuple[int, ...] = ()
    checksum: str = ""
    rank: int = 0

    def __post_init__(self) -> None:
        if not self.stride:
            object.__setattr__(self, "stride", _row_major(self.shape))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A contiguous piece of one tensor-parallel rank's flat weight buffer, held in one file.

    `buffer_offset_bytes` is its place in the flat buffer; `file_offset_bytes` and `size_bytes` its place in
    `file`, a plain name inside the model's directory. `checksum` is `"<algorithm>:<hex>"` over its bytes.
    """

    model: ModelId
    rank: int
    file: str
    file_offset_bytes: int
    buffer_offset_bytes: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything an engine needs before the first byte: architecture, tensors, shards, sizes.

    `config` is the text of the checkpoint's `config.json`; an engine that simulates may leave it empty.
    `buffer_bytes` is the size of one rank's flat buffer, padding included. Ranks hold different parts of the
    model, perhaps of different shapes: `tensors` lists those of all ranks, `tensors_of` those of one.

    `quantization` names how tensors that have a `<name>.scale` beside them are stored, empty where none are;
    `unquantized_dtype` is what those were, and become again where an engine computes with them.
    """

    model: ModelId
    shards: tuple[Shard, ...]
    buffer_bytes: int
    tensors: tuple[TensorSpec, ...] = ()
    world_size: int = 1
    alignment_bytes: int = 4096
    architecture: str = ""
    config: str = ""
    eos_token_ids: tuple[int, ...] = ()
    max_context_tokens: int = 2**31
    kv_bytes_per_token: int = 0
    quantization: str = ""
    unquantized_dtype: str = ""

    @property
    def weight_bytes(self) -> int:
        """All shards of all ranks."""
        return sum(shard.size_bytes for shard in self.shards)

    def tensors_of(self, rank: int) -> tuple[TensorSpec, ...]:
        """What lies in the buffer of one rank, in the manifest's order."""
        return tuple(tensor for tensor in self.tensors if tensor.rank == rank)

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """The shards of one rank, in buffer order."""
        mine = (shard for shard in self.shards if shard.rank == rank)
        return tuple(sorted(mine, key=lambda shard: shard.buffer_offset_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A registered model together with its manifest's facts: what engines load and policies weigh."""

    id: ModelId
    weight_bytes: int
    max_context_tokens: int
    architecture: str = ""
    eos_token_ids: tuple[int, ...] = ()
    kv_bytes_per_token: int = 0
    min_replicas: int = 0
    weight: float = 1.0

    @classmethod
    def of(cls, model: Model, manifest: Manifest) -> ModelCard:
        """Join what the user asked for with what the store knows."""
        context = manifest.max_context_tokens
        if model.max_context_tokens is not None:
            context = min(context, model.max_context_tokens)
        return cls(
            id=ModelId(model.id),
            weight_bytes=manifest.weight_bytes,
            max_context_tokens=context,
            architecture=manifest.architecture,
            eos_token_ids=manifest.eos_token_ids,
            kv_bytes_per_token=manifest.kv_bytes_per_token,
            min_replicas=model.min_replicas,
            weight=model.weight,
        )


@dataclass(frozen=True, slots=True)
class HostChunk:
    """Bytes of a shard in host memory, lent: valid until the next chunk is asked for.

    `offset_bytes` is the chunk's place in the rank's flat buffer, so an engine copies it there and forgets
    it. `tier` names where the bytes came from; `pinned` says that a device may copy from it asynchronously,
    `buffered` that they went through the page cache, as where a file system refuses direct reads.
    """

    offset_bytes: int
    data: memoryview
    tier: str = ""
    pinned: bool = False
    buffered: bool = False


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """A rank's whole flat buffer in host memory, lent to be read in place; `data` cannot be written.

    `tier` names where the bytes were when they were asked for; `pinned` says that a device may copy from
    them asynchronously. Other processes of the machine find them in `file` from `file_offset_bytes` on, and
    may map them while they are lent; `None` where they lie in this process alone.
    """

    data: memoryview
    tier: str = ""
    pinned: bool = False
    file: Path | None = None
    file_offset_bytes: int = 0
