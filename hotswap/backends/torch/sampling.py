"""Token sampling: the next token is a function of the logits, the seed and the position alone.

The rows of a step are sampled together, in one pass for each operation. The logits of a row are changed in
this order: the mask of a grammar, biases, penalties, tokens that may not come, temperature, `top_k`, `top_p`,
`min_p`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hotswap.backends.bad_words import BadWords
from hotswap.backends.torch.distribution import (
    Workspace,
    draw,
    keep_from,
    to_weights,
    top_k_threshold,
    top_p_threshold,
    uniform,
)
from hotswap.backends.torch.masks import Constraint, Mask, apply_mask
from hotswap.errors import HotswapError, InstanceError, InvalidRequest
from hotswap.request import TokenLogprob
from hotswap.sampling import Sampling

__all__ = ["Choice", "Sampler", "sample"]

_NEVER = -math.inf

_Change: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of a row, or why there is none.

    Attributes:
        token: The token id; -1 with an error.
        logprob: Its log-probability, if the request asks for it.
        top_logprobs: The most probable tokens, most probable first.
        error: Why the request cannot go on; the other rows are not affected.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    error: HotswapError | None = None


class Sampler:
    """The sampling parameters and the token counts of one request.

    Args:
        sampling: The request's sampling parameters.
        stop_ids: Its end tokens, which may not come before `sampling.min_tokens` tokens were generated.
        seen: The tokens so far, prompt included; `add_token` adds the later ones.
        num_prompt: The length of the prompt; `None` if no token was generated yet.
        constraint: What it may generate; `None` if anything.
    """

    def __init__(
        self,
        sampling: Sampling,
        stop_ids: Iterable[int],
        seen: Sequence[int],
        num_prompt: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.sampling, self.constraint = sampling, constraint
        generated = seen[len(seen) if num_prompt is None else num_prompt :]
        counts = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self.seen = _Counts(seen) if sampling.repetition_penalty != 1.0 else None
        self.generated = _Counts(generated) if counts else None
        self.biases = _biases(sampling.logit_bias) if sampling.logit_bias else None
        words = sampling.bad_words_ids
        self._bad_words = BadWords((word for word in words if len(word) > 1), generated)
        self._stop_ids = _ids(stop_ids)
        self._never = _ids([*sampling.suppress_tokens, *(word[0] for word in words if len(word) == 1)])
        self._changes = bool(
            self.seen or self.generated or sampling.logit_bias or sampling.suppress_tokens or words
        )

    def add_token(self, token: int) -> None:
        """Count a generated token."""
        for counts in (self.seen, self.generated):
            if counts is not None:
                counts.add(token)
        self._bad_words.add_token(token)
        if self.constraint is not None:
            self.constraint.add_token(token)

    def changes_logits(self, index: int) -> bool:
        """Whether the logits at position `index` are changed before a token is chosen."""
        return bool(
            self._changes
            or self.forced(index)
            or (index == 0 and self.sampling.begin_suppress_tokens)
            or self._may_not_stop(index)
        )

    def forced(self, index: int) -> tuple[int, ...]:
        """Return the tokens of which one must come at position `index`; none if any may."""
        return self.sampling.forced_end_tokens if index == self.sampling.max_tokens - 1 else ()

    def forbidden(self, index: int) -> Tensor:
        """Return the tokens that may not come at position `index`, int64; one may be named twice."""
        found = [self._never]
        if self._may_not_stop(index):
            found.append(self._stop_ids)
        if index == 0 and self.sampling.begin_suppress_tokens:
            found.append(_ids(self.sampling.begin_suppress_tokens))
        if completing := self._bad_words.completing():
            found.append(_ids(completing))
        return torch.cat(found) if len(found) > 1 else found[0]

    def _may_not_stop(self, index: int) -> bool:
        return bool(len(self._stop_ids)) and index < self.sampling.min_tokens


class _Counts:
    """How often each token occurs, in tensors that grow by doubling."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._places: dict[int, int] = {}
        counts: list[float] = []
        for token in tokens:
            if (place := self._places.setdefault(token, len(counts))) == len(counts):
                counts.append(0.0)
            counts[place] += 1
        room = max(64, 2 * len(counts))
        self._ids, self._counts = torch.zeros(room, dtype=torch.long), torch.zeros(room)
        self._ids[: len(counts)] = torch.tensor(list(self._places), dtype=torch.long)
        self._counts[: len(counts)] = torch.tensor(counts)

    def __bool__(self) -> bool:
        return True

    @property
    def ids(self) -> Tensor:
        """The tokens, `[distinct]`."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Tensor:
        """How often each occurs, `[distinct]`, fp32."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count a token."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._ids):
                self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
                self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
            self._ids[place] = token
        self._counts[place] += 1


