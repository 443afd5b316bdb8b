"""`NodeStores`: every node's tiers by its name, nodes that come and go, and a fleet that loads by node."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, ModelId, Residency, Sampling, StoreView, TierView
from hotswap.abc import Action, Prefetch, SupportsNodes, WrapperStore
from hotswap.backends.nodes import NodeStores
from hotswap.backends.sim import SimNodes, SimStore, sim_manifest
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.errors import ConfigError, ShardMissing, StoreError
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.policies import StartupTimePlacement
from hotswap.testing import WeightStoreConformance
from tests.backends.stores.models import UNIT, put_all
from tests.runtime.support import WEIGHT_BYTES, Idle, engine_of, read, sim_fleet, until

MODELS = (ModelId("a"), ModelId("b"))
A, B = MODELS
SHORT = Sampling(max_tokens=4)


class TestConformance(WeightStoreConformance):
    models = MODELS

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = put_all(tmp_path, MODELS)

    def make_store(self) -> NodeStores:
        def node() -> TieredStore:
            host = PinnedStore("1 MiB", chunk_bytes=UNIT)
            return TieredStore(host, NvmeStore(self.root, chunk_bytes=UNIT))

        return NodeStores({"n0": node(), "n1": node()})


def sim_store(*, host_bytes: int | None = None) -> SimStore:
    host = TierView(name="host", bytes_per_s=50e6, capacity_bytes=host_bytes)
    manifests = [
        sim_manifest(name, WEIGHT_BYTES, max_context_tokens=4096, eos_token_ids=(0,)) for name in "ab"
    ]
    return SimStore(manifests, home=TierView(name="disk", bytes_per_s=5e6), cache=host)


class Shown(WrapperStore):
    """Shows a view of its own."""

    def __init__(self, view: StoreView) -> None:
        super().__init__(sim_store())
        self.shown = view

    def view(self) -> StoreView:
        return self.shown


TIERS = ("host", "disk", "remote")


@st.composite
def store_views(draw: st.DrawFn) -> StoreView:
    tiers = tuple(
        TierView(name=name, bytes_per_s=draw(st.integers(1, 9)), used_bytes=draw(st.integers(0, 9)))
        for name in TIERS
        if draw(st.booleans())
    )
    held = st.sets(st.sampled_from(MODELS))
    entries = [Residency(model=m, tier=t.name, size_bytes=7) for t in tiers for m in sorted(draw(held))]
    loading = [Residency(model=m, tier=t.name, size_bytes=3) for t in tiers for m in sorted(draw(held))]
    return StoreView(tiers=tiers, residency=tuple(entries), loading=tuple(loading))


@given(st.dictionaries(st.sampled_from(["n0", "n1", "n2"]), store_views()))
def test_what_a_node_sees_is_what_its_store_shows_beside_the_tiers_that_all_share(
    views: dict[str, StoreView],
) -> None:
    async def look() -> StoreView:
        async with NodeStores({node: Shown(view) for node, view in views.items()}) as stores:
            assert stores.nodes == tuple(views)
            return stores.view()

    joined = run(look)
    assert len({(tier.name, tier.node) for tier in joined.tiers}) == len(joined.tiers)
    assert len(set(joined.residency)) == len(joined.residency)
    for node, view in views.items():
        seen = joined.seen_from(node)
        mine = [tier for tier in view.tiers if tier.name != "remote"]
        assert [(t.name, t.bytes_per_s, t.used_bytes) for t in seen.tiers if t.node == node] == [
            (t.name, t.bytes_per_s, t.used_bytes) for t in mine
        ]
        for model in MODELS:
            if view.tier_of(model) not in (None, "remote"):
                assert seen.tier_of(model) == view.tier_of(model)
        for entry in view.residency:
            assert any((e.model, e.tier) == (entry.model, entry.tier) for e in seen.residency)


@virtual_time
async def test_simulated_stores_look_the_same_in_both() -> None:
    named = {n: SimStore({"a": 100}, home=TierView(name="disk", node=n), cache=None) for n in ("n0", "n1")}
    plain = {n: SimStore({"a": 100}, home=TierView(name="disk"), cache=None) for n in named}
    async with NodeStores(plain) as joined:
        assert joined.view() == SimNodes(named).view()


@virtual_time
async def test_nodes_come_and_go_with_their_tiers() -> None:
    async with NodeStores({"n0": sim_store()}) as stores:
        assert isinstance(stores, SupportsNodes)
        late = sim_store()
        await stores.add("n1", late)
        await late.prefetch(A)
        assert (stores.view().tier_of(A), stores.view().seen_from("n0").tier_of(A)) == ("host", "disk")
        with pytest.raises(ConfigError, match="n1"):
            await stores.add("n1", sim_store())
        await stores.remove("n1")
        assert {tier.node for tier in stores.view().tiers} == {"n0"}
        assert stores.view().tier_of(A) == "disk"
        with pytest.raises(ShardMissing, match="n1"):
            stores.on("n1")
        with pytest.raises(ConfigError, match="n1"):
            await stores.remove("n1")
        await stores.remove("n0")
        with pytest.raises(ShardMissing, match="add one"):
            await stores.manifest(A)


class Closed(WrapperStore):
    """Cannot be opened."""

    is_mounted = False

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        if not self.is_mounted:
            raise StoreError("The disk is not mounted.")
        yield self


@virtual_time
async def test_a_store_that_cannot_be_opened_is_no_node() -> None:
    async with NodeStores({"n0": sim_store()}) as stores:
        with pytest.raises(StoreError, match="not mounted"):
            await stores.add("n1", Closed(sim_store()))
        assert stores.nodes == ("n0",)
    with pytest.raises(ConfigError, match="no name"):
        NodeStores({"": sim_store()})
    with pytest.raises(StoreError, match="not open"):
        await stores.add("n1", sim_store())


class Early(Idle):
    """Prefetches a model on a node."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return [Prefetch(model=A, node=node) for node in self.nodes]


