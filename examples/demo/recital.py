"""One client that has a model recite, and knows what it must hear."""

from dataclasses import dataclass, field
from typing import Final

import anyio

from examples.demo.checkpoints import Checkpoint
from hotswap import Fleet, Hop, HotswapError, RequestId, Sampling

__all__ = ["Recital", "Seam"]

MAX_TOKENS: Final = 1000  # more than any text has: every recitation ends by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """Where a text moved: the number of its characters from before, and the instances on either side."""

    at: int
    source: str
    target: str


@dataclass(slots=True, eq=False)
class Recital:
    """A request and what has come of it."""

    checkpoint: Checkpoint
    opening: str
    pieces: list[str] = field(default_factory=list)
    hops: tuple[Hop, ...] = ()
    request: RequestId | None = None
    ended: bool = False
    error: str = ""
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, fleet: Fleet) -> None:
        """Ask, and listen to the end. What the fleet refuses or breaks is kept as `error`."""
        try:
            async with fleet.stream(
                self.checkpoint.name, self.opening, Sampling(max_tokens=MAX_TOKENS)
            ) as stream:
                self.request = stream.request.id
                async for token in stream:
                    self.pieces.append(token.text)
                    self.hops = stream.hops
                    self._tell()
        except HotswapError as exc:
            self.error = f"{type(exc).__name__}: {exc}"
        finally:
            self.ended = True
            self._tell()

    async def reached(self, num_tokens: int) -> None:
        """Return once so many tokens were heard, or no more will come."""
        while len(self.pieces) < num_tokens and not self.ended:
            await self._changed.wait()

    async def landed(self) -> None:
        """Return once it has ended."""
        while not self.ended:
            await self._changed.wait()

    @property
    def text(self) -> str:
        """What was heard so far."""
        return "".join(self.pieces)

    @property
    def seams(self) -> tuple[Seam, ...]:
        """Where the text went on elsewhere; a move before the first token leaves no seam."""
        pairs = zip(self.hops, self.hops[1:], strict=False)
        return tuple(
            Seam(
                at=len("".join(self.pieces[: after.first_index])),
                source=before.instance,
                target=after.instance,
            )
            for before, after in pairs
            if after.first_index
        )

    @property
    def fault(self) -> str:
        """What is wrong with what was heard; empty when it is the text, whole and exact."""
        if self.error:
            return self.error
        right, heard = self.checkpoint.continuation_of(self.opening), self.text
        if heard == right:
            return ""
        pairs = zip(heard, right, strict=False)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(heard), len(right)))
        return f"after {at} characters it said {heard[at : at + 30]!r} where {right[at : at + 30]!r} was due"

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
