"""What a whole generation gives, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.request import FinishReason, ScoredPrompt, Token
from hotswap.runtime.active import Hop

__all__ = ["Completion", "Sample", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How many tokens a request had.

    Attributes:
        prompt_tokens: Those of its prompt, start tokens included.
        generated_tokens: Those generated, the end token included.
        reused_tokens: How many of the prompt's an engine had computed before, for another request.
    """

    prompt_tokens: int
    generated_tokens: int
    reused_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the generation."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One generation of a prompt.

    Attributes:
        text: Its text; empty without a tokenizer.
        tokens: Its tokens, each with its own part of the text.
        finish_reason: `"stop"` for an end token or a stop string, `"length"` for `max_tokens` or the end of
            the context.
        matched_stop: The stop string, or the end token, that ended it; `None` if none did.
        usage: How many tokens it had.
        seed: What chance depended on: asking again with it draws the same; `None` of a greedy request.
        hops: Where it ran, in order, and from which token on.
        queue_s: Seconds from its arrival until it first ran.
        ttft_s: Seconds from its arrival to its first token.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    seed: int | None
    hops: tuple[Hop, ...]
    queue_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Sample):
    """The answer to a request: its first sample, and all of them.

    Attributes:
        usage: How many tokens the request had: the prompt once, and those generated of every sample.
        prompt_logprobs: Log-probabilities of the prompt's tokens, if they were asked for.
        samples: The samples that `Sampling.n` asks for, in order, the first included; mostly one.
    """

    prompt_logprobs: ScoredPrompt | tuple[()]
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, samples: tuple[Sample, ...], *, prompt_logprobs: ScoredPrompt | tuple[()] = ()) -> Completion:
        """Return the answer that consists of these samples, at least one."""
        first = samples[0]
        return cls(
            text=first.text,
            tokens=first.tokens,
            finish_reason=first.finish_reason,
            matched_stop=first.matched_stop,
            usage=_usage_of(samples),
            seed=first.seed,
            hops=first.hops,
            queue_s=first.queue_s,
            ttft_s=first.ttft_s,
            prompt_logprobs=prompt_logprobs,
            samples=samples,
        )


def _usage_of(samples: tuple[Sample, ...]) -> Usage:
    return Usage(
        prompt_tokens=samples[0].usage.prompt_tokens,
        generated_tokens=sum(sample.usage.generated_tokens for sample in samples),
        # The others find the prompt that the first has computed.
        reused_tokens=min(sample.usage.reused_tokens for sample in samples),
    )
