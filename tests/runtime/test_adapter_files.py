"""The files of an adapter stay what they were when its version was added, or its next load is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hotswap import Adapter, Fleet, Sampling
from hotswap.backends.sim import SimEngine
from hotswap.errors import SourceChanged
from hotswap.runtime.adapter_files import AdapterFiles
from hotswap.runtime.state import FleetState
from tests.runtime.support import PROFILE, Idle, expected, sim_fleet, store_of
from tests.runtime.test_adapters import Counting

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GREEDY = Sampling(max_tokens=4, ignore_eos=True)


def write(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / CONFIG).write_text('{"r": 8}')
    (directory / WEIGHTS).write_bytes(weights)
    return directory


def overwrite_weights(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes(b"WEIGHTS")


def overwrite_config(directory: Path) -> None:
    (directory / CONFIG).write_text('{"r": 9}')


def add_a_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


def add_a_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages }}")


def remove_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()


def edit_and_set_the_time_back(directory: Path) -> None:
    """Known only before the first load, where the content is summed."""
    before = (directory / CONFIG).stat()
    overwrite_config(directory)
    os.utime(directory / CONFIG, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [overwrite_weights, overwrite_config, add_a_tokenizer, add_a_template, remove_weights]


def fleet_of(directory: Path, *engines: SimEngine) -> Fleet:
    return sim_fleet("a", engines=engines, adapters=[Adapter("sql", "a", directory)], scheduler=Idle())


async def ask(fleet: Fleet, instance: str) -> None:
    """Ask for the adapter where only one instance is open."""
    for other in fleet.view().instances:
        await fleet.drain(other.id) if other.id != instance else fleet.reopen(instance)
    async with fleet.stream("a", (1, 2), GREEDY, adapter="sql") as stream:
        assert [token.id for token in await stream.collect()] == expected(stream.request)
        assert [hop.instance for hop in stream.hops] == [instance]
    for other in fleet.view().instances:
        fleet.reopen(other.id)


@pytest.mark.parametrize("change", CHANGES)
async def test_files_that_changed_under_one_version_are_loaded_nowhere_else(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    directory, engines = write(tmp_path / "sql"), (Counting("e0"), Counting("e1"))
    async with fleet_of(directory, *engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        await ask(fleet, "e0")
        change(directory)
        await ask(fleet, "e0")  # which holds it
        with pytest.raises(SourceChanged, match=r"'sql'.*update"):
            await ask(fleet, "e1")
        assert engines[1].loaded == []


@pytest.mark.parametrize("change", [*CHANGES, edit_and_set_the_time_back])
async def test_files_that_changed_before_the_first_load_are_refused(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    directory, engine = write(tmp_path / "sql"), Counting("e0")
    async with fleet_of(directory, engine) as fleet:
        await fleet.swap("e0", to="a")
        change(directory)
        with pytest.raises(SourceChanged):
            await ask(fleet, "e0")
        assert engine.loaded == []


async def test_copies_of_the_same_files_are_the_same_version(tmp_path: Path) -> None:
    directory, engines = write(tmp_path / "sql"), (Counting("e0"), Counting("e1"))
    async with fleet_of(directory, *engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        await ask(fleet, "e0")
        shutil.rmtree(directory)
        write(directory)
        (directory / "README.md").write_text("Not read by any engine.")
        os.utime(directory / WEIGHTS, ns=(1, 1))
        await ask(fleet, "e1")
        assert engines[1].loaded == ["sql"]


async def test_an_adapter_that_changed_while_it_was_read_is_not_held(tmp_path: Path) -> None:
    directory = write(tmp_path / "sql")

    class Overwritten(Counting):
        async def load_adapter(self, adapter: Adapter) -> None:
            await super().load_adapter(adapter)
            overwrite_weights(directory)

    engine = Overwritten("e0")
    async with fleet_of(directory, engine) as fleet:
        await fleet.swap("e0", to="a")
        with pytest.raises(SourceChanged):
            await ask(fleet, "e0")
        assert engine.status().adapters == ()


async def test_files_may_come_after_their_adapter_was_added(tmp_path: Path) -> None:
    engines = (SimEngine("e0", PROFILE), SimEngine("e1", PROFILE))
    async with fleet_of(tmp_path / "sql", *engines) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        directory = write(tmp_path / "sql")
        await ask(fleet, "e0")
        overwrite_weights(directory)
        with pytest.raises(SourceChanged):
            await ask(fleet, "e1")


async def test_new_weights_in_a_directory_of_their_own_are_another_version(tmp_path: Path) -> None:
    engine = Counting("e0")
    async with fleet_of(write(tmp_path / "1"), engine) as fleet:
        await fleet.swap("e0", to="a")
        await ask(fleet, "e0")
        await fleet.adapters.update(Adapter("sql", "a", write(tmp_path / "2", b"other weights")))
        await ask(fleet, "e0")
        assert engine.loaded == ["sql", "sql@1"]


async def test_what_no_request_can_have_any_more_is_forgotten(tmp_path: Path) -> None:
    files = AdapterFiles(FleetState(store_of("a")))
    for epoch in range(50):
        files.note(Adapter("sql", "a", write(tmp_path / str(epoch)), epoch))
    assert len(files) <= 2
