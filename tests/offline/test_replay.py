"""Any view survives as text, and gives the same decision."""

from __future__ import annotations

import pytest
from hypothesis import given

from hotswap import FleetView
from hotswap.offline.replay import dump_view, load_view
from hotswap.policies import WeightedLoadSwap
from hotswap.testing.strategies import fleet_views


@given(fleet_views())
def test_a_view_comes_back_equal(view: FleetView) -> None:
    text = dump_view(view)
    assert "\n" not in text
    assert load_view(text) == view


@given(fleet_views())
def test_a_replayed_decision_is_the_same(view: FleetView) -> None:
    scheduler = WeightedLoadSwap(t1=2, t2=1, b=2.0, sigmas=0)
    assert scheduler.plan(load_view(dump_view(view))) == scheduler.plan(view)


@pytest.mark.parametrize("text", ["", "[]", '{"instances": [{}]}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of json or of pydantic
        load_view(text)
