"""The names of the public modules: to take one away, or to add one, is a decision that shows here."""

import importlib
import inspect

import pytest

import hotswap
from hotswap import abc, errors

NAMES = {
    "hotswap": [
        "Adapter",
        "AdapterId",
        "AdapterView",
        "Adapters",
        "Chat",
        "Completion",
        "DrainRecord",
        "EventKind",
        "EventStream",
        "FinishReason",
        "Fleet",
        "FleetEvent",
        "FleetStream",
        "FleetView",
        "Hop",
        "HotswapError",
        "InstanceId",
        "InstanceState",
        "InstanceView",
        "InvalidRequest",
        "Layout",
        "MigrationLimits",
        "MigrationMethod",
        "MigrationOutcome",
        "MigrationRecord",
        "Model",
        "ModelCard",
        "ModelId",
        "ModelView",
        "Models",
        "OnChange",
        "PhaseRecord",
        "PhaseView",
        "PromptLogprobs",
        "PromptTooLong",
        "Request",
        "RequestId",
        "Residency",
        "RollStreams",
        "RunningView",
        "Sample",
        "Sampling",
        "ScoredPrompt",
        "StoreView",
        "SwapLimits",
        "SwapOutcome",
        "SwapRecord",
        "TierView",
        "TimesView",
        "Token",
        "TokenLogprob",
        "Usage",
        "WaitingView",
    ],
    "hotswap.abc": [
        "Action",
        "Adapter",
        "AdapterId",
        "AdapterView",
        "Channel",
        "Chat",
        "ChatTemplate",
        "Count",
        "CountRank",
        "Engine",
        "EngineStatus",
        "FinishReason",
        "FleetView",
        "Frame",
        "HostBuffer",
        "HostChunk",
        "InstanceId",
        "InstanceState",
        "InstanceView",
        "KVLayout",
        "KVLease",
        "KVPages",
        "KVPrefix",
        "KVPut",
        "KVSink",
        "KVSource",
        "KVStore",
        "KVStoreView",
        "Layout",
        "Manifest",
        "Migrate",
        "MigrationMethod",
        "MigrationOutcome",
        "MigrationRecord",
        "Model",
        "ModelCard",
        "ModelId",
        "ModelView",
        "MoveChoice",
        "MoveView",
        "Mover",
        "OnChange",
        "PhaseView",
        "PinAdapters",
        "Prefetch",
        "PromptLogprobs",
        "Rank",
        "Request",
        "RequestId",
        "Residency",
        "Router",
        "RunningView",
        "Sampling",
        "Scheduler",
        "ScoredPrompt",
        "Shard",
        "StatusListener",
        "Stopped",
        "StoreView",
        "StoredKV",
        "SupportsAdapters",
        "SupportsGrammars",
        "SupportsImport",
        "SupportsKVLimit",
        "SupportsLeastTokens",
        "SupportsLend",
        "SupportsLendFiles",
        "SupportsMigration",
        "SupportsModelCheck",
        "SupportsModelTrial",
        "SupportsNodes",
        "SupportsPrefetch",
        "SupportsPreload",
        "SupportsReadInto",
        "SupportsSideFiles",
        "SupportsTextSettings",
        "SupportsTokenizer",
        "Swap",
        "TensorSpec",
        "TextSettings",
        "TextStream",
        "TierView",
        "TimesView",
        "Token",
        "TokenLogprob",
        "TokenQueue",
        "TokenReceiver",
        "TokenStream",
        "Tokenizer",
        "Unload",
        "WaitingView",
        "WeightStore",
        "WrapperEngine",
        "WrapperStore",
    ],
    "hotswap.errors": [
        "BackendMissing",
        "ConfigError",
        "ControllerSuperseded",
        "DeadlineExceeded",
        "FleetClosed",
        "HotswapError",
        "InstanceError",
        "InstanceLost",
        "InvalidRequest",
        "LoadsExhausted",
        "MemoryNotReclaimed",
        "MigrationAborted",
        "ModelTooLarge",
        "OutOfMemory",
        "PromptTooLong",
        "QueueFull",
        "RequestCancelled",
        "RequestError",
        "RequestEvicted",
        "ShardCorrupt",
        "ShardMissing",
        "SourceChanged",
        "StoreBusy",
        "StoreError",
        "SwapFailed",
        "SwapRefused",
        "TierFull",
        "UnknownAdapter",
        "UnknownModel",
        "UnsafeFile",
        "UnsupportedAdapter",
        "UnsupportedModel",
        "WrongLoop",
    ],
    "hotswap.backends.process": [
        "EngineMaker",
        "Mps",
        "ProcessEngine",
        "Share",
        "ShareMaker",
        "StoreMaker",
        "partition",
    ],
    "hotswap.backends.remote": [
        "EngineHost",
        "PeerLinks",
        "RemoteEngine",
        "SharedPeers",
        "TcpPeers",
        "serve_engine",
    ],
    "hotswap.door": [
        "ApiKey",
        "Limits",
        "Metrics",
        "PrometheusMetrics",
        "ReasoningFormat",
        "Served",
        "ToolFormat",
        "create_app",
        "listen",
    ],
    "hotswap.offline": [
        "Arrival",
        "Lengths",
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
        "Allocation",
        "Chain",
        "ConsistentHashRouter",
        "Cooldown",
        "CostSwap",
        "ElasticQuota",
        "FirstOf",
        "FirstOfRouters",
        "Forecast",
        "Freeness",
        "FreenessAutoscaler",
        "FreenessReading",
        "FreenessRouter",
        "HorizontalAutoscaler",
        "KeepAliveSwap",
        "KeepAsIs",
        "LeastLoadedRouter",
        "LeastTimeRouter",
        "LoadCosts",
        "MoveCosts",
        "PrePlacement",
        "PrefixRouter",
        "Quotas",
        "RestoreMinReplicas",
        "RoundRobinRouter",
        "RoutingKey",
        "SeasonalRates",
        "ShepherdSwap",
        "Spare",
        "StartupCosts",
        "StartupTimePlacement",
        "StaticPinning",
        "Victims",
        "VirtualUsage",
        "VirtualUsageRescheduler",
        "WeightedLoadSwap",
        "accepted",
        "assume",
        "infaas_router",
        "quotas",
        "restore_min_replicas",
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
        "ChaosEngine",
        "ChaosStore",
        "EngineConformance",
        "EngineFaults",
        "KVStoreConformance",
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


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as the linter sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("public", NAMES)
def test_public_names_are_pinned_and_sorted(public: str) -> None:
    module = importlib.import_module(public)
    assert module.__all__ == NAMES[public] == sorted(set(NAMES[public]), key=_order)


def test_every_error_is_public_and_has_one_home() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert sorted(cls.__name__ for cls in classes if cls.__module__ == errors.__name__) == errors.__all__
    # What every caller of a fleet catches is beside the fleet, too.
    caught = {"HotswapError", "InvalidRequest", "PromptTooLong"}
    assert set(errors.__all__) & {*hotswap.__all__, *abc.__all__} == caught


def test_interfaces_and_errors_come_with_the_package() -> None:
    assert (hotswap.abc, hotswap.errors) == (abc, errors)


@pytest.mark.parametrize("public", NAMES)
def test_every_public_class_and_function_is_documented(public: str) -> None:
    module = importlib.import_module(public)
    undocumented = [
        name
        for name, value in ((name, getattr(module, name)) for name in NAMES[public])
        if (inspect.isclass(value) or inspect.isfunction(value)) and not value.__doc__
    ]
    assert undocumented == []


# Not tests, whose names say what they hold, nor a loop, which does what asyncio documents.
@pytest.mark.parametrize("public", sorted(NAMES.keys() - {"hotswap.offline", "hotswap.testing"}))
def test_every_public_method_is_documented_here_or_by_its_interface(public: str) -> None:
    module = importlib.import_module(public)
    undocumented = [
        f"{name}.{method}"
        for name in NAMES[public]
        if inspect.isclass(cls := getattr(module, name)) and cls.__module__.startswith("hotswap.")
        for method, function in inspect.getmembers(cls, inspect.isfunction)
        # getdoc looks through the bases: an override may leave the words to its interface.
        if not method.startswith("_") and not inspect.getdoc(function)
    ]
    assert undocumented == []
