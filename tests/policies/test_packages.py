"""The packages of policies: what they export together, and what they load."""

import subprocess
import sys

import hotswap.policies
import hotswap.policies.routers
import hotswap.policies.schedulers


def test_every_router_and_scheduler_is_exported_by_its_group_and_by_the_package() -> None:
    routers, schedulers = hotswap.policies.routers.__all__, hotswap.policies.schedulers.__all__
    assert set(routers) | set(schedulers) <= set(hotswap.policies.__all__)
    assert set(routers).isdisjoint(schedulers)


def test_policies_bring_no_backend_and_no_heavy_library() -> None:
    code = "import hotswap.policies, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "hotswap.policies.schedulers.weighted_load" in loaded
    heavy = ("hotswap.backends", "numpy", "opentelemetry.sdk", "pydantic", "torch", "transformers")
    assert [name for name in loaded if name.startswith(heavy)] == []
