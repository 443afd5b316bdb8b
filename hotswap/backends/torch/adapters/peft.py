# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# The reader of safetensors has no types.
"""Reads adapters in PEFT's format: a directory with `adapter_config.json` and `adapter_model.safetensors`.

Supports LoRA of linear layers with alpha, rsLoRA (Kalajdzievski, arXiv:2312.03732), and rank and alpha
patterns. An adapter whose config enables any other option is refused with the name of the option, since
ignoring it would change results. Tested with PEFT 0.21.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hotswap.backends.stores.checkpoint import check_no_pickles
from hotswap.errors import ShardCorrupt, ShardMissing, UnsupportedAdapter

__all__ = ["AdapterWeights", "LowRank", "PeftCache", "read"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")

# Keys about the training or the name of an adapter, without effect on its results.
_HARMLESS = frozenset(
    {
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
    }
    | {"fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config"}
    | {
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
    }
    | {"revision", "runtime_config", "target_modules", "task_type", "ensure_weight_tying"}
)
_READ = frozenset(
    {"alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern"}
    | {"use_rslora"}
)
# Initializations that do not change the base model's weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The LoRA matrices of one layer, which add `x @ down.T @ up`; the scaling is included in `up`.

    Attributes:
        down: `[rank, in]`, PEFT's `lora_A`.
        up: `[rank, out]`, PEFT's `lora_B`, transposed.
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """The rank of the matrices."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """An adapter in host memory.

    Attributes:
        layers: Its matrices by layer name.
        digest: A hash of all that they change: names of layers, shapes, dtype and numbers.
    """

    layers: Mapping[str, LowRank]
    digest: bytes = b""

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(layer.rank for layer in self.layers.values())

    @property
    def size_bytes(self) -> int:
        """The size of all matrices."""
        return sum(layer.down.nbytes + layer.up.nbytes for layer in self.layers.values())


class PeftCache:
    """An LRU cache of adapters in host memory. Thread-safe.

    An adapter whose files have changed is read again.

    Args:
        limit_bytes: The maximum size of all cached adapters.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[object, ...], AdapterWeights] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, directory: Path, dtype: torch.dtype) -> AdapterWeights:
        """Return the adapter in `directory`; raises as `read` does."""
        key = (directory, dtype, *(_stamp(directory / name) for name in (_CONFIG, _WEIGHTS)))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            # Outdated entries are never found again; drop them before the new version takes memory.
            for outdated in [kept for kept in self._kept if kept[0] == directory and kept[2:] != key[2:]]:
                del self._kept[outdated]
        weights = read(directory, dtype)
        with self._lock:
            self._kept[key] = weights
            while self._kept and sum(kept.size_bytes for kept in self._kept.values()) > self._limit_bytes:
                self._kept.popitem(last=False)
        return weights


def read(directory: Path, dtype: torch.dtype) -> AdapterWeights:
    """Read an adapter and convert its matrices to `dtype`.

    Raises:
        ShardMissing: one of the two files is missing.
        UnsafeFile: the weights are a pickle.
        ShardCorrupt: a file cannot be parsed, or lacks one of the two matrices of a layer.
        UnsupportedAdapter: the kind of adapter is not supported, or it contains numbers that are not finite.
    """
    config = _config(directory)
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _tensors(directory).items():
        match = _TENSOR.fullmatch(key)
        if match is None or tensor.ndim != 2:
            raise _unsupported(
                directory, f"has a tensor {key!r} {list(tensor.shape)}, which is no LoRA of a linear layer"
            )
        pairs.setdefault(match["layer"], {})[match["side"]] = tensor
    if not pairs:
        raise ShardCorrupt(f"{str(directory / _WEIGHTS)!r} has no tensors; save the adapter again.")
    for name, pair in pairs.items():
        if (
            len(pair) != 2
            or pair["A"].shape[0] != pair["B"].shape[1]
            or not all(map(Tensor.numel, pair.values()))
        ):
            shapes = {f"lora_{side}": list(tensor.shape) for side, tensor in pair.items()}
            raise ShardCorrupt(
                f"Layer {name!r} of {str(directory)!r} has {shapes}, which is no pair; save it again."
            )
    # The tensors are views of the mapped file, which may change or be truncated.
    count = sum(tensor.numel() for pair in pairs.values() for tensor in pair.values())
    copy, at = torch.empty(count, dtype=dtype), 0
    weights: dict[str, LowRank] = {}
    for name, pair in pairs.items():
        end = at + pair["A"].numel() + pair["B"].numel()
        weights[name] = _pair(directory, name, pair, config, copy[at:end])
        at = end
    _refuse_infinite(directory, weights, copy)
    return AdapterWeights(weights, _digest(weights, copy))


