"""Every channel passes the conformance suite of channels."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from hotswap.abc import Channel
from hotswap.testing import ChannelConformance
from tests.backends.transports.links import SECRET, memory_link, shared_link, tcp_link


class TestMemory(ChannelConformance):
    def make_channels(self) -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
        return memory_link()


class TestShared(ChannelConformance):
    def make_channels(self) -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
        return shared_link()


class TestSharedWithLittleRoom(ChannelConformance):
    def make_channels(self) -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
        return shared_link(ring_bytes=self.large_bytes + 1)


class TestTcp(ChannelConformance):
    def make_channels(self) -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
        return tcp_link()


class TestTcpWithASecret(ChannelConformance):
    def make_channels(self) -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
        return tcp_link(SECRET)


class TestTls(ChannelConformance):
    def make_channels(self) -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
        return tcp_link(SECRET, tls=True)
