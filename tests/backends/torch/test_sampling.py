"""A token is a function of the logits, the seed and the position."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hotswap import Sampling
from hotswap.backends.torch.sampling import Sampler, choose

SIZE = 40


def logits_of(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def draw(
    sampling: Sampling, logits: Tensor, index: int, *, seen: tuple[int, ...] = (), stop: Any = ()
) -> int:
    return choose(logits[None], [Sampler(sampling, stop, seen)], [index])[0]


@given(
    seed=st.integers(0, 50),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, SIZE),
    top_p=st.floats(0.05, 1),
    penalty=st.floats(0.5, 2),
    seen=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=8),
)
def test_sampled_tokens_are_those_that_transformers_allows(
    seed: int, temperature: float, top_k: int, top_p: float, penalty: float, seen: list[int]
) -> None:
    logits = logits_of(seed)
    ids = torch.tensor([seen])
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    scores = logits[None].clone()
    for processor in processors:
        scores = processor(ids, scores)
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty, seed=seed
    )
    drawn = {draw(sampling, logits, index, seen=tuple(seen)) for index in range(30)}
    assert all(scores[0, token] > float("-inf") for token in drawn)


def test_draws_follow_the_softmax() -> None:
    logits, count = torch.tensor([2.0, 1.0, 0.0, -1.0]), 4000
    drawn = torch.tensor([draw(Sampling(temperature=1.5), logits, index) for index in range(count)])
    frequency = torch.bincount(drawn, minlength=4) / count
    # Five standard deviations of a count of that many draws at most.
    assert (frequency - (logits / 1.5).softmax(-1)).abs().max() < 5 * 0.5 / count**0.5


def test_samples_do_not_depend_on_the_batch() -> None:
    samplings = [Sampling(temperature=t, seed=seed) for t in (0.0, 0.7, 1.3) for seed in (0, 1)]
    logits = torch.stack([logits_of(seed) for seed in range(len(samplings))])
    together = choose(logits, [Sampler(s, (), ()) for s in samplings], range(len(samplings)))
    alone = [draw(s, row, index) for index, (s, row) in enumerate(zip(samplings, logits, strict=True))]
    assert together == alone


def test_seed_and_position_both_matter() -> None:
    flat = torch.zeros(1000)
    by_seed = [draw(Sampling(temperature=1.0, seed=seed), flat, 0) for seed in range(-10, 10)]
    by_index = [draw(Sampling(temperature=1.0, seed=3), flat, index) for index in range(20)]
    assert len(set(by_seed)) > 15
    assert len(set(by_index)) > 15
    assert by_index == [draw(Sampling(temperature=1.0, seed=3), flat, index) for index in range(20)]


@given(seed=st.integers(0, 20), index=st.integers(0, 6), temperature=st.sampled_from([0.0, 1.0]))
def test_end_tokens_wait_for_min_tokens(seed: int, index: int, temperature: float) -> None:
    logits = logits_of(seed)
    stop = int(logits.argmax())
    sampling = Sampling(min_tokens=3, temperature=temperature, top_k=1, seed=seed)
    ids = torch.zeros(1, 5 + index, dtype=torch.long)
    allowed: Any = MinNewTokensLengthLogitsProcessor(5, 3, stop)  # transformers' own reading of the rule
    expected = int(allowed(ids, logits[None].clone()).argmax())
    assert draw(sampling, logits, index, stop=(stop, SIZE + 5)) == expected


def test_greedy_with_penalty_follows_transformers() -> None:
    logits, seen = logits_of(4), (1, 2, 3, 39)
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([seen]), logits[None].clone()).argmax()
    assert draw(Sampling(repetition_penalty=1.8), logits, 0, seen=seen) == int(expected)


def test_tokens_are_penalised_for_each_time_and_for_once_if_they_were_generated() -> None:
    """As OpenAI states it: `mu[j] - c[j] * frequency - (c[j] > 0) * presence`; a prompt does not count."""
    logits = torch.tensor([5.0, 4.8, 4.5, 4.1, 0.0])
    prompt, generated = (0, 0, 0, 2), (1, 1, 2)

    def chosen(*, frequency_penalty: float = 0.0, presence_penalty: float = 0.0) -> int:
        sampling = Sampling(frequency_penalty=frequency_penalty, presence_penalty=presence_penalty)
        sampler = Sampler(sampling, (), (*prompt, *generated), len(prompt))
        sampler.add_token(0)
        return choose(logits[None], [sampler], [4])[0]

    assert chosen() == 0
    assert chosen(frequency_penalty=0.1) == 0  # 4.9 against 4.6 and 4.4
    assert chosen(frequency_penalty=0.1, presence_penalty=0.4) == 0  # 4.5 against 4.2, 4.0 and 4.1
    assert chosen(presence_penalty=1.0) == 3  # 4.0 against 3.8, 3.5 and 4.1
    assert chosen(frequency_penalty=1.0) == 3
    assert chosen(frequency_penalty=-1.0) == 1  # 6.0 against 6.8


def test_a_bias_is_added_before_the_penalties() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    assert draw(Sampling(logit_bias=((0, 2.5), (2, -0.5), (99, 9.0))), logits, 0) == 0
    # 3.5 halved is less than 2.5; were the bias added to the halved logit, it would be 3.
    biased = Sampling(logit_bias=((0, 2.5), (2, -0.5)), repetition_penalty=2.0)
    assert draw(biased, logits, 0, seen=(0,)) == 2


def test_the_logits_are_left_as_they_were() -> None:
    logits = logits_of(0)
    before = logits.clone()
    sampling = Sampling(
        temperature=0.5,
        top_k=3,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias=((3, 1.0),),
        min_tokens=2,
    )
    choose(logits[None], [Sampler(sampling, (2,), (1, 4), 1)], [0])
    assert torch.equal(logits, before)
