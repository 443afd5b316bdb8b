"""Stands for a GPU and its driver, in a process of its own, since it replaces parts of `torch.cuda`.

Launches check the device of their arguments. Streams remember copies for which the host has not waited.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch._subclasses.fake_tensor as fakes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotswap.kernels import calls
from hotswap.kernels import targets as kernel_targets

__all__ = ["DEVICE", "FREE_BYTES", "STEP_BYTES", "Copies", "Driver", "Stream"]

DEVICE = torch.device("cuda:0")
PROPERTIES = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100", multi_processor_count=132, gcnArchName="", total_memory=80 << 30
)
# What is free on the device, and the most that steps allocate there: no tensor has memory.
FREE_BYTES, STEP_BYTES = 24 << 20, 8 << 20


class Stream:
    """Copies that the host did not wait for are under way until `synchronize`.

    Attributes:
        reads: The host memory that copies under way read, as addresses.
        writes: The storages on the host that copies under way write to.
        num_seen: After the former use of how many allocations its work begins.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.reads: list[range] = []
        self.writes: set[int] = set()
        self.num_seen = 0
        driver.streams.append(self)

    def wait_stream(self, _: Stream) -> None:
        self.num_seen = self._driver.num_allocated

    def synchronize(self) -> None:
        self.reads.clear()
        self.writes.clear()


class Driver:
    """The stand-in.

    Attributes:
        launches: How often each kernel was launched.
        streams: All streams, the default one first.
        current: The one to which work is given.
        num_allocated: How many storages were allocated on the device.
        allocated: The number of each, in the order of their allocation.
        num_reads: How often the host has read what was sampled.
        host_buffers: The storages on the host that copies are read from.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was done."""
        self.launches: Counter[str] = Counter()
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.num_allocated = 0
        self.allocated: dict[int, int] = {}
        self.num_reads = 0
        self.host_buffers: set[int] = set()

    def install(self) -> None:
        """Replace what needs a driver: properties, launches, streams, pinned memory and addresses."""
        cuda: Any = torch.cuda
        cuda.get_device_properties = lambda device=None: PROPERTIES
        cuda.get_device_capability = lambda device=None: (PROPERTIES.major, PROPERTIES.minor)
        cuda.device = lambda device: nullcontext()
        cuda.mem_get_info = lambda device=None: (FREE_BYTES, PROPERTIES.total_memory)
        cuda.memory_reserved = cuda.memory_allocated = lambda device=None: 0
        cuda.reset_peak_memory_stats = lambda device=None: None
        cuda.max_memory_allocated = lambda device=None: STEP_BYTES
        cuda.Stream, cuda.stream = lambda device=None: Stream(self), self._on
        cuda.current_stream = lambda device=None: self.current
        vars(fakes)["CONSTANT_NUMEL_LIMIT"] = -1  # tensors that are made of numbers have no values
        call_class: Any = calls.Call
        call_class.launch = lambda call: self.launch(call)
        relaunched = _relaunched(self)
        for module in [module for name, module in sys.modules.items() if name.startswith("hotswap")]:
            if getattr(module, "Relaunch", None) is calls.Relaunch:
                vars(module)["Relaunch"] = relaunched
        vars(kernel_targets)["_launches"] = lambda device: True
        tensors: Any = Tensor
        tensors.pin_memory = lambda self, *_: self
        address = tensors.data_ptr
        tensors.data_ptr = lambda self: 256 if isinstance(self, fakes.FakeTensor) else address(self)
        numpy = tensors.numpy
        tensors.numpy = lambda given: (
            self._read(given) if isinstance(given, fakes.FakeTensor) else numpy(given)
        )

    def launch(self, call: calls.Call) -> None:
        """Stand for the launch of a kernel: its tensors must be on the device."""
        for argument in call.arguments:
            if isinstance(argument, Tensor) and argument.device != DEVICE:
                raise AssertionError(f"{call.kernel} gets an argument on {argument.device}.")
        self.launches[call.kernel.partition(":")[2]] += 1

    def host_memory(self, size_bytes: int) -> Tensor:
        """Return host memory without values, from which copies of the device may be read."""
        made = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        self.host_buffers.add(storage(made))
        return made

    def note_copy(self, target: Tensor, source: Tensor, *, waits: bool) -> None:
        """Note a copy that is given to the current stream; `waits` is whether the host waits for its end."""
        stream = self.current
        if target.device == DEVICE and source.device.type == "cpu":
            number = self.allocated.get(storage(target), 0)
            if stream is not self.streams[0] and stream.num_seen < number:
                raise AssertionError("A copy may begin before the former use of its memory has ended.")
            if not isinstance(source, fakes.FakeTensor):
                stream.reads.append(range(source.data_ptr(), source.data_ptr() + source.nbytes))
        elif target.device.type == "cpu" and source.device == DEVICE:
            stream.writes.add(storage(target))
        if waits:
            stream.synchronize()

    def note_allocation(self, made: Tensor) -> None:
        """Note memory whose former user may still be under way on the default stream."""
        self.num_allocated += 1
        self.allocated[storage(made)] = self.num_allocated

    def check_reuse(self, memory: memoryview) -> None:
        """Fail if a copy under way reads host memory, which is about to be reused."""
        start = np.frombuffer(memory, np.uint8).ctypes.data
        for stream in self.streams:
            if any(read.start < start + memory.nbytes and start < read.stop for read in stream.reads):
                raise AssertionError("A chunk is reused before its copy has ended.")

    def _read(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return an array for host memory that copies of the device were made to."""
        if storage(tensor) not in self.host_buffers:
            raise AssertionError("A value is read on the host.")
        if any(storage(tensor) in stream.writes for stream in self.streams):
            raise AssertionError("A copy is read on the host before it has ended.")
        return np.zeros(tuple(tensor.shape), np.uint8)

    @contextmanager
    def _on(self, stream: Stream) -> Generator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a driver of copies and allocations within the block."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._driver = driver

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        if func is torch.ops.aten.copy_.default:
            asynchronous = args[2] if len(args) > 2 else given.get("non_blocking")
            self._driver.note_copy(args[0], args[1], waits=not asynchronous)
        elif func is torch.ops.aten._to_copy.default:
            self._driver.note_copy(out, args[0], waits=not given.get("non_blocking"))
        elif func is torch.ops.aten.empty.memory_format and out.device == DEVICE:
            self._driver.note_allocation(out)
        return out


def storage(tensor: Tensor) -> int:
    """Return what tells the storage of a tensor from others."""
    untyped: Any = tensor.untyped_storage()
    return int(untyped._cdata)


def _relaunched(driver: Driver) -> type:
    class Relaunched:
        """Stands for a repeated launch."""

        def __init__(self, call: calls.Call, program: object, num_tensors: int) -> None:
            self._call = call

        def launch(self, *tensors: Tensor) -> None:
            driver.launch(calls.Call(self._call.kernel, self._call.grid, tensors, {}))

    return Relaunched
