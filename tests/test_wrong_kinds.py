"""Arguments of a wrong kind are refused by a typed error that names the argument, wherever one is given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hotswap.policies
from hotswap import Adapter, Chat, Fleet, MigrationLimits, Model, Sampling, SwapLimits
from hotswap.abc import Router, Scheduler
from hotswap.backends.kv_stores import HostKVStore, NvmeKVStore, SharedKVStore
from hotswap.backends.stores import NvmeStore, PinnedStore, SharedStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from hotswap.checks import shown
from hotswap.errors import ConfigError, HotswapError, InvalidRequest
from hotswap.policies import LeastLoadedRouter
from hotswap.profiling import Profile
from hotswap.simulation import Trace
from tests.runtime.support import Idle, models, sim_fleet, store_of


def ascii_of(value: Any) -> str:
    """A value as the name of a test, though an int may have too many digits to be shown."""
    return shown(value)[:20]


KINDS: list[Any] = [
    *("x", 5, 1.5, None, object(), [1], {}, (), b"x", True, math.nan, -1, 10**400, int, lambda: 0),
]


def fleet(**more: Any) -> Fleet:
    parts: dict[str, Any] = {
        "engines": (),
        "store": store_of("a"),
        "models": models("a"),
        "router": LeastLoadedRouter(),
        "scheduler": Idle(),
    }
    return Fleet(**{**parts, **more})


def model(**more: Any) -> Model:
    return Model(**{"id": "a", **more})


def adapter(**more: Any) -> Adapter:
    return Adapter(**{"id": "a", "model": "m", **more})


def chat(**more: Any) -> Chat:
    return Chat(**{"messages": [{"role": "user", "content": "hi"}], **more})


MADE: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (Model, model),
    (Adapter, adapter),
    (SwapLimits, SwapLimits),
    (MigrationLimits, MigrationLimits),
    (Sampling, Sampling),
    (Chat, chat),
    (Fleet, fleet),
]
CASES = [(make, name) for made, make in MADE for name in inspect.signature(made).parameters]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_a_value_of_any_kind_is_taken_or_refused_by_a_typed_error(
    make: Callable[..., Any], name: str
) -> None:
    for value in KINDS:
        with suppress(HotswapError):
            make(**{name: value})


GIVEN: dict[str, Any] = {"scheduler": Idle(), "pins": {"e0": "m"}, "cooldown_s": 1.0, "target": 1.0}
POLICIES = [
    (policy, name)
    for policy in vars(hotswap.policies).values()
    if isinstance(policy, type) and issubclass(policy, Router | Scheduler) and not inspect.isabstract(policy)
    for name, of in inspect.signature(policy).parameters.items()
    if of.kind is not inspect.Parameter.VAR_POSITIONAL
]


@pytest.mark.parametrize(("policy", "name"), POLICIES)
def test_a_policy_refuses_what_is_no_argument_of_its_by_name(policy: type[Any], name: str) -> None:
    needed = {
        name: GIVEN[name]
        for name, of in inspect.signature(policy).parameters.items()
        if of.default is inspect.Parameter.empty and of.kind is not inspect.Parameter.VAR_POSITIONAL
    }
    policy(**needed)
    wrong: list[Any] = [object(), [1], b"x", math.nan]
    for value in wrong:
        with pytest.raises(ConfigError, match=name):
            policy(**{**needed, name: value})


ENGINE = [name for name in inspect.signature(TorchEngine).parameters if name not in ("id", "skeletons")]


@pytest.mark.parametrize("name", ENGINE)
def test_an_engine_refuses_what_is_none_by_name(name: str) -> None:
    wrong: list[Any] = ["x", object(), [1], {}, b"x", math.nan, -1, int]
    for value in wrong:
        with pytest.raises(ConfigError, match=name):
            TorchEngine("e0", **{name: value})


@pytest.mark.parametrize(
    "size", ["much", -1, 1.5, True, [1], b"1 GiB", "8 MiTB", 1 << 63, "9" * 5000, 10**5000], ids=ascii_of
)
def test_a_store_refuses_what_is_no_size_by_name(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="budget is"):
        PinnedStore(size)
    with pytest.raises(ConfigError, match="chunk_bytes is"):
        NvmeStore(tmp_path, chunk_bytes=size)
    with pytest.raises(ConfigError, match="capacity is"):
        HostKVStore(size)


TAKES_A_PATH: list[tuple[str, Callable[[Any], object]]] = [
    ("root", NvmeStore),
    ("root", lambda path: convert("source", path, model_id="m")),
    ("directory", lambda path: SharedStore(path, "1 GiB")),
    ("directory", lambda path: NvmeKVStore(path, "1 GiB")),
    ("directory", lambda path: SharedKVStore(path, "1 GiB")),
    ("path", Profile.read),
    ("path", Trace.read),
    ("source of 'a'", lambda path: Model("a", path)),
]


@pytest.mark.parametrize(("name", "take"), TAKES_A_PATH)
@pytest.mark.parametrize("path", ["a\0b", Path("a\0b"), "\ud800", 5, b"x", [1]], ids=ascii)
def test_what_is_no_path_is_refused_by_name(name: str, take: Callable[[Any], object], path: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        take(path)


@pytest.mark.parametrize("name", ["tracer_provider", "meter_provider", "on_swap", "on_migration"])
@pytest.mark.parametrize("value", ["x", 5, object(), [print]], ids=["text", "int", "object", "list"])
def test_a_fleet_refuses_providers_and_callbacks_that_are_none_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        fleet(**{name: value})


@pytest.mark.parametrize("weight", ["x", None, [1], math.nan, math.inf, 0, -1.0, True], ids=repr)
def test_a_weight_is_a_number_over_0(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight of 'a' is"):
        Model("a", weight=weight)


@pytest.mark.parametrize("source", [5, b"x", [1], {}], ids=repr)
def test_a_source_is_a_path(source: Any) -> None:
    with pytest.raises(ConfigError, match="source of 'a' is"):
        Model("a", source)
    with pytest.raises(ConfigError, match="source of adapter 'a' is"):
        Adapter("a", "m", source)


async def test_a_field_that_sampling_has_not_is_named() -> None:
    async with sim_fleet("a") as opened:
        with pytest.raises(InvalidRequest, match="no field 'bogus'"):
            opened.models.sampling("a", bogus=1)
