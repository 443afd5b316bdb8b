"""Memory that comes and goes below addresses: by a stand-in for the CUDA driver, which keeps its rules."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hotswap.backends.torch.device_pages import CudaDriver, PagedRange, driver_for
from hotswap.errors import BackendMissing, ConfigError, OutOfMemory
from tests.backends.torch.host_pages import HostDriver

GRANULE = 2 << 20


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver(ModuleType):
    """The calls of `cuda.bindings.driver` that are used, over addresses that have no memory.

    Attributes:
        fails: The name of a call that fails.
        handles: The sizes of allocations that are neither released nor mapped, by handle.
        mapped: The sizes of mapped parts, by address.
        readable: The addresses of parts that the device may read and write.
        reserved: The sizes of reserved ranges, by address.
    """

    CUresult = Status
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.fails = ""
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.readable: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.num_made = 0

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def answer(self, name: str, act: Callable[[], Any] = lambda: None) -> tuple[Any, ...]:
        if name == self.fails:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY, None)
        result = act()
        return (Status.CUDA_SUCCESS,) if result is None else (Status.CUDA_SUCCESS, result)

    def cuMemGetAllocationGranularity(self, prop: Any, option: int) -> tuple[Any, ...]:
        assert (prop.type, prop.location.type, prop.location.id, option) == (1, 1, 1, 0)
        return self.answer("cuMemGetAllocationGranularity", lambda: GRANULE)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        assert size % GRANULE == 0 < size
        assert (alignment, address, flags) == (GRANULE, 0, 0)
        start = 1 << 40

        def reserve() -> int:
            self.reserved[start] = size
            return start

        return self.answer("cuMemAddressReserve", reserve)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.reserved.pop(address) == size
        assert not self.mapped
        return self.answer("cuMemAddressFree")

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        assert size % GRANULE == flags == 0

        def create() -> int:
            self.num_made += 1
            self.handles[self.num_made] = size
            return self.num_made

        return self.answer("cuMemCreate", create)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        assert self.handles[handle] == size
        assert address not in self.mapped
        assert offset == flags == 0
        return self.answer("cuMemMap", lambda: self.mapped.update({address: size}))

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        del self.handles[handle]
        return self.answer("cuMemRelease")

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        (granted,) = access
        assert (granted.flags, granted.location.id, count) == (3, 1, 1)
        assert self.mapped[address] == size
        return self.answer("cuMemSetAccess", lambda: self.readable.add(address))

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.mapped.pop(address) == size, "a part is unmapped as it was mapped"
        self.readable.discard(address)
        return self.answer("cuMemUnmap")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return driver


def test_parts_have_memory_that_the_device_may_use_until_they_are_unmapped(driver: Driver) -> None:
    pages = PagedRange(CudaDriver(torch.device("cuda:1")), 8 * GRANULE)
    assert not driver.mapped
    pages.map(2 * GRANULE, 2 * GRANULE)
    pages.map(2 * GRANULE, 2 * GRANULE)
    pages.map(6 * GRANULE, GRANULE)
    assert driver.mapped == {pages.address + 2 * GRANULE: 2 * GRANULE, pages.address + 6 * GRANULE: GRANULE}
    assert driver.readable == driver.mapped.keys()
    assert not driver.handles, "memory goes with its mapping"
    assert repr(pages) == "<PagedRange [6,291,456 of 16,777,216 bytes have memory]>"
    pages.unmap(2 * GRANULE)
    pages.unmap(0)
    assert pages.mapped_bytes == sum(driver.mapped.values()) == GRANULE


def test_a_range_that_is_dropped_frees_its_memory_and_its_addresses(driver: Driver) -> None:
    pages = PagedRange(CudaDriver(torch.device("cuda:1")), 4 * GRANULE)
    pages.map(0, GRANULE)
    del pages
    gc.collect()
    assert not driver.mapped
    assert not driver.reserved


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_the_device_lacks_leaves_nothing(driver: Driver, call: str) -> None:
    pages = PagedRange(CudaDriver(torch.device("cuda:1")), 4 * GRANULE)
    driver.fails = call
    with pytest.raises(OutOfMemory, match=f"{call} failed on cuda:1 with CUDA_ERROR_OUT_OF_MEMORY"):
        pages.map(0, GRANULE)
    assert not driver.handles
    assert not driver.mapped
    assert not pages.mapped_bytes
    driver.fails = ""
    pages.map(0, GRANULE)
    assert driver.mapped


def test_a_device_without_virtual_memory_and_a_missing_package_are_told(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.fails = "cuMemGetAllocationGranularity"
    with pytest.raises(ConfigError, match="cannot map memory"):
        CudaDriver(torch.device("cuda:1"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(BackendMissing, match="cuda-bindings"):
        CudaDriver(torch.device("cuda:1"))
    assert driver_for(torch.device("cpu")) is None


def test_tensors_keep_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostDriver()
    pages = PagedRange(driver, 4 * driver.granule_bytes)
    pages.map(0, driver.granule_bytes)
    tensor = pages.tensor()
    del pages
    gc.collect()
    tensor[: driver.granule_bytes] = 7
    assert tensor[: driver.granule_bytes].sum() == 7 * driver.granule_bytes
    del tensor
    gc.collect()
    assert not driver.parts
    assert not driver.reserved
