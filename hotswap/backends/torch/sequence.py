"""`Sequence`: the state of one request inside an engine, and `Chunk`: a part of it that a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.arrival import Arrival
from hotswap.backends.torch.forward import Piece
from hotswap.backends.torch.long_rope import LongRope
from hotswap.backends.torch.prompt_logprobs import PromptScores
from hotswap.backends.torch.sampling import Sampler
from hotswap.request import FinishReason

__all__ = ["Chunk", "Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request inside an engine.

    Attributes:
        ticket: Its number in order of arrival.
        tokens: Prompt and generated tokens.
        num_prompt: The length of the prompt, in tokens.
        max_tokens: The length of `tokens` at which the request ends.
        stop_ids: Token ids that end it.
        min_tokens: The number of generated tokens before which `stop_ids` do not end it.
        sampler: Chooses its tokens.
        adapter: The slot of its adapter; `None` without one.
        priority: Its priority; a higher one moves it ahead of requests that arrived before it.
        root: The prefix key of the weights that compute it, adapter included: `prefix.root_key`.
        blocks: Its block table. Only appended to while the request runs.
        num_computed: How many of `tokens` have their keys and values in `blocks`.
        num_reused: How many were found in the prefix cache at the first admission; `None` before that.
        keys: The prefix keys of its full blocks, as far as they were computed.
        scores: The log-probabilities of its prompt; `None` if they are not asked for, or told already.
        has_arrived: Whether a move or a restore holds blocks for it until it runs.
        arrival: What it takes over when it is admitted; `None` if nothing has arrived with states.
        slot: The slot of its recurrent states while it has blocks; requests that run have different ones.
        stops: The lengths at which a part of its prompt ends, so that its states are saved there; the last
            is the end of its last full block, from which on they are saved after each block.
        latest: The key of the snapshot that it made last, beside those of its prompt.
        long_rope: When its RoPE factors for long texts are taken; `None` if factors depend on no length.
        long_root: Its prefix key from then on.
    """

    ticket: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampler: Sampler
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    adapter: AdapterSlot | None = None
    priority: int = 0
    root: bytes = b""
    blocks: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_reused: int | None = None
    keys: list[bytes] = field(default_factory=list[bytes])
    scores: PromptScores | None = None
    has_arrived: bool = False
    arrival: Arrival | None = None
    slot: int = 0
    stops: tuple[int, ...] = ()
    latest: bytes | None = None
    long_rope: LongRope | None = None
    long_root: bytes = b""

    @property
    def num_unscored(self) -> int:
        """Rows to compute whose logits are needed for log-probabilities of the prompt."""
        return 0 if self.scores is None else max(0, self.num_prompt - 1 - self.num_computed)

    @property
    def num_reusable(self) -> int:
        """The length up to which its tokens may be found in the prefix cache, one more token included.

        A row that is found there has no logits, so that rows that are to be scored are computed.
        """
        return len(self.tokens) if self.scores is None else self.scores.num_scored

    @property
    def num_pending(self) -> int:
        """Tokens that are not computed yet; 1 while the request decodes."""
        return len(self.tokens) - self.num_computed

    def up_to_stop(self, num_tokens: int) -> int:
        """Return how many of its next tokens a step computes that has room for `num_tokens`."""
        ends = (stop for stop in self.stops if self.num_computed < stop)
        return min(num_tokens, next(ends, len(self.tokens)) - self.num_computed)

    @property
    def rope_length(self) -> int:
        """The length by which its RoPE factors are chosen; 0 where these depend on no length."""
        return 0 if self.long_rope is None else self.long_rope.length(self.num_prompt, len(self.tokens))

    @property
    def outgrows_keys(self) -> bool:
        """Whether its keys are to be computed anew, because it has grown too long for their RoPE factors."""
        is_long = self.long_rope is not None and self.rope_length > self.long_rope.limit
        return is_long and self.root != self.long_root

    @property
    def index(self) -> int:
        """The position of the next token among the generated ones, from 0."""
        return len(self.tokens) - self.num_prompt

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled token; return the finish reason if it is the last one, else `None`."""
        may_stop = self.index >= self.min_tokens
        self.tokens.append(token)
        self.sampler.add_token(token)
        if may_stop and token in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_tokens else None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The next `num_tokens` tokens of a request, computed in one step."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether a token is sampled after this chunk."""
        return self.num_tokens == self.sequence.num_pending

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.sequence.num_computed + self.num_tokens

    def piece(self) -> Piece:
        """Return the model input of the chunk; later changes of the sequence do not affect it."""
        sequence, start, end = self.sequence, self.sequence.num_computed, self.end
        scored = min(self.num_tokens, sequence.num_unscored)
        return Piece(
            sequence.tokens[start:end],
            start,
            sequence.blocks,
            self.is_last,
            sequence.adapter,
            scored,
            sequence.slot,
            sequence.rope_length,
        )
