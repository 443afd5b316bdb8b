"""Serve many language models on few engines: models are swapped in seconds, streams go on.

This package exports what a program that embeds a `Fleet` needs. The interfaces of engines, stores, policies
and channels are in `hotswap.abc`. All errors are in `hotswap.errors`; their base class, and those of a
request that asks for something wrong, are here, too.
Backends and policies are imported by their own paths (`hotswap.backends.torch`, `hotswap.policies`), so that
importing hotswap stays cheap.
"""

from hotswap import abc as abc
from hotswap import errors as errors
from hotswap.action import (
    DrainRecord,
    MigrationMethod,
    MigrationOutcome,
    MigrationRecord,
    PhaseRecord,
    SwapOutcome,
    SwapRecord,
)
from hotswap.chat import Chat
from hotswap.device_budget import DeviceBudget, DeviceLease
from hotswap.errors import HotswapError, InvalidRequest, PromptTooLong
from hotswap.event import EventKind, FleetEvent
from hotswap.model import Adapter, Layout, Model, ModelCard, OnChange
from hotswap.phase_view import PhaseView
from hotswap.request import (
    AdapterId,
    FinishReason,
    ModelId,
    PromptLogprobs,
    Request,
    RequestId,
    ScoredPrompt,
    Token,
    TokenLogprob,
)
from hotswap.runtime import (
    Adapters,
    Completion,
    EventStream,
    Fleet,
    FleetStream,
    Hop,
    MigrationLimits,
    Models,
    RollStreams,
    Sample,
    SwapLimits,
    Usage,
)
from hotswap.sampling import Sampling
from hotswap.store_view import Residency, StoreView, TierView
from hotswap.times_view import TimesView
from hotswap.view import (
    AdapterView,
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelView,
    RunningView,
    WaitingView,
)

__all__ = [
    "Adapter",
    "AdapterId",
    "AdapterView",
    "Adapters",
    "Chat",
    "Completion",
    "DeviceBudget",
    "DeviceLease",
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
]
