"""What is told of a prompt reads like a tuple of entries, and is kept as numbers."""

from __future__ import annotations

import gc
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import PromptLogprobs, ScoredPrompt, TokenLogprob

IDS = st.integers(0, 2**31 - 1)
TOP = st.lists(st.tuples(IDS, st.floats(max_value=0.0, allow_nan=False)), max_size=3)


def scored(entries: list[PromptLogprobs]) -> ScoredPrompt:
    made = ScoredPrompt(entries[0].id)
    for entry in entries[1:]:
        top = entry.top_logprobs
        made.add(entry.id, entry.logprob or 0.0, [one.id for one in top], [one.logprob for one in top])
    return made


@given(
    first=IDS,
    rest=st.lists(st.tuples(IDS, st.floats(max_value=-0.1, allow_nan=False), TOP), max_size=8),
    index=st.integers(-9, 9),
    part=st.slices(9),
)
def test_it_reads_like_a_tuple_of_its_entries(
    first: int, rest: list[tuple[int, float, list[tuple[int, float]]]], index: int, part: slice
) -> None:
    expected = [PromptLogprobs(id=first)]
    for id, logprob, top in rest:
        told = tuple(TokenLogprob(id=id, logprob=logprob, text=f"<{id}>") for id, logprob in top)
        expected.append(PromptLogprobs(id=id, logprob=logprob, top_logprobs=told))
    plain = scored(expected)
    found = plain.with_texts({id: f"<{id}>" for id in plain.top_ids()})
    assert (len(found), list(found), found[part]) == (len(expected), expected, tuple(expected[part]))
    assert found.num_top == sum(len(entry.top_logprobs) for entry in expected)
    if -len(expected) <= index < len(expected):
        assert found[index] == expected[index]
    else:
        with pytest.raises(IndexError):
            found[index]
    same = pickle.loads(pickle.dumps(found))
    assert (same, hash(same)) == (found, hash(found))
    assert (found == plain) == (found.num_top == 0)
    assert found != scored([*expected, PromptLogprobs(id=1, logprob=-1.0)])


def test_equal_ones_have_one_hash() -> None:
    """A token that is certain has 0.0 or -0.0, as an engine computes it."""
    one, other = ScoredPrompt(0), ScoredPrompt(0)
    one.add(1, 0.0, [1], [0.0])
    other.add(1, -0.0, [1], [-0.0])
    assert (one, hash(one)) == (other, hash(other))


def test_its_size_is_nothing_to_the_garbage_collector() -> None:
    """Which stops all threads to look at objects: a million of them for a second."""
    told = ScoredPrompt(0)
    before = len(gc.get_objects())
    for token in range(1, 5_000):
        told.add(token, -1.0, range(token, token + 20), [-0.5] * 20)
    named = told.with_texts(dict.fromkeys(told.top_ids(), "x"))
    assert named[4_999].top_logprobs[19] == TokenLogprob(id=5_018, logprob=-0.5, text="x")
    assert len(gc.get_objects()) - before < 100
