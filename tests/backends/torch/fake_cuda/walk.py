"""Walks the CUDA path of an engine with tensors that have a shape and a device and no values.

In a process of its own: it replaces parts of `torch.cuda`. A walk fails where a value is read on the host,
where tensors of two devices meet, where a kernel gets an argument on the host, where host memory is used
before a copy has ended, and where an unload leaves memory in use. Writes the result of each walk as JSON.

    python -m tests.backends.torch.fake_cuda.walk GUARD WALK...

A walk is an architecture, "+" and its kind, and perhaps "=" and a fault that is planted: "llama+life=a step
reads a value". Kinds: `life` is the life of models in engines (module `life`); the others are the parts
below an engine (module `parts`), `steps` with the kernels of attention, `gathered` without, `fp8` with FP8
weights.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import nullcontext

import anyio
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hotswap.backends.torch import attention
from tests.backends.torch.fake_cuda.driver import Copies, Driver
from tests.backends.torch.fake_cuda.faults import planted
from tests.backends.torch.fake_cuda.life import StagingStore, live, run_inline
from tests.backends.torch.fake_cuda.parts import walk_parts
from tests.backends.torch.hybrids import HYBRIDS
from tests.backends.torch.zoo import CONFIGS

_LIMIT_S = 100.0


def main() -> None:
    """Walk, and write what was launched, or the error."""
    _, guard, *walks = sys.argv
    ctypes.CDLL(guard)
    driver = Driver()
    driver.install()
    run_inline(driver)
    sys.stdout.write(json.dumps({walk: _result(walk, driver) for walk in walks}))


def _result(walk: str, driver: Driver) -> dict[str, object]:
    path, _, fault = walk.partition("=")
    name, _, kind = path.partition("+")
    driver.reset()
    vars(attention)["is_right"] = lambda layer: kind != "gathered"  # a trial compares values
    try:
        with planted(fault) if fault else nullcontext():
            _walk(name, kind, driver)
    except BaseException as exc:
        import traceback

        traceback.print_exc()
        return {"error": repr(exc), "launches": {}}
    return {"error": "", "launches": dict(driver.launches)}


def _walk(name: str, kind: str, driver: Driver) -> None:
    config = (CONFIGS | HYBRIDS)[name]()
    if kind == "life":
        store = StagingStore(config, driver)
        with FakeTensorMode(allow_non_fake_inputs=True), Copies(driver):
            anyio.run(_live, store)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
            walk_parts(config, fp8=kind == "fp8")


async def _live(store: StagingStore) -> None:
    with anyio.fail_after(_LIMIT_S):
        await live(store)


if __name__ == "__main__":
    main()
