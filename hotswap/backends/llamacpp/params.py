"""What llama.cpp is asked for a request: one token at a time, by rules for its position."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hotswap.backends.bad_words import BadWords
from hotswap.request import Request
from hotswap.sampling import Sampling

__all__ = ["SURELY", "Steps", "unsupported"]

_FIELDS = ["tokens", "completion_probabilities", "timings/cache_n"]
# The order of `Sampling`: biases, penalties, temperature, cuts. llama.cpp's own cuts before the temperature.
_SAMPLERS = ["penalties", "temperature", "top_k", "top_p", "min_p"]
_MANY_LOGPROBS = 256
SURELY = 1e6  # added to the logit of a token that is to come
_MOST_SEED = (1 << 32) - 1  # which llama.cpp takes for none


def unsupported(sampling: Sampling) -> list[str]:
    """Return the fields of `Sampling` that llama.cpp does not have as they are documented, for a request.

    Bad words come as token ids.
    """
    fields = ["bad_words", "prompt_logprobs", "logprobs_of"]
    if sampling.repetition_penalty != 1.0:  # llama.cpp's own count prompts; by biases they come before it
        fields += ["presence_penalty", "frequency_penalty"]
    return fields


class Steps:
    """The steps of one request: what llama.cpp is asked for at each position.

    Each token is a task of its own that continues the slot's sequence, with a seed of its own, so that what
    comes at a position depends on the tokens before it, the request's seed and the position alone.

    Args:
        request: The request, with what was generated elsewhere.
        ends: Its end tokens, which may not come before `min_tokens`.
        vocabulary: How many token ids the model has.
        most_tokens: How long it may grow, prompt included.
        reuses_prefix: Whether the first step may take what the slot has computed for another request.
    """

    def __init__(
        self,
        request: Request,
        ends: frozenset[int],
        vocabulary: int,
        most_tokens: int,
        *,
        reuses_prefix: bool,
    ) -> None:
        self._sampling, self._ends, self._vocabulary = request.sampling, ends, vocabulary
        self._index, self._continues = len(request.generated), reuses_prefix
        self._tokens, self._added = request.tokens, list[int]()
        self._prompt = bytearray(json.dumps(request.tokens, separators=(",", ":")).encode()[1:-1])
        words = request.sampling.bad_words_ids
        self._never = {*request.sampling.suppress_tokens, *(word[0] for word in words if len(word) == 1)}
        self._bad_words = BadWords((word for word in words if len(word) > 1), request.generated)
        self._counts = Counter(request.generated)
        self._constant = json.dumps(_constant(request.sampling, most_tokens), separators=(",", ":")).encode()[
            1:
        ]

    def prefill(self, slot: int, num_present: int, num_tokens: int) -> Iterator[bytes]:
        """Yield llama.cpp's requests to compute the prompt, all but the last `num_tokens` of it at most.

        Each computes so many tokens, after those that the slot has.
        """
        start = num_present if self._continues else 0
        for end in range(start + num_tokens, len(self._tokens), num_tokens):
            asked = {
                "id_slot": slot,
                "cache_prompt": self._continues,
                "prompt": self._tokens[:end],
                "n_predict": 0,
                "response_fields": _FIELDS,
            }
            self._continues = True
            yield json.dumps(asked, separators=(",", ":")).encode()

    def body(self, slot: int) -> bytes:
        """Return llama.cpp's request for the next token."""
        changing = {
            "id_slot": slot,
            "cache_prompt": self._continues,
            "logit_bias": self._biases(),
            **({"seed": _seed(self._sampling.seed or 0, self._index)} if self._sampling.is_random else {}),
        }
        head = json.dumps(changing, separators=(",", ":")).encode()[:-1]
        return b"".join((head, b',"prompt":[', self._prompt, b"],", self._constant))

    def logprobs_bodies(self, slot: int, end_token: int) -> Iterator[bytes]:
        """Yield llama.cpp's requests for the log-probabilities of the position, each of more tokens.

        llama.cpp tells none with a token that is a part of a character. They do not depend on the token, so
        another one comes in its place, which has no text.
        """
        for count in (_MANY_LOGPROBS, self._vocabulary):
            asked = {
                "id_slot": slot,
                "cache_prompt": True,
                "prompt": [*self._tokens, *self._added],
                "n_predict": 1,
                "return_tokens": True,
                "temperature": 0,
                "samplers": [],
                "logit_bias": [(end_token, SURELY)],
                "n_probs": min(count, self._vocabulary),
                "response_fields": _FIELDS,
            }
            yield json.dumps(asked, separators=(",", ":")).encode()

    def allows(self, token: int) -> bool:
        """Whether the rules of the position let a token come; if not, they have left none."""
        if forced := self._forced():
            return token in forced
        return token not in self._forbidden()

    def add(self, token: int) -> None:
        """Go on to the next position."""
        self._index += 1
        self._continues = True
        self._added.append(token)
        self._prompt += f",{token}".encode()
        self._bad_words.add_token(token)
        self._counts[token] += 1

    def _biases(self) -> list[tuple[int, float | bool]]:
        """Return what is added to logits; false forbids a token."""
        sampling, biases = self._sampling, dict(self._sampling.logit_bias)
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, count in self._counts.items():
                penalty = sampling.presence_penalty + count * sampling.frequency_penalty
                biases[token] = biases.get(token, 0.0) - penalty
        forced = self._forced()
        forbidden = set(range(self._vocabulary)).difference(forced) if forced else self._forbidden()
        allowed = ((token, bias) for token, bias in biases.items() if token not in forbidden)
        return [*allowed, *((token, False) for token in sorted(forbidden))]

    def _forced(self) -> tuple[int, ...]:
        is_last = self._index == self._sampling.max_tokens - 1
        return self._sampling.forced_end_tokens if is_last else ()

    def _forbidden(self) -> set[int]:
        forbidden: set[int] = self._never.union(self._bad_words.completing())
        if self._index < self._sampling.min_tokens:
            forbidden |= self._ends
        if not self._index:
            forbidden.update(self._sampling.begin_suppress_tokens)
        return forbidden


def _constant(sampling: Sampling, most_tokens: int) -> dict[str, Any]:
    """Return what is the same for all positions of a request."""
    asked: dict[str, Any] = {
        "n_predict": 1,
        "stream": False,
        "return_tokens": True,
        "response_fields": _FIELDS,
        "samplers": _SAMPLERS,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": most_tokens if sampling.repetition_penalty != 1.0 else 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if sampling.logprobs is not None:
        asked["n_probs"] = max(1, sampling.logprobs)
    return asked


def _seed(seed: int, index: int) -> int:
    """Return llama.cpp's seed of a position."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _MOST_SEED
