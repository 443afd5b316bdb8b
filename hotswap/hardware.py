"""`DeviceProfile`, the cost model of a simulated device, and `parse_bytes`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hotswap.checks import shown
from hotswap.errors import ConfigError

__all__ = ["DeviceProfile", "parse_bytes"]

# What the system's calls can count.
_MOST_BYTES = (1 << 63) - 1

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def parse_bytes(size: int | str, name: str = "The size") -> int:
    """Return a size in bytes: an `int` as it is, `"200 GiB"` binary, `"200 GB"` decimal.

    Raises:
        ConfigError: it is no size, negative, or 8 EiB or more; `name` is what the error calls it.
    """
    found: float = -1
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)) is not None:
        number, unit, binary = match.groups()
        found = float(number) * (_UNITS if binary else _DECIMAL)[unit.upper()]
    if not 0 <= found <= _MOST_BYTES:
        raise ConfigError(f"{name} is {shown(size)}; give bytes, as 4096, '200 GiB' or '1.5 GB'.")
    return int(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A linear cost model of engine steps, loads and copies on a device.

    A step over `n` tokens (decodes and prefill chunks together), `batch` requests, `context` cached tokens
    and `chunks` prefill chunks of `s` tokens, `S` together, lasts

        max(floor_s + n floor_token_s, base_s + n token_s) + batch request_s + context context_token_s
        + (decode_s if it decodes) + S prefill_token_s + sum s (s + 2 cached) prefill_square_s
        + chunks chunk_s + joined join_s + left leave_s

    the form that published simulators of serving engines agree on: a weight-bound floor, then linear in
    tokens, batch and context, and attention within prompts, whose sum does not depend on the chunks. The
    terms of the last line are 0 unless they were measured. They are the costs of requests that come and go:
    an attention call for each prefill chunk; adding the keys of a request that `joined`, whose first decode
    this is, to those of the batch; and closing the gap of one that has `left` since the last decode. An
    adapter is loaded in `adapter_s`. KV blocks of moving requests are copied at `kv_bytes_per_s`; the
    downtime of a move is its last copy plus `handover_s`, for the messages of both ends. Each resize of a KV
    pool makes the next step longer by `kv_resize_s`.
    """

    name: str = "laptop"
    memory_bytes: int = 16 << 30
    floor_s: float = 0.006
    base_s: float = 0.001
    token_s: float = 20e-6
    request_s: float = 4e-6
    context_token_s: float = 40e-9
    floor_token_s: float = 0.0
    decode_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_square_s: float = 0.0
    chunk_s: float = 0.0
    join_s: float = 0.0
    leave_s: float = 0.0
    load_bytes_per_s: float = 20e9
    unload_s: float = 0.05
    adapter_s: float = 0.015
    kv_bytes_per_s: float = 5e9
    handover_s: float = 0.0
    kv_resize_s: float = 0.0

    def step_s(
        self,
        *,
        tokens: int,
        batch: int,
        context: int,
        prefill: int = 0,
        prefill_squares: int = 0,
        chunks: int = 0,
    ) -> float:
        """Seconds of one engine step of requests that were there in the last one; 0 for an empty step.

        `prefill` of the tokens are prompt tokens, in `chunks` chunks, and `prefill_squares` is the sum of
        `s (s + 2 cached)` over them. Add `turnover_s` where requests joined or left.
        """
        if not tokens:
            return 0.0
        work = max(self.floor_s + tokens * self.floor_token_s, self.base_s + tokens * self.token_s)
        decode_s = self.decode_s if tokens > prefill else 0.0
        attention_s = prefill * self.prefill_token_s + prefill_squares * self.prefill_square_s
        requests_s = batch * self.request_s
        chunks_s = chunks * self.chunk_s
        return work + requests_s + context * self.context_token_s + decode_s + attention_s + chunks_s

    def turnover_s(self, *, joined: int, left: int) -> float:
        """Additional seconds of a step for requests that decode for the first time, or have left."""
        return joined * self.join_s + left * self.leave_s

    def kv_s(self, size_bytes: int) -> float:
        """Seconds to copy `size_bytes` of KV blocks to another instance."""
        return size_bytes / self.kv_bytes_per_s

    def load_s(self, size_bytes: int) -> float:
        """Seconds to copy `size_bytes` of weights from host memory to the device."""
        return size_bytes / self.load_bytes_per_s
