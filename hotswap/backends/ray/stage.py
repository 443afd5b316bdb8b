"""`RayStage`: a node of a Ray cluster for the ranks of one stage of an engine on another."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import anyio

from hotswap.backends.ray.address import Address
from hotswap.backends.ray.cluster import (
    Actor,
    RayError,
    check_connected,
    end_actor,
    kill_actor,
    make_actor,
    other_nodes,
    reason_of,
    reason_of_loss,
)
from hotswap.backends.ray.engine import NAMESPACE, options_of
from hotswap.backends.ray.host import HostActor, StoreMaker
from hotswap.backends.transports.silence import check_silence
from hotswap.checks import check_callables, check_positive_seconds, check_strings
from hotswap.errors import ConfigError, InstanceLost
from hotswap.transport import Channel

__all__ = ["RayStage"]

_PLACES: Final = frozenset({"label_selector", "scheduling_strategy"})
_END_S = 10.0


class StageActor(HostActor):
    """The class of the actors of stages, which `RayStage` makes."""

    def __init__(self, make_store: StoreMaker, silence_s: float, actor: str, namespace: str) -> None:
        super().__init__("The host of a stage")
        self._make_store, self._silence_s = make_store, silence_s
        self._actor, self._namespace = actor, namespace

    async def _serve(self) -> None:
        from hotswap.backends.torch import StageHost

        async with self._make_store() as store:
            host = StageHost(store, silence_s=self._silence_s)
            await self._serve_links(host.serve, store, self._actor, self._namespace)


class RayStage:
    """Has Ray start the ranks of one stage on another node than the engine's; a `StageNode`.

    ```python
    make_engine = partial(
        TorchEngine, "e0", device="cuda:0", tp=8, pp=2,
        stage_nodes=[RayStage(make_store, options={"num_gpus": 8})],
    )
    RayEngine("e0", make_engine, make_store, options={"num_gpus": 8})
    ```

    An actor there starts the ranks, which read their weights from the store of its node; a `PeerStore` in it
    reads from the nodes of other actors, and they from this one. It is placed anew at
    each start of the engine, also after a loss, and ends with it, or when the engine's process does.

    Args:
        make_store: Makes the store that the ranks read, on their node. It is pickled as Ray does.
        options: Options of the actor, as of `RayEngine`. Without `label_selector` and `scheduling_strategy`
            it is placed on any node but the engine's; a placement group can name one for each stage.
        namespace: Of the name of the actor.
        silence_s: How long the link may be silent before the node counts as lost.
        start_s: The time limit for Ray to find a place and to start the process there.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        make_store: StoreMaker,
        *,
        options: Mapping[str, object] | None = None,
        namespace: str = NAMESPACE,
        silence_s: float = 8.0,
        start_s: float = 120.0,
    ) -> None:
        check_strings(ConfigError, namespace=namespace)
        check_callables(ConfigError, make_store=make_store)
        check_silence(silence_s)
        check_positive_seconds(ConfigError, start_s=start_s)
        self._options = options_of(options, "RayStage")
        self._make_store, self._namespace = make_store, namespace
        self._silence_s, self._start_s = silence_s, start_s
        self._actor: Actor | None = None
        self._address: Address | None = None

    @property
    def name(self) -> str:
        """The address of its node, once Ray has placed it."""
        return "of Ray" if self._address is None else self._address.node

    @property
    def silence_s(self) -> float:
        """How long the link may be silent before the node counts as lost."""
        return self._silence_s

    async def open(self) -> Channel:
        """Have Ray start an actor on a node, and open a link to it.

        Raises:
            InstanceLost: there was no place for it within `start_s`, or it did not start.
            MigrationAborted: it cannot be reached.
            ConfigError: this process is not connected to a Ray cluster.
        """
        check_connected()
        self._address = None
        try:
            with anyio.fail_after(self._start_s):
                self._actor = actor = await self._made()
                actor.run.remote()
                address = await actor.address.remote()
        except TimeoutError as exc:
            raise InstanceLost(
                f"Ray gave it no process within {self._start_s:g} s. Either no other node has what it asks "
                f"for ({self._options}), or its start takes longer; `ray status` and the logs of nodes tell."
            ) from exc
        except RayError as exc:
            raise InstanceLost(f"It did not start; {reason_of(exc)}.") from exc
        if not isinstance(address, Address):
            raise InstanceLost(f"It did not start: {str(address).rstrip('.')}.")
        self._address = address
        return await address.link()

    async def reason_of_loss(self, reason: str) -> str:
        """Return what Ray knows of the end of the actor, else `reason`."""
        return reason if self._actor is None else await reason_of_loss(self._actor, self._silence_s, reason)

    async def close(self) -> None:
        """End the actor; it is killed if it has not ended after 10 s."""
        actor, self._actor = self._actor, None
        if actor is not None and self._address is None:  # it never served
            await kill_actor(actor, "a stage")
        elif actor is not None:
            await end_actor(actor, "a stage", end_s=_END_S)

    async def _made(self) -> Actor:
        name = f"hotswap/stage/{secrets.token_hex(8)}"
        own = {
            "name": name,
            "namespace": self._namespace,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        places = {} if _PLACES & self._options.keys() else {"label_selector": other_nodes()}
        options = {"num_cpus": 1, **places, **self._options, **own}
        served = self._make_store, self._silence_s, name, self._namespace
        return await make_actor(StageActor, options, "a stage", *served)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{self.name}]>"
