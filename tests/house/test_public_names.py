"""The public names of hotswap: taking one away, or adding one, is a decision that shows here."""

import importlib
import inspect

import pytest

import hotswap

PUBLIC = [
    "Action",
    "Adapter",
    "AdapterId",
    "AdapterView",
    "BackendMissing",
    "Channel",
    "Completion",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceProfile",
    "DrainRecord",
    "Engine",
    "EngineStatus",
    "FinishReason",
    "Fleet",
    "FleetClosed",
    "FleetStream",
    "FleetView",
    "Frame",
    "PinAdapters",
    "Hop",
    "HostBuffer",
    "HostChunk",
    "HotswapError",
    "InstanceError",
    "InstanceId",
    "InstanceLost",
    "InstanceState",
    "InstanceView",
    "InvalidRequest",
    "KVLayout",
    "KVPages",
    "KVSink",
    "KVSource",
    "LoadsExhausted",
    "Manifest",
    "MemoryNotReclaimed",
    "Migrate",
    "MigrationAborted",
    "MigrationLimits",
    "MigrationRecord",
    "Model",
    "ModelCard",
    "ModelId",
    "ModelTooLarge",
    "ModelView",
    "MoveChoice",
    "MoveView",
    "Mover",
    "OutOfMemory",
    "PhaseRecord",
    "Prefetch",
    "PromptTooLong",
    "QueueFull",
    "Request",
    "RequestError",
    "RequestEvicted",
    "RequestId",
    "Residency",
    "Router",
    "RunningView",
    "Sampling",
    "Scheduler",
    "Shard",
    "ShardCorrupt",
    "ShardMissing",
    "Stopped",
    "StoreError",
    "StoreView",
    "SupportsAdapters",
    "SupportsImport",
    "SupportsLend",
    "SupportsMigration",
    "SupportsNodes",
    "SupportsPrefetch",
    "SupportsPreload",
    "StatusListener",
    "SupportsReadInto",
    "SupportsTokenizer",
    "Swap",
    "SwapFailed",
    "SwapLimits",
    "SwapRecord",
    "SwapRefused",
    "TensorSpec",
    "TextStream",
    "TierFull",
    "TierView",
    "Token",
    "TokenQueue",
    "TokenStream",
    "Tokenizer",
    "UnknownAdapter",
    "UnknownModel",
    "Unload",
    "UnsafeFile",
    "UnsupportedAdapter",
    "UnsupportedModel",
    "WaitingView",
    "WeightStore",
    "WrapperEngine",
    "WrapperStore",
    "WrongLoop",
    "parse_bytes",
]

# The packages whose names users import from the package itself.
PACKAGES = {
    "hotswap.offline": [
        "Arrival",
        "VirtualTimeDeadlock",
        "VirtualTimeLoop",
        "dump_view",
        "load_view",
        "play",
        "workload",
    ],
    "hotswap.policies": [
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
    ],
    "hotswap.policies.planning": [
        "MethodReport",
        "ModelShape",
        "Recommendation",
        "ScalingMonitor",
        "ScalingStep",
        "SharedModel",
        "SharingAdvisor",
        "SharingMethod",
        "SharingReport",
    ],
    "hotswap.testing": [
        "ChannelConformance",
        "EngineConformance",
        "EngineFaults",
        "RecordedSpan",
        "RouterConformance",
        "SchedulerConformance",
        "SpanRecorder",
        "StoreFaults",
        "WeightStoreConformance",
        "cancel_everywhere",
        "chaotic_engine",
        "chaotic_store",
    ],
}


def _order(public_name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as the linter sorts them."""
    return (0 if public_name.isupper() else 1 if public_name[0].isupper() else 2, public_name)


def test_all_is_sorted_without_doubles() -> None:
    assert list(hotswap.__all__) == sorted(set(hotswap.__all__), key=_order)


def test_every_public_name_resolves() -> None:
    assert [public_name for public_name in hotswap.__all__ if not hasattr(hotswap, public_name)] == []


def test_public_names_are_pinned() -> None:
    assert sorted(hotswap.__all__) == sorted(PUBLIC)


def test_every_public_class_and_function_is_documented() -> None:
    public = {public_name: getattr(hotswap, public_name) for public_name in hotswap.__all__}
    undocumented = [
        public_name
        for public_name, value in public.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and not value.__doc__
    ]
    assert undocumented == []


def test_every_public_method_is_documented_here_or_by_its_interface() -> None:
    undocumented = [
        f"{public_name}.{method}"
        for public_name in hotswap.__all__
        if inspect.isclass(cls := getattr(hotswap, public_name)) and cls.__module__.startswith("hotswap.")
        for method, function in inspect.getmembers(cls, inspect.isfunction)
        # getdoc looks through the bases: an override may leave the words to its interface.
        if not method.startswith("_") and not inspect.getdoc(function)
    ]
    assert undocumented == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_of_packages_are_pinned_sorted_and_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == PACKAGES[package] == sorted(set(PACKAGES[package]), key=_order)
    assert [public_name for public_name in module.__all__ if not getattr(module, public_name).__doc__] == []
