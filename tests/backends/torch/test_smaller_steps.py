"""A step that ran out of memory gives the same rows when it is computed in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hotswap import Sampling
from hotswap.backends.torch import smaller_steps
from hotswap.backends.torch.distribution import Workspace
from hotswap.backends.torch.forward import Forward, Piece, Work
from hotswap.backends.torch.sampling import Choice, Sampler, sample
from hotswap.backends.torch.smaller_steps import compute_in_parts, sample_in_parts


class Rows:
    """A model whose row for a token is its id and position, and that has memory for so many tokens."""

    def __init__(self, most_tokens: int, error: Exception) -> None:
        self.most_tokens, self.error = most_tokens, error
        self.works: list[Work] = []
        self.written: list[tuple[int, int]] = []

    def submit(self, work: Work) -> None:
        self.works.append(work)

    def result(self) -> Tensor:
        work = self.works[-1]
        if work.num_tokens > self.most_tokens:
            raise self.error
        rows: list[tuple[int, int]] = []
        for piece in work.pieces:
            found = list(zip(piece.tokens, range(piece.start, piece.end), strict=True))
            self.written += found
            rows += found[: piece.num_scored] + ([found[-1]] if piece.samples else [])
        return torch.tensor(rows, dtype=torch.float64).view(-1, 2)


@st.composite
def works(draw: st.DrawFn) -> Work:
    pieces: list[Piece] = []
    for number in range(draw(st.integers(1, 6))):
        count = draw(st.one_of(st.just(1), st.integers(1, 40)))
        samples = draw(st.booleans())
        scored = draw(st.integers(0, count - samples))
        tokens = [100 * number + at for at in range(count)]
        pieces.append(Piece(tokens, draw(st.integers(0, 50)), [1], samples, num_scored=scored, length=7))
    return Work(tuple(pieces), fresh=(3,))


def run(rows: Rows, work: Work) -> Tensor:
    return compute_in_parts(cast("Forward", cast("Any", rows)), work)


@given(work=works(), share=st.floats(0.13, 1.0))
def test_the_rows_of_parts_are_those_of_the_step(work: Work, share: float) -> None:
    whole = Rows(work.num_tokens, RuntimeError())
    whole.submit(work)
    expected = whole.result()
    rows = Rows(max(1, int(share * work.num_tokens)), torch.OutOfMemoryError("no memory"))
    assert torch.equal(run(rows, work), expected)
    assert rows.written == whole.written, "each token is computed once, in the order of its request"
    assert all(piece.length == 7 for part in rows.works for piece in part.pieces)
    prepared = [part for part in rows.works if part.fresh]
    assert all(part.pieces[0].tokens[0] == work.pieces[0].tokens[0] for part in prepared)


def test_what_fails_by_another_error_is_not_halved_again() -> None:
    rows = Rows(3, RuntimeError("the device fell off"))
    with pytest.raises(RuntimeError, match="fell off"):
        run(rows, Work((Piece(list(range(64)), 0, [1], True),)))
    assert len(rows.works) == 1


def test_halving_ends() -> None:
    rows = Rows(0, torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        run(rows, Work((Piece(list(range(1024)), 0, [1], True),)))
    assert [part.num_tokens for part in rows.works] == [512, 256, 128, 64]


def most_rows(most: int) -> Callable[..., Any]:
    """Sampling that has memory for so many rows."""

    def limited(logits: Tensor, *given: Any) -> list[Choice]:
        if len(logits) > most:
            raise torch.OutOfMemoryError("no memory")
        return sample(logits, *given)

    return limited


@given(count=st.integers(1, 9), most=st.integers(1, 9), seed=st.integers(0, 99))
def test_rows_that_are_sampled_in_parts_get_the_same_tokens(count: int, most: int, seed: int) -> None:
    logits = torch.randn(count, 50, generator=torch.Generator().manual_seed(seed))
    samplings = (Sampling(), Sampling(temperature=1.0, seed=seed, logprobs=2), Sampling(repetition_penalty=2))
    samplers = [Sampler(samplings[row % 3], (), (1, 2, 3)) for row in range(count)]
    given = (logits, samplers, list(range(count)), Workspace())
    expected = sample(*given)
    with patch.object(smaller_steps, "sample", most_rows(most)):
        assert sample_in_parts(*given) == expected


def test_a_row_that_cannot_be_sampled_raises() -> None:
    samplers = [Sampler(Sampling(), (), ())] * 4
    with patch.object(smaller_steps, "sample", most_rows(0)), pytest.raises(torch.OutOfMemoryError):
        sample_in_parts(torch.zeros(4, 9), samplers, [0] * 4, Workspace())
