"""The shipped policies by name: taking one away, or adding one, is a decision that shows here."""

import subprocess
import sys

import hotswap.policies
import hotswap.policies.planning
import hotswap.policies.routers
import hotswap.policies.schedulers

PUBLIC = [
    "AdapterPool",
    "AffinityRouter",
    "Chain",
    "ConsistentHashRouter",
    "Cooldown",
    "ElasticQuota",
    "FirstOf",
    "FirstOfRouters",
    "Freeness",
    "FreenessAutoscaler",
    "FreenessRouter",
    "HorizontalAutoscaler",
    "KeepAliveSwap",
    "KeepAsIs",
    "LeastLoadedRouter",
    "LeastTimeRouter",
    "LoadCosts",
    "MoveCosts",
    "PrefixRouter",
    "Quotas",
    "RestoreMinReplicas",
    "RoundRobinRouter",
    "ShepherdSwap",
    "StartupCosts",
    "StartupTimePlacement",
    "StaticPinning",
    "VirtualUsage",
    "VirtualUsageRescheduler",
    "WeightedLoadSwap",
    "accepted",
    "assume",
    "infaas_router",
    "quotas",
]

PLANNING = [
    "MethodReport",
    "ModelShape",
    "Recommendation",
    "ScalingMonitor",
    "ScalingStep",
    "SharedModel",
    "SharingAdvisor",
    "SharingMethod",
    "SharingReport",
]


def test_public_names_are_pinned_sorted_and_documented() -> None:
    assert hotswap.policies.__all__ == PUBLIC
    assert hotswap.policies.planning.__all__ == PLANNING
    for package, names in ((hotswap.policies, PUBLIC), (hotswap.policies.planning, PLANNING)):
        assert [name for name in names if not getattr(package, name).__doc__] == []


def test_every_router_and_scheduler_is_exported_by_its_group_and_by_the_package() -> None:
    routers, schedulers = hotswap.policies.routers.__all__, hotswap.policies.schedulers.__all__
    assert set(routers) | set(schedulers) <= set(PUBLIC)
    assert set(routers).isdisjoint(schedulers)


def test_policies_bring_no_backend_and_no_heavy_library() -> None:
    code = "import hotswap.policies, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "hotswap.policies.schedulers.weighted_load" in loaded
    heavy = ("hotswap.backends", "numpy", "opentelemetry.sdk", "pydantic", "torch", "transformers")
    assert [name for name in loaded if name.startswith(heavy)] == []
