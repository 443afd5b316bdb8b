"""What a request may ask for is checked where it is written down."""

from __future__ import annotations

from typing import Any

import pytest

from hotswap import Sampling
from hotswap.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("max_tokens", 0),
        ("min_tokens", 200),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -3),
        ("logit_bias", {3: 1.0}),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((3, 101.0),)),
        ("logit_bias", ((3,),)),
        ("stop", ("",)),
        ("stop", "END"),
        ("json_schema", "no JSON"),
        ("json_schema", "[1, 2]"),
        ("json_schema", {"type": "object"}),
        ("regex", 3),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Sampling(**{field: wrong})


def test_a_grammar_stands_alone() -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        Sampling(json_schema="{}", regex="a+")
    with pytest.raises(InvalidRequest, match="min_tokens"):
        Sampling(regex="a+", min_tokens=3)


def test_what_lies_in_range_is_not() -> None:
    Sampling(regex="a+", max_tokens=3)
    Sampling(json_schema='{"type": "object"}')
    Sampling(presence_penalty=-2, frequency_penalty=2, logit_bias=((0, -100.0), (5, 100.0)), stop=("END",))
