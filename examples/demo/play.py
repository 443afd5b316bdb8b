"""The load of the demo: which requests arrive when, and when an engine is lost."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio.abc import TaskGroup

from examples.demo.checkpoints import Checkpoint
from examples.demo.recital import Recital
from hotswap import Fleet, InstanceId, InstanceState, ModelId
from hotswap.backends.torch import TorchEngine

__all__ = ["Loss", "Play"]

UNDER_WAY: Final = 25  # tokens after which a recitation is in the middle of a sentence
PATIENCE_S: Final = 60.0
PAUSE_S: Final = 0.15  # between two arrivals of the crowd


class _TookTooLong(Exception):
    """The fleet did not reach an expected state in time."""


@dataclass(slots=True, kw_only=True)
class Loss:
    """An engine that was lost, how many recitations it ran, and how long it took to serve again."""

    instance: InstanceId
    num_streams: int
    recovered_s: float | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Play:
    """Clients whose interest moves from model to model, and a device that fails.

    Each act starts `readers` requests at once, the last act `crowd` requests one after another. `tell` is
    called with a line of text for every event.
    """

    fleet: Fleet
    engines: Sequence[TorchEngine]
    checkpoints: Sequence[Checkpoint]
    tell: Callable[[str], None]
    readers: int = 4
    crowd: int = 24
    recitals: list[Recital] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether all acts were performed and every text was exact."""
        return not self.failure and not any(recital.fault for recital in self.recitals)

    async def perform(self) -> None:
        """Perform all acts; `failure` says why it stopped before the last recitation had ended."""
        began_s = anyio.current_time()
        async with anyio.create_task_group() as clients:
            try:
                await self._acts(clients)
            except _TookTooLong as exc:
                self.failure = str(exc)
                clients.cancel_scope.cancel()
        self.seconds = anyio.current_time() - began_s

    async def _acts(self, clients: TaskGroup) -> None:
        alice, gettysburg, sonnets = self.checkpoints
        self.tell(f"All requests are for {alice.name}.")
        await self._served_by_all(clients, alice)
        self.tell(f"The interest shifts to {gettysburg.name}.")
        await _under_way(self._begin(clients, gettysburg, self.readers))
        self.tell(f"Now {sonnets.name} too: two engines, three models in demand.")
        self._begin(clients, sonnets, self.readers)
        await _ended(self.recitals)
        self.tell(f"Only {sonnets.name} is asked for; then a device fails.")
        await self._served_by_all(clients, sonnets)
        await self._lose_an_engine()
        self.tell("A crowd comes, its interest moving from the first text to the last.")
        await self._let_a_crowd_in(clients)

    async def _served_by_all(self, clients: TaskGroup, checkpoint: Checkpoint) -> None:
        """Ask until every engine serves the model and is in the middle of reciting."""
        self._begin(clients, checkpoint, 3)
        model = ModelId(checkpoint.name)
        await self._until(
            lambda: len(self.fleet.view().serving(model)) == len(self.engines),
            f"serve {checkpoint.name} on every engine",
        )
        await _under_way(self._begin(clients, checkpoint, self.readers))

    async def _lose_an_engine(self) -> None:
        """Lose the busiest engine and wait until it serves again."""
        busiest = max(self.fleet.view().instances, key=lambda instance: instance.num_requests)
        engine = next(engine for engine in self.engines if engine.id == busiest.id)
        loss = Loss(instance=busiest.id, num_streams=busiest.num_requests)
        self.losses.append(loss)
        lost_s = anyio.current_time()
        engine.lose("its device failed, as the demo told it to")
        self.tell(f"{loss.instance} is lost, with {loss.num_streams} under way.")
        await self._until(
            lambda: engine.status().state is InstanceState.SERVING, f"bring {loss.instance} back"
        )
        loss.recovered_s = anyio.current_time() - lost_s
        self.tell(f"{loss.instance} serves again, {loss.recovered_s:.2f} s later.")

    async def _let_a_crowd_in(self, clients: TaskGroup) -> None:
        rng = random.Random(7)
        for number in range(self.crowd):
            focus = self.checkpoints[number * len(self.checkpoints) // self.crowd]
            checkpoint = rng.choice([focus, focus, *self.checkpoints])
            openings = checkpoint.openings
            self._recite(clients, checkpoint, rng.choice(openings[len(openings) // 2 :]))
            await anyio.sleep(PAUSE_S)

    def _begin(self, clients: TaskGroup, checkpoint: Checkpoint, num_readers: int) -> list[Recital]:
        openings = checkpoint.openings[:num_readers]  # the earliest, so that most of the text is to come
        return [self._recite(clients, checkpoint, opening) for opening in openings]

    def _recite(self, clients: TaskGroup, checkpoint: Checkpoint, opening: str) -> Recital:
        recital = Recital(checkpoint, opening)
        self.recitals.append(recital)
        clients.start_soon(recital.run, self.fleet)
        return recital

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(PATIENCE_S):
            while not holds():  # noqa: ASYNC110  # views have no event
                await anyio.sleep(0.01)
            return
        raise _TookTooLong(f"The fleet did not {what} within {PATIENCE_S:g} s. It is {self.fleet!r}.")


async def _under_way(recitals: Iterable[Recital]) -> None:
    for recital in recitals:
        await recital.reached(UNDER_WAY)


async def _ended(recitals: Iterable[Recital]) -> None:
    for recital in recitals:
        await recital.finished()
