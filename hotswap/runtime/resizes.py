"""Resizes of KV pools: planned by a scheduler, or by hand."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from hotswap import telemetry as tm
from hotswap.action import Resize
from hotswap.checks import check_counts
from hotswap.engine import SupportsResize
from hotswap.errors import ConfigError, HotswapError, InstanceError
from hotswap.runtime.instance import Instance
from hotswap.runtime.state import FleetState
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceId

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Resizes"]

log = logging.getLogger("hotswap")

RESIZE_S = 10.0  # an engine that takes longer does not keep others waiting


class Resizes:
    """Resizes KV pools one after another, so that the memory which one gives is there for the next.

    Args:
        state: Of the fleet.
        telemetry: Records a span of each.
    """

    def __init__(self, state: FleetState, telemetry: Telemetry) -> None:
        self._state, self._telemetry = state, telemetry
        self._turn, self._planned = anyio.Lock(), set[InstanceId]()

    async def run(self, instance: Instance, kv_blocks: int, reason: str) -> int:
        """Resize the pool of an instance; return the blocks reached.

        Raises:
            ConfigError: its engine cannot resize its pool, or the number is none.
            InstanceError: it serves no model, a swap or a drain has it, or the engine failed or took too
                long.
        """
        engine = self._engine(instance, kv_blocks)
        async with self._turn:
            if not _may_resize(instance):
                raise InstanceError(
                    f"Instance {instance.id!r} serves no model, or a swap or a drain has it; its KV pool was "
                    "not resized."
                )
            return await self._resize(instance, engine, kv_blocks, reason)

    def start(self, action: Resize, tasks: TaskGroup) -> None:
        """Start a planned resize, unless the instance has another one before it, or none can be made now.

        Raises:
            ConfigError: as of `run`.
        """
        instance = self._state.instance(action.instance)
        self._engine(instance, action.kv_blocks)
        if _may_resize(instance) and instance.id not in self._planned:
            self._planned.add(instance.id)
            tasks.start_soon(self._run_planned, instance, action, name=f"resize {instance.id}")

    async def _run_planned(self, instance: Instance, action: Resize) -> None:
        try:
            await self.run(instance, action.kv_blocks, action.reason)
        except Exception as exc:  # of an engine: the instance goes on as it is
            why = exc if isinstance(exc, HotswapError) else tm.traceback_of(exc)
            log.warning("The KV pool of instance %r was not resized: %s", instance.id, why)
        finally:
            self._planned.discard(instance.id)

    async def _resize(self, instance: Instance, engine: SupportsResize, kv_blocks: int, reason: str) -> int:
        reached = 0
        wanted: tm.Attributes = {tm.INSTANCE: instance.id, tm.WANTED_BLOCKS: kv_blocks}
        with no_stray_cancellation("The resize"), self._telemetry.span(tm.SPAN_RESIZE, wanted) as span:
            with anyio.move_on_after(RESIZE_S) as limit:
                reached = await engine.resize_kv(kv_blocks)
                span.set_attributes({tm.REACHED_BLOCKS: reached, tm.REASON: reason})
            if limit.cancelled_caught:
                raise InstanceError(
                    f"Engine {instance.id!r} took longer than {RESIZE_S:g} s to resize its KV pool."
                )
        log.info("Instance %r has %d KV blocks now (%s).", instance.id, reached, reason)
        self._state.events.note("kv_resized", instance=instance.id, reason=reason)
        return reached

    def _engine(self, instance: Instance, kv_blocks: int) -> SupportsResize:
        check_counts(ConfigError, 1, kv_blocks=kv_blocks)
        if (engine := instance.resizable) is None:
            raise ConfigError(
                f"Engine {instance.id!r} cannot resize its KV pool; give it a device_budget, or leave it."
            )
        return engine


def _may_resize(instance: Instance) -> bool:
    view = instance.view()
    return view.free and view.hosted is not None
