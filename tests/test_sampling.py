"""What a request may ask for is checked where it is written down, whatever a client sends."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import Sampling
from hotswap.checks import to_token_ids
from hotswap.errors import InvalidRequest

NAN, INF = float("nan"), float("inf")


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


WRONG: dict[str, list[object]] = {
    "n": [0, -1, 129, 1.0, "5", True, 2],  # 2 without a temperature
    "max_tokens": [0, -1, 2**31, 1.0, "5", True, NAN, [5], b"5"],
    "min_tokens": [-1, 129, 1.0, "5", True],
    "temperature": [-0.1, NAN, INF, "1", True, [1.0], 10**400, b"1"],
    "top_k": [-2, 2.0, 2**31, "5", True],
    "top_p": [0.0, -0.1, 1.1, NAN, "1"],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0.0, -1.0, NAN, INF],
    "presence_penalty": [2.1, -2.1, NAN],
    "frequency_penalty": [2.1, -3, NAN],
    "logit_bias": [
        5,
        "5",
        {-1: 1.0},
        {3: 101.0},
        {"x": 1.0},
        [(3,)],
        [3, 1.0],
        [{3, 1.0}],
        {3: NAN},
        {3: 1.0, "3": 2.0},
    ],
    "suppress_tokens": [5, "5", [-1], [1.0], [True], [[1]], {1: 2}, [2**31], list(range(2000))],
    "begin_suppress_tokens": [5, [None]],
    "forced_end_tokens": [5, [1.5]],
    "bad_words": [5, [""], [b"x"], {"a": 1}, ["x" * 2000]],
    "bad_words_ids": [5, [5], [[]], [[1.0]], ["ab"], [{1, 2}]],
    "seed": [1.5, "7", True, 2**64, -(2**63) - 1],
    "stop": [5, [""], "", [5], [b"x"], ["x"] * 65, ["x" * 2000], {"a": 1}, b"END"],
    "stop_token_ids": [5, [-1], ["5"], [[5]]],
    "ignore_eos": [1, "true"],
    "include_stop": [0],
    "skip_special_tokens": [0, "no"],
    "truncate_prompt_tokens": [0, -1, 1.0],
    "logprobs": [-1, 21, 1.0, True],
    "prompt_logprobs": [-1, 21],
    "logprobs_of": ["both", 1],
    "json_schema": ["no JSON", "[1, 2]", 5, [1], {"a": NAN}, {"a": object()}, "[" * 100_000, "\ud800"],
    "regex": [3, b"a", "x" * (1 << 21), "\ud800"],
    "grammar": [3, ["start: x"]],
}


def test_every_field_is_tried() -> None:
    assert WRONG.keys() == {field.name for field in fields(Sampling)}


@pytest.mark.parametrize("field", WRONG)
def test_what_is_wrong_is_refused_by_name(field: str) -> None:
    for wrong in [*WRONG[field], object(), NoRepr(), {1, "x"}]:
        with pytest.raises(InvalidRequest, match=field) as caught:
            Sampling(**{field: wrong})  # type: ignore[arg-type]
        assert len(str(caught.value)) < 400


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(field=st.sampled_from(sorted(WRONG)), value=values)
def test_any_value_gives_parameters_or_an_error_that_names_the_field(field: str, value: Any) -> None:
    try:
        sampling = Sampling(**{field: value})
    except InvalidRequest as exc:
        refusal = str(exc)
    else:
        assert pickle.loads(pickle.dumps(sampling)) == sampling == replace(sampling)
        assert repr(sampling).startswith("Sampling(")
        hash(sampling)
        return
    assert field in refusal


@given(
    field=st.sampled_from(("stop", "bad_words", "regex", "grammar")),
    before=st.text(max_size=4),
    alone=st.sampled_from(("", "\ud800", "\udbff", "\udc00", "\udfff", "\ud83d\ude00")),
    after=st.text(max_size=4),
)
def test_texts_are_refused_by_name_if_they_have_a_lone_surrogate(
    field: str, before: str, alone: str, after: str
) -> None:
    """Two side by side are no character of Python's, either."""
    text = f"{before}{alone}a{after}"
    values: list[Any] = [text] if field in {"regex", "grammar"} else [text, [text], ["END", text]]
    for value in values:
        if alone:
            with pytest.raises(InvalidRequest, match=rf"^{field}\b.* has a lone surrogate at"):
                Sampling(**{field: value})
        else:
            taken = getattr(Sampling(**{field: value}), field)
            assert taken == value or list(taken) in ([value], value)


@pytest.mark.parametrize("field", WRONG)
def test_none_is_the_default(field: str) -> None:
    given = Sampling(**{field: None})
    if field == "max_tokens":
        assert given.max_tokens == 2**31 - 1  # as many as fit
    else:
        assert given == Sampling()


