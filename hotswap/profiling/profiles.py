"""Devices that were measured, as linear models of a step: coefficients, their sources, how well they fit.

None was measured here. Llumnix's are read off the vector figures of its artifact; Vidur's and
AIConfigurator's come from the operator tables that these projects publish, fitted to the shape of
`DeviceProfile`. Those of H100, H200, A100 and L40S are composed of kernels: their host time, 0.126 ms and
0.0321 ms a layer, is that of BLIS (inference-sim), and no end-to-end run of these devices was there to check
it. Model weights are what the parameters take in 16 bits; the speeds of links, at which weights are loaded
and KV blocks copied, are nominal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, cast

from hotswap.checks import to_path
from hotswap.errors import ConfigError
from hotswap.hardware import DeviceProfile

__all__ = ["PROFILES", "Profile"]

_GB = 10**9
# What profiles that were written earlier do not have, and then is 0.
_LATER = frozenset({"chunk_s", "join_s", "leave_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A device, or several that hold one model together, with the model its steps were measured for.

    Attributes:
        device: How long steps and transfers take.
        weight_bytes: Of the model.
        kv_blocks: KV blocks of 16 tokens that remain beside it.
        kv_bytes_per_token: Of the model.
        source: Where the coefficients come from.
        error: The known errors of the profile, in words.
    """

    device: DeviceProfile
    weight_bytes: int
    kv_blocks: int
    kv_bytes_per_token: int
    source: str
    error: str

    @classmethod
    def read(cls, path: Path | str) -> Profile:
        """Read a profile that `as_json` wrote.

        Raises:
            ConfigError: the file cannot be read, or is no profile; the message names the field.
        """
        place = to_path(ConfigError, "path", path)
        try:
            whole: object = json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{str(place)!r} cannot be read as a profile: {exc}.") from exc
        values = _checked(cls, whole, str(place))
        device = DeviceProfile(**_checked(DeviceProfile, values.pop("device"), str(place), later=_LATER))
        return cls(device=device, **values)

    def as_json(self) -> str:
        """Return all of it as text, which `read` understands."""
        return json.dumps(asdict(self), indent=2) + "\n"


