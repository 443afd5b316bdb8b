"""Reading a checkpoint as the tensors of the module that will run it, a few rows at a time.

The module is built without data, each of its tensors has a `Recipe`, and the files are mapped into memory.
Only the rows in use take memory, and the values are those of `from_pretrained`, byte for byte, for any size.
Architectures whose conversions do not work on parts (a few) are loaded whole, within `memory_bytes`.

transformers renames, stacks, joins and splits checkpoint tensors, by a list of conversions for each
architecture. `from_pretrained` applies them to the whole checkpoint at once. Here the same conversions,
chosen in the same way, are a recipe for each tensor, applied when the tensor is needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping

from hotswap.backends.quantized import check_left_over, check_plain_dtype
from hotswap.backends.stores.checkpoint import read_header, weight_files
from hotswap.backends.torch import weights
from hotswap.backends.torch.default_dtype import own_default_dtype
from hotswap.errors import ConfigError, ShardCorrupt, UnsupportedModel

__all__ = ["Blueprint", "Entry", "Recipe", "Source", "open_checkpoint", "recipes"]


_PIECE_BYTES = 16 << 20


class _NotStreamable(Exception):
    """The checkpoint cannot be converted in parts."""


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the module, and how to read its values.

    `read(start, stop)` returns rows of its first dimension; if `whole`, each call computes all rows. A tensor
    without dimensions has one row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]
    whole: bool = False

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The tensor in pieces of some MiB, in order: the number of the first row, and the rows."""
        num_rows = self.shape[0] if self.shape else 1
        size_bytes = math.prod(self.shape) * self.dtype.itemsize
        step = num_rows if self.whole else max(1, _PIECE_BYTES * num_rows // max(1, size_bytes))
        for start in range(0, num_rows if size_bytes else 0, step):
            yield start, self.read(start, min(start + step, num_rows))


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The tensors of a module in the order of its state dict; tied names share one `Source` object.

    `module` is the module itself, on the meta device where the checkpoint is streamed.
    """

    module: Any
    sources: Mapping[str, Source]


@contextmanager
def open_checkpoint(directory: Path, dtype: torch.dtype | None, *, memory_bytes: int) -> Generator[Blueprint]:
    """Open a checkpoint; its sources can be read inside the block.

    `memory_bytes` limits the memory used beside mapped files.

    Raises:
        ShardMissing, UnsafeFile, ShardCorrupt, UnsupportedModel: as `weights.load_checkpoint`.
        ConfigError: a conversion needs more memory than that.
    """
    weights.check_files(directory)
    with ExitStack() as files:
        try:
            blueprint = _streamed(directory, dtype, memory_bytes, files)
        except _NotStreamable as exc:
            blueprint = _loaded(directory, dtype, memory_bytes, exc)
        try:
            yield blueprint
        except SafetensorError as exc:
            raise ShardCorrupt(
                f"The weights in {str(directory)!r} cannot be read ({exc}); fetch them again."
            ) from exc


def _streamed(directory: Path, dtype: torch.dtype | None, memory_bytes: int, files: ExitStack) -> Blueprint:
    config = _config(directory)
    entries = _entries(directory, files)
    main = dtype or _own_dtype(config, directory, entries)
    try:
        model = _skeleton(config, main)
        state = dict(weights.named_tensors(model))
        made = [(recipe, recipe.shapes()) for recipe in recipes(model, entries, main, state)]
    except Exception as exc:  # transformers may raise anything; then it loads the model itself
        raise _NotStreamable(f"{type(exc).__name__}: {exc}") from exc
    _check_plain(directory, [recipe for recipe, _ in made], entries)
    supplied: dict[str, Source] = {}
    mismatched: list[str] = []
    for recipe, shapes in made:
        for name, shape in shapes.items():
            if name in state and shape == tuple(state[name].shape):
                supplied[name] = _source(recipe, name, shape, memory_bytes)
            elif name in state:
                mismatched.append(name)
    sources = _tied(model, state, supplied)
    missing = [name for name in state if name not in sources]
    if any(re.search(pattern, name) for pattern in _may_miss(model) for name in missing):
        raise _NotStreamable("tensors that the checkpoint lacks are to be initialised")
    weights.check_complete(directory, mismatched + missing)
    return Blueprint(model, {name: sources[name] for name in state})


def _check_plain(directory: Path, made: Iterable[Recipe], entries: Mapping[str, Entry]) -> None:
    """Refuse what would be cast to numbers that it does not stand for; see `hotswap.backends.quantized`."""
    used: set[str] = set()
    for recipe in made:
        for name, entry in (named for group in recipe.entries.values() for named in group):
            used.add(name)
            if recipe.dtype.is_floating_point:
                check_plain_dtype(directory, name, entry.get_dtype())
    check_left_over(directory, entries.keys() - used)


def _loaded(directory: Path, dtype: torch.dtype | None, memory_bytes: int, reason: Exception) -> Blueprint:
    what = f"The checkpoint in {str(directory)!r}, which must be loaded whole ({reason}),"
    _check_memory(what, sum(path.stat().st_size for path in directory.glob("*.safetensors")), memory_bytes)
    for stored in chain.from_iterable(map(read_header, weight_files(directory))):
        if stored.dtype.startswith(("float8", "float6", "float4", "int8", "uint8")):
            check_plain_dtype(directory, stored.name, stored.dtype)
    module = weights.load_checkpoint(directory, dtype)
    made: dict[int, Source] = {}
    sources: dict[str, Source] = {}
    for name, tensor in weights.named_tensors(module):
        sources[name] = made.setdefault(id(tensor), _held(tensor.detach()))
    return Blueprint(module, sources)


def _held(tensor: Tensor) -> Source:
    def read(start: int, stop: int) -> Tensor:
        return tensor[start:stop] if tensor.ndim else tensor

    return Source(tensor.dtype, tuple(tensor.shape), read)


# ----------------------------------------------------------------------------- the module and the files


def _config(directory: Path) -> Any:
    configs: Any = AutoConfig
    try:
        return configs.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, ImportError) as exc:
        raise UnsupportedModel(
            f"transformers has no causal language model for {str(directory)!r} ({exc}); "
            "give a checkpoint whose architecture it knows."
        ) from exc
    except Exception as exc:
        raise _NotStreamable(str(exc)) from exc


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    models: Any = AutoModelForCausalLM
    with torch.device("meta"), own_default_dtype():
        return models.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)


def _may_miss(model: Any) -> Iterable[str]:
    return cast("Iterable[str]", model._keys_to_ignore_on_load_missing or ())


def _entries(directory: Path, files: ExitStack) -> dict[str, Entry]:
    """Every tensor of the files that transformers would read; of two with one name, the last."""
    if (directory / "adapter_config.json").exists():
        raise _NotStreamable("it has an adapter")
    found: dict[str, Entry] = {}
    for path in _files(directory):
        try:
            opened: Any = files.enter_context(cast("Any", safe_open)(path, framework="pt"))
        except (SafetensorError, OSError) as exc:
            raise ShardCorrupt(f"{str(path)!r} cannot be read ({exc}); fetch it again.") from exc
        names: list[str] = opened.keys()
        found |= {name: opened.get_slice(name) for name in names}
    return found


def _files(directory: Path) -> list[Path]:
    whole = directory / "model.safetensors"
    if whole.is_file():
        return [whole]
    names = _index(directory).get("weight_map")
    if not isinstance(names, dict):
        raise _NotStreamable("its files have names that transformers does not look for")
    return [directory / name for name in sorted(set(cast("dict[str, str]", names).values()))]


def _index(directory: Path) -> dict[str, object]:
    path = directory / "model.safetensors.index.json"
    # `read_checkpoint` has validated it and the names in it.
    return cast("dict[str, object]", json.loads(path.read_bytes())) if path.is_file() else {}


def _own_dtype(config: Any, directory: Path, entries: Mapping[str, Entry]) -> torch.dtype:
    """The dtype of `dtype="auto"`: the config's, else that of the first floating-point tensor."""
    named: object = config.dtype
    metadata = _index(directory).get("metadata") if not (directory / "model.safetensors").is_file() else None
    if named is None and isinstance(metadata, dict):
        named = cast("dict[str, object]", metadata).get("dtype")
    if named is None:
        first = (entry[...].dtype for entry in entries.values())
        named = next((dtype for dtype in first if dtype.is_floating_point), None)
    dtype = getattr(torch, named.removeprefix("torch.")) if isinstance(named, str) else named
    if not isinstance(dtype, torch.dtype):
        raise _NotStreamable("neither its config nor its weights tell its dtype")
    return dtype


# ----------------------------------------------------------------------------------------------- sources


def _source(recipe: Recipe, name: str, shape: tuple[int, ...], memory_bytes: int) -> Source:
    entry = recipe.only_entry
    if entry is not None:
        return Source(recipe.dtype, shape, lambda a, b: recipe.load(entry, slice(a, b) if shape else None))
    # Inputs, outputs, and intermediate values of conversions in two steps.
    needed = 3 * recipe.size_bytes
    if recipe.is_stacked:
        _check_memory(f"A row of {name!r}", needed // max(1, shape[0]), memory_bytes)
        return Source(recipe.dtype, shape, lambda a, b: recipe.run(slice(a, b))[name])
    _check_memory(f"The conversion of {name!r}, which needs whole tensors,", needed, memory_bytes)
    return Source(recipe.dtype, shape, lambda a, b: recipe.run()[name], whole=True)


def _check_memory(what: str, needed_bytes: int, memory_bytes: int) -> None:
    if needed_bytes > memory_bytes:
        raise ConfigError(
            f"{what} takes about {needed_bytes} bytes of memory, and {memory_bytes} may be used; "
            "convert with a larger `memory_bytes`."
        )


def _tied(model: Any, state: Mapping[str, Tensor], supplied: Mapping[str, Source]) -> dict[str, Source]:
    """The source of every name that has one, its own or that of a tied name.

    As in transformers, a tie is ignored where the checkpoint has both tensors and they differ.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    followers: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    sources: dict[str, Source] = {}
    for names in groups.values():
        there = sorted((name for name in names if name in supplied), key=lambda name: name in followers)
        if not there:
            continue
        first = supplied[there[0]]
        differing = [name for name in there[1:] if not _equal(first, supplied[name])]
        if differing and len(names) > 2:
            raise _NotStreamable(f"{differing[0]!r} is to be tied to what it differs from")
        sources |= {name: supplied[name] if name in differing else first for name in names}
    return sources


def _equal(one: Source, other: Source) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(one.pieces(), other.pieces(), strict=True)
    return all(torch.equal(rows, others) for (_, rows), (_, others) in pairs)


_Loading: Any = core_model_loading  # untyped there


class Entry(Protocol):
    """A tensor in a safetensors file, read when it is sliced."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """One conversion with its inputs: checkpoint entries in, one or more tensors of the module out.

    Attributes:
        name: The first of the output tensors.
        dtype: The entries are cast to it before the conversion.
        conversion: transformers' conversion, without tensors.
        entries: For each source pattern of the conversion the entries, by their names and in their order.
        model: The module on the meta device; some conversions need it.
    """

    name: str
    dtype: torch.dtype
    conversion: Any
    model: Any
    entries: dict[str, list[tuple[str, Entry]]] = field(default_factory=dict[str, list[tuple[str, Entry]]])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs, found by converting tensors without data."""
        made = self._convert(lambda entry: torch.empty(entry.get_shape(), dtype=self.dtype, device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def run(self, part: slice = slice(None)) -> dict[str, Tensor]:
        """Convert; where the recipe `is_stacked`, `part` selects entries of each list."""
        return self._convert(self.load, part)

    def load(self, entry: Entry, rows: slice | None = None) -> Tensor:
        """Read an entry, or some rows of it: a view of the file, unless it has to be cast."""
        return (entry[...] if rows is None else entry[rows]).to(self.dtype)

    @property
    def only_entry(self) -> Entry | None:
        """The entry that is the output unchanged, but for its name; `None` for a conversion that computes."""
        if isinstance(self.conversion, _Loading.WeightConverter):
            return None
        return self.entries[self.conversion.source_patterns[0]][0][1]

    @property
    def is_stacked(self) -> bool:
        """Whether row i of the output depends on the i-th entry of each list only."""
        operations = list(getattr(self.conversion, "operations", ()))
        lengths = {len(entries) for entries in self.entries.values()}
        return (
            bool(operations)
            and type(operations[0]) is _Loading.MergeModulelist
            and operations[0].dim == 0
            and len(lengths) == 1
            and len(self.conversion.target_patterns) == 1
            and all(_keeps_rows(operation) for operation in operations[1:])
        )

    @property
    def size_bytes(self) -> int:
        """The bytes of the inputs in the recipe's dtype."""
        shapes = (entry.get_shape() for entries in self.entries.values() for _, entry in entries)
        return sum(torch.Size(shape).numel() for shape in shapes) * self.dtype.itemsize

    def _convert(self, load: Callable[[Entry], Tensor], part: slice = slice(None)) -> dict[str, Tensor]:
        conversion = deepcopy(self.conversion)
        for pattern, entries in self.entries.items():
            for name, entry in entries[part]:
                conversion.add_tensor(self.name, name, pattern, lambda entry=entry: load(entry))
        made = conversion.convert(self.name, model=self.model, config=self.model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def recipes(
    model: Any, entries: Mapping[str, Entry], dtype: torch.dtype, state: Mapping[str, Tensor]
) -> list[Recipe]:
    """Return the recipes that make the tensors of `model` of a checkpoint's entries; some entries are unused.

    `model` is on the meta device, `state` its state dict, `dtype` its main dtype.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, _Loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, _Loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    dtypes: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    found: dict[str, Recipe] = {}
    for name in sorted(entries, key=_Loading.dot_natural_key):
        target, pattern = _target(name, renamings, converters, model.base_model_prefix, state)
        if target not in state:
            continue
        if pattern is None:
            pattern, conversion = name, _Loading.WeightRenaming(name, target)
        else:
            conversion = by_pattern[pattern]
        if target not in found:
            wanted = next(_matching(dtypes, target), state[target].dtype)
            found[target] = Recipe(target, wanted, conversion, model)
        found[target].entries.setdefault(pattern, []).append((name, entries[name]))
    return list(found.values())


def _target(
    name: str, renamings: list[Any], converters: list[Any], prefix: str, state: Mapping[str, Tensor]
) -> tuple[str, str | None]:
    """The tensor of the module that an entry belongs to, and the pattern of its converter."""
    rename = _Loading.rename_source_key
    target, pattern = rename(name, renamings, converters, prefix, state)
    if target not in state and name in state:
        # Its name differs from the module's by the prefix only.
        target, pattern = rename(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
    return target, pattern


def _matching(dtypes: Mapping[str, torch.dtype], name: str) -> Iterator[torch.dtype]:
    return (dtype for pattern, dtype in dtypes.items() if re.search(pattern.replace("*", ".*"), name))


def _keeps_rows(operation: Any) -> bool:
    if type(operation) is _Loading.Concatenate:
        return bool(operation.dim >= 1)
    if type(operation) is _Loading.Transpose:
        return bool(min(operation.dim0, operation.dim1) >= 1 and not operation.check_dims)
    return False
