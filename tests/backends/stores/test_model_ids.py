"""Every id that a `Model` may have is held by every store; every other one is refused at once."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hotswap import Model, ModelId
from hotswap.abc import WeightStore
from hotswap.backends.stores import NvmeStore, PinnedStore, RemoteStore, SharedStore, TieredStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.stores.index import models_in
from hotswap.backends.stores.layout import model_directory
from hotswap.errors import ConfigError, ShardMissing
from hotswap.model_id import directory_name, model_id_of
from tests.backends.stores.models import UNIT, put, read_rank

ODD = ["llama3:8b", "a model", ".hidden", "-rf", "~", "~3A", "a" * 200, "模型" * 11]
ODD += ["CON", "a.b.partial", "a.0-of-1.0123456789abcdef", "%2e", "a?b#c", " a ", "ä"]


def is_id(text: str) -> bool:
    try:
        return bool(directory_name(text))
    except ValueError:
        return False


IDS = st.text(st.characters(exclude_characters="\\", exclude_categories=("C", "Zl", "Zp")), min_size=1)
IDS = (IDS | st.text(st.sampled_from("a.-~:3A "), min_size=1)).filter(is_id)

Open: TypeAlias = Callable[[Path, Path], AbstractAsyncContextManager[WeightStore]]


@asynccontextmanager
async def on_disk(root: Path, other: Path) -> AsyncGenerator[WeightStore]:
    async with NvmeStore(root) as store:
        yield store


@asynccontextmanager
async def pinned(root: Path, other: Path) -> AsyncGenerator[WeightStore]:
    host = PinnedStore("1 MiB")
    async with TieredStore(host, NvmeStore(root)) as store:
        for model in models_in(root):
            await store.prefetch(model)
        yield host


@asynccontextmanager
async def shared(root: Path, other: Path) -> AsyncGenerator[WeightStore]:
    host = SharedStore(other, "1 MiB")
    async with TieredStore(host, NvmeStore(root)) as store:
        for model in models_in(root):
            await store.prefetch(model)
        yield host


@asynccontextmanager
async def remote(root: Path, other: Path) -> AsyncGenerator[WeightStore]:
    async with RemoteStore(other.as_uri()) as store:
        for model in models_in(root):
            await store.push(model_directory(root, model))
        yield store


@asynccontextmanager
async def written_through(root: Path, other: Path) -> AsyncGenerator[WeightStore]:
    """From a remote store to the disk."""
    disk = NvmeStore(other)
    async with TieredStore(disk, RemoteStore(root.as_uri())) as store:
        for model in models_in(root):
            await store.prefetch(model)
        yield disk


STORES = [on_disk, pinned, shared, remote, written_through]


@pytest.mark.parametrize("opened", STORES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(ids=st.lists(IDS, min_size=1, max_size=3, unique=True))
@example(ids=ODD)
def test_every_store_holds_models_of_every_id(opened: Open, ids: list[str]) -> None:
    async def round_trip(root: Path, other: Path) -> None:
        ranks = {Model(id).id: put(root, id, size=UNIT, seed=number)[1] for number, id in enumerate(ids)}
        assert sorted(models_in(root)) == sorted(ids)
        async with opened(root, other) as store:
            for id, (rank,) in ranks.items():
                manifest = await store.manifest(ModelId(id))
                assert manifest.model == id
                assert await read_rank(store, manifest) == rank
            assert {entry.model for entry in store.view().residency} == set(ids)

    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as other:
        anyio.run(round_trip, Path(root), Path(other))


@given(one=IDS, other=IDS)
def test_no_two_ids_have_one_directory_and_each_can_be_read_back(one: str, other: str) -> None:
    assert (directory_name(one) == directory_name(other)) == (one == other)
    assert model_id_of(directory_name(one)) == one
    assert re.fullmatch(r"[A-Za-z0-9_~][A-Za-z0-9._~-]*", directory_name(one))


@given(name=st.text(st.sampled_from("a.~-3AFC/ "), max_size=9))
def test_a_name_is_of_one_id_at_most(name: str) -> None:
    model = model_id_of(name)
    assert model is None or directory_name(model) == name


NO_IDS = ["", ".", "..", "a\\b", "a\nb", "a\0b", "\udc80", "a" * 201, "模" * 30, None, 7]


@pytest.mark.parametrize("id", NO_IDS)
def test_every_other_id_is_refused_where_the_model_is_named(id: str) -> None:
    with pytest.raises(ConfigError, match="Model id"):
        Model(id)


@pytest.mark.parametrize("id", [id for id in ODD if id.isprintable()])
async def test_a_checkpoint_is_imported_under_every_id(id: str, tmp_path: Path, checkpoint: Path) -> None:
    async with NvmeStore(tmp_path, budget="1 MiB") as store:
        await store.import_model(Model(id, checkpoint))
        assert await store.tokenizer(ModelId(id)) is not None
        await store.import_model(Model(id, checkpoint))
        assert await store.remove(ModelId(id)) > 0
        with pytest.raises(ShardMissing):
            await store.manifest(ModelId(id))
    assert os.listdir(tmp_path) == []


def test_a_plain_id_is_its_own_directory(tmp_path: Path, checkpoint: Path) -> None:
    """So models from before are found."""
    convert(checkpoint, tmp_path, model_id="Llama-3.1_8B")
    assert [path.name for path in tmp_path.iterdir()] == ["Llama-3.1_8B"]
