"""Latency models fitted to measurements: what was put in comes out, and the error that is told is true."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields, replace
from math import inf, nan
from pathlib import Path
from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import InstanceState, Model
from hotswap.abc import ModelCard
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore, sim_manifest
from hotswap.cli import main
from hotswap.commands.fit import check_error
from hotswap.errors import ConfigError
from hotswap.offline.virtual_time import run
from hotswap.profiling import Measurements, Profile, Shapes, StepSample, fit_profile, measure_engine
from hotswap.profiling.fit import fit_steps
from hotswap.profiling.least_squares import nonnegative

SIZES = (2, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
KINDS = [
    *(StepSample(seconds=1, prompts=(tokens,)) for tokens in SIZES),
    *(
        StepSample(seconds=1, num_decodes=batch, context=batch * context)
        for batch, context in itertools.product((1, 2, 4, 8, 16), (32, 128, 512))
    ),
    *(
        StepSample(seconds=1, num_decodes=batch, context=batch * 40, prompts=(tokens,))
        for batch, tokens in itertools.product((1, 4, 16), SIZES[1::2])
    ),
    *(
        StepSample(seconds=1, num_decodes=batch, context=batch * 100, joined=joined, left=1 - joined)
        for batch, joined in itertools.product((2, 6, 18), (0, 1))
    ),
]


def timed(device: DeviceProfile, noise: float = 0.0, seed: int = 0) -> list[StepSample]:
    """Every kind of step with the time that it would take, give or take a share."""
    random = Random(seed)
    return [
        replace(kind, seconds=kind.predicted_s(device) * (1 + random.uniform(-noise, noise)))
        for kind in KINDS
    ]


def seconds(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def devices(draw: st.DrawFn) -> DeviceProfile:
    """From small processors to large ones, with a floor or without; a knee between 64 and 512 tokens."""
    token_s = draw(seconds(5e-6, 1e-3))
    knee = draw(st.integers(64, 512))
    base_s = draw(seconds(1e-4, 0.01))
    has_floor = draw(st.booleans())
    floor_token_s = draw(st.sampled_from([0.0, 0.1, 0.3])) * token_s
    return DeviceProfile(
        name="made-up",
        memory_bytes=1 << 30,
        floor_s=base_s + knee * (token_s - floor_token_s) if has_floor else 0.0,
        floor_token_s=floor_token_s if has_floor else 0.0,
        base_s=base_s,
        token_s=token_s,
        request_s=draw(st.sampled_from([0.0, 1.0, 5.0])) * token_s,
        context_token_s=draw(st.sampled_from([0.0, 1e-3, 1e-2])) * token_s,
        decode_s=draw(st.sampled_from([0.0, 0.005])),
        prefill_square_s=draw(st.sampled_from([0.0, 1e-4, 1e-3])) * token_s,
        chunk_s=draw(st.sampled_from([0.0, 0.001])),
        join_s=draw(st.sampled_from([0.0, 0.002])),
        leave_s=draw(st.sampled_from([0.0, 0.001])),
        load_bytes_per_s=draw(seconds(1e8, 1e11)),
        unload_s=draw(seconds(1e-3, 1.0)),
    )


def any_step(draw: st.DrawFn) -> StepSample:
    decodes = draw(st.integers(0, 16))
    context = decodes * draw(st.integers(1, 500))
    prompts = draw(st.lists(st.integers(2, 1000), min_size=0 if decodes else 1, max_size=1))
    joined, left = draw(st.integers(0, decodes)), draw(st.integers(0, 4 if decodes else 0))
    return StepSample(
        seconds=1,
        num_decodes=decodes,
        context=context,
        prompts=tuple(prompts),
        joined=joined,
        left=left,
    )


any_steps = st.composite(any_step)


# ------------------------------------------------------------------ the fit


@settings(max_examples=30, deadline=None)
@given(devices(), st.lists(any_steps(), min_size=1, max_size=20))
def test_a_fit_predicts_steps_that_were_not_measured(device: DeviceProfile, steps: list[StepSample]) -> None:
    fitted = fit_steps(timed(device))
    for step in steps:
        assert step.predicted_s(fitted) == pytest.approx(step.predicted_s(device), rel=0.01)


@settings(max_examples=30, deadline=None)
@given(devices())
def test_a_fit_recovers_the_coefficients(device: DeviceProfile) -> None:
    """To a share of what they are for in the longest step; without a floor it may be one with the line."""
    fitted = fit_steps(timed(device))
    line = [step for step in KINDS if step.num_tokens > 600]
    for name, most in (
        ("token_s", max(step.num_tokens for step in line)),
        ("prefill_square_s", 1024**2),
        ("context_token_s", 16 * 512),
        ("request_s", 16),
        ("decode_s", 1),
        ("chunk_s", 1),
        ("join_s", 1),
        ("leave_s", 1),
        ("floor_s", 1 if device.floor_s else 0),
    ):
        known, found = getattr(device, name), getattr(fitted, name)
        longest_s = max(step.predicted_s(device) for step in KINDS)
        assert abs(known - found) * most < 0.02 * longest_s, name


@settings(max_examples=15, deadline=None)
@given(devices(), st.integers(0, 99))
def test_the_error_that_is_told_is_that_of_steps_it_has_not_seen(device: DeviceProfile, seed: int) -> None:
    """With a noise of a tenth either way it is about a twentieth in the mean; without any, none."""
    quiet, noisy = (fit_profile(measured(timed(device, noise=noise, seed=seed))) for noise in (0.0, 0.1))
    assert quiet.mean_error < 0.02
    assert 0.02 < noisy.mean_error < 0.12
    assert noisy.mean_error <= noisy.max_error < 0.5
    assert f"{noisy.mean_error:.1%}" in noisy.profile.error


@settings(max_examples=15, deadline=None)
@given(devices(), st.integers(0, 99))
def test_no_coefficient_is_below_zero_whatever_was_measured(device: DeviceProfile, seed: int) -> None:
    random = Random(seed)
    wild = [replace(step, seconds=step.seconds * random.uniform(0.2, 5)) for step in timed(device)]
    fitted = fit_steps(wild)
    for field in fields(DeviceProfile):
        if field.name.endswith("_s"):
            assert getattr(fitted, field.name) >= 0


@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=4, max_size=8),
    st.lists(st.floats(0, 3), min_size=3, max_size=3),
    st.lists(st.floats(-3, 3), min_size=8, max_size=8),
)
def test_no_other_solution_is_nearer(
    rows: list[list[float]], others: list[float], targets: list[float]
) -> None:
    """What `nonnegative` finds is no further from the targets than any other x >= 0 that is tried."""

    def distance(x: list[float]) -> float:
        return sum(
            (sum(a * b for a, b in zip(row, x, strict=True)) - target) ** 2
            for row, target in zip(rows, targets, strict=False)
        )

    found = nonnegative(rows, targets[: len(rows)])
    assert min(found) >= 0
    nearby = [[max(0.0, value + step) for value in found] for step in (-0.01, 0.01)]
    for other in (others, [0.0] * 3, *nearby):
        assert distance(found) <= distance(other) + 1e-6


def test_columns_that_others_make_up_count_for_nothing() -> None:
    rows = [[float(n), 2.0 * n, 0.0] for n in range(1, 6)]
    x = nonnegative(rows, [row[0] * 6 for row in rows])
    assert x[0] + 2 * x[1] == pytest.approx(6)
    assert x[2] == 0


# ------------------------------------------------------------------ the driver

WEIGHTS = 1 << 30
MANIFEST = sim_manifest("m", WEIGHTS, kv_bytes_per_token=1024, max_context_tokens=4096)
CARD = ModelCard.of(Model("m"), MANIFEST)


def measured(steps: list[StepSample]) -> Measurements:
    return Measurements(
        engine="e0",
        model="m",
        weight_bytes=WEIGHTS,
        kv_tokens=16_000,
        kv_bytes_per_token=1024,
        memory_bytes=8 << 30,
        steps=tuple(steps),
    )


def seen_of(
    device: DeviceProfile, shapes: Shapes, *, kv_blocks: int = 2048, max_requests: int = 64
) -> Measurements:
    """Measure a simulated engine of the device in virtual time."""

    async def scenario() -> Measurements:
        engine = SimEngine(
            "e0",
            replace(device, memory_bytes=8 << 30),
            kv_blocks=kv_blocks,
            token_budget=shapes.token_budget,
            max_requests=max_requests,
        )
        store = SimStore([MANIFEST])
        async with store, engine:
            seen = await measure_engine(engine, CARD, store, shapes, progress=told.append_pair)
            assert engine.status().state is InstanceState.EMPTY
        return seen

    told = Told()
    seen = run(scenario)
    total = len(told.pairs)
    assert told.pairs == [(n, total) for n in range(1, total + 1)]
    assert total % shapes.rounds == 0
    return seen


class Told:
    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def append_pair(self, done: int, of: int) -> None:
        self.pairs.append((done, of))


SMALL = Shapes(
    token_budget=1024, batches=(1, 4, 16), contexts=(32, 400), prompts=SIZES, steps=5, repeats=2, rounds=1
)


@settings(max_examples=8, deadline=None)
@given(devices())
def test_what_is_measured_of_a_simulated_engine_gives_its_device_back(device: DeviceProfile) -> None:
    seen = seen_of(device, SMALL)
    for step in seen.steps:
        assert step.seconds == pytest.approx(step.predicted_s(device), rel=0.01), step
    fit = fit_profile(seen, name="again")
    found = fit.profile.device
    for step in KINDS:
        assert step.predicted_s(found) == pytest.approx(step.predicted_s(device), rel=0.02)
    assert found.unload_s == pytest.approx(device.unload_s)
    if device.load_s(WEIGHTS) > 0.01:  # else most of it is the store's
        assert found.load_bytes_per_s == pytest.approx(device.load_bytes_per_s, rel=0.01)
    assert fit.mean_error < 0.02
    assert (found.name, fit.num_steps) == ("again", len(seen.steps))
    assert (fit.profile.weight_bytes, fit.profile.kv_blocks) == (WEIGHTS, 2048)


def test_kinds_of_steps_for_which_there_is_no_room_are_left_out() -> None:
    seen = seen_of(DeviceProfile(), SMALL, kv_blocks=64, max_requests=4)
    assert {step.num_decodes for step in seen.steps if not step.prompts} == {1, 2, 3, 4}
    assert max(step.num_tokens for step in seen.steps) <= 1024
    assert all(step.context + step.num_tokens < 64 * 16 for step in seen.steps)


def test_steps_in_which_requests_come_and_go_are_measured_for_each_batch_and_prompt() -> None:
    """Each prompt is computed, decodes for the first time, and leaves beside the one before or after it."""
    shapes = replace(SMALL, batches=(1, 4), prompts=(2, 8, 32, 96))
    kinds = {(step.num_decodes, step.prompts, step.joined, step.left) for step in fit_samples(shapes)}
    for batch in (1, 4):
        assert {(batch + 1, (8,), 0, 0), (batch + 1, (96,), 0, 0)} <= kinds
        assert {(batch + 2, (), 1, 0), (batch + 1, (), 0, 1)} <= kinds


def fit_samples(shapes: Shapes) -> tuple[StepSample, ...]:
    return seen_of(DeviceProfile(), shapes).steps


def test_an_engine_is_left_empty_also_where_measuring_breaks_off() -> None:
    async def scenario() -> None:
        store = SimStore([MANIFEST])
        engine = SimEngine("e0", replace(DeviceProfile(), memory_bytes=8 << 30))
        async with store, engine:
            with anyio.move_on_after(2.0) as scope:
                await measure_engine(engine, CARD, store, SMALL)
            assert scope.cancelled_caught
            assert engine.status().state is InstanceState.EMPTY
            await engine.load(CARD, store)
            with pytest.raises(ConfigError, match="EMPTY"):
                await measure_engine(engine, CARD, store, SMALL)

    run(scenario)


# ------------------------------------------------------------------ files and refusals


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    profile = fit_profile(measured(timed(DeviceProfile()))).profile
    path = tmp_path / "mine.json"
    path.write_text(profile.as_json())
    assert Profile.read(path) == profile


def test_a_profile_from_before_turnover_was_measured_predicts_as_it_did(tmp_path: Path) -> None:
    profile = fit_profile(measured(timed(DeviceProfile()))).profile
    whole = json.loads(profile.as_json())
    for name in ("chunk_s", "join_s", "leave_s"):
        del whole["device"][name]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(whole))
    assert Profile.read(path).device == replace(profile.device, chunk_s=0.0, join_s=0.0, leave_s=0.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[]", "no profile"),
        ('{"device": {}, "weight_bytes": 1}', "kv_blocks"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Profile.read(path)


@pytest.mark.parametrize(("name", "value"), [("token_s", "fast"), ("load_bytes_per_s", 0), ("speed", 1.0)])
def test_a_profile_with_a_field_that_makes_no_sense_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    whole = json.loads(fit_profile(measured(timed(DeviceProfile()))).profile.as_json())
    whole["device"][name] = value
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=name):
        Profile.read(path)


def test_simulate_takes_a_profile_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of half the speed makes every token take twice as long."""
    words = ["simulate", "poisson:rate=1,seconds=10,input=40,output=10", "--engines", "1", "--json"]
    words += ["--scheduler", "WeightedLoadSwap(t1=0, t2=50, b=1.5, sigmas=0)", "--token-budget", "512"]
    tpot_s: list[float] = []
    for name, factor in (("once", 1), ("twice", 2)):
        slower = [replace(step, seconds=factor * step.seconds) for step in timed(DeviceProfile())]
        path = tmp_path / f"{name}.json"
        path.write_text(fit_profile(measured(slower), name=name).profile.as_json())
        assert main([*words, "--profile", str(path)]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["device"] == name
        tpot_s.append(told["outcomes"][0]["tpot_s_mean"])
    assert tpot_s[1] == pytest.approx(2 * tpot_s[0], rel=0.05)
    assert main([*words, "--profile", str(tmp_path / "none.json")]) == 2


def test_too_few_steps_and_steps_without_time_are_refused() -> None:
    steps = timed(DeviceProfile())
    with pytest.raises(ConfigError, match="too few"):
        fit_profile(measured(steps[:9]))
    for wrong in (0.0, -1.0, inf):
        with pytest.raises(ConfigError, match="no time"):
            fit_profile(measured([*steps, replace(steps[0], seconds=wrong)]))
    with pytest.raises(ConfigError, match="prompts"):
        Shapes(prompts=(1,))
    with pytest.raises(ConfigError, match="steps"):
        Shapes(steps=0)


def test_a_profile_that_predicts_nothing_is_refused() -> None:
    random = Random(1)
    good = fit_profile(measured(timed(DeviceProfile())))
    check_error(good)
    steps = timed(DeviceProfile())
    wild = [replace(step, seconds=step.seconds * 10 ** random.uniform(-3, 3)) for step in steps]
    bad = fit_profile(measured(wild))
    assert bad.mean_error > 1
    for fit in (bad, replace(good, mean_error=nan)):
        with pytest.raises(ConfigError, match="no profile is written"):
            check_error(fit)
