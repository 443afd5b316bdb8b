"""What a store's view answers about one model, for any tiers, nodes and entries."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import ModelId
from hotswap.view import Residency, StoreView, TierView

MODELS = [ModelId(name) for name in "abc"]
PLACES = [(tier, node) for tier in ("host", "disk") for node in ("", "n0", "n1")]


def entries() -> st.SearchStrategy[list[Residency]]:
    """Models on places, each at most once, whether or not the view has such a tier."""
    keys = st.tuples(st.sampled_from(MODELS), st.sampled_from(PLACES))
    return st.dictionaries(keys, st.integers(1, 100)).map(
        lambda sizes: [
            Residency(model=model, tier=tier, node=node, size_bytes=size)
            for (model, (tier, node)), size in sizes.items()
        ]
    )


@st.composite
def views(draw: st.DrawFn) -> StoreView:
    """Tiers in any order, each with a bandwidth and a queue of its own, and models on some of them."""
    placed = draw(st.lists(st.sampled_from(PLACES), unique=True))
    tiers = (
        TierView(
            name=tier,
            node=node,
            bytes_per_s=draw(st.sampled_from([1.0, 2.0, 10.0])),
            queued_bytes=draw(st.integers(0, 50)),
        )
        for tier, node in placed
    )
    return StoreView(tiers=tuple(tiers), residency=tuple(draw(entries())), loading=tuple(draw(entries())))


@given(view=views(), model=st.sampled_from(MODELS))
def test_a_load_is_from_the_first_tier_that_has_the_model_and_there_from_the_soonest_node(
    view: StoreView, model: ModelId
) -> None:
    size = {(e.tier, e.node): e.size_bytes for e in view.residency if e.model == model}
    begun = {(e.tier, e.node) for e in view.loading if e.model == model}
    seconds: dict[str, float] = {}
    for tier in view.tiers:  # the fastest name first, as it is said of `StoreView.tiers`
        place = tier.name, tier.node
        if place in size:
            more = 0 if place in begun else size[place]
            alone_s = (tier.queued_bytes + more) / tier.bytes_per_s
            seconds[tier.name] = min(alone_s, seconds.get(tier.name, inf))
    assert view.tier_of(model) == next(iter(seconds), None)
    assert view.load_s(model) == pytest.approx(next(iter(seconds.values()), inf))
    for name in ("host", "disk"):
        assert view.load_s(model, name) == pytest.approx(seconds.get(name, inf))
