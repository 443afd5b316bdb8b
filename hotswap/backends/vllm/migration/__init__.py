"""Migration of KV blocks between vLLM cores while their request decodes: the part in the engine's process.

    context  the parts of an engine that source and sink use, and the memory they share with the core
    source   reads the KV blocks of a request that leaves
    sink     reserves and fills KV blocks for a request that arrives
    cached   lists and reads the KV blocks that requests which have ended left in the prefix cache

A request that is stopped is not scheduled any more, and keeps its place and its blocks. Blocks that arrive
are held by the core under the id of their sink. When the announced request arrives, its full blocks are
published to vLLM's prefix cache, and the last one is copied to a block of the request. `inside` has the part
that runs in the core's processes.
"""

from __future__ import annotations

from hotswap.backends.vllm.migration.cached import list_cached
from hotswap.backends.vllm.migration.context import MigrationContext, aborted, block_shape
from hotswap.backends.vllm.migration.sink import VllmKVSink, lent_sink
from hotswap.backends.vllm.migration.source import VllmKVSource, lent_source

__all__ = [
    "MigrationContext",
    "VllmKVSink",
    "VllmKVSource",
    "aborted",
    "block_shape",
    "lent_sink",
    "lent_source",
    "list_cached",
]