def test_what_json_gives_is_taken() -> None:
    assert Sampling(temperature=1, top_p=1, top_k=-1) == Sampling(temperature=1.0)
    assert Sampling(stop="END").stop == ("END",)
    assert Sampling(stop=["a", "b"], stop_token_ids=[5]) == Sampling(stop=("a", "b"), stop_token_ids=(5,))
    assert Sampling(logit_bias={"5": 1, "7": -100}).logit_bias == ((5, 1.0), (7, -100.0))
    assert Sampling(logit_bias=[(5, 1)]) == Sampling(logit_bias={5: 1.0})
    assert Sampling(json_schema={"type": "object"}) == Sampling(json_schema='{"type": "object"}')
    assert Sampling(bad_words="x", bad_words_ids=[[1, 2]]).bad_words_ids == ((1, 2),)
    assert sorted(Sampling(stop_token_ids={5, 7}).stop_token_ids) == [5, 7]  # type: ignore[arg-type]


def test_numbers_of_array_libraries_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    sampling = Sampling(
        max_tokens=numpy.int64(5),
        temperature=numpy.float32(0.5),
        stop_token_ids=numpy.array([1, 2]),
    )
    assert sampling == Sampling(max_tokens=5, temperature=0.5, stop_token_ids=(1, 2))
    assert type(sampling.max_tokens) is int
    assert type(sampling.temperature) is float
    assert [type(id) for id in sampling.stop_token_ids] == [int, int]


def test_arrays_are_read_as_a_whole() -> None:
    """A prompt of 128,000 tokens would hold the event loop for half a second, read number by number."""
    numpy = pytest.importorskip("numpy")

    def one_by_one(self: object) -> None:
        raise AssertionError("its numbers are read one by one")

    array = numpy.array([5, 0, 7]).view(type("Whole", (numpy.ndarray,), {"__iter__": one_by_one}))
    assert to_token_ids("prompt", array) == (5, 0, 7)
    assert [type(id) for id in to_token_ids("prompt", array)] == [int, int, int]
    for wrong in (numpy.array([1.0]), numpy.array([True]), numpy.array([[1]]), numpy.array([-1])):
        with pytest.raises(InvalidRequest, match=r"^prompt\[0\] is "):
            to_token_ids("prompt", wrong)


class Text(str):
    """As `numpy.str_` is: a string to Python, and none to libraries that write messages."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = str.__hash__


@pytest.mark.parametrize("field", ["stop", "bad_words", "regex", "grammar", "json_schema", "logprobs_of"])
def test_texts_are_kept_as_plain_strings(field: str) -> None:
    text = "raw" if field == "logprobs_of" else "{}"
    given: dict[str, Any] = {field: Text(text)}
    kept: Any = getattr(Sampling(**given), field)
    kept = kept[0] if field in ("stop", "bad_words") else kept
    assert (type(kept), kept) == (str, text)


@pytest.mark.parametrize("value", [True, [], 5, "[1]", "true"])
def test_a_schema_is_an_object_or_its_text(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^json_schema is .*; give an object, or its JSON text"):
        Sampling(json_schema=value)


def test_a_grammar_stands_alone() -> None:
    with pytest.raises(InvalidRequest, match="json_schema, regex and grammar"):
        Sampling(json_schema="{}", regex="a+")
    with pytest.raises(InvalidRequest, match="json_schema, regex and grammar"):
        Sampling(grammar="start: x", regex="a+")
    with pytest.raises(InvalidRequest, match="min_tokens"):
        Sampling(regex="a+", min_tokens=3)


def test_a_forced_end_comes_last_however_many_tokens_must_come() -> None:
    assert Sampling(forced_end_tokens=[5], max_tokens=4, min_tokens=4).min_tokens == 3
    assert Sampling(forced_end_tokens=[5], max_tokens=4, min_tokens=2).min_tokens == 2


def test_samples_of_one_prompt_have_seeds_of_their_own() -> None:
    last = Sampling(seed=2**64 - 1, n=3, temperature=1.0, prompt_logprobs=2)
    samples = [last.sample(index) for index in range(3)]
    assert [sample.seed for sample in samples] == [2**64 - 1, 0, 1]
    assert [sample.n for sample in samples] == [1, 1, 1]
    assert [sample.prompt_logprobs for sample in samples] == [2, None, None]
    assert Sampling().sample(3) == Sampling()


def test_a_sample_is_what_its_fields_give() -> None:
    asked = Sampling(n=3, seed=5, temperature=1.0, prompt_logprobs=2, stop="x", bad_words_ids=[[3, 9], [7]])
    for index, told in enumerate((2, None, None)):
        sample = asked.sample(index)
        assert sample == replace(asked, n=1, seed=5 + index, prompt_logprobs=told)
        assert hash(sample) == hash(replace(sample))
        assert pickle.loads(pickle.dumps(sample)) == sample
        assert (sample.largest_token, pickle.loads(pickle.dumps(sample)).largest_token) == (9, 9)


def test_the_largest_token_is_that_of_all_fields() -> None:
    assert Sampling().largest_token == -1
    for field in ("suppress_tokens", "begin_suppress_tokens", "forced_end_tokens", "stop_token_ids"):
        assert Sampling(**{field: [3, 9, 7]}).largest_token == 9  # type: ignore[arg-type]
    assert Sampling(logit_bias={9: 1.0, 3: 2.0}, stop_token_ids=[7]).largest_token == 9


def test_a_repr_shows_what_differs_from_the_default() -> None:
    assert repr(Sampling(max_tokens=5, stop="x")) == "Sampling(max_tokens=5, stop=('x',))"
