"""Traces: read whole or refused by the line, scaled in time without loss, prompts that share prefixes."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotswap.errors import ConfigError
from hotswap.offline.workloads import log_normal_lengths, power_law_lengths, zipf_mix
from hotswap.simulation import Arrivals, Trace, TraceRequest, generate, generate_each
from hotswap.simulation.trace import MOST_SECONDS, PREFIX_BLOCK_TOKENS

HEAD = "arrival_s,input_tokens,output_tokens,model,prefix_blocks_512\n"
ROWS = "0.5,1000,7,a,3 9\n0.25,12,1,b,\n2,600,90,a,3\n"


def asked(*times: float) -> list[TraceRequest]:
    return [TraceRequest(arrive_s=at_s, prompt_tokens=10, output_tokens=4) for at_s in times]


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_read_whole_and_in_order(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("t.csv.gz" if packed else "t.csv")
    data = (HEAD + ROWS).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    trace = Trace.read(path)
    assert [(r.arrive_s, r.model, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.25, "b", 12, 1),
        (0.5, "a", 1000, 7),
        (2.0, "a", 600, 90),
    ]
    assert trace.requests[1].prefix_blocks == (3, 9)
    assert trace.models == {"a": 2, "b": 1}
    assert trace.name == "t"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arrival_s,input_tokens\n1,2\n", "output_tokens"),
        (HEAD + "0,1,1,a,\nx,1,1,a,\n", "Line 3"),
        (HEAD + "0,many,1,a,\n", "Line 2"),
        (HEAD + "0,1\n", "Line 2"),
        (HEAD + "nan,1,1,a,\n", "Line 2"),
        (HEAD + "-1,1,1,a,\n", "Line 2"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Trace.read(path)


def test_a_file_that_is_cut_short_or_missing_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress((HEAD + ROWS * 100).encode())
    (tmp_path / "t.csv.gz").write_bytes(whole[: len(whole) // 2])
    for name in ("t.csv.gz", "other.csv"):
        with pytest.raises(ConfigError, match=name):
            Trace.read(tmp_path / name)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50), st.floats(0.01, 100))
@example([5e-324], 1.0)
def test_another_rate_changes_times_alone(times: list[float], rate_per_s: float) -> None:
    trace = Trace.of(asked(*times))
    other = trace.at_rate(rate_per_s)
    assert len(other.requests) == len(times)
    if trace.seconds > 1e-6:
        assert other.rate_per_s == pytest.approx(rate_per_s, rel=1e-6)


@given(st.lists(st.floats(0, 100), max_size=40), st.floats(0, 60), st.floats(0.1, 60))
def test_windows_beside_each_other_miss_no_request(
    times: list[float], start_s: float, seconds: float
) -> None:
    trace = Trace.of(asked(*times))
    inside = trace.window(start_s, seconds)
    assert len(inside.requests) == sum(start_s <= at_s < start_s + seconds for at_s in times)
    assert all(0 <= r.arrive_s <= seconds for r in inside.requests)


def test_jitter_moves_arrivals_and_nothing_else() -> None:
    trace = Trace.of(asked(*range(50)))
    one, again, other = (trace.jittered(seed, 3.0) for seed in (1, 1, 2))
    assert one == again != other
    assert [r.arrive_s for r in one.requests] == sorted(r.arrive_s for r in one.requests)
    assert len(one.requests) == 50


@given(
    st.lists(st.integers(0, 1 << 20), max_size=4),
    st.lists(st.integers(0, 1 << 20), max_size=4),
    st.integers(1, 3000),
    st.integers(1, 3000),
)
def test_prompts_begin_alike_as_far_as_their_blocks_do(
    left: list[int], right: list[int], long: int, longer: int
) -> None:
    one = TraceRequest(arrive_s=0, prompt_tokens=long, output_tokens=1, prefix_blocks=tuple(left)).prompt(1)
    two = TraceRequest(arrive_s=0, prompt_tokens=longer, output_tokens=1, prefix_blocks=tuple(right)).prompt(
        2
    )
    assert (len(one), len(two)) == (long, longer)
    same = next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    shared = min(same * PREFIX_BLOCK_TOKENS, long, longer)
    assert one[:shared] == two[:shared]
    if same < min(len(left), len(right)) and shared + 2 <= min(long, longer):
        assert one[shared : shared + 2] != two[shared : shared + 2]


def test_blocks_that_differ_and_what_is_ones_own_are_told_apart_by_their_first_sixteen_tokens() -> None:
    """Names of many more blocks than there are token ids, as an hour of Mooncake's has them."""
    shared = {ask(16, block).prompt(0) for block in range(0, 200_000, 7)}
    own = {ask(16).prompt(number) for number in range(0, 200_000, 7)}
    assert len(shared | own) == len(range(0, 200_000, 7)) * 2
    assert len(ask(100_000, 5).prompt(3)) == 100_000
    assert set(ask(100_000, 5).prompt(3)) <= set(range(32_000))


