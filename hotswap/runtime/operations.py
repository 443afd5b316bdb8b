"""Operations on a fleet by hand: swap, move, drain, add, remove and replace engines, roll a model."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import anyio

from hotswap.action import DrainRecord, MigrationMethod, MigrationRecord, SwapRecord
from hotswap.checks import check_choice, check_kind, check_required_seconds, check_seconds, check_strings
from hotswap.engine import Engine
from hotswap.errors import ConfigError, InstanceError, InvalidRequest, RequestCancelled, SwapRefused
from hotswap.model import Adapter
from hotswap.request import ModelId, Request, RequestId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.adapter_cache import AdapterCaches
from hotswap.runtime.adapters import Adapters
from hotswap.runtime.admission import Admission
from hotswap.runtime.change import Change
from hotswap.runtime.drain import Drain
from hotswap.runtime.instance import Instance
from hotswap.runtime.moves import Moves
from hotswap.runtime.offload import Offload
from hotswap.runtime.queue import Ticket
from hotswap.runtime.resizes import Resizes
from hotswap.runtime.state import FleetState
from hotswap.runtime.supervisor import EngineSupervisor
from hotswap.runtime.swaps import Swaps
from hotswap.view import InstanceId, InstanceState

__all__ = ["Operations", "RollStreams"]

log = logging.getLogger("hotswap")

RollStreams: TypeAlias = Literal["pinned", "moved"]

_METHODS = (None, *get_args(MigrationMethod))


class Operations:
    """The operations of one fleet; `Fleet` documents each, and bounds it by the fleet's own life."""

    def __init__(
        self,
        state: FleetState,
        admission: Admission,
        swaps: Swaps,
        moves: Moves,
        adapters: Adapters,
        caches: AdapterCaches,
        resizes: Resizes,
        offload: Offload | None,
    ) -> None:
        self.supervisor = EngineSupervisor()
        self._state, self._admission, self._swaps, self._moves = state, admission, swaps, moves
        self._adapters, self._caches = adapters, caches
        self._resizes, self._offload = resizes, offload
        self._starting: set[InstanceId] = set()
        self._emptying: set[InstanceId] = set()  # a drain, a removal or a roll has them

    async def min_replicas_served(self) -> None:
        """Wait until every model has its least number of replicas serving."""
        while True:
            state, version = self._state, self._state.version
            state.refresh()
            if all(len(state.index.hosts(card.id)) >= card.min_replicas for card in state.models.values()):
                return
            await state.changed(version)

    # ------------------------------------------------------------------ swaps and moves

    async def swap(self, instance: str, model: str, *, deadline_s: float, reason: str) -> SwapRecord:
        """Swap an instance to a model, and reopen it if it was drained, which ends a drain under way."""
        check_strings(ConfigError, to=model, reason=reason)
        check_required_seconds(ConfigError, deadline_s=deadline_s)
        card, chosen = self._state.card(ModelId(model)), self._state.instance(instance)
        status = chosen.status()
        if status.model == card.id and status.state is InstanceState.SERVING:
            raise SwapRefused(f"Instance {instance!r} serves {model!r} already; nothing was done.")
        record = await self._swap(chosen, card.id, deadline_s=deadline_s, reason=reason)
        if chosen.draining:
            self.reopen(chosen)
        return record

    async def unload(self, instance: str, *, deadline_s: float, reason: str) -> SwapRecord:
        """Evict what runs on an instance and free its weights."""
        check_strings(ConfigError, reason=reason)
        check_required_seconds(ConfigError, deadline_s=deadline_s)
        return await self._swap(self._state.instance(instance), None, deadline_s=deadline_s, reason=reason)

    async def _swap(
        self, instance: Instance, target: ModelId | None, *, deadline_s: float, reason: str
    ) -> SwapRecord:
        self._state.claim(instance, target)
        return await self._swaps.run(instance, target, deadline_s=deadline_s, reason=reason)

    async def migrate(
        self, request: str, *, to: str, method: MigrationMethod | None, reason: str
    ) -> MigrationRecord:
        """Move a request that runs to another instance of its model."""
        check_strings(InvalidRequest, request=request)
        check_strings(ConfigError, to=to, reason=reason)
        check_choice(ConfigError, _METHODS, method=method)
        active = self._state.requests.get(RequestId(request))
        if active is None:
            raise InvalidRequest(f"There is no request {request!r} under way; it may have ended.")
        return await self._moves.run(active, self._state.instance(to), method=method, reason=reason)

    async def resize(self, instance: str, kv_blocks: int, *, reason: str) -> int:
        """Resize the KV pool of an instance; return the blocks reached."""
        check_strings(ConfigError, reason=reason)
        return await self._resizes.run(self._state.instance(instance), kv_blocks, reason)

    def cancel(self, request: str) -> None:
        """End a request, with all its samples, or one sample of it."""
        check_strings(InvalidRequest, request=request)
        found = self._state.under_way(RequestId(request))
        if not found:
            raise InvalidRequest(f"There is no request {request!r} under way; it may have ended.")
        for one in found:
            one.abort(RequestCancelled(f"Request {request!r} was cancelled by its id."))

    # ------------------------------------------------------------------ drain

    async def drain(
        self, instance: str, *, deadline_s: float | None, method: MigrationMethod | None, reason: str
    ) -> DrainRecord:
        """Empty an instance of requests; it stays closed."""
        check_strings(ConfigError, reason=reason)
        check_choice(ConfigError, _METHODS, method=method)
        check_seconds(ConfigError, deadline_s=deadline_s)
        chosen = self._state.instance(instance)
        if chosen.draining:
            raise SwapRefused(f"Instance {instance!r} is drained already; reopen, swap or replace it.")
        with self._closed(chosen):
            return await self._empty(chosen, deadline_s, method, reason)

    async def _empty(
        self, instance: Instance, deadline_s: float | None, method: MigrationMethod | None, reason: str
    ) -> DrainRecord:
        drain = Drain(self._state, self._admission, self._moves, self._offload, instance, method, reason)
        record = await drain.run(deadline_s)
        self._state.events.note("drain_ended", instance=instance.id, reason=reason, record=record)
        return record

    @contextmanager
    def _closed(self, instance: Instance) -> Generator[None]:
        """Close an instance that a block empties, for no other at a time; an error leaves it as it was.

        Raises:
            SwapRefused: another block has it, or a swap.
        """
        if instance.id in self._emptying or instance.swapping:
            raise SwapRefused(
                f"Instance {instance.id!r} is being drained, or swapped, already; wait for that to end."
            )
        was_open = not instance.draining
        self._emptying.add(instance.id)
        self._state.close(instance)
        self._moves.turn_away(instance)
        try:
            yield
        except BaseException:
            if was_open:
                self.reopen(instance)
            raise
        finally:
            self._emptying.discard(instance.id)

    def reopen(self, instance: Instance) -> None:
        """Let requests come to an instance again that was drained."""
        if instance.id in self._state.instances:
            self._state.reopen(instance)

    # ------------------------------------------------------------------ engines

    async def add(self, engine: Engine) -> None:
        """Start an engine and take it in, EMPTY."""
        _check_engine("engine", engine)
        if engine.id in self._state.instances or engine.id in self._starting:
            raise ConfigError(f"There is an instance {engine.id!r} already; give the engine another id.")
        self._starting.add(engine.id)
        try:
            await self.supervisor.start(engine)
            self._state.add(engine)
        except BaseException:
            await self._stop(engine.id)
            raise
        self._starting.discard(engine.id)
        self._state.events.note("instance_added", instance=engine.id)
        self._state.tell(Change.INSTANCES)

    async def remove(self, instance: str, *, deadline_s: float | None, reason: str) -> DrainRecord:
        """Drain an instance, unload it and let it go, also one that is lost and cannot be unloaded."""
        check_strings(ConfigError, reason=reason)
        check_seconds(ConfigError, deadline_s=deadline_s)
        record = await self._let_go(instance, deadline_s, reason)
        await self._stop(record.instance)
        return record

    async def _let_go(self, instance: str, deadline_s: float | None, reason: str) -> DrainRecord:
        """Take an empty instance out of the fleet; its id is free once it has stopped."""
        await self._restarted(self._state.instance(instance))
        chosen = self._state.instance(instance)
        with self._closed(chosen):
            record = await self._empty(chosen, deadline_s, None, reason)
            _check_closed(chosen)
            await self._unload_unless_lost(chosen, reason)
        self._state.remove(chosen)
        self._state.events.note("instance_removed", instance=chosen.id, reason=reason)
        self._caches.forget(chosen.id)
        self._starting.add(chosen.id)
        return record

    async def _stop(self, instance: InstanceId) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self.supervisor.stop(instance)
            finally:
                self._starting.discard(instance)

    async def _unload_unless_lost(self, instance: Instance, reason: str) -> None:
        await self._restarted(instance)
        try:
            if instance.swapping or instance.status().state is not InstanceState.EMPTY:
                await self._swap(instance, None, deadline_s=0.0, reason=reason)
        except InstanceError as exc:
            if isinstance(exc, SwapRefused) or not _is_lost(instance):
                raise
            log.warning("Instance %r is lost and leaves without being unloaded: %s", instance.id, exc)

    async def _restarted(self, instance: Instance) -> None:
        """Wait while the control loop tries to restart a lost instance."""
        if instance.swapping and _is_lost(instance):
            while instance.swapping:
                await self._state.changed(self._state.version)

    async def replace(
        self, instance: str, by: Engine, *, deadline_s: float | None, reason: str
    ) -> DrainRecord:
        """Put another engine in an instance's place."""
        check_strings(ConfigError, reason=reason)
        _check_engine("by", by)
        check_seconds(ConfigError, deadline_s=deadline_s)
        old = self._state.instance(instance)
        self._state.refresh()
        model = None if (view := self._state.index.counted(old.id)) is None else view.model
        await self.add(by)
        try:
            if model is not None:
                await self.swap(by.id, model, deadline_s=0.0, reason=reason)
            record = await self._let_go(instance, deadline_s, reason)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.remove(by.id, deadline_s=0.0, reason=reason)
            raise
        await self._stop(record.instance)
        return record

    # ------------------------------------------------------------------ new weights

    async def roll(self, model: str, *, to: str, streams: RollStreams, reason: str) -> tuple[InstanceId, ...]:
        """Give a model new weights, one replica after the other; return the instances that have them."""
        check_strings(ConfigError, model=model, to=to, reason=reason)
        check_choice(ConfigError, get_args(RollStreams), streams=streams)
        old, new = self._state.card(ModelId(model)).id, self._state.card(ModelId(to)).id
        if old == new:
            raise ConfigError(f"Model {model!r} cannot be rolled to itself; give its new weights another id.")
        self._adapters.check_roll(old, new)
        with self._state.rolling(old, new):
            return await self._roll(old, new, streams, reason)

    async def _roll(
        self, old: ModelId, new: ModelId, streams: RollStreams, reason: str
    ) -> tuple[InstanceId, ...]:
        rolled: list[InstanceId] = []
        if self._replicas(new):
            self._take_over(old, new, everything=streams == "moved")
        while replicas := [instance for instance in self._replicas(old) if instance.id not in rolled]:
            instance = replicas[0]
            was_open = not instance.draining
            if was_open and self._is_awaited(instance, old, new, streams):
                await self._state.changed(self._state.version)
                continue
            if streams == "moved" and self._replicas(new):
                self._redirect(instance, new)
            with self._closed(instance):
                await self._empty(instance, None, None, reason)
                _check_closed(instance)
                # Its requests may have come back to the queue, from an engine that evicted them.
                if turns := not (was_open and self._is_awaited(instance, old, new, streams)):
                    await self._swap(instance, new, deadline_s=0.0, reason=reason)
            if turns:
                rolled.append(instance.id)
                self._take_over(old, new, everything=streams == "moved")
            self.reopen(instance)
        self._take_over(old, new, everything=True)
        self._state.hand_min_replicas(old, new)
        return tuple(rolled)

    def _replicas(self, model: ModelId) -> list[Instance]:
        self._state.refresh()
        hosts = self._state.index.hosts(model)
        return [self._state.instances[view.id] for view in hosts if not view.swapping]

    def _is_awaited(self, instance: Instance, old: ModelId, new: ModelId, streams: RollStreams) -> bool:
        """Whether an instance is the last open replica and requests wait that must have the old weights."""
        if any(other is not instance and not other.draining for other in self._replicas(old)):
            return False
        return any(
            (streams == "pinned" and active.num_generated > 0) or self._target(active, new) is None
            for active in self._unplaced(old)
        )

    def _unplaced(self, model: ModelId) -> list[ActiveRequest]:
        """Return a model's requests that run nowhere: they wait, pause, or begin to run."""
        requests = self._state.requests.values()
        return [r for r in requests if r.request.model == model and r.instance is None and not r.finished]

    def _target(self, active: ActiveRequest, model: ModelId) -> tuple[ModelId, Adapter | None] | None:
        """Return what a request goes on as with the new weights.

        `None` if its adapter has none, as it was removed: the request ends with the old ones.
        """
        if active.adapter is None:
            return model, None
        adapter = self._adapters.counterpart(active.adapter, model)
        return None if adapter is None else (model, adapter)

    def _take_over(self, old: ModelId, new: ModelId, *, everything: bool) -> None:
        """Have `new` serve new requests for `old`, and those that wait without a token, or all that wait."""
        self._state.add_alias(old, new)
        tickets = {ticket.request.id: ticket for ticket in self._state.queue.of(old)}
        retargeted: dict[Ticket, Request] = {}
        for active in self._unplaced(old):
            if (active.num_generated and not everything) or (target := self._target(active, new)) is None:
                continue
            if (ticket := tickets.get(active.request.id)) is not None:
                active.next_model = target
                active.take_model()
                retargeted[ticket] = active.remaining
            elif everything:  # it pauses, or has a place already
                active.next_model = target
        self._state.retarget(retargeted)

    def _redirect(self, instance: Instance, model: ModelId) -> None:
        """Have an instance's requests go on with the new weights, at once."""
        for active in self._state.running_on(instance.id):
            if (target := self._target(active, model)) is not None:
                active.next_model = target
                active.interrupt()


def _check_engine(name: str, engine: Engine) -> None:
    check_kind(ConfigError, name, engine, Engine)
    check_strings(ConfigError, **{f"{name}.id": getattr(engine, "id", None)})


def _check_closed(instance: Instance) -> None:
    """Raise `SwapRefused` if an instance was reopened by hand while it was emptied to be swapped or to go."""
    if not instance.draining:
        raise SwapRefused(f"Instance {instance.id!r} was reopened while it was emptied; it stays as it is.")


def _is_lost(instance: Instance) -> bool:
    """Whether an instance is LOST, or as good as that: it cannot tell."""
    try:
        return instance.status().state is InstanceState.LOST
    except InstanceError:
        return True
