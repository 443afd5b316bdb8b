"""Staged weights: a file in shared memory, and an index of the tensors in it.

vLLM's processes map the file, and each reads the tensors of its rank. A store that keeps models in shared
memory lends its own file, and nothing is copied. For any other store a file is made and filled, and deleted
once vLLM has read it.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio

from hotswap.backends.layouts import require_tensors
from hotswap.backends.memory import allocate
from hotswap.backends.tokenizer import HfTokenizer
from hotswap.backends.vllm.directories import SHARED_MEMORY, CoreDirectory
from hotswap.backends.vllm.settings import architecture_of
from hotswap.errors import OutOfMemory, ShardCorrupt, UnsupportedModel
from hotswap.model import Manifest, ModelCard, Shard
from hotswap.store import (
    SupportsLend,
    SupportsReadInto,
    SupportsSideFiles,
    SupportsTokenizer,
    WeightStore,
)
from hotswap.worker_threads import run_in_thread

__all__ = ["CONFIG", "INDEX", "TOKENIZER", "TOKENIZER_CONFIG", "Staged", "quantization_files", "stage"]

CONFIG, INDEX, _WEIGHTS = "config.json", "hotswap.json", "weights.bin"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json")
_SIDE_FILES = (
    *_QUANTIZATION_FILES,
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A model's weights in memory that other processes of this machine can map.

    Attributes:
        card: The model.
        manifest: Its manifest.
        held: The directory of their index, the model's config and tokenizer, and the weights unless lent.
        tokenizer: The tokenizer's text; empty where the store has none.
        quantization: What side files say of how it is quantised; empty where only the config does.
        grammar_ends: The model's end tokens that the tokenizer has.
        loan: The store's own file, while it is lent.
    """

    card: ModelCard
    manifest: Manifest
    held: CoreDirectory
    tokenizer: str = ""
    quantization: str = ""
    grammar_ends: tuple[int, ...] = ()
    loan: AsyncExitStack | None = None

    @property
    def architecture(self) -> str:
        """A text that is equal for models that differ in nothing but the values of their weights.

        Raises:
            ShardCorrupt: the config is no JSON object.
        """
        tensors = sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in self.manifest.tensors_of(0))
        return f"{architecture_of(self.manifest.config)} {self.quantization} {tensors} {self.tokenizer}"

    @property
    def directory(self) -> Path:
        """The directory that it holds."""
        return self.held.path

    @property
    def index(self) -> Path:
        """The path of the index."""
        return self.directory / INDEX

    def copy_settings(self, directory: Path) -> None:
        """Copy what tells vLLM how to compute with the model. Blocking."""
        names = (CONFIG, *_QUANTIZATION_FILES, *((TOKENIZER, TOKENIZER_CONFIG) if self.tokenizer else ()))
        for name in names:
            if (path := self.directory / name).exists():
                shutil.copyfile(path, directory / name)

    @property
    def size_bytes(self) -> int:
        """The memory that they take beside the store's."""
        return self.manifest.buffer_bytes if self.loan is None else 0

    async def release(self) -> None:
        """Free it; processes that have it mapped keep the memory. Cannot be interrupted."""
        with anyio.CancelScope(shield=True):
            await run_in_thread(self.held.remove)
            if self.loan is not None:
                await self.loan.aclose()


async def quantization_files(store: WeightStore, manifest: Manifest) -> dict[str, bytes]:
    """Return the files beside a checkpoint's config that tell of its quantization, by name.

    Raises:
        StoreError: one of them could not be read.
    """
    return {n: text for n, text in (await _side_files(store, manifest)).items() if n in _QUANTIZATION_FILES}


async def _side_files(store: WeightStore, manifest: Manifest) -> dict[str, bytes]:
    """Return what vLLM looks for beside the config of a checkpoint as it is."""
    if manifest.layout != "checkpoint" or not isinstance(store, SupportsSideFiles):
        return {}
    files = await store.side_files(manifest.model)
    return {name: files[name] for name in _SIDE_FILES if name in files}


async def stage(store: WeightStore, card: ModelCard, manifest: Manifest) -> Staged:
    """Bring a model's weights into shared memory; cancelled, it leaves nothing there.

    Raises:
        UnsupportedModel: the store has the model cut for ranks, quantised in its own format, as GGUF, or with
            a dtype that torch has not.
        OutOfMemory: shared memory has no room for them.
        ShardCorrupt: the store's bytes do not fit its manifest.
        StoreError: they could not be read.
    """
    if manifest.world_size != 1 or manifest.quantization:
        cut = f"cut for {manifest.world_size} ranks" if manifest.world_size != 1 else manifest.quantization
        raise UnsupportedModel(
            f"Model {card.id!r} is {cut} in its store, and vLLM cuts and quantises models itself; convert it "
            "again, whole."
        )
    require_tensors(card.id, manifest)
    _check_dtypes(manifest)
    held = await run_in_thread(_make_directory)
    directory = held.path
    loan = AsyncExitStack()
    try:
        quantization = await _write_side_files(directory, store, manifest)
        tokenizer, ends = await _write_tokenizer(directory, store, card)
        lent = await _borrow(loan, store, manifest)
        if lent is None:
            await run_in_thread(_make_file, directory, manifest)
            await _fill(directory, store, manifest)
        place = (directory / _WEIGHTS, 0) if lent is None else lent
        await run_in_thread(_write_index, directory, manifest, *place)
    except BaseException:
        await Staged(card, manifest, held, loan=loan).release()
        raise
    return Staged(card, manifest, held, tokenizer, quantization, ends, None if lent is None else loan)


