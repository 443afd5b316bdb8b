"""Runs a conformance suite without pytest, to see which of its tests fail."""

from __future__ import annotations

import pytest


def failures(suite: type[object], *tests: str) -> dict[str, BaseException]:
    """Return what the tests of a suite raised, by test; those that pass or skip are left out."""
    raised: dict[str, BaseException] = {}
    for name in tests or [name for name in dir(suite) if name.startswith("test_")]:
        try:
            getattr(suite(), name)()
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception) as error:
            raised[name] = error
    return raised
