"""The settings of a `VllmEngine`, and the arguments of vLLM that follow from them."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hotswap.backends.vllm.inside.connector import MOVES_BLOCKS
from hotswap.backends.vllm.names import named
from hotswap.checks import check_choice, check_counts, check_kind, check_strings
from hotswap.errors import ConfigError, ShardCorrupt
from hotswap.hardware import parse_bytes

__all__ = ["Settings", "StartMethod", "architecture_of", "choose_runner"]

log = logging.getLogger("hotswap.vllm")

StartMethod = Literal["fork", "spawn"]

# The part of a device's memory that vLLM takes by default; it refuses to start where less is free.
_USUAL_SHARE = 0.92
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
# Entries of a config that describe the checkpoint, not the architecture.
_IMMATERIAL = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)
# Arguments that the engine sets itself.
_OURS = frozenset(
    {"model", "load_format", "model_loader_extra_config", "worker_extension_cls", "disable_log_stats"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `VllmEngine` that its cores depend on; documented there."""

    kv_bytes: int | str = "1 GiB"
    kv_block_tokens: int | None = None
    dtype: str = "auto"
    device: str | None = None
    tp: int = 1
    pp: int = 1
    max_requests: int = 64
    token_budget: int | None = None
    prefix_reuse: bool = True
    eager: bool = True
    max_adapters: int = 0
    max_adapter_rank: int = 16
    memory_bytes: int | str | None = None
    start: StartMethod | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_counts(ConfigError, 1, tp=self.tp, pp=self.pp, max_requests=self.max_requests)
        check_counts(ConfigError, 0, max_adapters=self.max_adapters)
        check_counts(ConfigError, 1, max_adapter_rank=self.max_adapter_rank)
        optional = {"kv_block_tokens": self.kv_block_tokens, "token_budget": self.token_budget}
        check_counts(ConfigError, 1, **{name: size for name, size in optional.items() if size is not None})
        check_strings(ConfigError, dtype=self.dtype)
        check_choice(ConfigError, (None, "fork", "spawn"), start=self.start)
        check_kind(ConfigError, "arguments", self.arguments, Mapping)
        if self.device is not None and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise ConfigError(
                f"device is {self.device!r}; give a GPU, such as 'cuda:0', or leave it out on a CPU."
            )
        if taken := sorted(_OURS & self.arguments.keys()):
            raise ConfigError(f"The engine itself sets {', '.join(taken)} of vLLM; leave it out.")
        parse_bytes(self.kv_bytes, "kv_bytes")
        if self.memory_bytes is not None:
            parse_bytes(self.memory_bytes, "memory_bytes")

    @property
    def num_ranks(self) -> int:
        """How many processes compute."""
        return self.tp * self.pp

    @property
    def guides(self) -> bool:
        """Whether hotswap compiles grammars, not vLLM as `arguments` say."""
        return "structured_outputs_config" not in self.arguments

    @property
    def devices(self) -> tuple[int, ...]:
        """The number of each rank's GPU among those that the process sees, from `device` upwards."""
        first = int((self.device or "cuda:0").partition(":")[2] or 0)
        return tuple(range(first, first + self.num_ranks))

    @property
    def total_bytes(self) -> int:
        """The memory that the instance may use: `memory_bytes`, or that of its devices."""
        if self.memory_bytes is not None:
            return parse_bytes(self.memory_bytes, "memory_bytes")
        platform: Any = named("vllm.platforms:current_platform")
        if platform.is_cpu():
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return sum(int(_device_bytes(device) * _USUAL_SHARE) for device in self.devices)

    def _gpu_arguments(self) -> dict[str, Any]:
        """Return what vLLM takes for GPUs alone."""
        given: dict[str, Any] = {"enable_sleep_mode": True}
        if self.device is not None:
            given["device_ids"] = list(self.devices)
        if self.memory_bytes is not None:
            # vLLM starts where this part of a device is free, so that others may have the rest.
            share = self.total_bytes / self.num_ranks / _device_bytes(self.devices[0])
            given["gpu_memory_utilization"] = min(1.0, share)
        return given

    def vllm_arguments(
        self, directory: Path, index: Path, *, on_cpu: bool, has_tokenizer: bool
    ) -> dict[str, Any]:
        """Return vLLM's arguments for a model whose config lies in `directory`."""
        given: dict[str, Any] = {
            "model": str(directory),
            # The fleet makes text; vLLM needs the tokenizer for grammars alone.
            "skip_tokenizer_init": not has_tokenizer,
            "load_format": "hotswap",
            "model_loader_extra_config": {"index": str(index)},
            "worker_extension_cls": "hotswap.backends.vllm.inside.worker.WorkerExtension",
            "dtype": self.dtype,
            "max_model_len": -1,  # the model's context, or as much as the KV blocks hold
            "max_num_seqs": self.max_requests,
            "kv_cache_memory_bytes": parse_bytes(self.kv_bytes, "kv_bytes"),
            "enforce_eager": self.eager,
            "enable_prefix_caching": self.prefix_reuse,
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "scheduling_policy": "priority",
            "disable_log_stats": True,
            "enable_log_requests": False,
            # A single rank needs no process of its own.
            "distributed_executor_backend": _UNIPROC if self.num_ranks == 1 else "mp",
        }
        if MOVES_BLOCKS:
            given["kv_transfer_config"] = named("vllm.config:KVTransferConfig")(
                kv_connector="HotswapConnector",
                kv_connector_module_path="hotswap.backends.vllm.inside.connector",
                kv_role="kv_both",
            )
        if self.kv_block_tokens is not None:
            given["block_size"] = self.kv_block_tokens
        if self.token_budget is not None:
            given["max_num_batched_tokens"] = self.token_budget
        if self.max_adapters:
            # One more than are held: on a CPU, requests without an adapter get that of the last place when
            # they share a batch with others (seen with 0.32), so the last place stays empty.
            places = self.max_adapters + 1
            given |= {
                "enable_lora": True,
                "max_loras": places,
                "max_cpu_loras": places,
                "max_lora_rank": self.max_adapter_rank,
            }
        if has_tokenizer:
            given["structured_outputs_config"] = {"backend": "guidance"}
        if not on_cpu:
            given |= self._gpu_arguments()
        return given | dict(self.arguments)


def choose_runner() -> None:
    """Have cores take vLLM's first model runner, as hotswap's sampler does, unless the environment names one.

    A warning says so where vLLM would take the second.
    """
    if _RUNNER in os.environ:
        return
    os.environ[_RUNNER] = "0"
    if named("vllm.triton_utils:HAS_TRITON"):
        log.warning(
            "vLLM's first model runner serves, not its second, which has not hotswap's rules of sampling. "
            "%s=1 in the environment chooses the second, where requests that need those rules are refused.",
            _RUNNER,
        )


@cache
def _device_bytes(device: int) -> int:
    """Return the memory of a GPU, asked without a context of CUDA in this process."""
    return int(named("vllm.platforms:current_platform").get_device_total_memory(device))


def architecture_of(config_text: str) -> str:
    """Return a text that is equal for configs of models that differ in their weights alone.

    Raises:
        ShardCorrupt: the config is no JSON object.
    """
    try:
        parsed: object = json.loads(config_text)
    except ValueError as exc:
        raise ShardCorrupt(f"The model's config is no JSON ({exc}); convert the model again.") from exc
    if not isinstance(parsed, dict):
        raise ShardCorrupt("The model's config is no JSON object; convert the model again.")
    material = {str(key): value for key, value in parsed.items() if key not in _IMMATERIAL}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # of JSON
    return json.dumps(material, sort_keys=True)
