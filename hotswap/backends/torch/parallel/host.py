"""`StageHost`: runs ranks for engines on other nodes, with weights from a store of its own node."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

import anyio
import torch
from anyio.abc import TaskGroup

from hotswap.backends.layouts import require_modules
from hotswap.backends.torch.compatibility import check_config
from hotswap.backends.torch.modeling import SkeletonCache
from hotswap.backends.torch.parallel.grid import Grid, RankPosition
from hotswap.backends.torch.parallel.link import StageLink
from hotswap.backends.torch.parallel.link_messages import END, Ended, commands_of, said_ended, said_reply
from hotswap.backends.torch.parallel.local_ranks import LocalRanks, RankProcess
from hotswap.backends.torch.parallel.messages import (
    Bind,
    BindRead,
    Command,
    Done,
    Drop,
    Failed,
    NumberedCommand,
    ReadTotal,
    ReadWeights,
    Reply,
    Setup,
    Step,
)
from hotswap.backends.torch.parallel.part import part_of
from hotswap.backends.torch.parallel.shared import SharedMemory
from hotswap.backends.torch.parallel.weights import PartWeights, Reader, digest_of
from hotswap.backends.torch.weights import check_world_size
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.backends.transports.silence import check_silence
from hotswap.checks import check_kind
from hotswap.errors import ConfigError, HotswapError, ShardCorrupt
from hotswap.metered_store import MeteredStore
from hotswap.model import Manifest
from hotswap.store import WeightStore
from hotswap.transport import Channel
from hotswap.worker_threads import run_in_thread

__all__ = ["StageHost"]

log = logging.getLogger("hotswap")

_CPU = torch.device("cpu")
# The last stage alone writes logits, and it is never here: what the others share for them stays empty.
_NO_LOGITS = 1, 1, 1


class StageHost:
    """Serves links of engines whose `TorchEngine(stage_nodes=...)` name this node.

    ```python
    async with store:
        host = StageHost(store)
        await serve_tcp(host.serve, "10.0.0.7", 7000, secret=secret)
    ```

    Each link is a stage: its rank processes are started here when the engine starts, read their weights from
    this store, and end with the link. So they do when the engine is gone, or silent.

    Args:
        store: The store of this node. It must have the models that the engines load, cut alike.
        silence_s: How long a link may be silent before its engine counts as gone; the engine is told.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(self, store: WeightStore, *, silence_s: float = 8.0) -> None:
        check_kind(ConfigError, "store", store, WeightStore)
        check_silence(silence_s)
        self._store, self._silence_s = store, silence_s
        self._skeletons = SkeletonCache()

    async def serve(self, channel: Channel) -> None:
        """Serve one link until its engine ends it; a `ChannelHandler`. All of its ranks have ended then.

        Raises:
            MigrationAborted: the link is broken or was silent, or something else was received than messages.
        """
        try:
            await _HostedStage(StageLink(channel, self._silence_s), self._store, self._skeletons).run()
        except* HotswapError:
            raise
        except* Exception:  # other links go on
            log.exception("The host of a stage failed; its link is closed.")


