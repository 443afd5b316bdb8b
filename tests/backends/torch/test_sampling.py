"""A token is a function of the logits, the seed and the position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hotswap import Sampling
from hotswap.backends.torch.sampling import Choice, Sampler, sample
from hotswap.errors import InstanceError, InvalidRequest

SIZE = 40


def logits_of(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 3


SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.sampled_from([4, 100]),
    min_tokens=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 39]),
    top_p=st.sampled_from([0.1, 0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, 50), st.floats(-5, 5), max_size=3),
    suppress_tokens=st.lists(st.integers(0, 50), max_size=3),
    forced_end_tokens=st.sampled_from([(), (5, 6)]),
    bad_words_ids=st.lists(st.lists(st.integers(7, 12), min_size=1, max_size=2), max_size=3),
    seed=st.integers(0, 5),
    logprobs=st.sampled_from([None, 0, 3]),
    logprobs_of=st.sampled_from(["raw", "sampled"]),
)


def tokens(choices: list[Choice]) -> list[int]:
    return [choice.token for choice in choices]


def draw(
    sampling: Sampling, logits: Tensor, index: int, *, seen: tuple[int, ...] = (), stop: Any = ()
) -> int:
    return sample(logits[None], [Sampler(sampling, stop, seen)], [index])[0].token


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


SEEN, GENERATED = (3, 3, 7, 9), (7, 7, 11)
KNOBS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 1.5}, [TemperatureLogitsWarper(1.5)]),
    "top_k": ({"top_k": 7}, [TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    "min_p": ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    "repetition_penalty": ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    "logit_bias": (
        {"logit_bias": {7: 2.0, 3: -1.5}},
        [SequenceBiasLogitsProcessor([[[7], 2.0], [[3], -1.5]])],
    ),
    "suppress_tokens": ({"suppress_tokens": [3, 9]}, [SuppressTokensLogitsProcessor([3, 9])]),
    "begin_suppress_tokens": (
        {"begin_suppress_tokens": [7, 9]},
        [SuppressTokensAtBeginLogitsProcessor([7, 9], len(SEEN + GENERATED))],
    ),
    "forced_end_tokens": (
        {"forced_end_tokens": [5, 6], "max_tokens": 1},
        [ForcedEOSTokenLogitsProcessor(len(SEEN + GENERATED) + 1, [5, 6], device="cpu")],
    ),
    "bad_words_ids": (
        {"bad_words_ids": [[9], [7, 11, 30], [11, 31], [11, 11, 32]]},
        [NoBadWordsLogitsProcessor([[9], [7, 11, 30], [11, 31], [11, 11, 32]])],
    ),
    "all together": (
        {"repetition_penalty": 1.2, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(1.3),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("knob", KNOBS)
def test_draws_follow_the_distribution_of_transformers(knob: str) -> None:
    changes, processors = KNOBS[knob]
    logits, ids = logits_of(11) * 0.5, torch.tensor([SEEN + GENERATED])
    scores = logits[None].clone()
    for processor in processors:
        scores = processor(ids, scores)
    expected = scores[0].softmax(-1).double()
    count = 4000
    # Positions are the first where a rule depends on them, so the seeds differ.
    samplings = [Sampling(**{"temperature": 1.0, "seed": seed} | changes) for seed in range(count)]
    samplers = [Sampler(sampling, (), SEEN + GENERATED, len(SEEN)) for sampling in samplings]
    drawn = tokens(sample(logits.repeat(count, 1), samplers, [0] * count))
    found = torch.bincount(torch.tensor(drawn), minlength=SIZE).double()
    possible = expected > 0
    assert found[~possible].sum() == 0
    often = expected * count >= 5
    others = possible & ~often
    wanted = torch.cat((expected[often], expected[others].sum()[None])) * count
    counted = torch.cat((found[often], found[others].sum()[None]))
    wanted, counted = wanted[wanted > 0], counted[wanted > 0]
    statistic = float(((counted - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    # Five standard deviations over its mean; draws are functions of the seeds, so this never changes.
    assert statistic < degrees + 5 * (2 * max(degrees, 1)) ** 0.5


@pytest.mark.parametrize("of", ["raw", "sampled"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_those_of_the_distribution_that_was_asked_for(of: Any, temperature: float) -> None:
    logits = logits_of(2)
    sampling = Sampling(
        temperature=temperature,
        top_k=5 if temperature else 0,
        logprobs=6,
        logprobs_of=of,
        logit_bias={3: 4.0},
    )
    (choice,) = sample(logits[None], [Sampler(sampling, (), ())], [0])
    expected = logits.clone()
    if of == "sampled":
        expected[3] += 4.0
        if temperature:
            expected = TopKLogitsWarper(5)(torch.tensor([[]]), expected[None] / temperature)[0]
    logprobs = expected.log_softmax(-1)
    assert choice.logprob == pytest.approx(float(logprobs[choice.token]), abs=1e-5)
    most = logprobs.topk(6)
    assert [top.logprob for top in choice.top_logprobs] == pytest.approx(most.values.tolist(), abs=1e-5)
    assert [top.id for top in choice.top_logprobs][:5] == most.indices.tolist()[:5]


def test_a_row_that_cannot_go_on_ends_alone() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(5)])
    logits[1, 7] = float("nan")
    logits[2] = float("-inf")
    samplings = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(),
        Sampling(temperature=0.5, suppress_tokens=range(SIZE)),
        Sampling(temperature=0.9, seed=1),
    ]
    choices = sample(logits, [Sampler(s, (), ()) for s in samplings], [0] * 5)
    assert [type(choice.error) for choice in choices] == [
        type(None),
        InstanceError,
        InstanceError,
        InvalidRequest,
        type(None),
    ]
    for row in (0, 4):
        assert choices[row].token == draw(samplings[row], logits[row], 0)


@given(data=st.data())
def test_whatever_shares_the_batch_a_row_gets_the_same_token_and_logprobs(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([SIZE, 1000]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    samplings = data.draw(st.lists(SAMPLINGS, min_size=1, max_size=6))
    logits = torch.randn(len(samplings), size, generator=generator) * 3

    def sampler(sampling: Sampling) -> Sampler:
        return Sampler(sampling, (2, 5), SEEN + GENERATED, len(SEEN))

    together = sample(logits, [sampler(s) for s in samplings], [3] * len(samplings))
    alone = [sample(row[None], [sampler(s)], [3])[0] for row, s in zip(logits, samplings, strict=True)]
    assert [repr(choice) for choice in together] == [repr(choice) for choice in alone]


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12),
    generated=st.lists(st.integers(0, 3), max_size=6),
    later=st.lists(st.integers(0, 3), max_size=6),
)
def test_bad_words_forbid_the_token_that_would_complete_one(
    words: list[list[int]], generated: list[int], later: list[int]
) -> None:
    """Token by token, after those that were generated elsewhere; the prompt does not count."""
    sampler = Sampler(Sampling(bad_words_ids=words), (), [*SEEN, *generated], len(SEEN))
    for token in [*later, None]:
        ends = {word[-1] for word in words if generated[len(generated) - len(word) + 1 :] == word[:-1]}
        assert set(sampler.forbidden(3).tolist()) == ends
        if token is not None:
            sampler.add_token(token)
            generated = [*generated, token]


def test_samples_do_not_depend_on_the_batch() -> None:
    samplings = [Sampling(temperature=t, seed=seed) for t in (0.0, 0.7, 1.3) for seed in (0, 1)]
    logits = torch.stack([logits_of(seed) for seed in range(len(samplings))])
    together = tokens(sample(logits, [Sampler(s, (), ()) for s in samplings], range(len(samplings))))
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
        return sample(logits[None], [sampler], [4])[0].token

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
    sample(logits[None], [Sampler(sampling, (2,), (1, 4), 1)], [0])
    assert torch.equal(logits, before)
