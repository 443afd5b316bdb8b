"""Memory of a device that comes and goes below addresses that stay: for KV pools that grow and shrink.

A CPU has that by itself: pages are allocated when they are written, and `madvise` returns them. On a GPU the
driver's virtual memory management does it (CUDA Driver API, Virtual Memory Management): a range of addresses
is reserved for the largest pool, and memory is mapped to parts of it, in granules of 2 MiB mostly.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hotswap.errors import BackendMissing, ConfigError, OutOfMemory

__all__ = ["CudaDriver", "PageDriver", "PagedRange", "driver_for"]


class PageDriver(ABC):
    """Reserves addresses of one device, and maps memory to parts of them.

    Attributes:
        granule_bytes: Of what sizes and offsets of parts are multiples.
    """

    granule_bytes: int

    @abstractmethod
    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses, a multiple of the granule, and return the first.

        Raises:
            OutOfMemory: there are not so many.
        """

    @abstractmethod
    def free(self, address: int, size_bytes: int) -> None:
        """Release addresses that were reserved, to which nothing is mapped."""

    @abstractmethod
    def map(self, address: int, size_bytes: int) -> None:
        """Allocate memory and map it to a part; its content is arbitrary.

        Raises:
            OutOfMemory: the device has not so much.
        """

    @abstractmethod
    def unmap(self, address: int, size_bytes: int) -> None:
        """Free the memory of a part that was mapped as a whole, which nothing uses any more."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the device has finished what was launched. Blocking."""

    @abstractmethod
    def tensor(self, pages: PagedRange) -> Tensor:
        """Return the range as bytes, which keep it alive."""


class PagedRange:
    """Addresses of a device, of which parts have memory; used by one thread at a time.

    All is freed with the last reference, those of tensors included.

    Args:
        driver: Of the device.
        size_bytes: How long it is, a multiple of the granule.

    Attributes:
        address: The first address.
        size_bytes: How long it is.

    Raises:
        OutOfMemory: there are not so many addresses.
    """

    def __init__(self, driver: PageDriver, size_bytes: int) -> None:
        self.address, self.size_bytes = driver.reserve(size_bytes), size_bytes
        self._driver = driver
        self._parts: dict[int, int] = {}  # the size of each mapped part, by its offset
        weakref.finalize(self, _free, driver, self.address, size_bytes, self._parts)

    @property
    def mapped_bytes(self) -> int:
        """How much memory it has."""
        return sum(self._parts.values())

    def map(self, offset: int, size_bytes: int) -> None:
        """Give a part memory, unless it has some.

        Raises:
            OutOfMemory: the device has not so much.
        """
        if offset not in self._parts:
            self._driver.map(self.address + offset, size_bytes)
            self._parts[offset] = size_bytes

    def unmap(self, offset: int) -> None:
        """Return the memory of a part, if it has some: nothing on the device may use it any more."""
        size_bytes = self._parts.pop(offset, 0)
        if size_bytes:
            self._driver.unmap(self.address + offset, size_bytes)

    def tensor(self) -> Tensor:
        """Return all of it as bytes; those without memory must not be touched."""
        return self._driver.tensor(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __repr__(self) -> str:
        return f"<PagedRange [{self.mapped_bytes:,} of {self.size_bytes:,} bytes have memory]>"


def _free(driver: PageDriver, address: int, size_bytes: int, parts: dict[int, int]) -> None:
    driver.wait()
    for offset, part_bytes in parts.items():
        driver.unmap(address + offset, part_bytes)
    driver.free(address, size_bytes)


class CudaDriver(PageDriver):
    """Of a CUDA device, by `cuda-bindings`, which comes with torch for CUDA. It has not run on a GPU yet.

    Args:
        device: The device; torch has its context.

    Raises:
        BackendMissing: `cuda-bindings` is not installed.
        ConfigError: the device has no virtual memory management.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._api: Any = import_module("cuda.bindings.driver")
        except ImportError as exc:
            raise BackendMissing(
                "A device_budget on a GPU needs the package cuda-bindings of your CUDA; install that."
            ) from exc
        self._device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # which makes its context
            index = torch.cuda.current_device()
        api = self._api
        self._prop = api.CUmemAllocationProp()
        self._prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = index
        self._access = api.CUmemAccessDesc()
        self._access.location.type = self._prop.location.type
        self._access.location.id = self._prop.location.id
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        try:
            self.granule_bytes = int(self._call("cuMemGetAllocationGranularity", self._prop, least))
        except OutOfMemory as exc:
            raise ConfigError(f"{device} cannot map memory to reserved addresses: {exc}") from exc

    def reserve(self, size_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", size_bytes, self.granule_bytes, 0, 0))

    def free(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int) -> None:
        handle = self._call("cuMemCreate", size_bytes, self._prop, 0)
        try:
            self._call("cuMemMap", address, size_bytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
        try:
            self._call("cuMemSetAccess", address, size_bytes, [self._access], 1)
        except BaseException:
            self._call("cuMemUnmap", address, size_bytes)
            raise

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def tensor(self, pages: PagedRange) -> Tensor:
        return torch.as_tensor(pages, device=self._device)

    def _call(self, name: str, *arguments: object) -> Any:
        """Call the driver, and return what it returns beside its status.

        Raises:
            OutOfMemory: it fails.
        """
        status, *results = getattr(self._api, name)(*arguments)
        if status != self._api.CUresult.CUDA_SUCCESS:
            raise OutOfMemory(f"{name} failed on {self._device} with {status.name}.")
        return results[0] if results else None


@cache
def driver_for(device: torch.device) -> PageDriver | None:
    """Return the driver of a device; `None` for a CPU, whose pages come and go by themselves.

    Raises:
        BackendMissing, ConfigError: see `CudaDriver`.
    """
    return CudaDriver(device) if device.type == "cuda" else None