def _check_dtypes(manifest: Manifest) -> None:
    for tensor in manifest.tensors:
        if tensor.dtype.startswith("float6"):
            raise UnsupportedModel(
                f"Tensor {tensor.name!r} of model {manifest.model!r} has the dtype {tensor.dtype}, which "
                "torch has not, and so vLLM; serve another quantisation of the model."
            )


async def _write_side_files(directory: Path, store: WeightStore, manifest: Manifest) -> str:
    """Write the side files.

    Returns:
        What these files say of quantisation.
    """
    files = await _side_files(store, manifest)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return " ".join(files[name].decode(errors="replace") for name in _QUANTIZATION_FILES if name in files)


async def _write_tokenizer(
    directory: Path, store: WeightStore, card: ModelCard
) -> tuple[str, tuple[int, ...]]:
    """Write the model's tokenizer for transformers, if the store has it.

    Returns:
        Its text, empty without one, and the model's end tokens that it has.
    """
    tokenizer = await store.tokenizer(card.id) if isinstance(store, SupportsTokenizer) else None
    if not isinstance(tokenizer, HfTokenizer):
        return "", ()
    ends = {token: piece for token in card.eos_token_ids if (piece := tokenizer.piece(token)) is not None}
    end = next(iter(ends.values()), None)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": end} if end else {})}
    text = tokenizer.text
    (directory / TOKENIZER).write_text(text)
    (directory / TOKENIZER_CONFIG).write_text(json.dumps(config))
    return text, tuple(sorted(ends))


async def _borrow(loan: AsyncExitStack, store: WeightStore, manifest: Manifest) -> tuple[Path, int] | None:
    """Return the store's own file and the offset of the weights in it, if it lends them."""
    if not isinstance(store, SupportsLend):
        return None
    buffer = await loan.enter_async_context(store.lend(manifest))
    if buffer is not None and buffer.file is not None:
        return buffer.file, buffer.file_offset_bytes
    await loan.aclose()
    return None


def _make_directory() -> CoreDirectory:
    has_memory = os.access(SHARED_MEMORY, os.W_OK)
    return CoreDirectory.make(SHARED_MEMORY if has_memory else Path(tempfile.gettempdir()))


def _make_file(directory: Path, manifest: Manifest) -> None:
    """Make a file of the right length with its memory allocated."""
    try:
        with (directory / _WEIGHTS).open("w+b") as file:
            size_bytes = file.truncate(max(1, manifest.buffer_bytes))
            allocate(file.fileno(), 0, size_bytes)
    except OSError as exc:
        raise OutOfMemory(
            f"{directory.parent} has no room for the {manifest.buffer_bytes:,} bytes of {manifest.model!r} "
            f"for vLLM to read ({exc.strerror}); free some."
        ) from exc


async def _fill(directory: Path, store: WeightStore, manifest: Manifest) -> None:
    with (
        (directory / _WEIGHTS).open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as mapped,
        memoryview(mapped) as whole,
    ):
        for shard in manifest.shards_of(0):
            await _read(store, shard, whole)


async def _read(store: WeightStore, shard: Shard, whole: memoryview) -> None:
    end = shard.buffer_offset_bytes + shard.size_bytes
    if not 0 <= shard.buffer_offset_bytes <= end <= len(whole):
        raise _misfit(shard, shard.buffer_offset_bytes)
    if isinstance(store, SupportsReadInto):
        with whole[shard.buffer_offset_bytes : end] as place:
            if await store.read_into(shard, place) is not None:
                return
    at = shard.buffer_offset_bytes
    async with store.open(shard) as chunks:
        async for chunk in chunks:
            if chunk.offset_bytes != at or at + chunk.data.nbytes > end:
                raise _misfit(shard, chunk.offset_bytes)
            await run_in_thread(_copy, whole, at, chunk.data)
            at += chunk.data.nbytes
    if at != end:
        raise _misfit(shard, at)


def _copy(whole: memoryview, at: int, data: memoryview) -> None:
    whole[at : at + data.nbytes] = data


def _misfit(shard: Shard, at: int) -> ShardCorrupt:
    return ShardCorrupt(
        f"{shard.file!r} of {shard.model!r} does not fit its index at byte {at}; convert the model again."
    )


def _write_index(directory: Path, manifest: Manifest, file: Path, offset_bytes: int) -> None:
    tensors = [
        [
            tensor.name,
            tensor.dtype,
            list(tensor.shape),
            list(tensor.stride),
            offset_bytes + tensor.offset_bytes,
        ]
        for tensor in manifest.tensors_of(0)
    ]
    index = {"file": str(file), "tensors": tensors}
    (directory / INDEX).write_text(json.dumps(index))
    (directory / CONFIG).write_text(manifest.config)
