"""The tokens of a simulated model: a pure function of model, adapter, prompt, seed and position."""

from __future__ import annotations

import hashlib
import math
from array import array
from dataclasses import dataclass, field

from hotswap.backends.sim.sequence import Sequence
from hotswap.errors import InvalidRequest, PromptTooLong
from hotswap.model import ModelCard
from hotswap.request import FinishReason, Request, ScoredPrompt, TokenLogprob, new_token
from hotswap.stream import TokenQueue

__all__ = ["SimGeneration", "Streamed", "check_request", "expected_tokens"]

VOCABULARY = 32_000
_MASK = (1 << 64) - 1


class SimGeneration:
    """What one request generates: `token(n)` for any position, and when it ends.

    Tokens depend neither on earlier tokens nor on the batch, so a request that continues on another engine
    gets those of an undisturbed run. Sampling (`temperature > 0`) adds the seed; greedy requests ignore it.
    """

    __slots__ = ("_ends", "_max_context_tokens", "_request", "_salt", "_vocabulary")

    def __init__(self, request: Request, model: ModelCard, vocabulary: int = VOCABULARY) -> None:
        sampling = request.sampling
        digest = hashlib.blake2b(
            array("q", request.prompt).tobytes(), digest_size=8, key=_key(request, model)
        )
        self._salt = int.from_bytes(digest.digest(), "little")
        if sampling.temperature > 0:
            self._salt = _mixed(self._salt, (sampling.seed or 0) + 1)
        self._request = request
        self._vocabulary = vocabulary
        self._max_context_tokens = model.max_context_tokens
        eos = () if sampling.ignore_eos else model.eos_token_ids
        self._ends = frozenset(sampling.stop_token_ids + eos)

    def token(self, position: int) -> int:
        """The token at `position` of the generation, counted from 0."""
        return _mixed(self._salt, position) % self._vocabulary

    def finish_reason(self, position: int, token: int) -> FinishReason | None:
        """Why the generation ends with this token; `None` if it goes on."""
        sampling = self._request.sampling
        length = position + 1
        if token in self._ends and length >= sampling.min_tokens:
            return "stop"
        full = len(self._request.prompt) + length >= self._max_context_tokens
        return "length" if full or length >= sampling.max_tokens else None

    def logprobs(self, token: int) -> tuple[float | None, tuple[TokenLogprob, ...]]:
        """Return made-up log-probabilities, if the request asks for some: its token is the most probable."""
        count = self._request.sampling.logprobs
        if count is None:
            return None, ()
        ids = enumerate(self._top_ids(token, count))
        return _logprob(0), tuple(TokenLogprob(id=id, logprob=_logprob(place)) for place, id in ids)

    def prompt_logprobs(self) -> ScoredPrompt | None:
        """Return the same of the prompt."""
        count = self._request.sampling.prompt_logprobs
        if count is None:
            return None
        first, *rest = self._request.prompt
        scored = ScoredPrompt(first)
        logprobs = [_logprob(place) for place in range(min(count, self._vocabulary))]
        for token in rest:
            scored.add(token, _logprob(0), self._top_ids(token, count), logprobs)
        return scored

    def _top_ids(self, token: int, count: int) -> list[int]:
        return [(token + place) % self._vocabulary for place in range(min(count, self._vocabulary))]


@dataclass(slots=True, eq=False)
class Streamed(Sequence):
    """A sequence whose tokens go to a stream."""

    generation: SimGeneration
    tokens: TokenQueue = field(default_factory=TokenQueue)

    @classmethod
    def of(cls, request: Request, model: ModelCard, vocabulary: int) -> Streamed:
        """Return the sequence of a request for a model."""
        return cls(request, SimGeneration(request, model, vocabulary))

    def generate(self) -> bool:
        token = self.generation.token(self.position)
        reason = self.generation.finish_reason(self.position, token)
        if not self.position:
            self.tokens.prompt_logprobs = self.generation.prompt_logprobs() or ()
        logprob, top = self.generation.logprobs(token)
        self.tokens.put(new_token(token, self.position, reason, "", logprob, top))
        self.position += 1
        return reason is not None

    def token(self, position: int) -> int:
        return self.generation.token(position)

    def reuse(self, num_tokens: int) -> None:
        self.tokens.num_reused_tokens = num_tokens

    def close(self, error: Exception | None = None) -> None:
        self.tokens.close(error)


def expected_tokens(request: Request, model: ModelCard, *, vocabulary: int = VOCABULARY) -> list[int]:
    """Return what an undisturbed `SimEngine` generates from position `len(request.generated)` on."""
    generation = SimGeneration(request, model, vocabulary)
    tokens: list[int] = []
    position = len(request.generated)
    while True:
        tokens.append(generation.token(position))
        if generation.finish_reason(position, tokens[-1]):
            return tokens
        position += 1


def check_request(request: Request, model: ModelCard, vocabulary: int | None) -> None:
    """Refuse a request that cannot get a token of the model.

    Raises:
        InvalidRequest: it has all its tokens, or asks for several samples, or names a token that lies not
            below `vocabulary`; `None` if its tokens are known to.
        PromptTooLong: it leaves no room in the model's context.
    """
    if request.sampling.n > 1:
        raise InvalidRequest(f"Request {request.id!r} asks an engine for several samples; ask a fleet.")
    if request.remaining_tokens < 1:
        raise InvalidRequest(f"Request {request.id!r} has all its tokens; it needs no engine any more.")
    if vocabulary is not None:
        request.check_vocabulary(vocabulary)
    request.check_prompt_logprobs()
    if request.num_tokens >= model.max_context_tokens:
        raise PromptTooLong(
            f"Request {request.id!r} has {request.num_tokens} tokens, but the context of {model.id!r} "
            f"holds {model.max_context_tokens}. Shorten the prompt."
        )


def _key(request: Request, model: ModelCard) -> bytes:
    name = model.id if request.adapter is None else f"{model.id}\0{request.adapter}"
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _logprob(place: int) -> float:
    """The log-probability of the token of a rank: one half, a quarter, ..."""
    return -math.log(2) * (place + 1)


def _mixed(salt: int, number: int) -> int:
    """Steele et al., Fast splittable pseudorandom number generators, 2014, figure 17: 64 well mixed bits."""
    z = (salt + number * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
