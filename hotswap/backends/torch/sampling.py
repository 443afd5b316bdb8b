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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotswap.backends.bad_words import BadWords
from hotswap.backends.torch.distribution import (
    Workspace,
    cut_together,
    draw,
    keep_from,
    to_weights,
    top_k_threshold,
    top_p_threshold,
    uniform,
)
from hotswap.backends.torch.masks import Constraint, Mask, apply_mask
from hotswap.backends.torch.step_numbers import to_device
from hotswap.errors import HotswapError, InstanceError, InvalidRequest
from hotswap.request import TokenLogprob
from hotswap.sampling import Sampling

__all__ = ["Choice", "Sampler", "sample"]

_NEVER = -math.inf

_Change: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_Ids: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float32]


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

    def forbidden(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens that may not come at position `index`; one may be named twice."""
        found = [self._never]
        if self._may_not_stop(index):
            found.append(self._stop_ids)
        if index == 0 and self.sampling.begin_suppress_tokens:
            found.append(_ids(self.sampling.begin_suppress_tokens))
        if completing := self._bad_words.completing():
            found.append(_ids(completing))
        return np.concatenate(found) if len(found) > 1 else found[0]

    def _may_not_stop(self, index: int) -> bool:
        return bool(len(self._stop_ids)) and index < self.sampling.min_tokens


class _Counts:
    """How often each token occurs, in arrays that grow by doubling."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._places: dict[int, int] = {}
        counts: list[float] = []
        for token in tokens:
            if (place := self._places.setdefault(token, len(counts))) == len(counts):
                counts.append(0.0)
            counts[place] += 1
        room = max(64, 2 * len(counts))
        self._ids, self._counts = np.zeros(room, np.int64), np.zeros(room, np.float32)
        self._ids[: len(counts)] = list(self._places)
        self._counts[: len(counts)] = counts

    def __bool__(self) -> bool:
        return True

    @property
    def ids(self) -> _Ids:
        """The tokens, `[distinct]`."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> _Floats:
        """How often each occurs, `[distinct]`."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count a token."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
        self._counts[place] += 1


def sample(
    logits: Tensor,
    samplers: Sequence[Sampler],
    indices: Sequence[int],
    space: Workspace | None = None,
    masks: Sequence[Mask | None] = (),
) -> list[Choice]:
    """Return the next token of each request. The host reads the device once, at the end.

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
    in_order = order == list(range(len(order)))
    rows.copy_(logits if in_order else logits[to_device(np.array(order), logits.device)])
    placed = [(samplers[row], indices[row]) for row in order]
    largest = most = rows.amax(-1)
    changed = [(at, *one) for at, one in enumerate(placed) if one[0].changes_logits(one[1])]
    for row, number in zip(rows, order, strict=True):
        if masks and (mask := masks[number]) is not None and mask.error is None:
            apply_mask(row, mask)
    _change(rows, changed)
    if changed or any(masks):
        most = rows.amax(-1)
    able = largest.isfinite() & (most > _NEVER)
    if rows.device.type != "cpu" or not bool(able.all()):  # of these nothing is kept, and all is finite
        rows.masked_fill_(~able[:, None], 0.0)
        most = most.masked_fill(~able, 0.0)
    tokens = _choose(rows, placed, most, space)
    asking = [at for at, (sampler, _) in enumerate(placed) if sampler.sampling.logprobs is not None]
    logprobs = [
        _logprobs(logits[order[at]], rows[at], placed[at][0].sampling, tokens[at : at + 1]) for at in asking
    ]
    ids, highest, fine, *numbers = read([tokens, largest, able, *logprobs])
    found = dict(zip(asking, numbers, strict=True))
    choices = [Choice(-1)] * len(order)
    for at, row in enumerate(order):
        mask = masks[row] if masks else None
        if error := _error(highest[at], mask, is_able=bool(fine[at])):
            choices[row] = Choice(-1, error=error)
        else:
            choices[row] = _to_choice(int(ids[at]), found.get(at))
    return choices


def read(parts: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of vectors, as fp64; the host waits for the device once."""
    untyped: Any = torch.cat([part.double() for part in parts])
    numbers: list[float] = untyped.tolist()
    found: list[list[float]] = []
    at = 0
    for part in parts:
        found.append(numbers[at : at + part.numel()])
        at += part.numel()
    return found


def _choose(rows: Tensor, placed: Sequence[tuple[Sampler, int]], largest: Tensor, space: Workspace) -> Tensor:
    """Return the token of each row, `[rows]`, int64; rows that are drawn come first, and become weights.

    Args:
        rows: Logits, `[rows, vocabulary]`, in the workspace.
        placed: The sampler of each row, and its position.
        largest: The largest logit of each row, finite.
        space: Memory to compute in.
    """
    drawn = [(sampler.sampling, index) for sampler, index in placed if sampler.sampling.is_random]
    tokens = [rows[len(drawn) :].max(-1).indices]
    if drawn:
        weights = rows[: len(drawn)]
        to_weights(weights, [sampling.temperature for sampling, _ in drawn], largest[: len(drawn)])
        _cut(weights, [sampling for sampling, _ in drawn], space)
        tokens.insert(0, draw(weights, [uniform(sampling.seed or 0, index) for sampling, index in drawn]))
    return torch.cat(tokens)


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
            edits.put(row, ids, np.full(len(ids), sampler.sampling.repetition_penalty, np.float32))
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
            edits.put(row, forbidden, np.full(len(forbidden), _NEVER, np.float32))
    edits.apply(lambda _, never: never)


def _force(logits: Tensor, tokens: Sequence[int], *, unless_none: bool) -> None:
    """Leave only some tokens in a row, one as likely as another, as in transformers.

    With `unless_none` those stay out that a grammar has left out before, and if none is left the row stays as
    it is: what a grammar allows goes before what is forced.
    """
    kept = to_device(_ids(token for token in tokens if token < len(logits)), logits.device)
    forced = torch.full_like(logits, _NEVER)
    if unless_none:
        allowed = logits[kept] > _NEVER
        forced[kept] = torch.where(allowed, 0.0, _NEVER)
        logits.copy_(torch.where(allowed.any(), forced, logits))
    else:
        logits.copy_(forced.index_fill_(0, kept, 0.0))


class _Edits:
    """Changes of single logits of several rows, collected and then made in one pass."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._places: list[_Ids] = []
        self._values: list[_Floats] = []

    def put(self, row: int, ids: _Ids, values: _Floats) -> None:
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
            places = to_device(np.concatenate(self._places), self._logits.device)
            rows, width = len(self._logits), self._logits.stride(0)
            flat = self._logits.as_strided((rows * width,), (1,))
            values = to_device(np.concatenate(self._values), self._logits.device)
            flat[places] = change(flat[places], values)
            self._places, self._values = [], []


def _cut(weights: Tensor, samplings: Sequence[Sampling], space: Workspace) -> None:
    """Set the weights of rows that `top_k`, `top_p` and `min_p` cut to 0."""
    if weights.device.type == "cpu":
        for row, sampling in zip(weights, samplings, strict=True):
            _cut_row(row, sampling, space)
    elif any(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p for sampling in samplings):
        cut_together(
            weights,
            [sampling.top_k for sampling in samplings],
            [sampling.top_p for sampling in samplings],
            [sampling.min_p for sampling in samplings],
        )


def _cut_row(weights: Tensor, sampling: Sampling, space: Workspace) -> None:
    if sampling.top_k:
        keep_from(weights, top_k_threshold(weights, sampling.top_k))
    bound = top_p_threshold(weights, sampling.top_p, space) if sampling.top_p < 1.0 else 0.0
    least = sampling.min_p * float(weights.amax()) if sampling.min_p else 0.0
    keep_from(weights, max(bound, least))


def _logprobs(logits: Tensor, row: Tensor, sampling: Sampling, token: Tensor) -> Tensor:
    """Return the log-probability of a token, then the ids of the most probable ones, then theirs: fp64.

    Args:
        logits: The model's, `[vocabulary]`.
        row: What became of them: weights if the token was drawn, else changed logits.
        sampling: The request's parameters.
        token: The token, `[1]`.
    """
    if sampling.logprobs_of == "raw":
        logprobs = logits.float().log_softmax(-1)
    elif sampling.is_random:
        logprobs = (row / row.sum()).log()
    else:
        logprobs = row.log_softmax(-1)
    count = min(sampling.logprobs or 0, len(logprobs))
    top = logprobs.topk(count)
    return torch.cat((logprobs.gather(0, token).double(), top.indices.double(), top.values.double()))


def _to_choice(token: int, numbers: Sequence[float] | None) -> Choice:
    """Return the choice of a token with what `_logprobs` returned, if it was called."""
    if numbers is None:
        return Choice(token)
    count = len(numbers) // 2
    pairs = zip(numbers[1 : 1 + count], numbers[1 + count :], strict=True)
    top = tuple(TokenLogprob(id=int(id), logprob=value) for id, value in pairs)
    return Choice(token, numbers[0], top)


def _ids(tokens: Iterable[int]) -> _Ids:
    return np.array(list(tokens), np.int64)


def _biases(pairs: Sequence[tuple[int, float]]) -> tuple[_Ids, _Floats]:
    return _ids(token for token, _ in pairs), np.array([bias for _, bias in pairs], np.float32)


def _error(largest: float, mask: Mask | None, *, is_able: bool) -> HotswapError | None:
    """Return why a request cannot go on; `None` if it can.

    Args:
        largest: The largest logit of the model.
        mask: The mask of its grammar, if it has one.
        is_able: Whether a finite logit is left after all changes.
    """
    if not math.isfinite(largest):
        return _not_finite(largest)
    if mask is not None and mask.error is not None:
        return mask.error
    return None if is_able else _nothing_left()


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