def _digest(weights: Mapping[str, LowRank], copy: Tensor) -> bytes:
    """Return a hash of an adapter's matrices, which are views of `copy` in their order."""
    shapes = [(name, tuple(pair.down.shape), tuple(pair.up.shape)) for name, pair in weights.items()]
    digest = hashlib.blake2b(repr((str(copy.dtype), shapes)).encode(), digest_size=32)
    digest.update(copy.view(torch.uint8).numpy().data)
    return digest.digest()


def _pair(
    directory: Path, name: str, pair: dict[str, Tensor], config: dict[str, Any], copy: Tensor
) -> LowRank:
    """Write a layer's matrices to `copy`, and return them."""
    (rank, width_in), width_out = pair["A"].shape, len(pair["B"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if not isinstance(alpha, int | float):
        raise _unsupported(directory, f"has an alpha of {alpha!r} for {name!r}")
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    down, up = copy[: rank * width_in].view(rank, width_in), copy[rank * width_in :].view(rank, width_out)
    down.copy_(pair["A"])
    wide = pair["B"].T.to(torch.promote_types(copy.dtype, torch.float32))
    if up.dtype is wide.dtype:
        torch.mul(wide, scaling, out=up)
    else:
        up.copy_(wide * scaling)
    return LowRank(down, up)


def _refuse_infinite(directory: Path, weights: Mapping[str, LowRank], copy: Tensor) -> None:
    """Raise `UnsupportedAdapter` if any number of `copy`, which contains all weights, is not finite."""
    if _is_finite(copy):
        return
    name = next(name for name, pair in weights.items() if not (_is_finite(pair.down) and _is_finite(pair.up)))
    raise _unsupported(directory, f"has numbers in {name!r} that are not finite in {copy.dtype}")


def _is_finite(numbers: Tensor) -> bool:
    """Whether all numbers are finite: their minimum and maximum are, and `aminmax` propagates NaN."""
    least, most = numbers.aminmax()
    return bool(least.isfinite() & most.isfinite())


def _config(directory: Path) -> dict[str, Any]:
    path = directory / _CONFIG
    if not path.is_file():
        raise ShardMissing(
            f"There is no {_CONFIG} in {str(directory)!r}; give the directory of a PEFT adapter."
        )
    try:
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ShardCorrupt(f"{str(path)!r} is not JSON ({exc}); save the adapter again.") from exc
    if not isinstance(parsed, dict):
        raise ShardCorrupt(f"{str(path)!r} is not a JSON object; save the adapter again.")
    config = cast("dict[str, Any]", parsed)
    if config.get("peft_type") != "LORA":
        raise _unsupported(directory, f"is of type {config.get('peft_type')!r}, not LORA")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise _unsupported(
            directory,
            f"was initialized by {config['init_lora_weights']!r}, which changes the base model's weights",
        )
    if config.get("bias", "none") != "none":
        raise _unsupported(directory, f"trains biases ({config['bias']!r})")
    others = config.keys() - _HARMLESS - _READ
    if switched := sorted(key for key in others if config[key]):
        raise _unsupported(directory, f"has {switched[0]!r} set")
    return config


def _tensors(directory: Path) -> dict[str, Tensor]:
    path = directory / _WEIGHTS
    if not path.is_file():
        check_no_pickles(directory, ("adapter_model.bin",))
        raise ShardMissing(f"There is no {_WEIGHTS} in {str(directory)!r}; fetch it.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as exc:
        raise ShardCorrupt(f"{str(path)!r} cannot be read ({exc}); fetch it again.") from exc


def _by_pattern(patterns: object, name: str, otherwise: object) -> object:
    """Return the value of the first pattern, a regular expression, that matches the end of a layer's name."""
    if isinstance(patterns, dict):
        for pattern, value in cast("dict[str, object]", patterns).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
    return otherwise


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


def _unsupported(directory: Path, why: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(
        f"The adapter in {str(directory)!r} {why}; it cannot be applied exactly. Merge it into its model."
    )
