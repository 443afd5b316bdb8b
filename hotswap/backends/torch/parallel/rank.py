# pyright: reportUnknownMemberType=false
# torch.distributed has partial types.
"""The program of one rank: it is told what to do by the engine's process, and ends with it."""

from __future__ import annotations

import gc
import math
import os
import socket
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from hotswap.backends.torch.device import out_of_memory_mapped
from hotswap.backends.torch.parallel.collectives import Boundary, Group
from hotswap.backends.torch.parallel.messages import (
    Ask,
    Bind,
    Command,
    Done,
    Drop,
    Failed,
    OpenCache,
    Reply,
    Setup,
    Step,
    Told,
)
from hotswap.backends.torch.parallel.places import Grid
from hotswap.backends.torch.parallel.shared import SharedMemory
from hotswap.backends.torch.parallel.stage import Stage

__all__ = ["main"]


def main(commands: int, life: int) -> None:
    """Obey what comes over the socket `commands` until `life`, the other, is closed. Does not return."""
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    connection: Connection[Reply, Told] = Connection(commands)
    told = connection.recv()
    rank: _Rank | None = None
    try:
        assert isinstance(told.command, Setup), "a rank is set up before anything else"
        rank = _Rank(told.command, connection)
        connection.send(Done(told.number))
        with torch.inference_mode():
            while True:
                rank.obey(told := connection.recv())
    except BaseException as exc:
        # Of a step nobody knows what the other ranks have done of it; of the rest, whether memory is sound.
        connection.send(_failed(told.number, exc, ends=True))
    finally:
        # No clean end: whoever waits for this rank in a collective must notice at once.
        os._exit(1)


def _end_with(life: int) -> None:
    """End this process when the other end of a socket closes, as it does whatever way its owner ends."""
    with socket.socket(fileno=life) as end:
        end.recv(1)
    os._exit(1)


def _failed(number: int, exc: BaseException, *, ends: bool) -> Failed:
    return Failed(number, type(exc).__name__, str(exc), traceback.format_exc(), ends)


class _Rank:
    def __init__(self, setup: Setup, connection: Connection[Reply, Told]) -> None:
        self._connection = connection
        self._place = Grid(setup.tp, setup.pp).places[setup.rank]
        self._device = torch.device(setup.device)
        self._invariant = setup.invariant
        torch.set_num_threads(setup.threads)
        torch.zeros(1, device=self._device).item()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._group, self._boundary = self._join(setup)
        self._stage: Stage | None = None

    def obey(self, told: Told) -> None:
        """Carry out one command. A load that fails is undone and answered; any other error ends the rank."""
        try:
            done = self._carry_out(told.number, told.command)
        except Exception as exc:
            self._drop()
            if isinstance(told.command, Step):
                raise
            self._connection.send(_failed(told.number, exc, ends=False))
        else:
            if done is not None:
                self._connection.send(done)

    def _carry_out(self, number: int, command: Command) -> Done | None:
        match command:
            case Bind():
                with out_of_memory_mapped("the weights"):
                    self._bind(command)
            case OpenCache():
                with out_of_memory_mapped("the KV blocks"):
                    self._bound.open_cache(command)
            case Step():
                return self._step(number, command)
            case Drop():
                self._drop()
            case Ask():
                pass
            case Setup():
                raise AssertionError("a rank is set up once")
        return Done(number, sent_bytes=self._boundary.num_sent_bytes)

    def _bind(self, command: Bind) -> None:
        logits_bytes = math.prod(command.logits_shape) * torch.float32.itemsize
        # Both are received in any case: the next command follows them.
        with (
            self._receive_memory(command.size_bytes) as weights,
            self._receive_memory(logits_bytes) as logits,
        ):
            self._stage = Stage(
                self._place,
                command,
                weights=weights.tensor,
                logits=logits.tensor.view(torch.float32).view(command.logits_shape),
                group=self._group,
                boundary=self._boundary,
                device=self._device,
                invariant=self._invariant,
            )

    def _step(self, number: int, command: Step) -> Done | None:
        called = self._bound.step(command)
        if not (self._place.is_last or command.is_trial):
            return None
        return Done(number, self._bound.layers, called)

    def _receive_memory(self, size_bytes: int) -> SharedMemory:
        return SharedMemory(recv_handle(self._connection), size_bytes)

    def _drop(self) -> None:
        self._stage = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _bound(self) -> Stage:
        assert self._stage is not None, "the engine binds a model before it uses it"
        return self._stage

    def _join(self, setup: Setup) -> tuple[Group, Boundary]:
        place = self._place
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=FileStore(setup.rendezvous, place.grid.size),
            rank=place.rank,
            world_size=place.grid.size,
            timeout=timedelta(seconds=setup.timeout_s),
            device_id=self._device if self._device.type == "cuda" else None,
        )
        # Every rank makes every group, in the same order.
        made = [dist.new_group(list(stage)) for stage in _stages(place.grid)]
        mine = cast("dist.ProcessGroup", made[place.stage])
        group = Group(place, mine, ordered=setup.invariant)
        return group, Boundary(place, group, self._device, setup.depth)


def _stages(grid: Grid) -> list[range]:
    return [grid.places[stage * grid.tp].peers for stage in range(grid.pp)]
