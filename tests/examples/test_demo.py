"""The demo with few requests: what it shows has happened, and a wrong text fails it."""

import io
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from examples.demo import play as play_module
from examples.demo.__main__ import perform
from examples.demo.checkpoints import Checkpoint
from examples.demo.fleet import fill_store
from examples.demo.picture import lines_of, steady
from examples.demo.play import Play
from examples.demo.recital import Recital
from examples.demo.report import print_report
from examples.demo.screen import Screen
from hotswap import Hop, InstanceId, InstanceState, SwapRecord
from hotswap.testing import SpanRecorder

ROOT = Path(__file__).parents[2]
READERS, CROWD = 2, 3
Performance = tuple[Play, SpanRecorder, str]


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=100, height=40, force_terminal=terminal, color_system=None)


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def store(checkpoints: tuple[Checkpoint, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    fill_store(checkpoints, root, console=_console(terminal=False))
    return root


@pytest.fixture(scope="module")
def performance(checkpoints: tuple[Checkpoint, ...], store: Path) -> Performance:
    """One performance, drawn as on a terminal."""
    console = _console(terminal=True)
    play, spans = anyio.run(
        partial(perform, checkpoints, store, console=console, readers=READERS, crowd=CROWD)
    )
    return play, spans, _written(console)


def test_that_kernels_are_compiled_is_told() -> None:
    console = _console(terminal=False)
    log = logging.getLogger("hotswap.kernels")
    with Screen(console).telling_of_kernels():
        log.info("Kernels are compiled.")
    log.info("Kernels are compiled again.")
    assert _written(console) == "Kernels are compiled.\n"


def test_every_text_is_exact(performance: Performance) -> None:
    play = performance[0]
    assert len(play.recitals) == 2 * (3 + READERS) + 2 * READERS + CROWD
    for recital in play.recitals:
        text = recital.checkpoint.text
        assert recital.opening + recital.text == text[text.index(recital.opening) :]
    assert play.passed


def test_a_swap_moves_texts_in_the_middle(performance: Performance) -> None:
    play, spans, _ = performance
    moved = [recital for recital in play.recitals if recital.seams]
    assert moved
    assert all(len(recital.hops) >= 2 and 0 < recital.seams[0].at < len(recital.text) for recital in moved)
    swaps = {swap.span_id: swap for swap in spans.named("hotswap.swap")}
    links = {link for request in spans.of_operation("text_completion") for link in request.links}
    assert links <= set(swaps)
    below = [{child.name for child in swaps[link].children} for link in links]
    phases = {"hotswap.evict", "hotswap.unload", "hotswap.load", "hotswap.first_token"}
    assert any(phases <= names for names in below)


def test_every_model_was_swapped_in_by_the_scheduler(performance: Performance) -> None:
    play = performance[0]
    assert {swap.model for swap in play.fleet.swaps} == {checkpoint.name for checkpoint in play.checkpoints}
    assert {swap.outcome for swap in play.fleet.swaps} == {"done"}
    assert all(swap.reason != "by hand" for swap in play.fleet.swaps)


def test_what_a_lost_engine_recited_goes_on_elsewhere(performance: Performance) -> None:
    play = performance[0]
    (loss,) = play.losses
    assert loss.recovered_s is not None
    assert loss.num_streams >= READERS
    sonnets = play.checkpoints[2].name
    went_on = [
        recital
        for recital in play.recitals
        if recital.checkpoint.name == sonnets and any(seam.source == loss.instance for seam in recital.seams)
    ]
    assert len(went_on) >= READERS


def test_the_fleet_is_idle_again(performance: Performance) -> None:
    for engine in performance[0].engines:
        view = engine.status()
        assert (view.state, view.num_running, view.num_waiting) == (InstanceState.EMPTY, 0, 0)


def test_a_terminal_shows_the_fleet(performance: Performance) -> None:
    drawn = performance[2]
    for shown in ("╭─ fleet", "╭─ streams", "╭─ events", "SERVING", "queue", "is lost, with"):
        assert shown in drawn


def test_the_report_shows_the_seam_the_phases_and_the_trace(performance: Performance) -> None:
    play, spans, _ = performance
    console = _console(terminal=False)
    print_report(console, play, spans)
    printed = _written(console)
    # From an engine to itself, too: an evicted text goes on where its model is next.
    assert re.search(r"⟨e[01]→e[01]⟩", printed)
    for column in ("evict", "unload", "load", "first token", "GB/s", "tier"):
        assert column in printed
    assert printed.count("nvme") + printed.count("pinned") >= len(play.fleet.swaps)
    assert "── hotswap.evict" in printed
    assert "Every text is exact" in printed


def test_a_single_wrong_character_is_told_and_fails_the_demo(performance: Performance) -> None:
    play, spans, _ = performance
    right = play.recitals[0]
    wrong = Recital(right.checkpoint, right.opening, pieces=[*right.pieces], ended=True)
    wrong.pieces[7] = wrong.pieces[7].swapcase() + "?"
    spoiled = Play(fleet=play.fleet, engines=[], checkpoints=play.checkpoints, tell=print, recitals=[wrong])
    console = _console(terminal=False)
    print_report(console, spoiled, spans)
    assert not spoiled.passed
    said = " ".join(_written(console).split())
    assert f"WRONG: llama-alice from {right.opening!r}: after " in said
    assert "Every text is exact" not in said


def test_a_truncated_or_refused_recitation_is_wrong(checkpoints: tuple[Checkpoint, ...]) -> None:
    checkpoint = checkpoints[0]
    right = Recital(checkpoint, checkpoint.opening, pieces=[checkpoint.continuation], ended=True)
    assert right.fault == ""
    right.pieces[0] = right.pieces[0][:-1]
    assert f"after {len(right.text)} characters it said ''" in right.fault
    refused = Recital(checkpoint, checkpoint.opening, error="QueueFull: 3 wait", ended=True)
    assert refused.fault == "QueueFull: 3 wait"


def test_a_seam_lies_where_the_first_token_elsewhere_was_due(checkpoints: tuple[Checkpoint, ...]) -> None:
    hops = tuple(Hop(instance=InstanceId(id), first_index=at) for id, at in (("e0", 0), ("e1", 0), ("e0", 2)))
    recital = Recital(checkpoints[0], "", pieces=["ab", "", "cd"], hops=hops)
    assert [(seam.at, seam.source, seam.target) for seam in recital.seams] == [(2, "e1", "e0")]


def test_a_fleet_that_does_not_come_up_fails_the_demo(
    checkpoints: tuple[Checkpoint, ...], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play_module, "PATIENCE_S", 0.0)
    console = _console(terminal=False)
    play, spans = anyio.run(partial(perform, checkpoints, store, console=console, readers=1, crowd=0))
    print_report(console, play, spans)
    assert not play.passed
    assert "The fleet did not serve llama-alice on every engine" in _written(console)


def test_without_a_terminal_every_event_is_a_line() -> None:
    console = _console(terminal=False)
    screen = Screen(console)
    record = SwapRecord(
        instance=InstanceId("e0"),
        model_before=None,
        model=None,
        model_after=None,
        outcome="done",
        reason="",
        started_s=0.0,
        seconds=0.25,
        downtime_s=0.25,
    )
    screen.tell("All requests are for one model.")
    screen.tell_swap(replace(record, num_evicted=3))
    assert _written(console).splitlines() == [
        "All requests are for one model.",
        "  e0: empty → empty done in 250 ms, 3 recitations moved on",
    ]


def test_a_checkpoint_newer_than_the_store_is_converted_again(
    checkpoints: tuple[Checkpoint, ...], store: Path
) -> None:
    index = store / checkpoints[0].name / "index.json"
    before = index.stat().st_mtime_ns  # not before the checkpoint's
    fill_store(checkpoints[:1], store, console=_console(terminal=False))
    assert index.stat().st_mtime_ns == before
    os.utime(index, (0, 0))
    console = _console(terminal=False)
    fill_store(checkpoints[:1], store, console=console)
    assert index.stat().st_mtime_ns > before
    assert "converted" in _written(console)


def test_the_command_ends_well_and_prints_what_its_picture_shows(
    checkpoints: tuple[Checkpoint, ...], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").symlink_to(checkpoints[0].path.parent)
    drawn = tmp_path / "demo.svg"
    command = [sys.executable, "-m", "examples.demo", "--cache", str(tmp_path), "--readers", "1"]
    command += ["--crowd", "0", "--picture", str(drawn)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("Every text is exact: no character lost, doubled or foreign.")
    # The log tells of the engine that the demo takes away, and of nothing else.
    assert [line for line in done.stderr.splitlines() if "as the demo told it to" not in line] == []
    picture = ROOT / "docs" / "demo.svg"
    again = "make demo ARGS='--picture docs/demo.svg'"
    assert steady(lines_of(picture)) == steady(lines_of(drawn)), f"Draw the picture again: {again}."
    assert len(steady(lines_of(picture))) > 10


def test_the_picture_is_small_and_loads_nothing() -> None:
    svg = (ROOT / "docs" / "demo.svg").read_text("utf-8")
    assert len(svg) < 100_000
    assert re.findall(r"(?:src|href|url\()[^>]*?https?://", svg) == []
