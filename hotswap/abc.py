"""The interfaces for implementing an engine, a store, a policy or a channel, and their value types.

Programs that use a fleet import from `hotswap`; values that both need are in both. Errors are in
`hotswap.errors`.

Engines
    `Engine`, `WrapperEngine` to wrap another; `EngineStatus` and `StatusListener`, by which an engine tells
    its state; `ModelCard`, which it loads; `Request`, and `TokenQueue` for the `TokenStream` of its tokens.
    Optional abilities: `SupportsPreload`, `SupportsAdapters`, `SupportsGrammars`, `SupportsKVLimit`,
    `SupportsModelCheck`, `SupportsModelTrial`, `SupportsMigration` (with `KVSource`, `KVSink`, `KVLayout`,
    `KVPages`, `Stopped`), `SupportsKVListing` (with `CachedKV`).
Stores
    `WeightStore`, `WrapperStore` to wrap another; `Manifest`, `Shard`, `TensorSpec`, `HostChunk`,
    `HostBuffer`; `StoreView`, by which a store tells what it holds. Optional abilities: `SupportsImport`,
    `SupportsLend`, `SupportsLendFiles`, `SupportsNodes`, `SupportsPrefetch`, `SupportsReadInto`,
    `SupportsSideFiles`, `SupportsTokenizer` (with `Tokenizer`, and `TextStream` to decode with it; a
    tokenizer's own are `SupportsLeastTokens` and `SupportsLiteralText`), `SupportsTextSettings` (with
    `TextSettings`, and the `ChatTemplate` that writes a `Chat`, whose own is `SupportsSource`).
KV stores
    `KVStore`, which keeps KV blocks across swaps: `KVPrefix`, by which they are found; `KVPut` and `KVLease`,
    by which they are saved and restored; `KVStoreView` of `StoredKV`, by which a store tells what it holds.
Policies
    `Router`, `Scheduler` and `Mover`; `FleetView` and its parts, which they read, ranked by a `Rank`, `Count`
    or `CountRank`; the actions that a scheduler returns (`Swap`, `Unload`, `Prefetch`, `PinAdapters`,
    `Migrate`, `Resize`); `MoveView` and `MoveChoice`.
Channels
    `Channel`, which carries `Frame`s between the engines of a move.
"""

from hotswap.action import (
    Action,
    Migrate,
    MigrationMethod,
    MigrationOutcome,
    MigrationRecord,
    PinAdapters,
    Prefetch,
    Resize,
    Swap,
    Unload,
)
from hotswap.chat import Chat
from hotswap.engine import (
    Engine,
    StatusListener,
    SupportsAdapters,
    SupportsGrammars,
    SupportsKVLimit,
    SupportsModelCheck,
    SupportsModelTrial,
    SupportsPreload,
    SupportsResize,
    WrapperEngine,
)
from hotswap.kv_store import KVCopy, KVLease, KVPrefix, KVPut, KVStore
from hotswap.migration import (
    CachedKV,
    KVLayout,
    KVPages,
    KVSink,
    KVSource,
    MoveChoice,
    Mover,
    MoveView,
    Stopped,
    SupportsKVListing,
    SupportsMigration,
)
from hotswap.model import (
    Adapter,
    HostBuffer,
    HostChunk,
    Layout,
    Manifest,
    Model,
    ModelCard,
    OnChange,
    Shard,
    TensorSpec,
)
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
from hotswap.router import Router
from hotswap.sampling import Sampling
from hotswap.scheduler import Scheduler
from hotswap.store import (
    SupportsImport,
    SupportsLend,
    SupportsLendFiles,
    SupportsNodes,
    SupportsPrefetch,
    SupportsReadInto,
    SupportsSideFiles,
    SupportsTextSettings,
    SupportsTokenizer,
    WeightStore,
    WrapperStore,
)
from hotswap.store_view import KVStoreView, Residency, StoredKV, StoreView, TierView
from hotswap.stream import TokenQueue, TokenReceiver, TokenStream
from hotswap.text import (
    ChatTemplate,
    SupportsLeastTokens,
    SupportsLiteralText,
    SupportsSource,
    TextSettings,
    TextStream,
    Tokenizer,
)
from hotswap.times_view import TimesView
from hotswap.transport import Channel, Frame
from hotswap.view import (
    AdapterView,
    Count,
    CountRank,
    EngineStatus,
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelView,
    Rank,
    RunningView,
    WaitingView,
)

__all__ = [
    "Action",
    "Adapter",
    "AdapterId",
    "AdapterView",
    "CachedKV",
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
    "KVCopy",
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
    "Resize",
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
    "SupportsKVListing",
    "SupportsLeastTokens",
    "SupportsLend",
    "SupportsLendFiles",
    "SupportsLiteralText",
    "SupportsMigration",
    "SupportsModelCheck",
    "SupportsModelTrial",
    "SupportsNodes",
    "SupportsPrefetch",
    "SupportsPreload",
    "SupportsReadInto",
    "SupportsResize",
    "SupportsSideFiles",
    "SupportsSource",
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
]
