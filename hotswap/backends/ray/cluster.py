"""What is asked of Ray, which has no types: nodes, actors, and the answers of actors.

Calls that wait for Ray's head run in threads, so that an event loop never does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, TypeAlias

import anyio

from hotswap.backends.ray.daemon_thread import in_daemon_thread
from hotswap.backends.transports.link_errors import ENDED
from hotswap.errors import ConfigError

__all__ = [
    "Actor",
    "RayError",
    "RayNode",
    "actor_names",
    "alive_nodes",
    "check_connected",
    "end_actor",
    "find_actor",
    "kill_actor",
    "make_actor",
    "on_node",
    "other_nodes",
    "own_address",
    "reason_of",
    "reason_of_loss",
    "reason_of_silence",
    "renew_engine",
]

_ray: Any = import_module("ray")
_strategies: Any = import_module("ray.util.scheduling_strategies")

Actor: TypeAlias = Any
"""A handle of an actor; `await actor.method.remote(...)` calls it."""

RayError: Final[type[Exception]] = _ray.exceptions.RayError

log = logging.getLogger("hotswap")

_MAX_REASON = 300
_KILL_S = 5.0  # that Ray may take to kill an actor, which needs its head
# From the end of a link until Ray tells that the process has ended: if the link was closed by the process, as
# its end does, and otherwise.
_CLOSED_NOTICE_S, _NOTICE_S = 2.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node of a Ray cluster that is alive.

    Attributes:
        name: Its address; it names the node for engines and stores. A node that comes back has the same.
        id: What Ray calls it; a node that comes back has another.
        labels: Its labels.
        resources: All its resources, such as `{"CPU": 16.0, "GPU": 8.0}`, also those that are in use.
    """

    name: str
    id: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]


def check_connected() -> None:
    """Raise `ConfigError` unless this process is connected to a cluster."""
    if not _ray.is_initialized():
        raise ConfigError("This process is not connected to a Ray cluster; call ray.init(address=...) first.")


async def alive_nodes() -> list[RayNode]:
    """Return the nodes that are alive, in the order of their names.

    Raises:
        ConfigError: this process is not connected to a cluster.
        RayError: the head does not answer.
    """
    check_connected()
    nodes = [
        RayNode(
            name=str(node["NodeManagerAddress"]),
            id=str(node["NodeID"]),
            labels=dict(node.get("Labels") or {}),
            resources={str(name): float(amount) for name, amount in node["Resources"].items()},
        )
        for node in await in_daemon_thread(_ray.nodes)
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.name, node.id))


def on_node(node: RayNode) -> object:
    """Return the scheduling strategy for that node alone."""
    return _strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)


async def make_actor(kind: type, options: Mapping[str, object], what: str, *args: object) -> Actor:
    """Have Ray make an actor, or find the one of its name; it may wait for the head, but not for a place.

    A cancellation returns at once, and what Ray makes nevertheless is killed then.

    Raises:
        ConfigError: Ray does not take the options, or cannot pickle an argument.
        RayError: the head does not answer.
    """
    making = _Making(kind, options, args)
    try:
        return await in_daemon_thread(making.make)
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"Ray makes no actor of {what}; {reason_of(exc)}. Give it options that `ray.remote` takes, and "
            "what can be pickled."
        ) from exc
    except BaseException:
        if (made := making.abandon()) is not None:
            await kill_actor(made, what)
        raise


class _Making:
    """An actor that is made in a thread, and may be wanted no more when it is there."""

    def __init__(self, kind: type, options: Mapping[str, object], args: tuple[object, ...]) -> None:
        self._kind, self._options, self._args = kind, options, args
        self._lock = threading.Lock()
        self._made: Actor = None
        self._is_wanted = True

    def make(self) -> Actor:
        """Make it, and kill it if it is wanted no more. Blocking."""
        made = _ray.remote(self._kind).options(**self._options).remote(*self._args)
        with self._lock:
            self._made = made
            is_wanted = self._is_wanted
        if not is_wanted:
            _ray.kill(made)
        return made

    def abandon(self) -> Actor | None:
        """Have it killed as soon as it is made; return it if it is made already."""
        with self._lock:
            self._is_wanted = False
            return self._made