def sample(
    logits: Tensor,
    samplers: Sequence[Sampler],
    indices: Sequence[int],
    space: Workspace | None = None,
    masks: Sequence[Mask | None] = (),
) -> list[Choice]:
    """Return the next token of each request.

    Args:
        logits: `[requests, vocabulary]`, of any floating dtype; not changed.
        samplers: Of each request.
        indices: The position of the token in its request's generation.
        space: Memory to compute in; `None` takes fresh memory.
        masks: Of each request, the tokens that may come; empty if none is constrained.
    """
    space = space or Workspace()
    # Rows that are drawn come first, so that all operations on them are on one block of memory.
    order = sorted(range(len(samplers)), key=lambda row: not samplers[row].sampling.is_random)
    rows = space.rows(len(order), logits.shape[1], logits.device)
    rows.copy_(logits if order == list(range(len(order))) else logits[order])
    placed = [(samplers[row], indices[row]) for row in order]
    largest = rows.amax(-1)
    finite = [math.isfinite(most) for most in _floats(largest)]
    changed = [
        at for at, (sampler, index) in enumerate(placed) if finite[at] and sampler.changes_logits(index)
    ]
    placed_masks = [(at, mask) for at, row in enumerate(order) if masks and (mask := masks[row]) is not None]
    for at, mask in placed_masks:
        if finite[at] and mask.error is None:
            apply_mask(rows[at], mask)
    _change(rows, [(at, *placed[at]) for at in changed])
    able = list(finite)
    if changed or placed_masks:
        largest = rows.amax(-1)
        for at, most in enumerate(_floats(largest)):
            able[at] = finite[at] and most > _NEVER
    for at, mask in placed_masks:
        able[at] = able[at] and mask.error is None
    for at, fine in enumerate(able):
        if not fine:
            rows[at] = largest[at] = 0.0  # of what follows nothing is kept, and all of it is finite
    tokens = _choose(rows, placed, largest, space)
    choices = [Choice(-1)] * len(order)
    for at, row in enumerate(order):
        sampling = samplers[row].sampling
        if not finite[at]:
            choices[row] = Choice(-1, error=_not_finite(float(logits[row].max())))
        elif not able[at]:
            mask = masks[row] if masks else None
            choices[row] = Choice(-1, error=(mask and mask.error) or _nothing_left())
        elif sampling.logprobs is None:
            choices[row] = Choice(tokens[at])
        else:
            choices[row] = _with_logprobs(logits[row], rows[at], sampling, tokens[at])
    return choices


def _choose(
    rows: Tensor, placed: Sequence[tuple[Sampler, int]], largest: Tensor, space: Workspace
) -> list[int]:
    """Return the token of each row; rows that are drawn come first, and become weights.

    Args:
        rows: Logits, `[rows, vocabulary]`, in the workspace.
        placed: The sampler of each row, and its position.
        largest: The largest logit of each row, finite.
        space: Memory to compute in.
    """
    drawn = [(sampler.sampling, index) for sampler, index in placed if sampler.sampling.is_random]
    tokens: list[int] = []
    if drawn:
        weights = rows[: len(drawn)]
        to_weights(weights, [sampling.temperature for sampling, _ in drawn], largest[: len(drawn)])
        for row, (sampling, _) in zip(weights, drawn, strict=True):
            _cut(row, sampling, space)
        tokens = draw(weights, [uniform(sampling.seed or 0, index) for sampling, index in drawn])
    if len(drawn) < len(rows):
        tokens += _integers(rows[len(drawn) :].max(-1).indices)
    return tokens


def _change(logits: Tensor, placed: Sequence[tuple[int, Sampler, int]]) -> None:
    """Apply biases, penalties and prohibitions to rows of logits, in place.

    Args:
        logits: `[rows, vocabulary]`.
        placed: The rows to change, each with its sampler and its position.
    """
    edits = _Edits(logits)
    for row, sampler, _ in placed:
        if sampler.biases is not None:
            edits.put(row, *sampler.biases)
    edits.apply(lambda found, bias: found + bias)
    for row, sampler, _ in placed:
        if sampler.seen is not None:
            ids = sampler.seen.ids
            edits.put(row, ids, torch.full(ids.shape, sampler.sampling.repetition_penalty))
    edits.apply(lambda found, penalty: torch.where(found > 0, found / penalty, found * penalty))
    for row, sampler, _ in placed:
        if sampler.generated is not None:
            counts, sampling = sampler.generated.counts, sampler.sampling
            penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
            edits.put(row, sampler.generated.ids, penalties)
    edits.apply(lambda found, penalty: found - penalty)
    for row, sampler, index in placed:
        if forced := sampler.forced(index):
            _force(logits[row], forced, unless_none=sampler.constraint is not None)
        if len(forbidden := sampler.forbidden(index)):
            edits.put(row, forbidden, torch.full(forbidden.shape, _NEVER))
    edits.apply(lambda _, never: never)


