# pyright: reportUnknownMemberType=false
# torch.distributed has partial types.
"""The program of a rank process: runs the commands of the engine's process, and ends with that process."""

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

from hotswap.backends.torch.device import out_of_memory_mapped
from hotswap.backends.torch.parallel.addresses import store_at
from hotswap.backends.torch.parallel.collectives import Boundary, Group
from hotswap.backends.torch.parallel.grid import Grid
from hotswap.backends.torch.parallel.messages import (
    Bind,
    BindRead,
    Command,
    Done,
    Drop,
    Failed,
    GetStats,
    NumberedCommand,
    OpenCache,
    ReadWeights,
    Reply,
    RestoreKV,
    SaveKV,
    Setup,
    Step,
)
from hotswap.backends.torch.parallel.shared import SharedMemory
from hotswap.backends.torch.parallel.stage import Stage

__all__ = ["main"]


def main(commands: int, liveness: int) -> None:
    """Run the commands of a socket until the liveness socket closes. Does not return.

    Args:
        commands: The file descriptor of the socket for commands and replies.
        liveness: The file descriptor of the socket that closes when the engine's process ends.
    """
    threading.Thread(target=_exit_when_closed, args=(liveness,), daemon=True).start()
    connection: Connection[Reply, NumberedCommand] = Connection(commands)
    message = connection.recv()
    rank: _Rank | None = None
    try:
        assert isinstance(message.command, Setup), "a rank is set up before anything else"
        rank = _Rank(message.command, connection)
        connection.send(Done(message.number))
        with torch.inference_mode():
            while True:
                rank.execute(message := connection.recv())
    except BaseException as exc:
        # After a failed step the state of the other ranks is unknown, after other errors that of the memory.
        connection.send(_failed(message.number, exc, ends=True))
    finally:
        # Without clean-up, so that ranks that wait for this one in a collective fail at once.
        os._exit(1)


def _exit_when_closed(liveness: int) -> None:
    """End this process when the other end of a socket closes, as it does even if its process is killed."""
    with socket.socket(fileno=liveness) as end:
        end.recv(1)
    os._exit(1)


def _failed(number: int, exc: BaseException, *, ends: bool) -> Failed:
    return Failed(number, type(exc).__name__, str(exc), traceback.format_exc(), ends)


class _Rank:
    def __init__(self, setup: Setup, connection: Connection[Reply, NumberedCommand]) -> None:
        self._connection = connection
        self._position = Grid(setup.tp, setup.pp).positions[setup.rank]
        self._device = torch.device(setup.device)
        self._invariant = setup.invariant
        torch.set_num_threads(setup.threads)
        torch.zeros(1, device=self._device).item()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._group, self._boundary = self._join(setup)
        self._stage: Stage | None = None

    def execute(self, message: NumberedCommand) -> None:
        """Run one command and reply. A failed step ends the rank; any other failure releases the model."""
        try:
            done = self._carry_out(message.number, message.command)
        except Exception as exc:
            self._drop()
            if isinstance(message.command, Step):
                raise
            self._connection.send(_failed(message.number, exc, ends=False))
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
            case SaveKV():
                return Done(number, data=self._bound.save_kv(command))
            case RestoreKV():
                self._bound.restore_kv(command)
            case Drop():
                self._drop()
            case GetStats():
                pass
            case Setup():
                raise AssertionError("a rank is set up once")
            case ReadWeights() | BindRead():
                raise AssertionError("they are for the host of the rank")
        return Done(number, sent_bytes=self._boundary.num_sent_bytes)

    def _bind(self, command: Bind) -> None:
        logits_bytes = math.prod(command.logits_shape) * torch.float32.itemsize
        # Receive both before anything can fail: the next command follows them on the socket.
        with (
            self._receive_memory(command.size_bytes) as weights,
            self._receive_memory(logits_bytes) as logits,
        ):
            self._stage = Stage(
                self._position,
                command,
                weights=weights.tensor,
                logits=logits.tensor.view(torch.float32).view(command.logits_shape),
                group=self._group,
                boundary=self._boundary,
                device=self._device,
                invariant=self._invariant,
            )

    def _step(self, number: int, command: Step) -> Done | None:
        self._bound.step(command)
        if command.is_preflight:
            return Done(number, self._bound.layers)
        return Done(number) if self._position.is_last else None

    def _receive_memory(self, size_bytes: int) -> SharedMemory:
        return SharedMemory.adopt(recv_handle(self._connection), size_bytes)

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
        position = self._position
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=store_at(setup.rendezvous, position.grid.size, setup.timeout_s),
            rank=position.rank,
            world_size=position.grid.size,
            timeout=timedelta(seconds=setup.timeout_s),
            device_id=self._device if self._device.type == "cuda" else None,
        )
        # Every rank makes every group, in the same order.
        made = [dist.new_group([peer.rank for peer in stage]) for stage in position.grid.stages]
        mine = cast("dist.ProcessGroup", made[position.stage])
        group = Group(position, mine, ordered=setup.invariant)
        return group, Boundary(position, group, self._device, setup.depth)