@virtual_time
async def test_a_prefetch_goes_to_the_node_that_it_names(caplog: pytest.LogCaptureFixture) -> None:
    first, second = sim_store(), sim_store()
    stores = NodeStores({"n0": first, "n1": second})
    async with sim_fleet("a", "b", store=stores, scheduler=Early("n1", "n2")):
        await until(lambda: second.view().tier_of(A) == "host")
        assert first.view().tier_of(A) == "disk"
        assert "no node 'n2'" in caplog.text


@virtual_time
async def test_a_prefetch_without_a_node_goes_where_it_is_done_soonest() -> None:
    small, large = sim_store(host_bytes=2 * WEIGHT_BYTES), sim_store(host_bytes=4 * WEIGHT_BYTES)
    async with NodeStores({"n0": small, "n1": large}) as stores:
        await stores.prefetch(A)
        await stores.prefetch(B)
        assert [large.view().tier_of(m) for m in MODELS] == ["host", "host"]
        assert [small.view().tier_of(m) for m in MODELS] == ["disk", "disk"]


@virtual_time
async def test_placement_loads_where_the_weights_are_and_elsewhere_once_that_node_is_gone() -> None:
    near, far = sim_store(), sim_store()
    stores = NodeStores({"n0": far, "n1": near})
    engines = [engine_of("e0", node="n0"), engine_of("e1", node="n1")]
    fleet = sim_fleet("a", "b", engines=engines, store=stores, scheduler=StartupTimePlacement(measured=False))
    async with fleet:
        await near.prefetch(A)
        await read(fleet, "a", (1, 2), SHORT)
        assert (fleet.swaps[-1].instance, fleet.swaps[-1].tier) == ("e1", "host")
        await fleet.swap("e1", to="b")
        await stores.remove("n1")
        engines[1].lose()
        await read(fleet, "a", (1, 2), SHORT)
        assert (fleet.swaps[-1].instance, fleet.swaps[-1].tier) == ("e0", "disk")
