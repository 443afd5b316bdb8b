"""The validated arguments of `LlamaCppEngine`, and llama.cpp's parameters made of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap.checks import check_counts, check_kind, shown
from hotswap.errors import ConfigError
from hotswap.hardware import parse_bytes

__all__ = ["KV_BLOCK_TOKENS", "Settings"]

KV_BLOCK_TOKENS = 32
"""llama.cpp has no KV blocks; its cells are counted by as many as this."""

_CELLS = 256  # llama.cpp rounds its cells up to a multiple of it
_INVARIANT_BUDGET, _BUDGET = 64, 512

# What the engine decides itself, and what would end or change streams behind its back.
_OWN = frozenset(
    {
        "api_keys",
        "cache_prompt",
        "cont_batching",
        "cpuparams.n_threads",
        "cpuparams_batch.n_threads",
        "ctx_shift",
        "embedding",
        "endpoint_metrics",
        "endpoint_props",
        "endpoint_slots",
        "hostnames",
        "kv_unified",
        "lora_adapters",
        "model.path",
        "n_batch",
        "n_cache_reuse",
        "n_ctx",
        "n_parallel",
        "n_predict",
        "n_threads_http",
        "n_ubatch",
        "port",
        "sleep_idle_seconds",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `LlamaCppEngine`, as documented there; sizes may be text.

    Raises:
        ConfigError: one of them is out of range, or the engine's own to decide.
    """

    kv_tokens: int
    max_requests: int
    token_budget: int | None
    invariant: bool
    prefix_reuse: bool
    threads: int | None
    memory_bytes: int | str | None
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        counts = {"threads": self.threads, "token_budget": self.token_budget}
        check_counts(
            ConfigError,
            1,
            kv_tokens=self.kv_tokens,
            max_requests=self.max_requests,
            **{name: count for name, count in counts.items() if count is not None},
        )
        for name in ("invariant", "prefix_reuse"):
            check_kind(ConfigError, name, getattr(self, name), bool)
        if self.token_budget is not None and self.token_budget < self.max_requests:
            raise ConfigError(
                f"token_budget is {self.token_budget}; give at least max_requests, {self.max_requests}."
            )
        own = (name for name in self.arguments if name in _OWN or name.startswith("sampling."))
        if taken := sorted(own):
            raise ConfigError(f"arguments have {taken}, which the engine decides itself; leave them out.")
        try:
            json.dumps(self.arguments)
        except (TypeError, ValueError) as exc:
            raise ConfigError(
                f"arguments are {shown(self.arguments)}; give numbers, text, lists of them, and names of "
                "llama.cpp's enumerations as text."
            ) from exc
        parse_bytes(self.total_bytes, "memory_bytes")

    @property
    def request_blocks(self) -> int:
        """The KV blocks that one request can have."""
        return self._cells // (self.max_requests if self.invariant else 1) // KV_BLOCK_TOKENS

    @property
    def num_blocks(self) -> int:
        """The blocks of the KV cache."""
        return self._cells // KV_BLOCK_TOKENS

    @property
    def num_at_once(self) -> int:
        """How many requests llama.cpp computes together."""
        return 1 if self.invariant else self.max_requests

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of a step."""
        return self.token_budget or max(self.max_requests, _INVARIANT_BUDGET if self.invariant else _BUDGET)

    @property
    def _cells(self) -> int:
        """The cells of the KV cache, all alike for each slot that has its own."""
        unit = _CELLS * self.max_requests if self.invariant else _CELLS
        return -(-self.kv_tokens // unit) * unit

    @property
    def total_bytes(self) -> int:
        """What weights may take: `memory_bytes`, or the machine's memory."""
        if self.memory_bytes is not None:
            return parse_bytes(self.memory_bytes, "memory_bytes")
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def parameters(self, file: Path, socket: Path, key: str) -> dict[str, Any]:
        """Return llama.cpp's parameters of a server of `file` at `socket`, for callers with `key`."""
        threads = self.threads or len(os.sched_getaffinity(0))
        own: dict[str, Any] = {
            "model.path": str(file),
            "hostnames": [str(socket)],
            "api_keys": [key],
            "ui": False,
            "endpoint_props": False,
            "endpoint_slots": False,
            "verbosity": 1,  # errors
            "n_threads_http": 2 * self.max_requests + 4,
            "n_parallel": self.max_requests,
            "n_ctx": self._cells,
            # Attention adds in the order of the cells, and products round by the number of rows. So each slot
            # has cells of its own, filled in order, and each token is computed by itself.
            "kv_unified": not self.invariant,
            "n_batch": self.max_step_tokens,
            "n_ubatch": 1 if self.invariant else self.max_step_tokens,
            "ctx_shift": False,
            "fit_params": False,
            "cache_ram_mib": 0,
            "cpuparams.n_threads": threads,
            "cpuparams_batch.n_threads": threads,
        }
        return own | self.arguments