def ask(prompt_tokens: int, *blocks: int) -> TraceRequest:
    return TraceRequest(arrive_s=0, prompt_tokens=prompt_tokens, output_tokens=1, prefix_blocks=blocks)


def test_columns_may_be_called_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("at,input_tokens,output_tokens,model,tenant\n1,2,3,a,x\n2,3,4,a,y\n")
    trace = Trace.read(path, columns={"arrival_s": "at", "model": "tenant"})
    assert [(r.arrive_s, r.model) for r in trace.requests] == [(1.0, "x"), (2.0, "y")]
    assert Trace.read(path, columns={"arrival_s": "at", "adapter": "tenant"}).requests[1].adapter == "y"
    crossed = Trace.read(path, columns={"arrival_s": "at", "model": "tenant", "adapter": "model"})
    assert [(r.model, r.adapter) for r in crossed.requests] == [("x", "a"), ("y", "a")]
    with pytest.raises(ConfigError, match="client"):
        Trace.read(path, columns={"arrival_s": "at", "model": "client"})
    with pytest.raises(ConfigError, match="modle"):
        Trace.read(path, columns={"arrival_s": "at", "modle": "tenant"})


def test_a_made_trace_is_its_seed() -> None:
    made = [generate(seed, models={"a": 3, "b": 1}, rate_per_s=5, seconds=60, cv=4) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert set(made[0].models) == {"a", "b"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": {}},
        {"models": {"a": -1.0, "b": 2.0}},
        {"rate_per_s": 0},
        {"cv": -1},
        {"cv": 1e9},
        {"rate_per_s": 1e9},
    ],
)
def test_a_workload_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    settings: dict[str, object] = {"models": {"a": 1.0}, "rate_per_s": 1.0, "seconds": 10.0, **wrong}
    with pytest.raises(ConfigError):
        generate(0, **settings)  # type: ignore[arg-type]


def test_draws_that_cannot_be_are_refused() -> None:
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="median"):
            log_normal_lengths(wrong)
    for wrong in (float("nan"), 1e9, -1e9):
        with pytest.raises(ConfigError, match="exponent"):
            zipf_mix(["a", "b"], exponent=wrong)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("1.7e9,10,5", "seconds from the start of the trace"),
        ("1e300,10,5", "seconds from the start of the trace"),
        ("nan,10,5", "arrive_s is nan"),
        ("0,99999999999999999999,5", "prompt_tokens"),
        ("0,-10,5", "prompt_tokens"),
        ("0,10,-5", "output_tokens"),
        ("0,10,5,5000", "priority"),
    ],
)
def test_a_row_out_of_range_is_refused_by_its_line(tmp_path: Path, row: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"arrival_s,input_tokens,output_tokens,priority\n0,1,1,0\n{row}\n")
    with pytest.raises(ConfigError, match=rf"Line 3 .*{says}"):
        Trace.read(path)


def test_a_table_that_excel_has_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + ROWS, encoding="utf-8-sig")
    assert len(Trace.read(path).requests) == 3


