"""Migration of KV blocks: copies that the engine's thread makes between two steps.

    context  the parts of an engine that source and sink use, and jobs for the engine's thread
    source   reads the KV blocks of a request that leaves
    cached   reads what the prefix cache keeps of requests that have ended
    sink     reserves and fills KV blocks for a request that arrives

Blocks that arrived are published like the prefix of an ended request. The stream that follows finds them by
its tokens (`prefix`), under the root key of the engine's weights. Blocks that a sink has acquired are in use
until the sink is closed.
"""

from __future__ import annotations

from hotswap.backends.torch.migration.cached import list_cached
from hotswap.backends.torch.migration.context import MigrationContext, aborted
from hotswap.backends.torch.migration.sink import TorchKVSink, lent_sink
from hotswap.backends.torch.migration.source import TorchKVSource, lent_source

__all__ = [
    "MigrationContext",
    "TorchKVSink",
    "TorchKVSource",
    "aborted",
    "lent_sink",
    "lent_source",
    "list_cached",
]
