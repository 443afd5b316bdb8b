"""Runs a conformance suite without pytest, to see which of its tests fail."""

from __future__ import annotations

import pytest


def failures(suite: type[object]) -> dict[str, Exception]:
    """Return what the tests of a suite raised, by test; those that pass or skip are left out."""
    raised: dict[str, Exception] = {}
    for name in dir(suite):
        if not name.startswith("test_"):
            continue
        try:
            getattr(suite(), name)()
        except pytest.skip.Exception:
            continue
        except Exception as error:
            raised[name] = error
    return raised
