"""The shipped policies by name: taking one away, or adding one, is a decision that shows here."""

import subprocess
import sys

import hotswap.policies

PUBLIC = [
    "AdapterPool",
    "AffinityRouter",
    "ConsistentHashRouter",
    "Cooldown",
    "ElasticQuota",
    "FirstOf",
    "FirstOfRouters",
    "Freeness",
    "FreenessAutoscaler",
    "FreenessRouter",
    "HorizontalAutoscaler",
    "InOrder",
    "KeepAliveSwap",
    "LeastLoadedRouter",
    "LeastTimeRouter",
    "LoadCosts",
    "ModelShape",
    "MoveCosts",
    "PrefixRouter",
    "Quotas",
    "Recommendation",
    "RestoreFloors",
    "RoundRobinRouter",
    "ScalingMonitor",
    "ScalingStep",
    "SharedModel",
    "SharingAdvisor",
    "SharingReport",
    "SharingWay",
    "ShepherdSwap",
    "StartupCosts",
    "StartupTimePlacement",
    "StaticPinning",
    "VirtualUsage",
    "VirtualUsageRescheduler",
    "WayReport",
    "WeightedLoadSwap",
    "accepted",
    "assume",
    "infaas_router",
    "quotas",
]


def test_public_names_are_pinned_sorted_and_documented() -> None:
    assert hotswap.policies.__all__ == PUBLIC
    assert [name for name in PUBLIC if not getattr(hotswap.policies, name).__doc__] == []


def test_policies_bring_no_backend_and_no_heavy_library() -> None:
    code = "import hotswap.policies, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "hotswap.policies.swap" in loaded
    heavy = ("hotswap.backends", "numpy", "opentelemetry.sdk", "pydantic", "torch", "transformers")
    assert [name for name in loaded if name.startswith(heavy)] == []
