"""Recipes: how each tensor of the module that runs a checkpoint is made of the checkpoint's tensors.

transformers renames, stacks, joins and splits checkpoint tensors, by a list of conversions for each
architecture. `from_pretrained` applies them to the whole checkpoint at once. Here the same conversions,
chosen in the same way, are a recipe for each tensor, applied when the tensor is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping

__all__ = ["Entry", "Recipe", "recipes"]

_Loading: Any = core_model_loading  # untyped there


class Entry(Protocol):
    """A tensor in a safetensors file, read when it is sliced."""

    def get_shape(self) -> list[int]: ...

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