def _checked(made: type, value: object, place: str, *, later: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The values of a dataclass as JSON has them: of their kind, finite, all but `later`, and no others."""
    names = {field.name: field.type for field in fields(made)}
    if not isinstance(value, dict):
        raise ConfigError(f"{place!r} is no profile: where {made.__name__} should be is {value!r}.")
    found = cast("Mapping[str, object]", value)
    for name in [*(name for name in names if name not in later or name in found), *found]:
        if name not in found or name not in names:
            what = "lacks" if name in names else "has, and should not,"
            raise ConfigError(f"{place!r} {what} {name!r}; write it again with `hotswap fit`.")
        if not _is_of(str(names[name]), name, found[name]):
            raise ConfigError(f"{name} is {found[name]!r} in {place!r}, which makes no sense.")
    return dict(found)


def _is_of(kind: str, name: str, value: object) -> bool:
    if kind not in ("int", "float"):
        return kind != "str" or isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float if kind == "float" else int):
        return False
    return isfinite(value) and (value > 0 or not name.endswith("bytes_per_s"))


def _kernels(
    name: str, memory_gb: int, a: tuple[float, float], b: tuple[float, float], *rest: float, host_ms: float
) -> DeviceProfile:
    """A profile in milliseconds: `max(a0 + a1 n, b0 + b1 n) + c0 + c1 B + c2 ctx + p1 S + p2 s^2 + host`."""
    c0, c1, c2, p1, p2 = (value / 1e3 for value in rest)
    return DeviceProfile(
        name=name,
        memory_bytes=memory_gb * _GB,
        floor_s=(a[0] + host_ms) / 1e3,
        floor_token_s=a[1] / 1e3,
        base_s=(b[0] + host_ms) / 1e3,
        token_s=b[1] / 1e3,
        decode_s=c0,
        request_s=c1,
        context_token_s=c2,
        prefill_token_s=p1,
        prefill_square_s=p2,
        load_bytes_per_s=50e9,
        unload_s=0.02,
        kv_bytes_per_s=20e9,
    )


_AIC = "AIConfigurator's operator tables for {}, fitted; host time from BLIS"
_AIC_ERROR = (
    "linear part 2.6 to 5.8 % in the mean, up to 20 % at the knee; decode attention 1 to 4 % of a step, with "
    "one request of 8k up to 57 %; host time assumed"
)
_TP_ERROR = f"{_AIC_ERROR}; attention within prompts up to 48 % of that term"

_LLAMA_7B = 13_476_839_424
_LLAMA_8B, _LLAMA_70B = 16_060_522_496, 141_107_412_992
_KV_7B, _KV_8B, _KV_70B = 524_288, 131_072, 327_680


def _measured(
    device: DeviceProfile,
    weight_bytes: int,
    kv_bytes_per_token: int,
    source: str,
    error: str,
    kv_blocks: int = 0,
) -> Profile:
    free = int(0.9 * device.memory_bytes) - weight_bytes
    blocks = kv_blocks or max(1, free // (16 * kv_bytes_per_token))
    return Profile(
        device=replace(
            device, memory_bytes=max(device.memory_bytes, weight_bytes + blocks * 16 * kv_bytes_per_token)
        ),
        weight_bytes=weight_bytes,
        kv_blocks=blocks,
        kv_bytes_per_token=kv_bytes_per_token,
        source=source,
        error=error,
    )


_A10 = DeviceProfile(
    name="a10",
    memory_bytes=24 * _GB,
    floor_s=0.0,
    base_s=0.0075,
    token_s=0.272e-3,
    request_s=0.141e-3,
    context_token_s=1.82e-6,
    decode_s=0.0244,
    prefill_square_s=6.83e-9,
    load_bytes_per_s=12e9,
    kv_bytes_per_s=2.5e9,
)

PROFILES: dict[str, Profile] = {
    "a10-llama-7b": _measured(
        _A10,
        _LLAMA_7B,
        _KV_7B,
        "fitted to the means of Sun et al., Llumnix, OSDI 2024, figure 11 (vLLM 0.1.7)",
        "means within 3.2 % at the 12 points of the fit",
        kv_blocks=785,
    ),
    "a10-llama-7b-vllm-0.2": _measured(
        replace(
            _A10,
            base_s=0.00558,
            token_s=0.2028e-3,
            request_s=0.0832e-3,
            context_token_s=1.45e-6,
            decode_s=0.02512,
            prefill_square_s=5.09e-9,
            handover_s=0.012,
        ),
        _LLAMA_7B,
        _KV_7B,
        "the points of Sun et al., Llumnix, OSDI 2024, figure 10 (vLLM 0.2.0)",
        "prefill within 2 %; decode is exact at 8192 tokens, and split from there by a roofline; copies at "
        "once within 7.5 %, pauses within 4 ms up to 2048 tokens, 7 and 11 ms too short at 4096 and 8192",
        kv_blocks=785,
    ),
    "a40-llama-2-7b": _measured(
        DeviceProfile(
            name="a40",
            memory_bytes=48 * _GB,
            floor_s=0.02603,
            floor_token_s=0.0533e-3,
            base_s=0.0096,
            token_s=0.1235e-3,
            request_s=0.0,
            context_token_s=0.753e-6,
            load_bytes_per_s=20e9,
            kv_bytes_per_s=10e9,
        ),
        _LLAMA_7B,
        _KV_7B,
        "linear operators as measured by Vidur; attention by a roofline; host time from BLIS",
        "unknown; attention takes 1 to 1.95 times the roofline that is taken here",
    ),
    "a5000-opt-6.7b": _measured(
        DeviceProfile(
            name="a5000",
            memory_bytes=24 * _GB,
            floor_s=0.0354,
            base_s=0.0096,
            token_s=0.16e-3,
            request_s=0.0,
            context_token_s=0.0,
            load_bytes_per_s=20e9,
            kv_bytes_per_s=10e9,
        ),
        13_316_947_968,
        _KV_7B,
        "28.2 tokens/s of Hugging Face generation, from ServerlessLLM's repository; prefill slope assumed",
        "unknown beyond one request: the measurement has no batches",
    ),
    "a100-llama-3.1-8b": _measured(
        _kernels(
            "a100",
            80,
            (10.02, 0.0418),
            (-0.93, 0.05602),
            0.65,
            0.0059,
            48.6e-6,
            1.79e-3,
            1.296e-6,
            host_ms=1.15,
        ),
        _LLAMA_8B,
        _KV_8B,
        _AIC.format("vLLM 0.14"),
        _AIC_ERROR,
    ),
    "l40s-llama-3.1-8b": _measured(
        _kernels(
            "l40s", 48, (22.72, 0.0253), (-15.5, 0.0639), 0.30, 0.0, 84.3e-6, 1.08e-3, 1.340e-6, host_ms=1.15
        ),
        _LLAMA_8B,
        _KV_8B,
        _AIC.format("vLLM 0.14"),
        _AIC_ERROR,
    ),
    "h100-llama-3.1-8b": _measured(
        _kernels(
            "h100",
            80,
            (5.76, 0.00595),
            (-3.57, 0.02006),
            0.36,
            0.00347,
            38.7e-6,
            0.90e-3,
            0.311e-6,
            host_ms=1.15,
        ),
        _LLAMA_8B,
        _KV_8B,
        _AIC.format("vLLM 0.24"),
        _AIC_ERROR,
    ),
    "h200-llama-3.1-8b": _measured(
        _kernels(
            "h200",
            141,
            (4.33, 0.00669),
            (-2.83, 0.01955),
            0.38,
            0.00375,
            27.9e-6,
            0.88e-3,
            0.321e-6,
            host_ms=1.15,
        ),
        _LLAMA_8B,
        _KV_8B,
        _AIC.format("vLLM 0.24"),
        _AIC_ERROR,
    ),
    "4xh100-llama-3.1-70b": _measured(
        _kernels(
            "4xh100",
            320,
            (14.17, 0.0263),
            (-9.31, 0.06492),
            0.94,
            0.00096,
            26.3e-6,
            1.64e-3,
            0.313e-6,
            host_ms=2.69,
        ),
        _LLAMA_70B,
        _KV_70B,
        _AIC.format("vLLM 0.24"),
        _TP_ERROR,
    ),
    "2xh200-llama-3.1-70b": _measured(
        _kernels(
            "2xh200",
            282,
            (19.35, 0.0315),
            (-8.85, 0.10523),
            0.97,
            0.00439,
            34.5e-6,
            2.18e-3,
            0.817e-6,
            host_ms=2.69,
        ),
        _LLAMA_70B,
        _KV_70B,
        _AIC.format("vLLM 0.24"),
        _AIC_ERROR,
    ),
}
"""By name: the device, and the model whose steps were measured."""
