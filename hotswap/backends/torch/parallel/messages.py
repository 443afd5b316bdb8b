"""What the engine's process and its ranks say to each other, over a pair of connected sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hotswap.backends.torch.forward import Work
from hotswap.backends.torch.kv import LayerShape
from hotswap.model import TensorSpec

__all__ = ["Ask", "Bind", "Command", "Done", "Drop", "Failed", "OpenCache", "Reply", "Setup", "Step", "Told"]


@dataclass(frozen=True, slots=True)
class Setup:
    """The first thing a rank is told.

    Attributes:
        rank: Which it is, of `tp` × `pp`.
        rendezvous: A file where the ranks find each other.
        device: Where it computes.
        threads: For how many CPU threads.
        invariant: Whether bits may not depend on the batch.
        depth: How many steps may be under way.
        timeout_s: How long a rank waits for another.
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
    """Take the weights that lie in memory which is sent along, and where logits go, likewise.

    Attributes:
        config: The text of the model's config.
        specs: What lies in the memory of the weights.
        size_bytes: Of that memory.
        logits_shape: Of the other: slots, rows, logits of a token; in fp32.
    """

    config: str
    specs: tuple[TensorSpec, ...]
    size_bytes: int
    logits_shape: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class OpenCache:
    """Make KV blocks, in place of those there are; without `layers` as layers are first seen."""

    num_blocks: int
    block_tokens: int
    layers: tuple[LayerShape, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Compute; the logits go to a slot of the shared memory. Only the ranks of the last stage answer.

    As a trial, all ranks answer; and a trial may be `eager`, by the model's own attention: one piece alone.
    """

    work: Work
    slot: int
    is_trial: bool = False
    eager: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of model and blocks, or of nothing if there is nothing."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Say how you are: the answer tells it."""


Command: TypeAlias = Setup | Bind | OpenCache | Step | Drop | Ask


@dataclass(frozen=True, slots=True)
class Told:
    """A command with its number; replies carry it back."""

    number: int
    command: Command


@dataclass(frozen=True, slots=True)
class Done:
    """A command was carried out.

    Attributes:
        number: Of the command.
        layers: What each layer of the stage keeps of a token, as far as they were seen.
        called: The layers that called attention in a step, in order.
        sent_bytes: What this rank has sent to the next stage since it started.
    """

    number: int
    layers: tuple[LayerShape, ...] = ()
    called: tuple[int, ...] = ()
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A command was not carried out.

    Attributes:
        number: Of the command.
        kind: The name of the error's class.
        message: What it says.
        traceback: Where it came from.
        ends: Whether the rank ends for it.
    """

    number: int
    kind: str
    message: str
    traceback: str
    ends: bool


Reply: TypeAlias = Done | Failed
