"""The shipped policies by name: taking one away, or adding one, is a decision that shows here."""

import subprocess
import sys

import hotswap.policies

PUBLIC = """
AffinityRouter
Cooldown
FirstOf
FirstOfRouters
InOrder
LeastLoadedRouter
RestoreFloors
WeightedLoadSwap
accepted
assume
""".split()


def test_public_names_are_pinned_sorted_and_documented() -> None:
    assert hotswap.policies.__all__ == PUBLIC
    assert [name for name in PUBLIC if not getattr(hotswap.policies, name).__doc__] == []


def test_policies_bring_no_runtime_and_no_backend() -> None:
    code = "import hotswap.policies, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "hotswap.policies.swap" in loaded
    assert [
        m for m in loaded if m.startswith(("hotswap.runtime", "hotswap.backends", "torch", "pydantic"))
    ] == []
