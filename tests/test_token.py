"""`new_token`: a `Token` like any other, made in less time."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from hotswap import Token
from hotswap.request import TokenLogprob, new_token

TOP = (TokenLogprob(id=7, logprob=-0.5),)


@pytest.mark.parametrize(
    ("made", "token"),
    [
        (new_token(5, 3), Token(id=5, index=3)),
        (
            new_token(5, 3, "stop", "x", -0.5, TOP),
            Token(id=5, index=3, text="x", finish_reason="stop", logprob=-0.5, top_logprobs=TOP),
        ),
    ],
)
def test_it_is_what_the_constructor_makes(made: Token, token: Token) -> None:
    assert type(made) is Token
    assert made == token
    assert hash(made) == hash(token)
    assert repr(made) == repr(token)
    assert pickle.loads(pickle.dumps(made)) == token
    with pytest.raises(FrozenInstanceError):
        made.id = 6  # type: ignore[misc]
