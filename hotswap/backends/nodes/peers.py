"""`PeerStore`: the tier above a shared storage, which reads a shard from other nodes that have it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import anyio

from hotswap.backends.crc import combine
from hotswap.backends.nodes.chunks import received_chunks
from hotswap.backends.nodes.links import Call, LinkToNode, NodeLost
from hotswap.backends.nodes.messages import shard_fields
from hotswap.backends.nodes.readings import Reading, rank_of
from hotswap.backends.stores.bandwidth import Meter
from hotswap.backends.stores.held import from_byte
from hotswap.backends.stores.loading import copy_any
from hotswap.backends.stores.tiered import TieredStore
from hotswap.backends.transports import LinkOpener, wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.checks import check_counts, check_positive_seconds
from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing, StoreError
from hotswap.model import Adapter, HostChunk, Shard
from hotswap.request import ModelId
from hotswap.store import (
    SupportsSideFiles,
    SupportsTextSettings,
    SupportsTokenizer,
    WeightStore,
    WrapperStore,
)
from hotswap.text import TextSettings, Tokenizer
from hotswap.view import StoreView, TierView
from hotswap.worker_threads import run_in_thread

__all__ = ["PeerStore", "peer_stores"]

_log = logging.getLogger("hotswap.stores")

_PAUSE_S = 0.02  # before peers that cannot give a shard yet are asked again


class PeerStore(WrapperStore):
    """Reads shards from other nodes, and from the storage what none of them has.

        TieredStore(SharedStore(...), NvmeStore(...), PeerStore(RemoteStore(...), peers, node="n1"))

    Each node serves what it has by a `StoreHost`, also a shard that is still arriving. So nodes that load a
    model together read it from the storage once, and hand it on along a chain or a tree: while the last part
    of it comes in, the first is already at the end of the chain (the multicast of BlitzScale: Zhang et al.,
    OSDI 2025, arXiv:2412.17246). Which node reads from the storage differs by shard.

    Of the peers that have a shard, or more of it than this node, the one with the fewest readers is asked. A
    peer that is lost, or that gives nothing for `stall_s`, is left for another one or for the storage, which
    goes on at the byte that is due. Checksums are compared before the last chunk of a shard is lent: if they
    differ, the peers that it came from are logged and not asked for it again, and `ShardCorrupt` is raised,
    unless nothing was lent yet: then the shard is read from elsewhere.

    Args:
        storage: The store that all nodes share.
        peers: Openers of links to the `StoreHost`s of other nodes, by the names of the nodes; one under the
            name of this node is left out.
        node: The name of this node.
        name: The tier that chunks from peers name.
        most_asked: How many peers are asked for a shard, of more those that are ranked highest for it.
        wait_s: How long the first byte of a shard waits for a peer that reads it and cannot give it yet, or
            has as many readers as it may.
        stall_s: How long a peer may give nothing.
        avoid_s: How long one that could not be reached, or stalled, is not asked.

    Attributes:
        node: The name of this node.
        num_bytes_from: How many bytes were read from each peer, and from the storage, under `""`.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        storage: WeightStore,
        peers: Mapping[str, LinkOpener],
        *,
        node: str,
        name: str = "peers",
        most_asked: int = 32,
        wait_s: float = 2.0,
        stall_s: float = 10.0,
        avoid_s: float = 10.0,
    ) -> None:
        super().__init__(storage)
        check_counts(ConfigError, 1, most_asked=most_asked)
        check_positive_seconds(ConfigError, wait_s=wait_s, stall_s=stall_s, avoid_s=avoid_s)
        self.node, self.name = node, name
        self._wait_s = wait_s
        self._most_asked, self._stall_s, self._avoid_s = most_asked, stall_s, avoid_s
        self._links: dict[str, LinkToNode] = {}
        for peer, open_link in peers.items():
            self.add_peer(peer, open_link)
        self._avoided_until_s: dict[str, float] = {}
        self._corrupt: set[tuple[str, Shard]] = set()
        self._readings: dict[Shard, Reading] = {}
        self._meter = Meter(1e9, anyio.current_time)
        self.num_bytes_from: Counter[str] = Counter()

    def add_peer(self, node: str, open_link: LinkOpener) -> None:
        """Ask a node that has come, or one that has another address now."""
        if node != self.node:
            self._links[node] = LinkToNode(node, open_link, answer_s=self._stall_s)

    def remove_peer(self, node: str) -> None:
        """Ask a node no more; nothing happens if it is unknown."""
        self._links.pop(node, None)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self._opened(shard, None) as chunks:
            yield chunks

    @asynccontextmanager
    async def open_into(
        self, shard: Shard, destination: memoryview
    ) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        """Lend a shard as `open` does; each chunk lies at its place in `destination`, which is as long.

        What comes over TCP is written there by the kernel, without a further copy.
        """
        async with self._opened(shard, destination) as chunks:
            yield chunks

    @asynccontextmanager
    async def _opened(
        self, shard: Shard, destination: memoryview | None
    ) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        reading = Reading(self.node, shard, destination)
        self._readings[shard] = reading
        try:
            async with aclosing(self._chunks(reading)) as chunks:
                yield chunks
        finally:
            if self._readings.get(shard) is reading:
                del self._readings[shard]

    def leads(self, shard: Shard, reader: str) -> bool:
        """Whether a node that is as far with a shard as this one may read on from here.

        It may if this node reads the shard from the storage, or looks for a peer and is ranked higher. A node
        that is ranked higher is noted as one that reads the shard, too.
        """
        reading = self._readings.get(shard)
        if reading is None:  # the load is about to ask for it
            return rank_of(self.node, shard) > rank_of(reader, shard)
        return reading.leads(reader)

    def will_lead(self, shard: Shard, reader: str) -> bool:
        """Whether a node that is as far may wait for this one, which follows another: it is ranked higher."""
        reading = self._readings.get(shard)
        is_higher = rank_of(self.node, shard) > rank_of(reader, shard)
        return reading is not None and reading.follows and is_higher

    def view(self) -> StoreView:
        below = self.wrapped.view()
        return StoreView(
            tiers=(TierView(name=self.name, bytes_per_s=self._meter.bytes_per_s), *below.tiers),
            residency=below.residency,
            loading=below.loading,
        )

    # ------------------------------------------------------------------ the files beside weights

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """Return the small files beside a model's weights, from the storage."""
        return await self.wrapped.side_files(model) if isinstance(self.wrapped, SupportsSideFiles) else {}

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return await self.wrapped.tokenizer(model) if isinstance(self.wrapped, SupportsTokenizer) else None

    async def text_settings(self, model: ModelId) -> TextSettings | None:
        if isinstance(self.wrapped, SupportsTextSettings):
            return await self.wrapped.text_settings(model)
        return None

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        if isinstance(self.wrapped, SupportsTextSettings):
            return await self.wrapped.adapter_settings(adapter)
        return TextSettings()

    @property
    def num_lent(self) -> int:
        """How many shards are being read, and buffers the storage has lent; 0 when nothing is open."""
        return len(self._readings) + int(getattr(self.wrapped, "num_lent", 0))

    def __repr__(self) -> str:
        return f"<PeerStore {self.node!r} of {len(self._links)} peers, over {self.wrapped!r}>"

    # ------------------------------------------------------------------ reading

    async def _chunks(self, reading: Reading) -> AsyncGenerator[HostChunk]:
        """Yield the chunks of a shard, from one source after the other until it is complete."""
        while not reading.is_complete:
            async with AsyncExitStack() as stack:
                call = await self._next_peer(reading, stack)
                chunks = self._from_storage(reading) if call is None else self._from_peer(reading, call)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk

    async def _from_peer(self, reading: Reading, call: Call) -> AsyncGenerator[HostChunk]:
        """Yield what a peer gives; one that is lost, or damaged from its first byte, ends it early."""
        shard, peer = reading.shard, call.node
        chunks = received_chunks(
            call, shard, reading.position, tier=self.name, destination=reading.destination
        )
        async with aclosing(chunks):
            while True:
                self._meter.begin()
                num_bytes = 0
                try:
                    chunk = await anext(chunks, None)
                    num_bytes = 0 if chunk is None else len(chunk.data)
                except NodeLost as exc:
                    self._avoid(peer, exc)
                    return
                except StoreError as exc:
                    self._give_up(reading, peer, exc)
                    return
                finally:
                    self._meter.end(num_bytes)
                if chunk is None:
                    return
                await reading.count(peer, chunk.data)
                if reading.is_complete and not reading.matches:
                    self._blame(reading)
                    return
                self.num_bytes_from[peer] += num_bytes
                reading.has_lent = True
                yield chunk

    async def _from_storage(self, reading: Reading) -> AsyncGenerator[HostChunk]:
        start, shard = reading.position, reading.shard
        try:
            async with AsyncExitStack() as stack:
                chunks = await self._opened_storage(reading, stack)
                async for chunk in chunks:
                    reading.position += len(chunk.data)
                    self.num_bytes_from[""] += len(chunk.data)
                    reading.has_lent = True
                    yield await self._placed(reading, chunk)
        except ShardCorrupt:
            if not start:
                raise
            self._blame(reading)
            return
        if not reading.is_complete:
            raise StoreError(f"{self.wrapped!r} gave {reading.position - start} bytes of {shard.file!r}.")

    async def _placed(self, reading: Reading, chunk: HostChunk) -> HostChunk:
        """Copy a chunk of the storage to its place in the destination, if there is one."""
        if reading.destination is None:
            return chunk
        start = chunk.offset_bytes - reading.shard.buffer_offset_bytes
        data = reading.destination[start : start + len(chunk.data)]
        await run_in_thread(copy_any, data, chunk.data)
        return replace(chunk, data=data)

    async def _opened_storage(self, reading: Reading, stack: AsyncExitStack) -> AsyncIterator[HostChunk]:
        """Open the storage at the byte that is due, as a shard of its own where it can read such a one."""
        shard, start = reading.shard, reading.position
        if not start:
            return await stack.enter_async_context(self.wrapped.open(shard))
        try:
            return await stack.enter_async_context(self.wrapped.open(_rest(reading)))
        except ShardMissing:
            whole = await stack.enter_async_context(self.wrapped.open(shard))
            return await stack.enter_async_context(
                aclosing(from_byte(whole, shard.buffer_offset_bytes + start))
            )

    # ------------------------------------------------------------------ choosing a peer

    async def _next_peer(self, reading: Reading, stack: AsyncExitStack) -> Call | None:
        """Begin to read from a peer that is further; `None` if there is none: then read from the storage."""
        until_s = anyio.current_time() + (0.0 if reading.position else self._wait_s)
        while True:
            reading.seek()
            while peers := self._candidates(reading):
                reading.asked.update(peers)
                for peer in await self._offers(reading, peers):
                    async with AsyncExitStack() as attempt:
                        if (call := await self._begin(reading, peer, attempt)) is not None:
                            reading.follow(peer)
                            stack.push_async_exit(attempt.pop_all())
                            return call
            if not reading.may_wait or anyio.current_time() >= until_s:
                reading.lead()
                return None
            await anyio.sleep(_PAUSE_S)

    def _candidates(self, reading: Reading) -> list[str]:
        """The peers to ask: at first those that are ranked highest, then those that have asked meanwhile."""
        now_s = anyio.current_time()
        known = reading.noted if reading.asked else set(self._links)
        peers = [
            peer
            for peer in known - reading.asked - reading.failed
            if peer in self._links
            and self._avoided_until_s.get(peer, 0.0) <= now_s
            and (peer, reading.shard) not in self._corrupt
        ]
        peers.sort(key=lambda peer: rank_of(peer, reading.shard), reverse=True)
        return peers[: self._most_asked]

    async def _offers(self, reading: Reading, peers: list[str]) -> list[str]:
        """Ask peers at the same time; return those that have something, the fewest readers first."""
        found: dict[str, tuple[int, int]] = {}

        async def ask(peer: str) -> None:
            try:
                async with self._links[peer].call() as call:
                    answer = await call.ask("offer", shard=shard_fields(reading.shard))
                    with wire.protocol_errors():
                        if answer.fields.get("is_here") is True:
                            num_children = answer.fields.size("num_children")
                            found[peer] = num_children, -answer.fields.size("arrived_bytes")
            except (StoreError, ProtocolError) as exc:
                self._avoid(peer, exc)

        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(ask, peer)
        return sorted((peer for peer in peers if peer in found), key=lambda peer: found[peer])

    async def _begin(self, reading: Reading, peer: str, stack: AsyncExitStack) -> Call | None:
        """Have a peer begin to send; `None` if it refuses or cannot."""
        try:
            call = await stack.enter_async_context(self._links[peer].call())
            fields = {"shard": shard_fields(reading.shard), "start": reading.position, "node": self.node}
            answer = await call.ask("read", **fields)
        except NodeLost as exc:
            self._avoid(peer, exc)
            return None
        except StoreError:  # it went since the offer
            return None
        reading.may_wait |= answer.verb == "refused" and answer.fields.get("later") is True
        return call if answer.verb == "begin" else None

    # ------------------------------------------------------------------ peers that fail

    def _avoid(self, peer: str, error: Exception) -> None:
        """Ask a peer no more for a while."""
        self._avoided_until_s[peer] = anyio.current_time() + self._avoid_s
        _log.warning("Peer %r is not asked for weights for %g s: %s", peer, self._avoid_s, error)

    def _give_up(self, reading: Reading, peer: str, error: StoreError) -> None:
        """A peer could not go on: read on from elsewhere, unless what it had was found to be damaged.

        Raises:
            ShardCorrupt: what it gave so far may be damaged, and was lent.
        """
        _log.warning("Peer %r gives no more of %r: %s", peer, reading.shard.file, error)
        if isinstance(error, ShardCorrupt) and reading.has_lent:
            raise error
        reading.failed.add(peer)

    def _blame(self, reading: Reading) -> None:
        """The checksum differs: ask none of the peers again for this shard, which begins anew if it can.

        Raises:
            ShardCorrupt: bytes of it were lent.
        """
        shard, peers = reading.shard, sorted(reading.sources)
        names = ", ".join(map(repr, peers))
        self._corrupt.update((peer, shard) for peer in peers)
        _log.error("%r of model %r came damaged from %s; not asked again.", shard.file, shard.model, names)
        if not reading.restart():
            raise ShardCorrupt(
                f"The bytes of {shard.file!r} of model {shard.model!r} that {names} gave do not match their "
                "checksum. It is read from elsewhere the next time; run `hotswap store verify` there."
            )


def _rest(reading: Reading) -> Shard:
    """The rest of a shard as a shard of its own; its checksum follows from those of the whole and the start.

    A CRC-32 is linear: that of the whole is that of the start, followed by zeros, XOR that of the rest.
    """
    shard, start = reading.shard, reading.position
    size_bytes = shard.size_bytes - start
    whole = int(shard.checksum.removeprefix("crc32:"), 16) if reading.has_checksum else 0
    rest = combine(reading.value, whole, size_bytes)
    return replace(
        shard,
        file_offset_bytes=shard.file_offset_bytes + start,
        buffer_offset_bytes=shard.buffer_offset_bytes + start,
        size_bytes=size_bytes,
        checksum=f"crc32:{rest:08x}" if reading.has_checksum else shard.checksum,
    )


def peer_stores(store: WeightStore) -> list[PeerStore]:
    """Return the peer stores that a store consists of: its tiers, and what is wrapped."""
    found = [store] if isinstance(store, PeerStore) else list[PeerStore]()
    parts = store.tiers if isinstance(store, TieredStore) else ()
    for part in (*parts, *((store.wrapped,) if isinstance(store, WrapperStore) else ())):
        found += peer_stores(part)
    return found
