"""What a simulated engine computes: requests as sequences of tokens, and the steps that advance them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from hotswap.hardware import DeviceProfile
from hotswap.request import Request

__all__ = ["Sequence", "Step", "Turnover"]


@dataclass(slots=True, eq=False)
class Sequence(ABC):
    """A request inside an engine; `num_cached` of its `num_tokens` lie in KV blocks.

    `position` is that of the next token in the generation. A sequence that was preempted, at `preempted_s`,
    has `num_to_recompute` tokens to compute again; 0 once it has. Where prefixes are reused, `names` are
    those of its prompt's blocks, and the first `num_named` of its blocks are shared.
    """

    request: Request
    position: int = field(init=False, default=0)
    num_prompt: int = field(init=False)
    num_cached: int = field(init=False, default=0)
    num_blocks: int = field(init=False, default=0)
    num_named: int = field(init=False, default=0)
    names: tuple[int, ...] = field(init=False, default=())
    num_to_recompute: int = field(init=False, default=0)
    preempted_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.num_prompt, self.position = len(self.request.prompt), len(self.request.generated)

    @property
    def num_tokens(self) -> int:
        """Prompt and everything generated so far."""
        return self.num_prompt + self.position

    @property
    def num_pending(self) -> int:
        """Tokens still to compute before the next can be generated: 1 in decode, more in prefill."""
        return self.num_prompt + self.position - self.num_cached

    @abstractmethod
    def generate(self) -> bool:
        """Emit the next token; return whether it was the last."""

    @abstractmethod
    def token(self, position: int) -> int:
        """Return the generated token at a position."""

    @abstractmethod
    def reuse(self, num_tokens: int) -> None:
        """Note that so many tokens were found in KV blocks."""

    @abstractmethod
    def close(self, error: Exception | None = None) -> None:
        """End the sequence, after its last token or by an error."""


class Step:
    """One pass over the device: how many tokens of which sequence.

    Attributes:
        chunks: Tokens of each sequence.
        prefills: Those of sequences that need more than one before they generate.
        num_tokens: All of them.
        num_joined: How many sequences decode for the first time, where that takes time.
        num_left: How many sequences decoded in the step before and do not in this one, likewise.
        num_resizes: How often the KV pool was resized since the step before.
    """

    __slots__ = ("chunks", "num_joined", "num_left", "num_resizes", "num_tokens", "prefills")

    def __init__(self) -> None:
        self.chunks: dict[Sequence, int] = {}
        self.prefills: dict[Sequence, int] = {}
        self.num_tokens = self.num_joined = self.num_left = self.num_resizes = 0

    @property
    def num_context(self) -> int:
        """Cached tokens that the step attends to."""
        return sum(sequence.num_cached for sequence in self.chunks)

    def seconds(self, profile: DeviceProfile) -> float:
        """How long it takes on a device."""
        return self.steady_s(profile) + self.turnover_s(profile)

    def turnover_s(self, profile: DeviceProfile) -> float:
        """How much of that is for sequences that joined or left, and for resizes of the KV pool."""
        resizes_s = self.num_resizes * profile.kv_resize_s
        return profile.turnover_s(joined=self.num_joined, left=self.num_left) + resizes_s

    def steady_s(self, profile: DeviceProfile) -> float:
        """How long it would take if the same had decoded before."""
        prefills = [(s.num_cached, count) for s, count in self.prefills.items()]
        return profile.step_s(
            tokens=self.num_tokens,
            batch=len(self.chunks),
            context=self.num_context,
            prefill=sum(count for _, count in prefills),
            prefill_squares=sum(count * (count + 2 * cached) for cached, count in prefills),
            chunks=len(prefills),
        )

    def add(self, sequence: Sequence, count: int) -> None:
        """Compute `count` more tokens of a sequence."""
        self.chunks[sequence] = count
        self.num_tokens += count
        if sequence.num_pending > 1:
            self.prefills[sequence] = count

    def drop(self, sequence: Sequence) -> None:
        """Leave a sequence out after all."""
        self.num_tokens -= self.chunks.pop(sequence, 0)
        self.prefills.pop(sequence, None)


class Turnover:
    """Counts, in each step, the sequences that have joined its decodes and those that have left them."""

    def __init__(self) -> None:
        self._decoded: set[Sequence] = set()  # in the last step that had decodes, unless idle since

    def count(self, step: Step) -> None:
        """Set a step's counts; steps come in order, an empty one too."""
        decodes = step.chunks.keys() - step.prefills
        if decodes:
            num_stayed = len(decodes & self._decoded)
            step.num_joined = len(decodes) - num_stayed
            # A batch of which none stays is not compacted.
            step.num_left = len(self._decoded) - num_stayed if num_stayed else 0
        if decodes or not step.num_tokens:
            self._decoded = decodes
