"""`EngineHost`: the end of links at which an engine is; `RemoteEngine` is the other end.

The engine is entered and left by the program that has the host, in one task, and outlives controllers. Each
link is served by a task of its own, with the streams and calls of that link as its children: when the link
ends they have all ended, and the engine has its requests and its half-done verbs taken back.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import anyio

from hotswap.backends.remote.failures import failure
from hotswap.backends.remote.messages import Message, check_version, taking
from hotswap.backends.remote.outbox import Inbox, Outbox
from hotswap.backends.remote.peers import PeerLinks
from hotswap.backends.remote.session import Session
from hotswap.backends.remote.verbs import Verbs
from hotswap.backends.transports.link_errors import link_broken, reason_in
from hotswap.backends.transports.silence import check_silence, silence_in
from hotswap.checks import check_counts
from hotswap.engine import Engine
from hotswap.errors import ConfigError, ControllerSuperseded, HotswapError, InstanceLost, MigrationAborted
from hotswap.store import WeightStore
from hotswap.transport import Channel

__all__ = ["EngineHost", "serve_engine"]

log = logging.getLogger("hotswap")

_MAX_TOKENS = 1 << 18
_REFUSE_S = 1.0


class EngineHost:
    """Serves an engine over links, to one controller at a time.

    ```python
    async with store, engine:
        host = EngineHost(engine, store)
        await serve_tcp(host.serve, "10.0.0.7", 7000, secret=secret)
    ```

    A link lets its other end load models, run requests and read their tokens; serve links that have a secret,
    or that only processes of this user can open. Of two controllers the newer one has the engine: its link
    ends that of the other, and an older one is refused.

    Args:
        engine: The engine, which has been entered.
        store: Where it reads weights, likewise.
        silence_s: After so long without a frame of a controller, its link ends. It is told, and beats four
            times as often; so does the host for the silence that a controller tells.
        max_tokens: The most tokens of a request, prompt included.
    """

    def __init__(
        self, engine: Engine, store: WeightStore, *, silence_s: float = 8.0, max_tokens: int = _MAX_TOKENS
    ) -> None:
        check_silence(silence_s)
        check_counts(ConfigError, 1, max_tokens=max_tokens)
        self.engine = engine
        self._verbs = Verbs(engine, store, max_tokens)
        self._silence_s, self._max_tokens = silence_s, max_tokens
        self._turn = anyio.Lock()  # of controllers that take over
        self._epoch = 0
        self._session: Session | None = None

    @property
    def peers(self) -> PeerLinks | None:
        """How it reaches other hosts, and they it, for KV blocks; set it once the host is served.

        `None`, which it is at first, has blocks go through the controller.
        """
        return self._verbs.peers

    @peers.setter
    def peers(self, peers: PeerLinks | None) -> None:
        self._verbs.peers = peers

    def __repr__(self) -> str:
        has = "a controller" if self._session is not None else "no controller"
        return f"<{type(self).__name__} {self.engine.id!r} [{has}]>"

    async def serve(self, channel: Channel) -> None:
        """Serve a link until it ends, which is logged with its reason; for `serve_tcp` and `serve_shared`.

        A controller that is gone leaves no request, and no verb half done; the engine keeps its model. KV
        blocks that it keeps here stay until it has left, another one comes, or the host ends.
        """
        inbox = Inbox(channel, self._silence_s)
        try:
            because = await self._serve(channel, inbox)
        except (ControllerSuperseded, InstanceLost) as exc:
            because = f"the controller was refused ({exc})"
            await _refuse(channel, exc)
        except MigrationAborted as exc:
            because = reason_in(exc)
        except Exception as exc:  # of one link: the others, and the engine, go on
            because = f"{type(exc).__name__}: {exc}"
            log.exception("Engine %r failed in serving a link.", self.engine.id)
        finally:
            await channel.aclose()
        if because:
            log.warning("A link to engine %r has ended: %s.", self.engine.id, because)
        else:
            log.info("A link to engine %r was left.", self.engine.id)

    async def _serve(self, channel: Channel, inbox: Inbox) -> str:
        messages = list[Message]()
        with anyio.move_on_after(self._silence_s):
            messages = await inbox.receive()
        match [message.verb for message in messages]:
            case ["control"]:
                return await self._serve_controller(channel, inbox, messages[0])
            case ["pages"]:
                return await self._serve_pages(channel, messages[0])
            case verbs:
                raise link_broken(f"it began with {', '.join(verbs)[:40]!r}")

    async def _serve_pages(self, channel: Channel, first: Message) -> str:
        check_version(first)
        with taking(first):
            key = first.fields.text("key")
        if (lent := self._verbs.lent.get(key)) is None:
            raise link_broken("it asked for the blocks of a move that has ended, or never was")
        try:
            await lent.serve_pages(channel)
        except MigrationAborted:
            if not lent.left.is_set():  # else it is the end of the move
                raise
        return ""

    async def _serve_controller(self, channel: Channel, inbox: Inbox, first: Message) -> str:
        try:
            check_version(first)
        except MigrationAborted as exc:  # what refuses a controller has been the same in every version
            told = f"The host of engine {self.engine.id!r} refuses the link: {reason_in(exc)}."
            raise InstanceLost(f"{told} Use one version of hotswap at both ends.") from exc
        with taking(first):
            epoch, heard_within_s = first.fields.size("epoch"), silence_in(first.fields)
        session = await self._take_over(channel, inbox, epoch, heard_within_s)
        try:
            because = await session.run()
            if not because:
                self._verbs.drop_memory()  # it has no controller that could come back for it
            return because
        finally:
            if self._session is session:
                self._session = None
                self._verbs.lent.forget_listing()

    async def _take_over(self, channel: Channel, inbox: Inbox, epoch: int, heard_within_s: float) -> Session:
        """Return the session of a new controller, once nothing is left of that of another."""
        async with self._turn:
            if epoch < self._epoch:
                raise ControllerSuperseded(
                    f"Engine {self.engine.id!r} has a newer controller, of epoch {self._epoch}; this one is "
                    f"of epoch {epoch}. Close this one, or give it a higher `epoch`."
                )
            if self._session is not None:
                await self._session.supersede(
                    ControllerSuperseded(f"Engine {self.engine.id!r} was taken over by another controller.")
                )
            if epoch > self._epoch:  # else it is the same one, which has come back
                self._verbs.drop_memory()
            self._epoch = epoch
            self._session = session = Session(self._verbs, channel, inbox, self._max_tokens, heard_within_s)
            return session


async def serve_engine(
    engine: Engine,
    store: WeightStore,
    channel: Channel,
    *,
    silence_s: float = 8.0,
    max_tokens: int = _MAX_TOKENS,
) -> None:
    """Serve an engine to one controller over one link, until it ends; see `EngineHost`."""
    await EngineHost(engine, store, silence_s=silence_s, max_tokens=max_tokens).serve(channel)


async def _refuse(channel: Channel, error: HotswapError) -> None:
    outbox = Outbox(channel, _REFUSE_S)
    outbox.say("refused", error=failure(error))
    with suppress(MigrationAborted), anyio.move_on_after(_REFUSE_S):
        await outbox.flush()
