"""The numbers of a step, sent to its device by copies for which the host does not wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["send", "to_device"]

# Integers of 64 bits in 16 bytes. Triton builds another program for tensors that are not aligned to 16 bytes.
_ALIGNED = 2


def to_device(numbers: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, on a CPU without a copy.

    The copy to a GPU comes from pinned memory, so that the host does not wait for the device.
    """
    sent = torch.as_tensor(numbers)
    return sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent.to(device)


def send(
    longs: Mapping[str, Sequence[int]], ints: Mapping[str, Sequence[int]], device: torch.device
) -> dict[str, Tensor]:
    """Return vectors on a device, `longs` as int64 and `ints` as int32, all parts of one tensor."""
    sizes = {name: len(values) for name, values in longs.items()}
    sizes |= {name: -(-len(values) // 2) for name, values in ints.items()}
    starts, total = dict[str, int](), 0
    for name, size in sizes.items():
        starts[name] = total
        total += -(-size // _ALIGNED) * _ALIGNED
    numbers = np.zeros(max(total, _ALIGNED), np.int64)  # an empty tensor has no view as int32
    halves = numbers.view(np.int32)
    for name, values in longs.items():
        numbers[starts[name] : starts[name] + len(values)] = values
    for name, values in ints.items():
        halves[2 * starts[name] : 2 * starts[name] + len(values)] = values
    sent = to_device(numbers, device)
    sent_halves = sent.view(torch.int32)
    found = {name: sent[starts[name] : starts[name] + len(values)] for name, values in longs.items()}
    for name, values in ints.items():
        found[name] = sent_halves[2 * starts[name] : 2 * starts[name] + len(values)]
    return found
