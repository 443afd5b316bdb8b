"""Holds the choices of routers in the check of a load, so that chance does not decide about a model.

A router gives each token to the experts with the highest scores. Where two scores are nearly equal, one
rounding decides, and with other experts all later numbers differ, in a model that computes as it should:
transformers' own attention implementations differ by as much. So the reference pass records what routers
choose, and the pass that is checked repeats these choices. To repeat them is sound only if the scores agree
too, so those are compared: a router that computes something else is found by its scores.

A choice is a call of `topk`, or of `max` along a dimension, with one row of scores per token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Choices", "Comparison", "HeldChoices", "RecordedChoices"]

_Kind: TypeAlias = tuple[str, int, int]  # function, number of scores, number of them that are chosen


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """The choice of one router: `[tokens, scores]`, and the indices of the chosen, `[tokens, k]`."""

    scores: Tensor
    chosen: Tensor


@dataclass(slots=True, eq=False)
class Choices:
    """All choices of one pass over a request, in the order of the calls of each kind."""

    calls: defaultdict[_Kind, list[_Choice]] = field(
        default_factory=lambda: defaultdict[_Kind, list[_Choice]](list)
    )


@dataclass(slots=True)
class Comparison:
    """How the scores of a checked model differ from those of the reference, over all its steps.

    Attributes:
        num_choices: How many choices of tokens were held.
        num_others: How many of these the checked model would have made otherwise.
    """

    num_choices: int = 0
    num_others: int = 0
    _squares: defaultdict[tuple[_Kind, int], Tensor] = field(
        default_factory=lambda: defaultdict[tuple[_Kind, int], Tensor](lambda: torch.zeros(2).double())
    )

    @property
    def error(self) -> float:
        """The largest difference of a router's scores, as root mean squares, relative to the reference's.

        0 without routers; infinite if a router excludes other scores than in the reference.
        """
        return max((float((d / s.clamp(min=1e-30)).sqrt()) for d, s in self._squares.values()), default=0.0)

    def note(self, router: tuple[_Kind, int], mine: Tensor, theirs: Tensor) -> None:
        """Take the scores of some tokens by one router into account."""
        finite = theirs.isfinite()
        if torch.equal(mine.isfinite(), finite):
            both = mine[finite].double().cpu(), theirs[finite].double().cpu()
            self._squares[router] += torch.stack([(both[0] - both[1]).square().sum(), both[1].square().sum()])
        else:
            self._squares[router][0] = float("inf")


class RecordedChoices(TorchFunctionMode):
    """Records the choices of a pass over one request within the block.

    Args:
        num_tokens: The tokens of the pass, all of one request.

    Attributes:
        choices: What was recorded.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self.choices = Choices()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = _choice(func, args, kwargs or {}, out, self._num_tokens)
        if found is not None:
            kind, scores = found
            chosen = out.indices.reshape(self._num_tokens, -1)
            self.choices.calls[kind].append(_Choice(scores.clone(), chosen.clone()))
        return out


class HeldChoices(TorchFunctionMode):
    """Repeats recorded choices within the block, in a pass over parts of several requests.

    Rows without a recorded choice, such as padding, choose for themselves.

    Args:
        parts: The choices of each request of the pass, in order, and the range of its tokens.
        num_rows: The rows of the pass, padding at the end included.
        comparison: Takes the differences of scores.
    """

    def __init__(self, parts: Sequence[tuple[Choices, range]], num_rows: int, comparison: Comparison) -> None:
        super().__init__()
        self._parts, self._num_rows, self._comparison = parts, num_rows, comparison
        self._num_calls: defaultdict[_Kind, int] = defaultdict(int)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = _choice(func, args, kwargs or {}, out, self._num_rows)
        if found is None:
            return out
        kind, scores = found
        number = self._num_calls[kind]
        self._num_calls[kind] += 1
        held = [choices.calls[kind][number : number + 1] for choices, _ in self._parts]
        if not all(held):  # the reference made no such call
            return out
        chosen = out.indices.reshape(self._num_rows, -1).clone()
        end = 0
        for (choice,), (_, tokens) in zip(held, self._parts, strict=True):
            rows, end = slice(end, end + len(tokens)), end + len(tokens)
            theirs = choice.chosen[tokens.start : tokens.stop]
            others = (chosen[rows].sort(1).values != theirs.sort(1).values).any(1)
            self._comparison.num_choices += len(tokens)
            self._comparison.num_others += int(others.sum())
            self._comparison.note((kind, number), scores[rows], choice.scores[tokens.start : tokens.stop])
            chosen[rows] = theirs
        values = scores.gather(1, chosen)
        return type(out)((values.view_as(out.values), chosen.view_as(out.indices)))


def _choice(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, num_rows: int
) -> tuple[_Kind, Tensor] | None:
    """Return the kind of a choice and its scores `[rows, scores]`; `None` for any other call."""
    name = _CHOOSING.get(func)
    scores = args[0] if args else kwargs.get("input")
    if name is None or not isinstance(scores, Tensor) or isinstance(out, Tensor) or not scores.ndim:
        return None  # `max` of all elements, or of two tensors, returns a tensor
    dim = kwargs.get("dim", args[_DIM_AT[name]] if len(args) > _DIM_AT[name] else -1)
    width = scores.shape[-1]
    last = dim in (-1, scores.ndim - 1) and scores.is_floating_point() and width > 1
    if not last or scores.numel() != num_rows * width:
        return None
    return (name, width, out.indices.numel() // num_rows), scores.reshape(num_rows, width)


_CHOOSING: dict[Callable[..., Any], str] = {
    torch.topk: "topk",
    Tensor.topk: "topk",
    torch.max: "max",
    Tensor.max: "max",
}
_DIM_AT = {"topk": 2, "max": 1}
