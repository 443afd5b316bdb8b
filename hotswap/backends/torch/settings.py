"""The validated arguments of `TorchEngine`, and values derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch

from hotswap.backends.torch.batcher import Batcher
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.budget import TokenBudget
from hotswap.backends.torch.device import resolve, total_bytes
from hotswap.backends.torch.device_memory import DeviceMemory, LeasedMemory
from hotswap.backends.torch.forward import Forward
from hotswap.backends.torch.loading import KVBudget
from hotswap.backends.torch.parallel.nodes import StageNode
from hotswap.backends.torch.recurrent.snapshots import SnapshotPool
from hotswap.backends.torch.step_options import GpuSteps, StepOptions
from hotswap.checks import check_counts, check_kind, check_positive, check_positive_seconds, to_objects
from hotswap.device_budget import DeviceBudget
from hotswap.errors import ConfigError
from hotswap.hardware import parse_bytes
from hotswap.view import InstanceId

__all__ = ["Settings"]


class _Usual(NamedTuple):
    """What an engine has if its user gives no number."""

    requests: int
    step_tokens: int


# A step of a GPU takes hardly longer with more rows, until its products are as long as the reads of weights.
_DEFAULTS, _DEFAULTS_OF_GPU = _Usual(64, 256), _Usual(128, 2048)
_KV_TOKENS, _LARGEST_BUDGET = 16_384, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `TorchEngine`, as documented there; sizes may be text.

    Raises:
        ConfigError: one of them is out of range.
    """

    device: str | torch.device
    dtype: torch.dtype | None
    tp: int
    pp: int
    stage_nodes: Sequence[StageNode | None]
    kv_tokens: int | None
    kv_bytes: int | str | None
    kv_block_tokens: int
    token_budget: int | None
    itl_target_s: float | None
    prefix_reuse: bool
    snapshot_bytes: int | str | None
    max_requests: int | None
    memory_bytes: int | str | None
    device_budget: DeviceBudget | None
    floor_bytes: int | str | None
    idle_bytes: int | str
    max_adapters: int
    adapter_bytes: int | str
    packed_bytes: int | str | None
    keep_fp8: bool | None
    threads: int | None
    invariant: bool
    rank_timeout_s: float
    gpu_steps: GpuSteps

    def __post_init__(self) -> None:
        counts = {
            "kv_tokens": self.kv_tokens,
            "max_requests": self.max_requests,
            "threads": self.threads,
            "token_budget": self.token_budget,
        }
        check_counts(
            ConfigError,
            1,
            kv_block_tokens=self.kv_block_tokens,
            tp=self.tp,
            pp=self.pp,
            **{name: count for name, count in counts.items() if count is not None},
        )
        check_counts(ConfigError, 0, max_adapters=self.max_adapters)
        check_positive_seconds(ConfigError, rank_timeout_s=self.rank_timeout_s)
        if self.itl_target_s is not None:
            check_positive(ConfigError, itl_target_s=self.itl_target_s)
        for name in ("prefix_reuse", "invariant"):
            check_kind(ConfigError, name, getattr(self, name), bool)
        if self.keep_fp8 is not None:
            check_kind(ConfigError, "keep_fp8", self.keep_fp8, bool)
        if self.dtype is not None:
            check_kind(ConfigError, "dtype", self.dtype, torch.dtype)
        kinds = get_args(GpuSteps)
        _check(self.gpu_steps in kinds, "gpu_steps", self.gpu_steps, f"one of {', '.join(kinds)}")
        alone = self.num_ranks == 1 or self.gpu_steps == "gathered"
        _check(alone, "gpu_steps", self.gpu_steps, "'gathered' with several ranks")
        blocks = self.kv_block_tokens
        _check(blocks % 16 == 0, "kv_block_tokens", blocks, "16, 32 ...")
        enough = self.token_budget is None or self.token_budget >= self.most_requests
        _check(enough, "token_budget", self.token_budget, "at least max_requests")
        holds = self.kv_tokens is None or self.kv_tokens >= blocks
        _check(holds, "kv_tokens", self.kv_tokens, "at least one block")
        can_keep = self.num_ranks == 1 or not self.keep_fp8
        _check(can_keep, "keep_fp8", self.keep_fp8, "False or None with ranks, which dequantize weights")
        self._check_budget()
        _check_nodes(self.stage_nodes, self.pp)
        _check_ranks(self.first_device, self.num_own_ranks)

    def _check_budget(self) -> None:
        """Raise `ConfigError` unless `device_budget` and `floor_bytes` fit each other and the engine."""
        if self.device_budget is None:
            _check(self.floor_bytes is None, "floor_bytes", self.floor_bytes, "None without a device_budget")
            return
        check_kind(ConfigError, "device_budget", self.device_budget, DeviceBudget)
        what = "with a device_budget, which is implemented for engines of one rank"
        _check(self.first_device.type in ("cpu", "cuda"), "device", self.device, f"'cpu' or 'cuda' {what}")
        _check(self.num_ranks == 1, "tp times pp", self.num_ranks, f"1 {what}")
        _check(not self.packed_bytes, "packed_bytes", self.packed_bytes, "0 or None with a device_budget")
        if self.floor_bytes is None or not parse_bytes(self.floor_bytes, "floor_bytes"):
            raise ConfigError(
                f"floor_bytes is {self.floor_bytes!r}; with a device_budget give the bytes that the engine"
                " can always take: the weights of its largest model, and KV blocks for its longest request."
            )

    @property
    def num_ranks(self) -> int:
        """The number of ranks; with 1 the model runs in the engine's process."""
        return self.tp * self.pp

    @property
    def nodes(self) -> dict[int, StageNode]:
        """The nodes of stages that are not on this machine, by the number of the stage."""
        return {stage: node for stage, node in enumerate(self.stage_nodes) if node is not None}

    @property
    def num_own_ranks(self) -> int:
        """The number of ranks on this machine; other nodes have `tp` each."""
        return self.num_ranks - self.tp * len(self.nodes)

    @property
    def first_device(self) -> torch.device:
        """The device of the engine's process, or of rank 0."""
        return resolve(self.device)

    @property
    def most_requests(self) -> int:
        """The maximum number of running requests."""
        usual = _DEFAULTS_OF_GPU if self.first_device.type == "cuda" else _DEFAULTS
        return usual.requests if self.max_requests is None else self.max_requests

    @property
    def num_adapters(self) -> int:
        """The maximum number of loaded adapters; engines of several ranks load none."""
        return self.max_adapters if self.num_ranks == 1 else 0

    @property
    def rank_devices(self) -> tuple[str, ...]:
        """The device of each rank: consecutive GPUs of its machine, from the first."""
        first = self.first_device
        if first.type != "cuda":
            return (str(first),) * self.num_ranks
        devices, num_own = list[str](), 0
        for stage in range(self.pp):
            is_here = stage not in self.nodes
            start = (first.index or 0) + (num_own if is_here else 0)
            devices += (f"cuda:{start + part}" for part in range(self.tp))
            num_own += self.tp if is_here else 0
        return tuple(devices)

    @property
    def rank_threads(self) -> int:
        """The CPU threads of each rank: `threads` divided by the number of ranks of this machine."""
        return max(1, (self.threads or torch.get_num_threads()) // self.num_own_ranks)

    @property
    def total_memory_bytes(self) -> int:
        """The budget of weights and KV blocks of all ranks together, in bytes."""
        if self.memory_bytes is not None:
            return parse_bytes(self.memory_bytes, "memory_bytes")
        if self.device_budget is not None:
            return self.device_budget.size_bytes
        whole = total_bytes(self.first_device)
        if self.first_device.type == "cuda":
            return whole * self.num_ranks
        return whole * self.num_ranks // self.num_own_ranks

    @property
    def max_packed_bytes(self) -> int:
        """The limit of packed weights in bytes; by default a quarter of all memory, 0 under a budget."""
        if self.packed_bytes is not None:
            return parse_bytes(self.packed_bytes, "packed_bytes")
        if self.device_budget is not None:
            return 0
        return self.total_memory_bytes // 4

    @property
    def max_idle_bytes(self) -> int:
        """The limit of freed weight memory that is kept for the next load; under a budget none is."""
        idle_bytes = parse_bytes(self.idle_bytes, "idle_bytes")
        return idle_bytes if self.device_budget is None else 0

    def make_memory(self, engine: InstanceId) -> DeviceMemory:
        """Return the memory that an engine may take."""
        if self.device_budget is None:
            return DeviceMemory()
        return LeasedMemory(
            engine,
            self.device_budget,
            floor_bytes=parse_bytes(self.floor_bytes or 0, "floor_bytes"),
            ceiling_bytes=self.total_memory_bytes,
        )

    @property
    def kv(self) -> KVBudget:
        """The limits of the KV cache."""
        tokens = self.kv_tokens
        if tokens is None and (self.first_device.type != "cuda" or self.num_ranks > 1):
            tokens = max(_KV_TOKENS, self.kv_block_tokens)
        return KVBudget(
            tokens,
            None if self.kv_bytes is None else parse_bytes(self.kv_bytes, "kv_bytes"),
            self.kv_block_tokens,
            self.most_requests,
            parse_bytes(self.adapter_bytes, "adapter_bytes") if self.num_adapters else 0,
            self._max_snapshot_bytes,
            is_elastic=self.device_budget is not None,
        )

    @property
    def _max_snapshot_bytes(self) -> int | None:
        if not self.prefix_reuse or (self.snapshot_bytes is None and self.device_budget is not None):
            return 0
        return None if self.snapshot_bytes is None else parse_bytes(self.snapshot_bytes, "snapshot_bytes")

    @property
    def steps(self) -> StepOptions:
        """How steps are computed in one process."""
        return StepOptions(
            self.kv_block_tokens,
            self.is_invariant,
            self.gpu_steps,
            self.max_step_tokens,
            self.most_requests,
        )

    @property
    def max_step_tokens(self) -> int:
        """The largest token budget of a step."""
        if self.token_budget is not None:
            return self.token_budget
        usual = (_DEFAULTS_OF_GPU if self.first_device.type == "cuda" else _DEFAULTS).step_tokens
        return max(usual if self.itl_target_s is None else _LARGEST_BUDGET, self.most_requests)

    def make_batcher(self, forward: Forward, blocks: BlockPool) -> Batcher:
        """Return a new batcher for a loaded model, whose blocks these are."""
        slots = range(self.most_requests, self.most_requests + forward.num_snapshots)
        return Batcher(
            blocks,
            block_tokens=self.kv_block_tokens,
            token_budget=self.max_step_tokens,
            max_requests=self.most_requests,
            num_batches=forward.depth,
            prefix_reuse=self.prefix_reuse and (bool(slots) or not forward.keeps_states),
            snapshots=SnapshotPool(slots) if slots else None,
        )

    def make_budget(self) -> TokenBudget | None:
        """Return the controller of the token budget; `None` if the budget is fixed.

        The smallest budget has room for a token of every request and one block of a prompt.
        """
        if self.itl_target_s is None:
            return None
        least = min(self.max_step_tokens, self.most_requests + self.kv_block_tokens)
        return TokenBudget(self.itl_target_s, min_tokens=least, max_tokens=self.max_step_tokens)

    @property
    def is_invariant(self) -> bool:
        """Whether steps are batch-invariant, which is implemented for CPUs only."""
        return self.invariant and self.first_device.type == "cpu"


def _check_nodes(nodes: Sequence[StageNode | None], pp: int) -> None:
    """Raise `ConfigError` unless nodes are given for stages before the last."""
    for stage, node in enumerate(to_objects(ConfigError, "stage_nodes", nodes, object)):
        if node is not None:
            check_kind(ConfigError, f"stage_nodes[{stage}]", node, StageNode)
    if len(nodes) >= pp:
        raise ConfigError(
            f"stage_nodes has {len(nodes)} entries, and with pp={pp} there are {pp - 1} stages before the "
            "last, which is on the engine's machine; raise pp or leave some out."
        )


def _check_ranks(first: torch.device, num_ranks: int) -> None:
    """Raise `ConfigError` if there are fewer GPUs than ranks from the first on."""
    last = (first.index or 0) + num_ranks - 1
    if first.type == "cuda" and last >= torch.cuda.device_count():
        raise ConfigError(
            f"tp times pp is {num_ranks}, which takes GPUs 'cuda:{first.index or 0}' to 'cuda:{last}', and "
            f"PyTorch sees {torch.cuda.device_count()}; lower tp or pp."
        )


def _check(holds: bool, name: str, value: object, otherwise: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}, it must be {otherwise}.")
