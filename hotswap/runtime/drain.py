"""Emptying one instance of its requests: they move elsewhere, end, or are interrupted and wait."""

from __future__ import annotations

import math

import anyio

from hotswap.action import DrainRecord, MigrationMethod
from hotswap.errors import InstanceError
from hotswap.loop_time import current_time
from hotswap.request import RequestId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.admission import Admission
from hotswap.runtime.instance import Instance
from hotswap.runtime.moves import Moves
from hotswap.runtime.offload import Offload
from hotswap.runtime.state import FleetState

__all__ = ["Drain"]

# Moves of a request that may fail before it is interrupted instead.
_MAX_FAILED_MOVES = 2


class Drain:
    """Empties one closed instance: its requests move elsewhere, end, or are interrupted and wait."""

    def __init__(
        self,
        state: FleetState,
        admission: Admission,
        moves: Moves,
        offload: Offload | None,
        instance: Instance,
        method: MigrationMethod | None,
        reason: str,
    ) -> None:
        self._state, self._admission, self._moves = state, admission, moves
        self._offload, self._instance, self._reason = offload, instance, reason
        self._method: MigrationMethod | None = method
        self._seen: dict[RequestId, ActiveRequest] = {}
        self._failed_moves: dict[RequestId, int] = {}
        self._interrupted: set[RequestId] = set()
        self._left_alone: set[RequestId] = set()  # the mover has them end where they are
        self._num_moved = 0
        self._error: Exception | None = None

    async def run(self, deadline_s: float | None) -> DrainRecord:
        """Return once no request is assigned to the instance, or it was reopened.

        Requests move as soon as another instance has room, as many at a time as the limits of moves allow.
        After `deadline_s` seconds those that are left are interrupted, and wait for a place like others.
        """
        started_s = current_time()
        with anyio.move_on_after(math.inf if deadline_s is None else deadline_s):
            async with anyio.create_task_group() as tasks:
                while self._is_under_way:
                    version = self._state.version
                    for active in self._state.running_on(self._instance.id):
                        self._seen[active.request.id] = active
                        if (destination := self._destination(active)) is not None:
                            tasks.start_soon(self._move, active, destination, tasks.cancel_scope)
                            await anyio.lowlevel.checkpoint()  # it counts at both ends before the next begins
                    await self._state.changed(version)
        if self._error is not None:
            raise self._error
        if self._offload is not None and self._is_under_way:
            self._seen |= {one.request.id: one for one in self._state.running_on(self._instance.id)}
            self._interrupted |= await self._offload.save_running(self._instance)
        while self._is_under_way:
            version = self._state.version
            for active in self._state.running_on(self._instance.id):
                self._interrupt(active)
            await self._state.changed(version)
        return DrainRecord(
            instance=self._instance.id,
            reason=self._reason,
            started_s=started_s,
            seconds=current_time() - started_s,
            num_moved=self._num_moved,
            num_evicted=len(self._interrupted),
            num_finished=sum(map(self._finished_here, self._seen.values())),
        )

    @property
    def _is_under_way(self) -> bool:
        return self._instance.draining and self._instance.num_requests > 0

    def _destination(self, active: ActiveRequest) -> Instance | None:
        """Return where a request could move now, if it can."""
        if active.instance is not self._instance or active.moving or active.request.id in self._left_alone:
            return None
        if self._moves.is_busy(self._instance):
            return None
        self._state.refresh()
        destination = self._admission.choose(active.remaining)
        is_free = destination not in (None, self._instance) and not self._moves.is_busy(destination)
        return destination if is_free else None

    async def _move(self, active: ActiveRequest, destination: Instance, all_moves: anyio.CancelScope) -> None:
        try:
            record = await self._moves.run(active, destination, method=self._method, reason=self._reason)
        except InstanceError:  # one of the ends takes part in another move meanwhile, or tells no status
            return
        except Exception as exc:  # not of the move: a mover's fault, say
            self._error = exc
            all_moves.cancel()
            return
        if record.outcome == "done":
            self._num_moved += 1
        elif record.outcome == "waited":
            self._left_alone.add(active.request.id)
        elif record.outcome == "aborted":
            failed = self._failed_moves[active.request.id] = self._failed_moves.get(active.request.id, 0) + 1
            if failed >= _MAX_FAILED_MOVES:
                self._interrupt(active)

    def _interrupt(self, active: ActiveRequest) -> None:
        self._seen[active.request.id] = active
        self._interrupted.add(active.request.id)
        active.interrupt()

    def _finished_here(self, active: ActiveRequest) -> bool:
        finished = active.finish_reason is not None and active.request.id not in self._interrupted
        return finished and active.hops[-1].instance == self._instance.id
