"""`hotswap fit`, as the command line calls it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio

from hotswap.errors import ConfigError, ShardMissing
from hotswap.model import Model, ModelCard
from hotswap.profiling.fit import Fit, Measurements, fit_profile
from hotswap.profiling.measuring import Shapes, measure_engine
from hotswap.request import ModelId

__all__ = ["MOST_MEAN_ERROR", "check_error", "fit", "fitted"]

MOST_MEAN_ERROR = 1.0  # of what a step takes; a machine by itself has a few hundredths

_QUICK = Shapes(batches=(1, 4, 8), contexts=(16, 128), steps=5, repeats=2, rounds=2, loads=1)


def fit(arguments: argparse.Namespace, progress: Callable[[int, int], None]) -> Fit:
    """Measure a `TorchEngine` with a model of a store, fit a profile and write it to a file.

    Raises:
        ConfigError: the file cannot be written, the engine has no room for any step, or the fit is off by
            more than a step takes in the mean: no profile is written then.
        ShardMissing: there is no such store or model.
        HotswapError: whatever the engine raises.
    """
    if not arguments.root.is_dir():
        raise ShardMissing(
            f"There is no store at {str(arguments.root)!r}; add a model with `hotswap store add`."
        )
    out: Path = arguments.out
    if not out.parent.is_dir():
        raise ConfigError(f"There is no directory {str(out.parent)!r} for the profile; make it.")
    fit = fit_profile(
        anyio.run(partial(_measured, arguments, progress)), name=arguments.name or arguments.device
    )
    check_error(fit)
    out.write_text(fit.profile.as_json(), encoding="utf-8")
    return fit


def check_error(fit: Fit) -> None:
    """Refuse a profile that predicts nothing.

    Raises:
        ConfigError: it is off by more than a step takes in the mean, or its error is no number.
    """
    if not fit.mean_error <= MOST_MEAN_ERROR:
        raise ConfigError(
            f"The fit is off by {fit.mean_error:.0%} in the mean and {fit.max_error:.0%} at most, so no "
            "profile is written: other programs used this machine, or --quick has measured too little. "
            "Measure again, with nothing beside it."
        )


def fitted(fit: Fit) -> dict[str, object]:
    """The fit in short, as plain values."""
    return {
        "device": fit.profile.device.name,
        "num_steps": fit.num_steps,
        "mean_error": fit.mean_error,
        "max_error": fit.max_error,
    }


async def _measured(arguments: argparse.Namespace, progress: Callable[[int, int], None]) -> Measurements:
    from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
    from hotswap.backends.torch import TorchEngine

    shapes = replace(_QUICK if arguments.quick else Shapes(), token_budget=arguments.token_budget)
    engine = TorchEngine(
        "fit",
        device=arguments.device,
        kv_tokens=arguments.kv_tokens,
        token_budget=arguments.token_budget,
        max_requests=min(arguments.token_budget, 2 * max(shapes.batches)),
        threads=arguments.threads,
    )
    store = TieredStore(PinnedStore(arguments.host), NvmeStore(arguments.root))
    async with store, engine:
        manifest = await store.manifest(ModelId(arguments.model))
        card = ModelCard.of(Model(arguments.model), manifest)
        shapes = replace(shapes, vocabulary=min(shapes.vocabulary, manifest.vocabulary or shapes.vocabulary))
        return await measure_engine(engine, card, store, shapes, progress=progress)
