"""The tensors of recurrent states: one slot for each running request and each snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from hotswap.backends.torch.buffers import host_bytes
from hotswap.backends.torch.recurrent.snapshots import StateCopy
from hotswap.kernels.recurrent import DTYPES, Spans, compile_for

__all__ = ["Group", "Span", "StatePool", "StateShape", "StepStates"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of a request in one layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """The size of the state of one request."""
        return prod(self.shape) * self.dtype.itemsize


class StatePool:
    """The states of all layers: `[num_slots, ...]` each.

    Args:
        num_slots: The number of requests that have a state at once, and of snapshots.
        device: The device of the tensors.
        layers: The states of each layer. Without them each is allocated when it is first taken.
        first_layer: The index of the first of `layers`, for a pipeline stage.
    """

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        layers: Sequence[Sequence[StateShape]] = (),
        *,
        first_layer: int = 0,
    ) -> None:
        self.num_slots, self.device = num_slots, device
        self._states: dict[tuple[int, int], Tensor] = {}
        for layer, states in enumerate(layers, first_layer):
            for number, state in enumerate(states):
                self._allocate(layer, number, state)

    @property
    def uses_kernels(self) -> bool:
        """Whether hotswap's kernels change the states in place."""
        return self.device.type == "cpu"

    @property
    def size_bytes(self) -> int:
        """The size of all slots."""
        return sum(state.nbytes for state in self._states.values())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the states."""
        return tuple(self._states.values())

    def shapes(self, layer: int) -> tuple[StateShape, ...]:
        """Return the states that a layer has taken so far."""
        taken = sorted(number for at, number in self._states if at == layer)
        states = [self._states[layer, number] for number in taken]
        return tuple(StateShape(tuple(state.shape[1:]), state.dtype) for state in states)

    def state(self, layer: int, number: int, shape: StateShape) -> Tensor:
        """Return the slots of one state of a layer, `[num_slots, ...]`."""
        found = self._states.get((layer, number))
        if found is None:
            found = self._allocate(layer, number, shape)
        assert (tuple(found.shape[1:]), found.dtype) == (shape.shape, shape.dtype), "it stays the same"
        return found

    @property
    def slot_bytes(self) -> int:
        """The size of the states of one request."""
        return sum(state[0].nbytes for state in self._states.values())

    @property
    def format(self) -> tuple[tuple[int, tuple[int, ...], str], ...]:
        """Each state of a request, in the order of `save`: its layer, shape and dtype."""
        return tuple(
            (layer, tuple(state.shape[1:]), str(state.dtype).removeprefix("torch."))
            for (layer, _), state in sorted(self._states.items())
        )

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states between slots on the device, in order."""
        for state in self._states.values():
            for copy in copies:
                state[copy.target].copy_(state[copy.source])

    def save(self, slot: int, out: Tensor) -> None:
        """Copy the states in a slot to host memory: `out` is uint8, `slot_bytes` long.

        Thread-safe, if no step continues the states meanwhile. Runs on the calling thread only, like
        `KVCache.save`.
        """
        if self.device.type != "cpu":
            self._save_staged(slot, out)
            return
        for state, part in self._parts(slot, out):
            part.numpy()[:] = state.numpy()

    def restore(self, slot: int, data: Tensor) -> None:
        """Fill a slot that no request has yet with data that `save` wrote. Thread-safe, like `save`."""
        if self.device.type != "cpu":
            self._restore_staged(slot, data)
            return
        for state, part in self._parts(slot, data):
            state.numpy()[:] = part.numpy()

    def clear(self, slot: int) -> None:
        """Zero a slot on a CPU that no request has yet, whose memory is allocated by the first write."""
        for state in self._states.values():
            state[slot].view(-1).view(torch.uint8).numpy().fill(0)

    @torch.inference_mode()
    def _save_staged(self, slot: int, out: Tensor) -> None:
        """Save by one copy from the device."""
        staging = torch.empty(len(out), dtype=torch.uint8, device=self.device)
        for state, part in self._parts(slot, staging):
            part.copy_(state)
        out.copy_(staging)

    @torch.inference_mode()
    def _restore_staged(self, slot: int, data: Tensor) -> None:
        """Restore by one copy to the device; `data` may be overwritten when this returns."""
        for state, part in self._parts(slot, data.to(self.device)):
            state.copy_(part)

    def _parts(self, slot: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each state in a slot as bytes, with its part of `data`."""
        at = 0
        for _, state in sorted(self._states.items()):
            content = state[slot].view(-1).view(torch.uint8)
            yield content, data[at : at + len(content)]
            at += len(content)

    def build_kernels(self) -> None:
        """Compile the kernels that compute with the states, so that no request waits for it. Blocking."""
        if self.uses_kernels:
            for dtype in {state.dtype for state in self._states.values()} & DTYPES:
                compile_for(dtype)

    def _allocate(self, layer: int, number: int, state: StateShape) -> Tensor:
        """Allocate without writing: a state is cleared when a request begins."""
        shape = (self.num_slots, *state.shape)
        if self.device.type == "cpu":
            made = host_bytes(self.num_slots * state.size_bytes).view(state.dtype).view(shape)
        else:
            made = torch.empty(shape, dtype=state.dtype, device=self.device)
        self._states[layer, number] = made
        return made


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one request in a step, the slot of its states, and whether these begin at zero."""

    slot: int
    first: int
    end: int
    is_new: bool


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Requests with the same number of rows in a step.

    Attributes:
        slots: `[n]`, their slots.
        rows: `[n * m]`, the rows of each request, one request after the other.
    """

    slots: Tensor
    rows: Tensor

    @property
    def num_requests(self) -> int:
        """*n*."""
        return len(self.slots)


class StepStates:
    """The states that one forward pass continues.

    Args:
        pool: Their tensors.
        requests: The rows of each request, contiguous from row 0 on.
        watches: Whether mixers compute in `BatchInvariantMode`, because the rest of the model does not.

    Attributes:
        layer: The layer that computes now.
        taken: How many states each layer has taken in this pass.
    """

    def __init__(self, pool: StatePool, requests: Sequence[Span], *, watches: bool = False) -> None:
        self.pool, self.requests, self.watches = pool, requests, watches
        self.layer = -1
        self.taken: dict[int, int] = {}

    @property
    def num_rows(self) -> int:
        """The number of rows that are no padding."""
        return self.requests[-1].end if self.requests else 0

    @cached_property
    def spans(self) -> Spans:
        """The requests as the kernels take them."""
        table = [(span.slot, span.first, span.end, int(span.is_new)) for span in self.requests]
        return Spans(torch.tensor(table, dtype=torch.int32).view(-1, 4), self.num_rows)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """All requests with one row, and each of the others."""
        single = [span for span in self.requests if span.end - span.first == 1]
        grouped = [single] if single else []
        grouped += [[span] for span in self.requests if span.end - span.first > 1]
        return tuple(
            Group(
                self._index([span.slot for span in group]),
                self._index([row for span in group for row in range(span.first, span.end)]),
            )
            for group in grouped
        )

    @cached_property
    def _new_slots(self) -> Tensor:
        return self._index([span.slot for span in self.requests if span.is_new])

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the slots of the next state of the layer that computes now.

        Kernels clear the states of new requests themselves; on other devices they are cleared here.
        """
        number = self.taken.get(self.layer, 0)
        self.taken[self.layer] = number + 1
        state = self.pool.state(self.layer, number, StateShape(shape, dtype))
        if not self.pool.uses_kernels and len(self._new_slots):
            state.index_fill_(0, self._new_slots, 0)
        return state

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.pool.device)