def _force(logits: Tensor, tokens: Sequence[int], *, unless_none: bool) -> None:
    """Leave only some tokens in a row, one as likely as another, as in transformers.

    With `unless_none` those stay out that a grammar has left out before, and if none is left the row stays as
    it is: what a grammar allows goes before what is forced.
    """
    kept = torch.tensor([token for token in tokens if token < len(logits)], dtype=torch.long)
    kept = kept.to(logits.device)
    if unless_none:
        kept = kept[logits[kept] > _NEVER]
        if not len(kept):
            return
    logits.fill_(_NEVER)
    logits[kept] = 0.0


class _Edits:
    """Changes of single logits of several rows, collected and then made in one pass."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._places: list[Tensor] = []
        self._values: list[Tensor] = []

    def put(self, row: int, ids: Tensor, values: Tensor) -> None:
        """Collect a change of tokens of a row; those outside of the vocabulary are left out."""
        size = self._logits.shape[1]
        if len(ids) and int(ids.max()) >= size:
            known = ids < size
            ids, values = ids[known], values[known]
        self._places.append(ids + row * self._logits.stride(0))
        self._values.append(values)

    def apply(self, change: _Change) -> None:
        """Make the collected changes."""
        if self._places:
            places = torch.cat(self._places).to(self._logits.device)
            rows, width = len(self._logits), self._logits.stride(0)
            flat = self._logits.as_strided((rows * width,), (1,))
            values = torch.cat(self._values).to(self._logits.device)
            flat[places] = change(flat[places], values)
            self._places, self._values = [], []


def _cut(weights: Tensor, sampling: Sampling, space: Workspace) -> None:
    """Set the weights of a row that `top_k`, `top_p` and `min_p` cut to 0."""
    if sampling.top_k:
        keep_from(weights, top_k_threshold(weights, sampling.top_k))
    bound = top_p_threshold(weights, sampling.top_p, space) if sampling.top_p < 1.0 else 0.0
    least = sampling.min_p * float(weights.amax()) if sampling.min_p else 0.0
    keep_from(weights, max(bound, least))


def _with_logprobs(logits: Tensor, row: Tensor, sampling: Sampling, token: int) -> Choice:
    """Return the choice of a token with the log-probabilities that were asked for.

    Args:
        logits: The model's, `[vocabulary]`.
        row: What became of them: weights if the token was drawn, else changed logits.
        sampling: The request's parameters.
        token: The token.
    """
    if sampling.logprobs_of == "raw":
        logprobs = logits.float().log_softmax(-1)
    elif sampling.is_random:
        logprobs = (row / row.sum()).log()
    else:
        logprobs = row.log_softmax(-1)
    count = min(sampling.logprobs or 0, len(logprobs))
    top = logprobs.topk(count)
    pairs = zip(_integers(top.indices), _floats(top.values), strict=True)
    return Choice(
        token, float(logprobs[token]), tuple(TokenLogprob(id=id, logprob=value) for id, value in pairs)
    )


def _ids(tokens: Iterable[int]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long)


def _biases(pairs: Sequence[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    return _ids(token for token, _ in pairs), torch.tensor([bias for _, bias in pairs])


def _nothing_left() -> InvalidRequest:
    return InvalidRequest(
        "The request's grammar, suppressed, forced and bad words leave no token that may come; allow "
        "at least one."
    )


def _not_finite(largest: float) -> InstanceError:
    return InstanceError(
        f"The largest logit of the request is {largest}; its weights or its adapter may be damaged, or the "
        "dtype too small for them."
    )


def _floats(numbers: Tensor) -> list[float]:
    untyped: Any = numbers
    return untyped.tolist()  # type: ignore[no-any-return]


def _integers(numbers: Tensor) -> list[int]:
    untyped: Any = numbers
    return untyped.tolist()  # type: ignore[no-any-return]
