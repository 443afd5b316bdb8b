"""Both ends of a move of KV blocks: copies between the steps of an engine's thread.

    desk    what both use of an engine, and how they have its thread do something
    source  the giving end
    sink    the taking end

What arrives is published like the prefix of an ended request, so the stream that follows finds it by its
tokens (`prefix`), under the root of the very weights that serve here. Blocks that a sink holds are nobody's
to take until it is left.
"""

from __future__ import annotations

from hotswap.backends.torch.migration.desk import Desk, aborted
from hotswap.backends.torch.migration.sink import TorchKVSink, lent_sink
from hotswap.backends.torch.migration.source import TorchKVSource, lent_source

__all__ = ["Desk", "TorchKVSink", "TorchKVSource", "aborted", "lent_sink", "lent_source"]
