"""`RayEngine`: an engine in an actor of a Ray cluster, over links of hotswap's own."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, Self, cast

import anyio

from hotswap.backends.ray.address import Address
from hotswap.backends.ray.cluster import (
    Actor,
    RayError,
    check_connected,
    end_actor,
    find_actor,
    kill_actor,
    make_actor,
    reason_of,
    reason_of_loss,
    reason_of_silence,
    renew_engine,
)
from hotswap.backends.ray.host import EngineActor, EngineMaker, ServedEngine, StoreMaker
from hotswap.backends.remote import RemoteEngine
from hotswap.checks import check_callables, check_positive_seconds, check_strings, shown
from hotswap.errors import ConfigError, InstanceLost, MigrationAborted
from hotswap.model import ModelCard
from hotswap.store import WeightStore
from hotswap.transport import Channel

__all__ = ["NAMESPACE", "RayEngine", "options_of"]

log = logging.getLogger("hotswap")

NAMESPACE: Final = "hotswap"

_LINK_S = 10.0  # to open a link to a host that is up
_MAX_CALLS = 1000
_OWN_OPTIONS: Final = {
    "get_if_exists", "lifetime", "max_concurrency", "max_restarts", "max_task_retries", "name", "namespace",
}  # fmt: skip


class RayEngine(RemoteEngine):
    """An engine in an actor, which Ray places on a node and starts there with the engine.

    ```python
    ray.init(address="auto")
    RayEngine("e0", partial(TorchEngine, "e0", device="cuda:0"), make_store, options={"num_gpus": 1})
    ```

    When its process, its node or the link is lost, or says nothing for `silence_s`, the engine is LOST with
    the reason. `unload`, which a fleet calls, opens another link to an actor that lives, and has another
    actor started for one that does not. An engine that is LOST and does not come back by its own `unload` is
    made anew in its actor, whose store keeps what it has; if it loads no model then, as where a device fails
    for the whole process, another actor is started. Everything else is as of `RemoteEngine`, whose `node` is
    the address of the Ray node. Ray itself restarts and retries nothing.

    Args:
        id: The instance's name; give the engine the same.
        make_engine: Makes the engine, in the actor. It is pickled as Ray does.
        make_store: Makes the store that the engine reads, likewise. The actor serves it, too: see
            `open_store_channel`.
        options: Options of the actor, as `ray.remote` has them: `num_gpus`, `num_cpus` (1 by default),
            `resources`, `label_selector`, `runtime_env`, and `scheduling_strategy`, which takes placement
            groups.
        detached: Whether the actor outlives this process. Then it is found by `id` the next time: an engine
            that serves a model is SERVING it from the start on, without a load. Leaving the engine leaves the
            actor alone; `stop` ends it.
        namespace: Of the names of actors; fleets of one cluster have a namespace each.
        epoch: As of `RemoteEngine`.
        silence_s: As of `RemoteEngine`; also how long an actor may take to answer before it is replaced.
        start_s: The time limit for Ray to find a place and to start the process, and for the engine there.
        end_s: The time that the engine has to end, before its process is killed.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        id: str,
        make_engine: EngineMaker,
        make_store: StoreMaker,
        *,
        options: Mapping[str, object] | None = None,
        detached: bool = False,
        namespace: str = NAMESPACE,
        epoch: int | None = None,
        silence_s: float = 8.0,
        start_s: float = 120.0,
        end_s: float = 10.0,
    ) -> None:
        check_strings(ConfigError, namespace=namespace)
        check_callables(ConfigError, make_engine=make_engine, make_store=make_store)
        check_positive_seconds(ConfigError, silence_s=silence_s, start_s=start_s, end_s=end_s)
        super().__init__(
            id, self._open, epoch=epoch, silence_s=silence_s, start_s=start_s + silence_s + end_s + _LINK_S
        )
        self._options = options_of(options, "RayEngine")
        self._make_engine, self._make_store = make_engine, make_store
        self._detached, self._namespace = detached, namespace
        self._place_s, self._end_s = start_s, end_s
        self._name = f"hotswap/{id}"
        self._is_found = False  # and was not made here
        self._is_renewed = False  # in its actor, since it has loaded a model
        self._actor: Actor | None = None
        self._address: Address | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        try:
            async with super().__asynccontextmanager__():
                yield self
        finally:
            if not self._detached:
                with anyio.CancelScope(shield=True):
                    await self.stop()

    @property
    def pid(self) -> int | None:
        """The id of the actor's process, on its node; `None` while there is none."""
        return None if self._address is None else self._address.pid

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await super().load(model, store)
        self._is_renewed = False

    async def start(self) -> None:
        """Have Ray start the actor, or find it; return once its engine is up. Entering the engine does so.

        Raises:
            InstanceLost: there was no place for it within `start_s`, or it did not start.
            ConfigError: this process is not connected to a Ray cluster, or Ray does not take `options`, or
                cannot pickle what makes the engine and its store.
        """
        if self._address is not None:
            return
        check_connected()
        try:
            with anyio.fail_after(self._place_s):
                self._address = await self._placed()
        except TimeoutError as exc:
            await self._kill()
            raise InstanceLost(
                f"Ray gave engine {self.id!r} no process that serves it within {self._place_s:g} s. Either "
                f"no node has what it asks for ({self._wanted()}), or its start takes longer; `ray status` "
                "and the log of its node tell."
            ) from exc
        except RayError as exc:
            await self._kill()
            raise InstanceLost(f"Engine {self.id!r} did not start; {reason_of(exc)}.") from exc
        except Exception:
            await self._kill()
            raise
        except BaseException:
            if self._is_found:  # it serves on, for the next controller
                self._actor = None
            await self._kill()
            raise
        self._status.move(self._address.node)

    async def stop(self) -> None:
        """End the engine and its process, also those of a detached actor; without one it does nothing."""
        if self._actor is not None:
            await end_actor(self._actor, f"engine {self.id!r}", end_s=self._end_s)
            self._actor = self._address = None

    async def open_channel(self) -> Channel:
        try:
            return await self._located().link()
        except MigrationAborted as exc:
            if because := await self._reason_of_loss(""):
                raise InstanceLost(f"Engine {self.id!r} is lost: {because}.") from exc
            raise

    async def open_store_channel(self) -> Channel:
        """Open a link to the store of the actor, for a `LinkedStore`.

        Raises:
            MigrationAborted: there is no actor, or it cannot be reached.
        """
        return await self._located().link_to_store()

    # ------------------------------------------------------------------ private

    async def _open(self) -> Channel:
        if self._address is not None and (because := await self._reason_of_silence()):
            log.warning("The actor of engine %r is replaced: %s.", self.id, because)
            with anyio.CancelScope(shield=True):
                await self._kill()
        await self.start()
        return await self.open_channel()

    async def _placed(self) -> Address:
        """Return where the actor serves the engine, once it does."""
        if self._actor is None:
            self._actor = await self._found()
            self._is_found = self._actor is not None
        if self._actor is None:
            self._actor = await self._made()
        assert self._actor is not None, "it was found or made"
        self._actor.run.remote()
        address = await self._actor.address.remote()
        if not isinstance(address, Address):
            raise InstanceLost(
                f"The actor of engine {self.id!r} did not start: {str(address).rstrip('.')}; the log of its "
                "node says more."
            )
        return address

    async def _found(self) -> Actor | None:
        """Return the detached actor that an earlier controller has left; `None` if there is none."""
        if self._detached:
            with suppress(ValueError):
                return await find_actor(self._name, self._namespace)
        return None

    async def _made(self) -> Actor:
        name = self._name if self._detached else f"{self._name}/{secrets.token_hex(8)}"
        served = ServedEngine(
            id=self.id,
            make_engine=self._make_engine,
            make_store=self._make_store,
            actor=name,
            namespace=self._namespace,
            silence_s=self._silence_s,
        )
        own = {
            "name": name,
            "namespace": self._namespace,
            "get_if_exists": self._detached,
            "lifetime": "detached" if self._detached else "non_detached",
            "max_concurrency": _MAX_CALLS,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        options = {"num_cpus": 1, **self._options, **own}
        return await make_actor(EngineActor, options, f"engine {self.id!r}", served)

    async def _kill(self) -> None:
        """End the process of the actor, if there is one."""
        actor, self._actor, self._address = self._actor, None, None
        if actor is not None:
            await kill_actor(actor, f"engine {self.id!r}")

    async def _end_host(self, because: str) -> bool:
        what, limit_s = f"engine {self.id!r}", self._end_s + self._place_s
        with anyio.CancelScope(shield=True):
            if self._actor is not None and not self._is_renewed:
                self._is_renewed = True
                log.warning("Engine %r is made anew in its actor: %s", self.id, because)
                if await renew_engine(self._actor, what, end_s=self._end_s, limit_s=limit_s):
                    return True
            log.warning("The actor of engine %r is replaced: %s", self.id, because)
            await self.stop()
        return True

    async def _reason_of_silence(self) -> str:
        """Return why the actor cannot serve; "" if it answers."""
        if self._actor is None:
            return "it was stopped"
        return await reason_of_silence(self._actor, self._silence_s)

    async def _reason_of_loss(self, because: str) -> str:
        if self._actor is None:
            return "it was stopped"
        return await reason_of_loss(self._actor, self._silence_s, because)

    def _located(self) -> Address:
        if self._address is None:
            raise MigrationAborted(f"Engine {self.id!r} has no actor.", stage="link")
        return self._address

    def _wanted(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in {"num_cpus": 1, **self._options}.items())

    def __repr__(self) -> str:
        at = self._address
        where = "no actor" if at is None else f"process {at.pid} on {at.node}"
        return f"<{type(self).__name__} {self.id!r} [{self.status().state}, {where}]>"


def options_of(options: object, whose: str) -> dict[str, object]:
    """Return options of an actor.

    Raises:
        ConfigError: they are no mapping, or have one that is set here.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options is {shown(options)}; give a dict of options of `ray.remote`.")
    given = dict(cast("Mapping[str, object]", options or {}))
    if taken := sorted(_OWN_OPTIONS & given.keys()):
        raise ConfigError(f"options has {taken[0]!r}, which {whose} sets itself; leave it out.")
    return given
