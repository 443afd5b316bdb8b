"""Models and adapters as users register them, and the description of their weights in stores."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from hotswap.checks import check_counts, check_paths, check_positive, check_strings, shown
from hotswap.errors import ConfigError
from hotswap.model_id import directory_name
from hotswap.request import AdapterId, ModelId

__all__ = [
    "Adapter",
    "HostBuffer",
    "HostChunk",
    "Layout",
    "Manifest",
    "Model",
    "ModelCard",
    "OnChange",
    "Shard",
    "TensorSpec",
]

Layout: TypeAlias = Literal["modules", "checkpoint"]
"""What a store keeps of a model: `"modules"`, the tensors as the modules of transformers have them; or
`"checkpoint"`, the tensors or files of the checkpoint as they are."""

OnChange: TypeAlias = Literal["refuse", "convert", "serve"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the user registers it: an id, where its checkpoint is, and how it is to be served.

    `id` is text without backslashes that can be shown, of up to 200 characters; all but ASCII letters,
    digits, `.`, `_` and `-` count as three for each byte. `source` is a local Hugging Face directory, a GGUF
    file, a name on the Hugging Face Hub as `"org/name"` or `"org/name@revision"`, or another source that the
    store supports; `None` if the store has the model under its id. `min_replicas` is the
    minimum that the shipped schedulers keep and restore. `weight` is the weight *w* of the swap policy: twice
    the value for half the throughput. `max_context_tokens` limits the model's own context.

    `on_change` is what an import does when the checkpoint is not the one that the store's weights were
    converted from: `"refuse"` it by `SourceChanged`, `"convert"` it anew with the options of before, or
    `"serve"` the weights that there are, with a warning.

    `layout` is the one that an import writes; `None` is `"modules"`, and `"checkpoint"` for a GGUF file. What
    a store holds of a model is told by `Manifest.layout`.
    """

    id: str
    source: str | Path | None = None
    min_replicas: int = 0
    weight: float = 1.0
    max_context_tokens: int | None = None
    on_change: OnChange = "refuse"
    layout: Layout | None = None

    def __post_init__(self) -> None:
        try:
            directory_name(self.id)
        except ValueError as exc:
            raise ConfigError(f"Model id {shown(self.id)} {exc}.") from None
        check_counts(ConfigError, 0, **{f"min_replicas of {self.id!r}": self.min_replicas})
        check_paths(ConfigError, **{f"source of {self.id!r}": self.source})
        check_positive(ConfigError, **{f"weight of {self.id!r}": self.weight})
        if self.max_context_tokens is not None:
            check_counts(ConfigError, 1, **{f"max_context_tokens of {self.id!r}": self.max_context_tokens})
        if self.on_change not in get_args(OnChange):
            raise ConfigError(
                f"on_change of {self.id!r} is {shown(self.on_change)}; give 'refuse', 'convert' or 'serve'."
            )
        if self.layout not in (None, *get_args(Layout)):
            raise ConfigError(
                f"layout of {self.id!r} is {shown(self.layout)}; give 'modules', 'checkpoint' or None."
            )


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter as the user registers it: an id, the model it was trained on, and its path.

    Requests for `model` name it by `id`; another model may have an adapter of the same id. `source` is a
    local directory in PEFT's format, or another source that the engine supports. `epoch` counts its versions;
    the fleet sets it.
    """

    id: str
    model: str
    source: str | Path | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        check_strings(ConfigError, id=self.id, model=self.model)
        check_paths(ConfigError, **{f"source of adapter {self.id!r}": self.source})
        if not self.id:
            raise ConfigError(f"An adapter of model {self.model!r} has an empty id; give it a name.")
        if re.search(r"@\d+$", self.id):
            raise ConfigError(
                f"Adapter {self.id!r} has the form of a version, 'name@number'; choose another id."
            )
        check_counts(ConfigError, 0, **{f"epoch of adapter {self.id!r}": self.epoch})

    @property
    def version(self) -> AdapterId:
        """The id of these weights in engines and requests: `id`, or `id@epoch` for later versions."""
        return AdapterId(f"{self.id}@{self.epoch}" if self.epoch else self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The place of a tensor, or of a tensor-parallel rank's part of it, in the rank's flat buffer.

    Tied names have the same offset; their bytes are stored once. `stride` counts elements, as in torch;
    the default is row-major order. `checksum` is `"<algorithm>:<hex>"` over the tensor's bytes, empty if it
    was not computed.
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
    """A contiguous piece of one tensor-parallel rank's flat weight buffer, stored in one file.

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
    """The description of a model that an engine reads before its weights: architecture, tensors, shards.

    `config` is the text of the checkpoint's `config.json`; it may be empty in a simulation. `buffer_bytes` is
    the size of one rank's flat buffer, padding included. Ranks have different parts of the model, which may
    have different shapes: `tensors` lists the tensors of all ranks, `tensors_of` those of one.

    In the layout `"checkpoint"` there is one rank, and the tensors have the names and dtypes of the
    checkpoint. A GGUF model has none: its shards are its files, which `SupportsLendFiles` lends.

    `quantization` is the scheme of tensors that are stored with a `<name>.scale`, empty if there are none;
    `unquantized_dtype` is their dtype before quantization and after dequantization.
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
    layout: Layout = "modules"

    @property
    def vocabulary(self) -> int | None:
        """How many token ids the model has, as far as its config tells."""
        try:
            config = json.loads(self.config)
            size = (config.get("text_config") or config).get("vocab_size")
        except (ValueError, AttributeError):  # it is empty, or nothing that an engine could load
            return None
        return size if type(size) is int and size > 0 else None

    @property
    def is_gguf(self) -> bool:
        """Whether its files are GGUF files."""
        return self.layout == "checkpoint" and not self.tensors

    @property
    def weight_bytes(self) -> int:
        """The bytes of all shards of all ranks."""
        return sum(shard.size_bytes for shard in self.shards)

    def tensors_of(self, rank: int) -> tuple[TensorSpec, ...]:
        """The tensors of one rank, in the manifest's order."""
        return tuple(tensor for tensor in self.tensors if tensor.rank == rank)

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """The shards of one rank, in buffer order."""
        mine = (shard for shard in self.shards if shard.rank == rank)
        return tuple(sorted(mine, key=lambda shard: shard.buffer_offset_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A registered model with the facts of its manifest that engines and policies use.

    `vocabulary` is how many token ids it has; `None` if that is not known.
    """

    id: ModelId
    weight_bytes: int
    max_context_tokens: int
    architecture: str = ""
    eos_token_ids: tuple[int, ...] = ()
    kv_bytes_per_token: int = 0
    min_replicas: int = 0
    weight: float = 1.0
    vocabulary: int | None = None
    layout: Layout = "modules"
    is_gguf: bool = False

    @classmethod
    def of(cls, model: Model, manifest: Manifest) -> ModelCard:
        """Combine the user's settings with the manifest."""
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
            vocabulary=manifest.vocabulary,
            layout=manifest.layout,
            is_gguf=manifest.is_gguf,
        )


@dataclass(frozen=True, slots=True)
class HostChunk:
    """Lent bytes of a shard in host memory, valid until the next chunk is requested.

    `offset_bytes` is the chunk's place in the rank's flat buffer, where the engine copies it to. `tier` is
    the tier that the bytes were read from. If `pinned`, a device may copy from the chunk asynchronously; if
    `buffered`, the bytes went through the page cache, as on file systems that refuse direct reads.
    """

    offset_bytes: int
    data: memoryview
    tier: str = ""
    pinned: bool = False
    buffered: bool = False


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """A rank's whole flat buffer in host memory, lent read-only, to be used in place.

    `tier` is the tier that had the bytes when they were requested. If `pinned`, a device may copy from them
    asynchronously. Other processes of the machine may map them from `file` at `file_offset_bytes` while they
    are lent; `None` if they are private to this process.
    """

    data: memoryview
    tier: str = ""
    pinned: bool = False
    file: Path | None = None
    file_offset_bytes: int = 0
