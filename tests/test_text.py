"""Streamed text is the text of the whole: nothing lost or doubled, and cut where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotswap.abc import TextStream, Tokenizer
from tests.text_tokenizers import (
    BYTE_LEVEL_SIZE,
    NUM_SPECIAL,
    PIECES_SIZE,
    SPECIAL,
    START,
    byte_level,
    byte_tokens,
    metaspace,
    one_byte_each,
    sentencepiece,
    with_start_token,
    word_token,
)

UNFINISHED = "\N{REPLACEMENT CHARACTER}"

characters = st.text(st.sampled_from("aé世😀\n\u0301𝄞 "), min_size=1, max_size=4)
pieces = st.integers(NUM_SPECIAL + 256, PIECES_SIZE - 1).map(lambda token: [token])
specials = st.integers(1, NUM_SPECIAL - 1).map(lambda token: [token])
# Runs of byte tokens that are UTF-8, which is what a model that writes sense writes.
sensible = st.lists(pieces | specials | characters.map(byte_tokens), max_size=12).map(
    lambda runs: [*chain(*runs)]
)
anything_byte_level = st.lists(st.integers(0, BYTE_LEVEL_SIZE - 1), max_size=40)
anything_pieces = st.lists(st.integers(1, PIECES_SIZE - 1), max_size=40)


def stream(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    *,
    prompt: Sequence[int] = (),
    stop: Sequence[str] = (),
    min_tokens: int = 0,
) -> list[str]:
    """What each push gives."""
    text = TextStream(tokenizer, prompt=prompt, stop=stop, min_tokens=min_tokens)
    return [text.push(token, last=n == len(tokens)) for n, token in enumerate(tokens, 1)]


def whole(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The decoded generation as the continuation of its prompt, whose last character it may complete."""
    after = tokenizer.decode([*prompt, *tokens])
    befores = [tokenizer.decode(prompt[:end]) for end in range(max(len(prompt) - 3, 0), len(prompt) + 1)]
    return after[max(_num_shared(before, after) for before in befores) :]


def _num_shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return sum(accumulate((a == b for a, b in zip(one, other, strict=False)), min))


@given(anything_byte_level, anything_byte_level)
def test_byte_level_text_is_the_text_of_the_whole(prompt: list[int], tokens: list[int]) -> None:
    tokenizer = byte_level()
    assert "".join(stream(tokenizer, tokens, prompt=prompt)) == whole(tokenizer, prompt, tokens)


@given(st.text(max_size=30), st.text(max_size=30))
def test_byte_level_text_of_any_language_comes_back(prompt: str, answer: str) -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode(answer)
    assert "".join(stream(tokenizer, tokens, prompt=tokenizer.encode(prompt))) == answer


@pytest.mark.parametrize("tokenizer", [sentencepiece(), metaspace()], ids=["sentencepiece", "metaspace"])
@given(prompt=sensible, tokens=sensible)
@example(prompt=[], tokens=byte_tokens("世世世世世"))
@example(prompt=byte_tokens("世世世世世"), tokens=byte_tokens("世"))
@example(prompt=[word_token("▁the"), 1], tokens=[2, word_token("▁a"), 2, 2, word_token("▁c")])
@example(prompt=[1], tokens=[word_token("▁"), word_token("▁the"), *byte_tokens("\n"), word_token("▁a")])
def test_sentencepiece_text_is_the_text_of_the_whole(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int]
) -> None:
    assert "".join(stream(tokenizer, tokens, prompt=prompt)) == whole(tokenizer, prompt, tokens)


@pytest.mark.parametrize("split", range(1, 8))
@pytest.mark.parametrize("tokenizer", [sentencepiece(), metaspace()], ids=["sentencepiece", "metaspace"])
def test_a_prompt_may_end_within_a_character(tokenizer: Tokenizer, split: int) -> None:
    tokens = [word_token("▁the"), *byte_tokens("😀é"), word_token("▁a")]
    prompt, tokens = tokens[:split], tokens[split:]
    assert "".join(stream(tokenizer, tokens, prompt=prompt)) == whole(tokenizer, prompt, tokens)


