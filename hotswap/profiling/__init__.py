"""How long a device takes: engines measured through their interface, latency models fitted, profiles known.

`measure_engine` times steps and loads of any engine, `fit_profile` turns that into a `Profile`, and
`PROFILES` has those of published measurements. Simulated engines take as long as their profile says. Names
load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotswap.profiling.fit import Fit, Measurements, StepSample, fit_profile
    from hotswap.profiling.measuring import Shapes, measure_engine
    from hotswap.profiling.profiles import PROFILES, Profile

__all__ = [
    "PROFILES",
    "Fit",
    "Measurements",
    "Profile",
    "Shapes",
    "StepSample",
    "fit_profile",
    "measure_engine",
]

_MODULES = {
    "fit": ("Fit", "Measurements", "StepSample", "fit_profile"),
    "measuring": ("Shapes", "measure_engine"),
    "profiles": ("PROFILES", "Profile"),
}


def __getattr__(name: str) -> object:
    for home, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
