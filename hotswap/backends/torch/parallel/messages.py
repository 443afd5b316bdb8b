"""The messages between the engine's process and its ranks.

To ranks of this machine they go over a pair of connected sockets; `link_messages` encodes them for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from hotswap.backends.torch.forward import Work
from hotswap.backends.torch.kv import LayerShape
from hotswap.model import TensorSpec
from hotswap.request import ModelId

__all__ = [
    "Bind",
    "BindRead",
    "Command",
    "Done",
    "Drop",
    "Failed",
    "GetStats",
    "NumberedCommand",
    "OpenCache",
    "ReadTotal",
    "ReadWeights",
    "Reply",
    "RestoreKV",
    "SaveKV",
    "Setup",
    "Step",
]


@dataclass(frozen=True, slots=True)
class Setup:
    """The first command to a rank: initialize.

    Attributes:
        rank: The number of the rank, of `tp` × `pp`.
        tp: The number of tensor-parallel ranks of a stage.
        pp: The number of stages.
        rendezvous: The place of the `Rendezvous` at which the ranks find each other.
        device: The rank's device.
        threads: Its number of CPU threads.
        invariant: Whether steps are batch-invariant.
        depth: The maximum number of steps in flight.
        timeout_s: The time that a rank waits for another one, in seconds.
    """

    rank: int
    tp: int
    pp: int
    rendezvous: str
    device: str
    threads: int
    invariant: bool
    depth: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind a model. Two file descriptors follow: the memory of the weights, and the memory for logits.

    Attributes:
        config: The text of the model's config.
        specs: The tensors in the memory of the weights.
        size_bytes: The size of that memory.
        logits_shape: The shape of the memory for logits, in fp32: slots, rows, logits of a token.
    """

    config: str
    specs: tuple[TensorSpec, ...]
    size_bytes: int
    logits_shape: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """To the host of a stage on another node: read the weights of its ranks from the store of that node.

    Attributes:
        model: The model.
        digest: Of the engine's manifest, from `digest_of`; the host's must be the same.
        dtype: The dtype to which weights of the model's main dtype are converted; `None` keeps it.
    """

    model: ModelId
    digest: str
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class BindRead:
    """To the host of a stage on another node: have its ranks bind what it has read."""


@dataclass(frozen=True, slots=True)
class OpenCache:
    """Allocate KV blocks and recurrent states, and free existing ones.

    Attributes:
        num_blocks: The number of KV blocks.
        block_tokens: Tokens per block.
        num_slots: The number of requests and snapshots that have states, where layers keep any.
        layers: What a request keeps in each layer of the stage; without them memory is allocated at the first
            write of each layer.
    """

    num_blocks: int
    block_tokens: int
    num_slots: int
    layers: tuple[LayerShape, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Compute a step, and write the logits to a slot of the shared memory.

    Attributes:
        work: The input of the step.
        slot: The slot for its logits.
        is_preflight: Whether all ranks reply, and not only those of the last stage.
        eager: Whether a preflight uses the model's own attention, for a single piece.
    """

    work: Work
    slot: int
    is_preflight: bool = False
    eager: bool = False


@dataclass(frozen=True, slots=True)
class SaveKV:
    """Reply with the content of KV blocks, or with the states in a slot.

    Attributes:
        blocks: The blocks.
        slot: The slot; `None` for blocks.
    """

    blocks: tuple[int, ...] = ()
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class RestoreKV:
    """Fill KV blocks that no request reads yet, or a slot that none has, with what `SaveKV` has replied.

    Attributes:
        blocks: The blocks.
        data: Their content.
        slot: The slot; `None` for blocks.
    """

    blocks: tuple[int, ...] = ()
    data: bytes = b""
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Release the model and its blocks, if there are any."""


@dataclass(frozen=True, slots=True)
class GetStats:
    """Do nothing but reply, with the counters of `Done`."""


Command: TypeAlias = (
    Setup | Bind | ReadWeights | BindRead | OpenCache | Step | SaveKV | RestoreKV | Drop | GetStats
)


@dataclass(frozen=True, slots=True)
class NumberedCommand:
    """A command with its number, which the reply repeats."""

    number: int
    command: Command


@dataclass(frozen=True, slots=True)
class ReadTotal:
    """What a host has read for `ReadWeights`, as `MeteredStore` counts it.

    Attributes:
        num_bytes: The bytes, of all ranks of the stage together.
        tier: The tier that had the last of them.
        buffered: Whether any went through the page cache.
    """

    num_bytes: int
    tier: str
    buffered: bool


@dataclass(frozen=True, slots=True)
class Done:
    """The reply to a command that succeeded.

    Attributes:
        number: The number of the command.
        layers: In a preflight, what a request keeps in each layer of the stage, for layers used so far.
        sent_bytes: The bytes that the rank has sent to the next stage since it started.
        read: What was read for a `ReadWeights`, in the reply of one rank of the stage; else `None`.
        data: The rank's part of what a `SaveKV` asks for.
    """

    number: int
    layers: tuple[LayerShape, ...] = ()
    sent_bytes: int = 0
    read: ReadTotal | None = None
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed:
    """The reply to a command that failed.

    Attributes:
        number: The number of the command.
        kind: The name of the error's class.
        message: The error's message.
        traceback: The error's traceback, as text.
        ends: Whether the rank ends because of the error.
    """

    number: int
    kind: str
    message: str
    traceback: str
    ends: bool


Reply: TypeAlias = Done | Failed