@given(anything_pieces)
@example([*byte_tokens("😀"), NUM_SPECIAL + 0xFF, word_token("a")])
def test_bytes_that_are_no_text_cost_no_other_text(tokens: list[int]) -> None:
    tokenizer = sentencepiece()
    tokens = [token for token in tokens if not _is_ascii_byte(token)]
    expected = [character for character in tokenizer.decode(tokens) if character in "abcthe.,"]
    got = [character for character in "".join(stream(tokenizer, tokens)) if character in "abcthe.,"]
    assert got == expected


def _is_ascii_byte(token: int) -> bool:
    return NUM_SPECIAL <= token < NUM_SPECIAL + 128


@given(anything_byte_level | anything_pieces, st.data())
def test_what_was_released_is_never_taken_back(tokens: list[int], data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([byte_level(), sentencepiece()]))
    tokens = [token for token in tokens if token < BYTE_LEVEL_SIZE and token < PIECES_SIZE]
    longer = stream(tokenizer, tokens)
    for length in range(1, len(tokens)):
        unfinished = TextStream(tokenizer)
        assert [unfinished.push(token) for token in tokens[:length]] == longer[:length]


@given(
    st.text("abc é😀", max_size=20),
    st.lists(st.text("abc é😀", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_is_cut_at_its_first_occurrence(answer: str, stops: list[str]) -> None:
    tokenizer = byte_level()
    ends = [(answer.find(stop) + len(stop), answer.find(stop)) for stop in stops if stop in answer]
    expected = answer[: min(ends)[1]] if ends else answer
    for tokens in (tokenizer.encode(answer), one_byte_each(answer)):
        got = stream(tokenizer, tokens, stop=stops)
        assert "".join(got) == expected


@given(
    st.text("ab", min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
)
@example("aabaa", ["a", "ab"], 1)  # the first `a` may begin `ab`, and is held until the next token
def test_no_stop_string_ends_within_the_least_tokens(answer: str, stops: list[str], min_tokens: int) -> None:
    tokenizer = byte_level()
    tokens = one_byte_each(answer)
    got = "".join(stream(tokenizer, tokens, stop=stops, min_tokens=min_tokens))
    # Every stop string that may stop ends after the least tokens; what it begins with may be text already.
    ends = [
        (n, n - len(stop))
        for n in range(min_tokens + 1, len(answer) + 1)
        for stop in stops
        if answer[:n].endswith(stop)
    ]
    assert got == (answer[: min(ends)[1]] if ends else answer)


def test_nothing_follows_a_stop_string() -> None:
    tokenizer = byte_level()
    text = TextStream(tokenizer, stop=["st"])
    got = [text.push(token) for token in one_byte_each("first second")]
    assert "".join(got) == "fir"
    assert text.stopped
    assert text.push(5, last=True) == ""


def test_the_beginning_of_a_stop_string_is_held_back_and_released_at_the_end() -> None:
    tokenizer = byte_level()
    tokens = one_byte_each("end st")
    text = TextStream(tokenizer, stop=["stop"])
    assert "".join(text.push(token) for token in tokens[:-1]) == "end "
    assert text.push(tokens[-1], last=True) == "st"
    assert not text.stopped


class Counting:
    """Counts the tokens that another tokenizer decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(tokens)
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


CONTINUATION = one_byte_each("é")[1:]
SPECIAL_BYTE_LEVEL = [*byte_level().encode(SPECIAL)]


@pytest.mark.parametrize(
    ("tokenizer", "unit"),
    [
        (byte_level(), CONTINUATION),
        (byte_level(), SPECIAL_BYTE_LEVEL),
        (byte_level(), one_byte_each("é")),
        (sentencepiece(), byte_tokens("世")),
        (sentencepiece(), byte_tokens("世")[1:]),
        (sentencepiece(), [2]),
    ],
    ids=["continuation", "special", "two bytes", "pieces", "pieces cut", "special piece"],
)
def test_a_longer_prompt_takes_no_more_to_begin_its_text(tokenizer: Tokenizer, unit: list[int]) -> None:
    counts = list[int]()
    for repeats in (200, 20_000):
        counting = Counting(tokenizer)
        TextStream(counting, prompt=unit * repeats)
        counts.append(counting.num_decoded)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize("tokenizer", [sentencepiece(), metaspace()], ids=["sentencepiece", "metaspace"])
@pytest.mark.parametrize("text", ["世", "😀", "é", "é世😀"])
def test_a_long_prompt_of_byte_tokens_may_end_within_a_character(
    tokenizer: Tokenizer, text: str, cut: int
) -> None:
    run = byte_tokens(text * 60)
    prompt, tokens = run[: len(run) - cut], [*run[len(run) - cut :], word_token("▁a")]
    assert "".join(stream(tokenizer, tokens, prompt=prompt)) == whole(tokenizer, prompt, tokens)


@pytest.mark.parametrize("end", [CONTINUATION * 300, SPECIAL_BYTE_LEVEL * 300], ids=["bytes", "special"])
def test_a_long_end_of_a_prompt_without_text_costs_no_text(end: list[int]) -> None:
    tokenizer = byte_level()
    prompt, tokens = [*one_byte_each("one"), *end], one_byte_each(" two é")
    assert "".join(stream(tokenizer, tokens, prompt=prompt)) == " two é"


def test_a_character_is_released_once_it_is_whole() -> None:
    assert stream(sentencepiece(), [*byte_tokens("😀é"), word_token("a")]) == ["", "", "", "😀", "", "é", "a"]


def test_garbage_is_not_held_back_for_ever() -> None:
    tokenizer = byte_level()
    (lead,) = one_byte_each("é")[:1]
    text = TextStream(tokenizer)
    released = [text.push(lead) for _ in range(200)]
    assert len("".join(released)) >= 199


@given(tokens=anything_byte_level.filter(bool), include=st.booleans())
def test_an_end_token_gives_what_was_held_back_and_none_of_its_own_text(
    tokens: list[int], include: bool
) -> None:
    tokenizer = byte_level()
    text = TextStream(tokenizer, include_stop=include)
    pushed = [text.push(token, is_end=n == len(tokens)) for n, token in enumerate(tokens, 1)]
    shown = tokens if include else tokens[:-1]
    assert "".join(pushed) == whole(tokenizer, [], shown)


def test_a_stop_string_is_kept_where_asked() -> None:
    tokenizer = byte_level()
    tokens = one_byte_each("one two three")
    for include, expected in ((False, "one "), (True, "one two")):
        text = TextStream(tokenizer, stop=("two",), include_stop=include)
        assert "".join(text.push(token) for token in tokens) == expected
        assert text.matched_stop == "two"


def test_special_tokens_have_text_where_asked() -> None:
    tokenizer = byte_level()
    special, after = tokenizer.encode(SPECIAL)[0], one_byte_each("ab")
    for skip, expected in ((True, "ab"), (False, f"{SPECIAL}ab")):
        text = TextStream(tokenizer, skip_special_tokens=skip)
        assert "".join(text.push(token) for token in (special, *after)) == expected


@given(st.text(max_size=12))
def test_start_tokens_come_once(text: str) -> None:
    tokenizer = with_start_token()
    plain = tokenizer.encode(text, add_special_tokens=False)
    start = tokenizer.encode("")
    assert len(start) == 1
    assert tokenizer.encode(text) == [*start, *plain]
    assert tokenizer.encode(START + text) == [*start, *plain]
    assert tokenizer.encode(START + START + text) == [*start, *start, *plain]
    assert tokenizer.encode(START + text, add_special_tokens=False) == [*start, *plain]