class _HostedStage:
    """The ranks of one stage, for one link."""

    def __init__(self, link: StageLink, store: WeightStore, skeletons: SkeletonCache) -> None:
        self._link, self._store, self._skeletons = link, store, skeletons
        self._ranks: LocalRanks | None = None
        self._reading = anyio.CancelScope()
        self._read_ended = anyio.Event()
        self._read_ended.set()
        self._config = ""
        self._weights: tuple[PartWeights, ...] = ()

    async def run(self) -> None:
        """Do what the engine wants, until it ends the link or the link is broken."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._kill_when_cancelled)
                tasks.start_soon(self._link.run)
                while not await self._take_frame(tasks):
                    pass
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                if self._ranks is not None:
                    self._ranks.kill()
                    await run_in_thread(self._ranks.join)
                self._free()

    async def _kill_when_cancelled(self) -> None:
        """Kill the ranks as the link ends, since a thread may wait for one of them."""
        try:
            await anyio.sleep_forever()
        finally:
            if self._ranks is not None:
                self._ranks.kill()

    async def _take_frame(self, tasks: TaskGroup) -> bool:
        """Take the messages of a frame; true if the engine wants the end."""
        for message in await self._link.receive():
            if message.verb == END:
                return True
            try:
                commands = commands_of(message, 0 if self._ranks is None else len(self._ranks.processes))
            except ProtocolError as exc:
                raise link_broken(str(exc)) from exc
            await self._execute(tasks, message.number, commands)
        return False

    async def _execute(self, tasks: TaskGroup, number: int, commands: Sequence[Command]) -> None:
        match commands[0] if commands else None:
            case None:
                raise link_broken("a command was received before a setup")
            case Setup() as setup:
                await self._launch(tasks, setup)
                await self._forward(number, commands)
            case ReadWeights() as read:
                self._read_ended = anyio.Event()
                self._reading = anyio.CancelScope()
                tasks.start_soon(self._read, number, read)
            case BindRead():
                await self._bind(number)
            case Step():
                # Not in a thread: as many steps as are in flight fit what a pipe holds.
                self._started.send([NumberedCommand(number, each) for each in commands], [()] * len(commands))
            case Drop():
                self._reading.cancel()
                await self._read_ended.wait()
                self._free()
                await self._forward(number, commands)
            case _:
                await self._forward(number, commands)

    @property
    def _started(self) -> LocalRanks:
        assert self._ranks is not None, "the ranks are set up before anything else"
        return self._ranks

    async def _forward(
        self, number: int, commands: Sequence[Command], files: Sequence[Sequence[int]] = ()
    ) -> None:
        """Send each rank its command."""
        messages = [NumberedCommand(number, command) for command in commands]
        await run_in_thread(self._started.send, messages, files or [()] * len(messages))

    # ------------------------------------------------------------------ ranks

    async def _launch(self, tasks: TaskGroup, setup: Setup) -> None:
        if self._ranks is not None:
            raise link_broken("a second setup was received")
        stage = Grid(setup.tp, setup.pp).stages[setup.rank // setup.tp]
        self._ranks = LocalRanks(stage, setup.threads)
        await run_in_thread(self._ranks.launch, self._link.own_address)
        for rank in self._ranks.processes:
            tasks.start_soon(self._pass_on, rank)

    async def _pass_on(self, rank: RankProcess) -> None:
        """Send the engine what a rank replies, and that it has ended."""
        part = rank.position.part
        while not rank.ended:
            await anyio.wait_readable(rank.connection)
            rank.receive()
            replies, rank.inbox = list(rank.inbox.values()), {}
            if rank.final_error is not None:
                replies.append(rank.final_error)
            self._link.say(*(said_reply(part, reply) for reply in replies))
        code, output = await run_in_thread(rank.ending)
        self._link.say(said_ended(Ended(part, code, output)))

    # ------------------------------------------------------------------ weights

    async def _read(self, number: int, command: ReadWeights) -> None:
        """Read the weights of the ranks, and reply for all of them; the first tells how much was read."""
        parts = [rank.position.part for rank in self._started.processes]
        replies: list[Reply] = [Done(number)] * len(parts)
        try:
            with self._reading:
                self._free()
                try:
                    replies[0] = Done(number, read=await self._read_weights(command))
                except Exception as exc:
                    traced = traceback.format_exc()
                    replies = [Failed(number, type(exc).__name__, str(exc), traced, ends=False)] * len(parts)
        finally:
            self._read_ended.set()
        if not self._reading.cancel_called:
            self._link.say(*map(said_reply, parts, replies))

    async def _read_weights(self, command: ReadWeights) -> ReadTotal:
        store = MeteredStore(self._store)
        manifest = await store.manifest(command.model)
        if await run_in_thread(digest_of, manifest) != command.digest:
            raise ShardCorrupt(
                f"The store of this node has other weights of model {command.model!r} than that of the "
                "engine; import the same on both."
            )
        positions = [rank.position for rank in self._started.processes]
        require_modules(manifest.model, manifest)
        check_world_size(manifest, positions[0].grid.tp)
        reader = await run_in_thread(self._reader, manifest, positions, command.dtype)
        self._weights = await reader.read(store)
        self._config = manifest.config
        return ReadTotal(store.num_bytes, store.tier, store.buffered)

    def _reader(
        self, manifest: Manifest, positions: Sequence[RankPosition], dtype: torch.dtype | None
    ) -> Reader:
        check_config(manifest.config)
        skeleton = self._skeletons.borrow(manifest.config, _CPU)
        try:
            return Reader(manifest, [part_of(skeleton, position) for position in positions], dtype)
        finally:
            self._skeletons.give_back(skeleton, _CPU)

    async def _bind(self, number: int) -> None:
        """Have the ranks bind what was read, whose memory is theirs then."""
        if not self._weights:
            raise link_broken("a model was to be bound that was not read")
        commands = [
            Bind(self._config, part.specs, part.memory.size_bytes, _NO_LOGITS) for part in self._weights
        ]
        with SharedMemory.make(torch.float32.itemsize) as logits:
            files = [(part.memory.file, logits.file) for part in self._weights]
            await self._forward(number, commands, files)
        self._free()

    def _free(self) -> None:
        for part in self._weights:
            part.memory.close()
        self._weights = ()