async def find_actor(name: str, namespace: str) -> Actor:
    """Return an actor by its name; raise `ValueError` if there is none."""
    return await in_daemon_thread(_ray.get_actor, name, namespace)


async def actor_names(namespace: str) -> list[str]:
    """Return the names of the actors of a namespace that are alive.

    Raises:
        RayError: the head does not answer.
    """
    named = await in_daemon_thread(_ray.util.list_named_actors, True)
    return [str(each["name"]) for each in named if each["namespace"] == namespace]


async def end_actor(actor: Actor, what: str, *, end_s: float) -> None:
    """Have a `HostActor` end, and kill what has not ended after `end_s`."""
    with anyio.move_on_after(end_s) as limit:
        try:
            await actor.stop.remote()
        except RayError:
            log.debug("The actor of %s has ended already.", what)
    if limit.cancelled_caught:
        log.warning("The actor of %s did not end in %g s and is killed.", what, end_s)
    await kill_actor(actor, what)


async def renew_engine(actor: Actor, what: str, *, end_s: float, limit_s: float) -> bool:
    """Have an `EngineActor` make its engine anew beside its store; false if it does not within `limit_s`."""
    reason = f"it did not within {limit_s:g} s"
    with anyio.move_on_after(limit_s):
        try:
            reason = str(await actor.renew.remote(end_s))
        except RayError as exc:
            reason = reason_of(exc)
    if reason:
        log.warning("The actor of %s did not make it anew: %s.", what, reason.rstrip("."))
    return not reason


async def kill_actor(actor: Actor, what: str) -> None:
    """End the process of an actor, or have it never started; not cancelled.

    Without Ray's head this returns after 5 s, and the process ends when the head is back, or with its node.
    """
    with anyio.move_on_after(_KILL_S, shield=True) as limit:
        try:
            await in_daemon_thread(_ray.kill, actor)
        except RayError as exc:
            log.warning("The actor of %s was not killed; %s.", what, reason_of(exc))
    if limit.cancelled_caught:
        log.warning(
            "The actor of %s is not killed yet: the head of Ray's cluster does not answer for %g s.",
            what,
            _KILL_S,
        )


async def reason_of_silence(actor: Actor, silence_s: float) -> str:
    """Return why a `HostActor` cannot serve; "" if it answers within `silence_s`."""
    with anyio.move_on_after(silence_s):
        try:
            address = await actor.address.remote()
        except RayError as exc:
            return reason_of(exc)
        return f"it has ended: {address}".rstrip(".") if isinstance(address, str) else ""
    return f"it did not answer a call of Ray within {silence_s:g} s"


async def reason_of_loss(actor: Actor, silence_s: float, because: str) -> str:
    """Return why the link to a `HostActor` has ended: what Ray knows, else `because`, as the link says."""
    notice_s = _CLOSED_NOTICE_S if because.startswith(ENDED) else _NOTICE_S
    with anyio.move_on_after(notice_s, shield=True):
        return await reason_of_silence(actor, silence_s) or because
    return because


def own_address() -> str:
    """Return the address of the node on which this process is, the name of the node."""
    return str(_ray.util.get_node_ip_address())


def other_nodes() -> dict[str, str]:
    """Return the label selector of all nodes but the one on which this process is."""
    return {"ray.io/node-id": f"!{_ray.get_runtime_context().get_node_id()}"}


def reason_of(error: Exception) -> str:
    """Return what an error of Ray says, in one line, for the end of a sentence."""
    text = " ".join(str(error).split())
    _, because, reason = text.partition(" because ")  # before it are the names of the actor, after it advice
    reason = reason.partition(" Some common causes ")[0] or text
    cut = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
    return f"Ray says{' that' if because else ':'} {cut.rstrip('.')}"
