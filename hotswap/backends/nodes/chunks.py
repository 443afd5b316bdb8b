"""The chunks of a shard as they come from the store of another node."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from hotswap.backends.memory import copy
from hotswap.backends.nodes.links import Call, NodeLost
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.model import HostChunk, Shard
from hotswap.worker_threads import run_in_thread

__all__ = ["received_chunks"]


async def received_chunks(
    call: Call, shard: Shard, start: int, *, tier: str = "", destination: memoryview | None = None
) -> AsyncGenerator[HostChunk]:
    """Yield the chunks of a shard from its byte `start` on, after the answer that they begin.

    They are in memory of the link, valid until the next; with a `destination`, which is as long as the shard,
    they lie at their place there. `tier` is where they are said to come from, "" for what the other end says.

    Raises:
        NodeLost: the link broke, was silent for too long, or has sent other bytes than are due.
        StoreError: the error of the store there.
    """
    due = start
    while True:
        answer = await call.answer(target=None if destination is None else destination[due:])
        try:
            if answer.verb == "done" and due == shard.size_bytes:
                return
            if answer.verb != "chunk" or wire.size(answer, "offset") != due or not call.payload:
                raise ProtocolError(f"{answer.verb!r} came where byte {due:,} of {shard.file!r} was due")
            with wire.protocol_errors():
                source = tier or answer.fields.text("tier")
        except ProtocolError as exc:
            raise NodeLost(f"Node {call.node!r} broke the protocol: {exc}.") from exc
        due += len(call.payload)
        if due > shard.size_bytes:
            raise NodeLost(f"Node {call.node!r} sent more than the {shard.size_bytes:,} bytes of a shard.")
        data = call.payload
        if destination is not None:
            data = destination[due - len(data) : due]
            if call.payload.obj is not destination.obj:
                await run_in_thread(copy, data, call.payload)
        yield HostChunk(shard.buffer_offset_bytes + due - len(call.payload), data, source)