def test_the_longest_time_is_a_time_of_a_request() -> None:
    assert Trace.of(asked(0.0, MOST_SECONDS)).seconds == MOST_SECONDS
    with pytest.raises(ConfigError, match="num_requests"):
        Trace.of(asked(0.0, 1.0)).first(-1)


@pytest.mark.parametrize("mean", [128, 256, 512])
def test_power_laws_have_llumnix_means_and_long_tails(mean: int) -> None:
    """Sun et al., Llumnix, OSDI 2024, table 1: medians of 38, 32 and 55 below means of 128, 256 and 512."""
    draw, random = power_law_lengths(mean), Random(0)
    lengths = sorted(draw(random) for _ in range(20_000))
    assert fmean(lengths) == pytest.approx(mean, rel=0.15)
    assert 25 <= lengths[10_000] <= 60
    assert lengths[-200] > 8 * mean
    assert lengths[-1] <= 6144
    with pytest.raises(ConfigError, match="100"):
        power_law_lengths(100)


# ---------------------------------------------------------------------- loads made of loads


def test_merged_traces_keep_every_request_at_its_time() -> None:
    one, other = Trace.of(asked(0.0, 2.0, 5.0), "one"), Trace.of(asked(1.0, 2.0), "other")
    merged = one.merge(other, one.after(10.0))
    assert [r.arrive_s for r in merged.requests] == [0.0, 1.0, 2.0, 2.0, 5.0, 10.0, 12.0, 15.0]
    assert merged.name == "one+other+one"


@given(st.integers(0, 99), st.floats(0.05, 1.0))
def test_a_thinned_trace_is_part_of_it_and_the_same_each_time(seed: int, share: float) -> None:
    trace = generate(1, models={"a": 1}, rate_per_s=20, seconds=100)
    thin = trace.thin(seed, share)
    assert set(thin.requests) <= set(trace.requests)
    assert thin == trace.thin(seed, share)
    assert abs(len(thin.requests) - share * len(trace.requests)) < 6 * (len(trace.requests) ** 0.5)


def test_a_trace_is_spread_over_models_by_their_weights() -> None:
    trace = generate(1, models={"a": 1}, rate_per_s=40, seconds=100)
    spread = trace.spread(3, {"x": 3, "y": 1, "z": 0})
    assert [r.arrive_s for r in spread.requests] == [r.arrive_s for r in trace.requests]
    assert set(spread.models) == {"x", "y"}
    assert 2.5 < spread.models["x"] / spread.models["y"] < 3.5


@pytest.mark.parametrize("models", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}])
def test_weights_that_are_none_are_refused(models: dict[str, float]) -> None:
    trace = Trace.of(asked(0.0))
    with pytest.raises(ConfigError, match="weights"):
        trace.spread(0, models)


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_that_is_no_chance_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        Trace.of(asked(0.0)).thin(0, share)


def test_each_model_arrives_by_a_process_of_its_own() -> None:
    arrivals = {
        "steady": Arrivals(rate_per_s=5),
        "bursts": Arrivals(rate_per_s=5, cv=8),
        "late": Arrivals(rate_per_s=2, parts=(0, 0, 0, 5)),
    }
    trace = generate_each(4, arrivals, seconds=400)
    assert trace == generate_each(4, arrivals, seconds=400)
    by_model = {name: [r.arrive_s for r in trace.requests if r.model == name] for name in arrivals}
    assert 1700 < len(by_model["steady"]) < 2300
    assert min(by_model["late"]) >= 300
    assert 850 < len(by_model["late"]) < 1150
    per_second = {
        name: [sum(s <= at < s + 1 for at in by_model[name]) for s in range(400)] for name in by_model
    }
    assert max(per_second["bursts"]) > 2 * max(per_second["steady"])


@pytest.mark.parametrize("parts", [(), (0.0,), (1.0, -1.0), (float("inf"),)])
def test_parts_that_say_no_rate_are_refused(parts: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="parts"):
        Arrivals(rate_per_s=1, parts=parts)
