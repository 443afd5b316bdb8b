"""An index that is kept current answers as a walk over the whole fleet would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, replace
from operator import itemgetter
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, InstanceId, InstanceState, InstanceView, ModelId
from hotswap.abc import CountRank
from hotswap.offline.replay import dump_view, load_view
from hotswap.runtime.index import Index

Pull: TypeAlias = Callable[[InstanceId], InstanceView]
WithCounts: TypeAlias = Callable[[InstanceView], InstanceView]

MODELS = [ModelId(name) for name in "abc"]
IDS = [InstanceId(f"e{number}") for number in range(6)]


class Indexed:
    """An instance as an index sees it."""

    def __init__(self, now: InstanceView, pull: Pull | None, with_counts: WithCounts | None) -> None:
        self.now, self.told, self.is_put = now, now, False
        self._pull, self._with_counts = pull, with_counts

    def view(self) -> InstanceView:
        self.told = self.now if self.is_put or self._pull is None else self._pull(self.now.id)
        return self.told

    def last_view(self) -> InstanceView:
        return self.told

    def counted(self, view: InstanceView) -> InstanceView:
        return self.view() if self._with_counts is None else self._with_counts(view)


class Kept(Index):
    """An index of instances that tests `put`; of other changes it asks `pull` and `with_counts`."""

    def __init__(
        self,
        instances: Iterable[InstanceView] = (),
        pull: Pull | None = None,
        with_counts: WithCounts | None = None,
    ) -> None:
        super().__init__()
        self._shown: dict[InstanceId, Indexed] = {}
        self._pull, self._with_counts = pull, with_counts
        for view in instances:
            self.put(view)

    def put(self, view: InstanceView) -> None:
        if view.id not in self._shown:
            self._shown[view.id] = Indexed(view, self._pull, self._with_counts)
            self.add(view.id, self._shown[view.id])
        shown = self._shown[view.id]
        shown.now, shown.is_put = view, True
        self.state_changed(view.id)
        self.refresh()
        shown.is_put = False

    def drop(self, instance: InstanceId) -> None:
        del self._shown[instance]
        self.remove(instance)


def by_requests(instance: InstanceView) -> tuple[int, InstanceId] | None:
    return (instance.num_requests, instance.id) if instance.open else None


def by_id(instance: InstanceView) -> InstanceId:
    return instance.id


def by_requests_and_blocks(instance: InstanceView) -> tuple[int, int, InstanceId] | None:
    return (instance.num_requests, -instance.num_free_kv_blocks, instance.id) if instance.open else None


def open_requests(instance: InstanceView) -> int | None:
    return instance.num_requests if instance.open else None


class ByCounts(CountRank):
    """The same, as a rank that asks for loads only where requests are equal."""

    def count(self, instance: InstanceView) -> int | None:
        return instance.num_requests if instance.open else None

    def load(self, instance: InstanceView) -> tuple[int, InstanceId]:
        return -instance.num_free_kv_blocks, instance.id


BY_COUNTS = ByCounts()


views = st.builds(
    InstanceView,
    id=st.sampled_from(IDS),
    state=st.sampled_from(InstanceState),
    model=st.none() | st.sampled_from(MODELS),
    num_requests=st.integers(0, 3),
    num_free_kv_blocks=st.integers(0, 5),
    max_requests=st.just(3),
    draining=st.booleans(),
    swapping=st.booleans(),
    target=st.none() | st.sampled_from(MODELS),
)
kinds = st.sampled_from(["put", "count", "load", "drop"])
changes = st.lists(st.tuples(kinds, views, st.booleans()), max_size=40)


def walk_hosts(now: dict[InstanceId, InstanceView], model: ModelId) -> tuple[InstanceView, ...]:
    return tuple(i for i in now.values() if i.model == model and i.state is InstanceState.SERVING)


def walk_replicas(now: dict[InstanceId, InstanceView], model: ModelId) -> tuple[InstanceView, ...]:
    def counts(view: InstanceView) -> bool:
        if view.swapping:
            return view.target == model
        alive = view.state in (InstanceState.SERVING, InstanceState.LOADING) and not view.draining
        return alive and view.model == model

    return tuple(view for view in now.values() if counts(view))


@given(changes, st.booleans())
def test_it_answers_as_a_walk_over_all_instances_does(
    steps: list[tuple[str, InstanceView, bool]], has_counts: bool
) -> None:
    def with_counts(view: InstanceView) -> InstanceView:
        return view.updated(num_requests=now[view.id].num_requests)

    now: dict[InstanceId, InstanceView] = {}
    kept = Kept(pull=lambda instance: now[instance], with_counts=with_counts if has_counts else None)
    for kind, view, asked in steps:
        if kind == "put":
            now[view.id] = view
            kept.put(view)
        elif kind == "count" and view.id in now:  # more than that it changed is not told
            now[view.id] = replace(now[view.id], num_requests=view.num_requests)
            kept.counts_changed(view.id)
        elif kind == "load" and view.id in now:
            now[view.id] = replace(now[view.id], num_free_kv_blocks=view.num_free_kv_blocks)
            kept.load_changed(view.id)
        elif kind == "drop" and view.id in now:
            del now[view.id]
            kept.drop(view.id)
        if not asked:
            continue
        for model in MODELS:
            hosts = walk_hosts(now, model)
            counted = [i.num_requests for i in hosts if i.open]  # first, before another question renews them
            assert kept.total(model, open_requests) == (len(counted), sum(counted))
            for rank in (
                BY_COUNTS,
                by_requests,
                by_id,
                by_requests_and_blocks,
            ):  # loads not asked for at first
                ranked = [(rank(instance), instance) for instance in hosts if rank(instance) is not None]
                best = min(ranked, key=itemgetter(0), default=(None, None))[1]
                assert kept.min_by(model, rank) == best
                assert list(kept.ranked(model, rank)) == [i for _, i in sorted(ranked, key=itemgetter(0))]
            assert kept.host_ids(model) == {i.id for i in hosts}
            assert kept.hosts(model) == hosts
            assert kept.replicas(model) == walk_replicas(now, model)
    assert kept.instances() == tuple(now.values())
    assert kept.ids == now.keys()
    assert all(kept.instance(key) == view for key, view in now.items())


@given(st.lists(views, unique_by=lambda view: view.id))
def test_a_view_made_by_hand_answers_likewise_and_stays_what_it_was(instances: list[InstanceView]) -> None:
    view = FleetView(now_s=0.0, instances=tuple(instances))
    now = {instance.id: instance for instance in instances}
    for model in MODELS:
        assert view.hosts(model) == walk_hosts(now, model)
        assert view.serving(model) == tuple(i for i in walk_hosts(now, model) if i.open)
        assert view.replicas(model) == walk_replicas(now, model)
    again = load_view(dump_view(view))
    assert again == view
    assert hash(again) == hash(view)
    assert repr(again) == repr(view)


def test_an_instance_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        FleetView(now_s=0.0).instance(IDS[0])


def test_ids_stay_one_object_while_loads_change() -> None:
    kept = Kept([InstanceView(id=key, state=InstanceState.SERVING, model=MODELS[0]) for key in IDS])
    before = kept.ids
    kept.put(InstanceView(id=IDS[0], state=InstanceState.EMPTY))
    assert kept.ids is before
    kept.drop(IDS[0])
    assert kept.ids == before - {IDS[0]}


def test_ids_of_hosts_stay_one_object_while_loads_change() -> None:
    kept = Kept([InstanceView(id=key, state=InstanceState.SERVING, model=MODELS[0]) for key in IDS])
    before = kept.host_ids(MODELS[0])
    kept.put(replace(kept.instance(IDS[0]), num_requests=3))
    assert kept.host_ids(MODELS[0]) is before
    kept.put(InstanceView(id=IDS[0], state=InstanceState.EMPTY))
    assert kept.host_ids(MODELS[0]) == before - {IDS[0]}


def test_a_request_that_leaves_is_no_longer_counted() -> None:
    kept = Kept(
        InstanceView(id=key, state=InstanceState.SERVING, model=MODELS[0], num_requests=2) for key in IDS
    )
    assert kept.total(MODELS[0], open_requests) == (len(IDS), 2 * len(IDS))
    kept.drop(IDS[0])
    assert kept.total(MODELS[0], open_requests) == (len(IDS) - 1, 2 * len(IDS) - 2)


def test_all_come_in_order_after_many_changes_also_if_the_same_was_put_twice() -> None:
    kept = Kept(InstanceView(id=key, state=InstanceState.SERVING, model=MODELS[0]) for key in IDS)
    for turn in range(100):
        view = replace(kept.instance(IDS[turn % len(IDS)]), num_requests=turn * 7 % 200)
        for _ in range(2):
            kept.put(view)
            kept.min_by(MODELS[0], by_requests)
        ranked = [instance.num_requests for instance in kept.ranked(MODELS[0], by_requests)]
        assert ranked == sorted(i.num_requests for i in kept.hosts(MODELS[0]))


def test_a_heap_that_many_changes_went_through_still_knows_the_best() -> None:
    kept = Kept(InstanceView(id=key, state=InstanceState.SERVING, model=MODELS[0]) for key in IDS)
    for turn in range(500):
        key = IDS[turn % len(IDS)]
        kept.put(replace(kept.instance(key), num_requests=turn * 7 % 200))
        best = kept.min_by(MODELS[0], by_requests)
        assert best is not None
        assert best.num_requests == min(i.num_requests for i in kept.hosts(MODELS[0]))


def test_engines_are_not_looked_at_for_what_the_fleet_itself_counts() -> None:
    def with_counts(view: InstanceView) -> InstanceView:
        return view.updated(num_requests=7)

    def pull(instance: InstanceId) -> InstanceView:
        raise AssertionError(f"{instance} was looked at")

    kept = Kept(
        [InstanceView(id=key, state=InstanceState.SERVING, model=MODELS[0]) for key in IDS], pull, with_counts
    )
    for key in IDS:
        kept.counts_changed(key)
    kept.load_changed(IDS[0])  # the load changes, too, but is not read
    assert kept.total(MODELS[0], open_requests) == (len(IDS), 7 * len(IDS))
    counted = kept.counted(IDS[0])
    assert counted is not None
    assert counted.num_requests == 7


def test_an_instance_that_could_not_be_looked_at_is_looked_at_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def pull(instance: InstanceId) -> InstanceView:
        if faults:
            raise faults.pop()
        return now[instance]

    now = {key: InstanceView(id=key, state=InstanceState.SERVING, model=MODELS[0]) for key in IDS}
    faults: list[Exception] = [RuntimeError("it does not answer")]
    kept = Kept(now.values(), pull, lambda view: view)
    before = dict(now)
    now[IDS[0]] = now[IDS[0]].updated(num_free_kv_blocks=7)
    kept.load_changed(IDS[0])
    assert kept.instances() == tuple(before.values()), "its last view is shown"
    assert "it does not answer" in caplog.text
    assert kept.instances() == tuple(now.values())


@given(views, views)
def test_a_renewed_view_is_as_a_replaced_one(view: InstanceView, other: InstanceView) -> None:
    before = repr(view)
    new = view.updated(num_requests=other.num_requests, num_free_kv_blocks=other.num_free_kv_blocks)
    same = replace(view, num_requests=other.num_requests, num_free_kv_blocks=other.num_free_kv_blocks)
    assert (new, hash(new), repr(new)) == (same, hash(same), repr(same))
    assert repr(view) == before
    with pytest.raises(FrozenInstanceError):
        new.num_requests = 3  # type: ignore[misc]


def test_a_rank_by_counts_looks_at_loads_only_where_counts_are_equal() -> None:
    looked: list[InstanceId] = []

    def pull(instance: InstanceId) -> InstanceView:
        looked.append(instance)
        return now[instance]

    now = {
        key: InstanceView(id=key, state=InstanceState.SERVING, model=MODELS[0], num_requests=number // 2)
        for number, key in enumerate(IDS)
    }
    kept = Kept(now.values(), pull)
    for key in IDS:
        kept.load_changed(key)
    now[IDS[1]] = replace(now[IDS[1]], num_free_kv_blocks=7)
    assert kept.min_by(MODELS[0], BY_COUNTS) == now[IDS[1]]
    assert set(looked) == set(IDS[:2])
