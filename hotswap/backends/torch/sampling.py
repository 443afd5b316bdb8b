"""Token sampling: the next token is a function of the logits, the seed and the position alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hotswap.sampling import Sampling

__all__ = ["Sampler", "choose"]

_MASK = (1 << 64) - 1


class Sampler:
    """Chooses the tokens of one request.

    Args:
        sampling: The request's sampling parameters.
        stop_ids: Its end tokens, which are masked before `sampling.min_tokens` tokens were generated.
        seen: The tokens so far, prompt included; `add_token` adds the later ones.
        num_prompt: The length of the prompt; `None` if no token was generated yet.
    """

    def __init__(
        self, sampling: Sampling, stop_ids: Iterable[int], seen: Sequence[int], num_prompt: int | None = None
    ) -> None:
        self._sampling = sampling
        self._stop_ids = tuple(stop_ids)
        self._seen = set(seen) if sampling.repetition_penalty != 1.0 else None
        counts = bool(sampling.presence_penalty or sampling.frequency_penalty)
        generated = seen[len(seen) if num_prompt is None else num_prompt :]
        self._generated = Counter(generated) if counts else None

    def add_token(self, token: int) -> None:
        """Count a generated token for the penalties."""
        if self._seen is not None:
            self._seen.add(token)
        if self._generated is not None:
            self._generated[token] += 1

    def is_plain(self, index: int) -> bool:
        """Whether the token at position `index` of the generation is the argmax of unmodified logits."""
        changed = self._seen is not None or self._generated is not None or self._sampling.logit_bias
        return self._sampling.temperature == 0 and not changed and not self._forbids_stop(index)

    def choose(self, logits: Tensor, index: int) -> int:
        """Return the token at position `index` of the generation, from fp32 logits `[vocabulary]`."""
        logits = self._penalised(logits.clone())
        if self._forbids_stop(index):
            logits[[token for token in self._stop_ids if token < len(logits)]] = float("-inf")
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        scaled = _top_p(
            _top_k(logits.div_(self._sampling.temperature), self._sampling.top_k), self._sampling.top_p
        )
        # The largest of logits plus Gumbel noise is a draw from the softmax (Maddison et al., 2014).
        return int(
            (scaled + _gumbel(len(scaled), self._sampling.seed or 0, index).to(scaled.device)).argmax()
        )

    def _forbids_stop(self, index: int) -> bool:
        return bool(self._stop_ids) and index < self._sampling.min_tokens

    def _penalised(self, logits: Tensor) -> Tensor:
        for token, bias in self._sampling.logit_bias:
            if token < len(logits):
                logits[token] += bias
        if self._seen:
            ids = torch.tensor(sorted(self._seen), device=logits.device)
            ids = ids[ids < len(logits)]
            seen, penalty = logits[ids], self._sampling.repetition_penalty
            logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self._generated:
            counts = {token: count for token, count in sorted(self._generated.items()) if token < len(logits)}
            ids = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
            logits[ids] -= self._sampling.frequency_penalty * times + self._sampling.presence_penalty
        return logits


def choose(logits: Tensor, samplers: Sequence[Sampler], indices: Sequence[int]) -> list[int]:
    """Return each request's next token; row *i* of `logits` is position `indices[i]` of its generation."""
    logits = logits.float()
    tokens = [int(token) for token in logits.argmax(-1).cpu()]
    for row, (sampler, index) in enumerate(zip(samplers, indices, strict=True)):
        if not sampler.is_plain(index):
            tokens[row] = sampler.choose(logits[row], index)
    return tokens


def _top_k(logits: Tensor, k: int) -> Tensor:
    if not 0 < k < len(logits):
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[-1], float("-inf"))


def _top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest tokens whose probabilities reach `p` (Holtzman et al., arXiv:1904.09751, 3.1)."""
    if p >= 1.0:
        return logits
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return logits.index_fill(0, order[before >= p], float("-inf"))


def _gumbel(size: int, seed: int, index: int) -> Tensor:
    """Return Gumbel noise, computed on the CPU for equal values on all devices, in fp64 so it is finite."""
    generator = torch.Generator().manual_seed(_mixed(seed, index))
    uniform = torch.rand(size, generator=generator, dtype=torch.float64).clamp_(min=1e-300)
    return uniform.log_().neg_().log_().neg_().float()


def _mixed(seed: int, index: int) -> int:
    """Mix two numbers into a seed; close pairs give unrelated noise (SplitMix64, Steele et al. 2014)."""
    mixed = ((seed & _MASK) * 0x9E3779B97F4A7C15 + index + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) & (_MASK >> 1)
