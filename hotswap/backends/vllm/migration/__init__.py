"""KV blocks that move between vLLM cores while their request decodes: our end of it.

    desk    asking a core, and the memory that goes to and fro
    source  the giving end
    sink    the taking end

A request that leaves is scheduled no more once it is stopped, and keeps its place and its blocks. Blocks that
arrive are held under the name of their sink; when the request comes that they were announced for, those that
are full become a prefix that vLLM's cache knows, and the last one is copied to the request's own. The other
end of all this is `inside`.
"""

from __future__ import annotations

from hotswap.backends.vllm.migration.desk import Desk, aborted, look_at
from hotswap.backends.vllm.migration.sink import VllmKVSink, lent_sink
from hotswap.backends.vllm.migration.source import VllmKVSource, lent_source

__all__ = ["Desk", "VllmKVSink", "VllmKVSource", "aborted", "lent_sink", "lent_source", "look_at"]
