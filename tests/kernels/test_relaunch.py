"""A launch that is kept passes what Triton's own launch passes to the driver; for sm_90, without a device."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import LazyDict
from triton.runtime import driver

from hotswap.errors import ConfigError
from hotswap.kernels.fp8_gemm import Fp8Product, Workspace, fp8_linear, launch, pack, product
from hotswap.kernels.targets import TARGETS, Device
from tests.kernels.fp8_weights import input_of, weight_of

GPU = Device("a test GPU", TARGETS["sm_90"], 132)
CPU = torch.device("cpu")


class RecordingDriver:
    """Compiles for sm_90 and records the arguments of launches.

    Attributes:
        launches: The arguments of each launch.
    """

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": TARGETS["sm_90"].shared_bytes},
        load_binary=lambda *arguments: (object(), object(), 32, 0, 1024),
    )

    _devices = count(100)  # Triton keeps the programs of each device, which launch by its first driver

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self._device = next(self._devices)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: object, metadata: object) -> Any:
        def run(*arguments: Any) -> None:
            self.launches.append(arguments)

        return run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    made = RecordingDriver()
    monkeypatch.setattr(launch, "kernel_device", lambda device: GPU)
    monkeypatch.setattr(product, "kernel_device", lambda device: GPU)
    monkeypatch.setattr(driver, "_active", made)  # `driver.reset_active` needs a device
    return made


def comparable(arguments: tuple[Any, ...]) -> list[object]:
    """Return tensors by what a program depends on: inputs and results have other addresses each time."""
    return [
        (given.dtype, given.data_ptr() % 16) if isinstance(given, torch.Tensor) else given
        for given in arguments
        if not isinstance(given, LazyDict)  # what hooks are told, made anew for each launch
    ]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("width", "is_split"), [(1024, True), (256, False)])
def test_a_kept_launch_has_the_arguments_of_the_first(
    recorded: RecordingDriver, width: int, is_split: bool, with_bias: bool
) -> None:
    weight, space = pack(weight_of(192, width, 128, torch.bfloat16)), Workspace(CPU)
    bias = input_of(1, 192, torch.bfloat16)[0] if with_bias else None
    multiply = Fp8Product(weight, bias, space)
    for rows in (1, 7, 40, 200):
        for _ in range(2):
            x = input_of(rows, width, torch.bfloat16)
            found = multiply(x.view(1, rows, width))
            assert found.shape == (1, rows, 192)
            fp8_linear(x, weight, bias, workspace=space)
            kept, own = recorded.launches[-2:]
            assert comparable(kept) == comparable(own)
            tensors = [given for given in kept if isinstance(given, torch.Tensor)]
            assert [tensors[0].data_ptr(), tensors[4].data_ptr()] == [x.data_ptr(), found.data_ptr()]
            assert tensors[1] is weight.qweight
            assert (kept[1] > 1) is is_split


def test_a_kept_launch_gets_aligned_inputs_and_checks_their_width(recorded: RecordingDriver) -> None:
    weight = pack(weight_of(192, 1024, 128, torch.bfloat16))
    multiply = Fp8Product(weight, None, Workspace(CPU))
    wide = input_of(4, 1030, torch.bfloat16)
    for _ in range(2):
        multiply(wide[:, 1:1025])
        given = next(each for each in recorded.launches[-1] if isinstance(each, torch.Tensor))
        assert given.data_ptr() % 16 == 0
        assert torch.equal(given, wide[:, 1:1025])
    with pytest.raises(ConfigError, match="x is"):
        multiply(input_of(8, 512, torch.bfloat16))  # as many numbers as four rows
