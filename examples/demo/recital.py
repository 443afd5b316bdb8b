"""One client: it has a model recite a text, and compares the answer with the text."""

from dataclasses import dataclass, field
from typing import Final

import anyio

from examples.demo.checkpoints import Checkpoint
from hotswap import Fleet, Hop, RequestId, Sampling
from hotswap.errors import HotswapError

__all__ = ["Recital", "Seam"]

MAX_TOKENS: Final = 1000  # more than any text has: every recitation ends by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """Where a request moved in its text: after how many characters, from which instance to which."""

    at: int
    source: str
    target: str


@dataclass(slots=True, eq=False)
class Recital:
    """A request and its answer so far."""

    checkpoint: Checkpoint
    opening: str
    pieces: list[str] = field(default_factory=list)
    hops: tuple[Hop, ...] = ()
    request: RequestId | None = None
    ended: bool = False
    error: str = ""
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, fleet: Fleet) -> None:
        """Send the request and read its stream to the end. An error of the fleet is kept as `error`."""
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
        """Return once so many tokens have arrived, or no more will."""
        while len(self.pieces) < num_tokens and not self.ended:
            await self._changed.wait()

    async def finished(self) -> None:
        """Return once it has ended."""
        while not self.ended:
            await self._changed.wait()

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.pieces)

    @property
    def seams(self) -> tuple[Seam, ...]:
        """Every move after the first token; a move before it does not show in the text."""
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
        """How the answer differs from the text; empty when it is complete and exact."""
        if self.error:
            return self.error
        expected, answer = self.checkpoint.continuation_of(self.opening), self.text
        if answer == expected:
            return ""
        pairs = zip(answer, expected, strict=False)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(answer), len(expected)))
        return f"after {at} characters it said {answer[at : at + 30]!r} instead of {expected[at : at + 30]!r}"

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
