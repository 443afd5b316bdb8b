"""Reports are short to read and lose nothing but digits; partial results survive an interruption."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measure import brief, write_json
from benchmarks.partial import PartialResults

_NUMBERS = st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9)
_REPORTS = st.dictionaries(
    st.text(max_size=12),
    st.recursive(
        _NUMBERS | st.none() | st.booleans() | st.text(max_size=40) | st.lists(_NUMBERS, max_size=40),
        lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=12), each, max_size=4),
    ),
    max_size=4,
)


def _same(written: Any, given: Any) -> bool:
    if isinstance(given, dict):
        return written.keys() == given.keys() and all(_same(written[key], given[key]) for key in given)
    if isinstance(given, list):
        return len(written) == len(given) and all(map(_same, written, given))
    if isinstance(given, float):
        return math.isclose(written, given, rel_tol=1e-4, abs_tol=1e-300)
    return bool(written == given)


@given(_REPORTS)
def test_a_report_has_what_was_measured_but_for_rounding(report: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "report.json"
        write_json(path, report)
        assert _same(json.loads(path.read_text()), report)


def test_a_series_takes_one_line_and_short_ones_share_it(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", {"kv": [0.0123456789] * 8, "tokens": [1e-9] * 3, "few": [1], "no": 0})
    lines = (tmp_path / "r.json").read_text().splitlines()
    assert lines[1:-1] == [
        ' "kv": [0.012346, 0.012346, 0.012346, 0.012346, 0.012346, 0.012346, 0.012346, 0.012346],',
        ' "tokens": [1e-09, 1e-09, 1e-09], "few": [1], "no": 0',
    ]


def test_a_brief_report_has_long_series_in_short_and_short_ones_whole() -> None:
    found = brief({"few": [3, 1, 2], "many": list(range(101)), "runs": [{"many": [1.0] * 13}]})
    assert found["few"] == [3, 1, 2]
    assert found["many"] == {"median": 50, "least": 0, "most": 100, "count": 101}
    assert found["runs"] == [{"many": {"median": 1.0, "least": 1.0, "most": 1.0, "count": 13}}]


def test_results_of_an_interrupted_run_are_not_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "report.part"
    assert PartialResults(path).get("a", lambda: {3: 0.99}) == {"3": 0.99}
    assert PartialResults(path).get("a", lambda: {3: 0.5}) == {"3": 0.99}
    assert PartialResults(path).get("b", lambda: {3: 0.5}) == {"3": 0.5}
    PartialResults(path).clear()
    assert not path.exists()
    assert PartialResults(path).get("a", lambda: 1) == 1
