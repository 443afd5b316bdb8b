"""The hand-over of one request with its KV blocks, as a transition system small enough to look at all of it.

    flight        what its client has, where it runs, where it heads            `runtime/flight.py`
    source        the request's steps and stream, what it was asked to do       `backends/torch/`
    destination   the same, with the blocks that it keeps for a move, and what streams find in blocks
    move          where it stands, from "reserve" to "arrive"                   `runtime/move.py`

Between two steps here lies an await there, so all that may come between two awaits comes between two steps.
Tokens are told by their index, blocks by how many positions of the request they hold. Where the code is finer
the model allows more: an engine does what it was asked at any later time, the watchdog may bark at any, and a
move may be given up in any stage, for whatever reason: a cancellation, a time limit, a link, a drain of the
destination.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from tests.model.explore import Step

__all__ = ["BOOKS", "HELD", "OWNER", "PUBLISHED", "TOKENS", "WHERE", "Bounds", "Fault", "HandOver", "State"]

TOKENS = "tokens: the client is given every token once, in order"
OWNER = "owner: at most one engine decodes the request, the one where its flight is"
PUBLISHED = "published: what a stream finds in blocks was copied there before"
HELD = "held: no block is given back while it is read or written"
BOOKS = "books: charges and blocks that were taken are given back, once"

Fault: TypeAlias = Literal[
    "publish before the copy",
    "publish the last block without its copy",
    "source frees before the last copy",
    "read what a preempted request gave back",
    "watchdog frees what is being written",
    "watchdog never frees",
    "cancel leaves a write behind",
    "no stop",
    "release what has gone",
    "resume after release",
    "stop cancelled half way stays",
    "go on from the source, unread dropped",
    "go on from what was read at the stop",
    "abort keeps the charge",
    "failed release leaves the heading",
    "failed release gives back what the flight took over",
    "client leaves its heading behind",
]
Where: TypeAlias = Literal["source", "destination"]
WHERE: tuple[Where, Where] = ("source", "destination")


class Bounds(NamedTuple):
    """How large the system is.

    Attributes:
        prompt: Tokens that the request begins with.
        tokens: Those that are generated.
        block: Tokens of a KV block.
        last_stage_blocks: Full blocks left at which the request stops.
        stages: Most copies before the last.
        moves: Most moves, one after the other.
        breaks: How often an engine may be evicted or lost; afterwards it comes back.
    """

    prompt: int = 2
    tokens: int = 4
    block: int = 2
    last_stage_blocks: int = 1
    stages: int = 3
    moves: int = 1
    breaks: int = 1


class Seq(NamedTuple):
    """The request inside an engine: of its `tokens`, prompt included, `computed` are in KV blocks."""

    tokens: int
    computed: int = 0
    state: Literal["asked", "running", "parked", "preempted"] = "asked"


class Engine(NamedTuple):
    """One engine.

    Attributes:
        serves: Whether it admits requests; else it was evicted or lost, and comes back.
        lost: Whether it was lost.
        seq: The request.
        unread: Tokens in the stream.
        end: How the stream ends after them.
        mail: What it was asked and has not done, in order; with each how many positions it is about.
    """

    serves: bool = True
    lost: bool = False
    seq: Seq | None = None
    unread: tuple[int, ...] = ()
    end: Literal["", "finished", "evicted", "lost"] = ""
    mail: tuple[tuple[str, int], ...] = ()

    def asked(self, word: str, about: int = 0) -> Engine:
        return self._replace(mail=(*self.mail, (word, about)))


class Sink(NamedTuple):
    """What the destination keeps for a move: `written` positions in `blocks`."""

    is_open: bool = False
    blocks: int = 0
    written: int = 0
    is_writing: bool = False


class Flight(NamedTuple):
    """The request's task.

    Attributes:
        at: Where it is; on an engine without a stream it is about to open one.
        journal: What its client has.
        heading: Whether it goes to the destination next, which is charged already.
        arrived: Whether whoever waits for its arrival has been told.
        goes_on_from: Tokens that the destination is told of, where a fault does not take the journal.
    """

    at: Literal["room", "source", "destination", "landed", "left"] = "room"
    journal: tuple[int, ...] = ()
    heading: bool = False
    arrived: bool = True
    goes_on_from: int | None = None

    @property
    def is_over(self) -> bool:
        return self.at in ("landed", "left")


class Move(NamedTuple):
    """The move.

    Attributes:
        at: What it does next, or waits for.
        left: How many more may begin.
        owes: Whether the charge of the destination is its own to give back.
        stages: Copies so far.
        copied: Full blocks that are at the destination.
        until: Positions that the copy under way goes up to.
        stopped: Positions computed when the request stopped; `None` before, -1 if it could not.
        parks: Whether the source was asked to stop, and not yet to let go.
        stale: Whether the stream from which it takes the request has ended.
    """

    at: Literal[
        "idle",
        "reserve",
        "read",
        "write",
        "writing",
        "stop",
        "stopping",
        "commit",
        "head",
        "release",
        "arrive",
    ] = "idle"
    left: int = 0
    owes: bool = False
    stages: int = 0
    copied: int = 0
    until: int = 0
    stopped: int | None = None
    parks: bool = False
    stale: bool = False


class State(NamedTuple):
    """All of it.

    Attributes:
        breaks: How often an engine may still break.
        charges: Places taken at the source and at the destination.
        published: Positions that a stream finds at the destination.
        content: Positions that were copied to what it finds.
        broken: The invariant that the last step itself broke.
    """

    flight: Flight = Flight()
    source: Engine = Engine()
    destination: Engine = Engine()
    sink: Sink = Sink()
    move: Move = Move()
    breaks: int = 0
    charges: tuple[int, int] = (0, 0)
    published: int = 0
    content: int = 0
    broken: str | None = None

    def engine(self, where: Where) -> Engine:
        return self.source if where == "source" else self.destination

    def put(self, where: Where, engine: Engine) -> State:
        return self._replace(source=engine) if where == "source" else self._replace(destination=engine)

    def charge(self, where: Where, by: int) -> State:
        source, destination = self.charges
        return self._replace(
            charges=(source + by, destination) if where == "source" else (source, destination + by)
        )


Steps: TypeAlias = Iterator[Step[State]]


class HandOver:
    """The system, with or without a fault; `successors` are the actors' steps, one after the other."""

    def __init__(self, fault: Fault | None = None, bounds: Bounds | None = None) -> None:
        self._fault, self._bounds = fault, bounds or Bounds()

    def initial(self) -> State:
        return State(move=Move(left=self._bounds.moves), breaks=self._bounds.breaks)

    def successors(self, state: State) -> Steps:
        yield from self._flight(state)
        for where in WHERE:
            yield from self._engine(state, where)
            yield from self._trouble(state, where)
        yield from self._sink(state)
        yield from self._move(state)

    def may_end(self, state: State) -> bool:
        return state.flight.is_over

    def broken(self, state: State, *, is_end: bool) -> str | None:
        flight, sink = state.flight, state.sink
        if flight.journal != tuple(range(len(flight.journal))):
            return TOKENS
        if flight.at == "landed" and len(flight.journal) != self._bounds.tokens:
            return TOKENS
        for where in WHERE:
            seq = state.engine(where).seq
            if seq is not None and seq.state != "parked" and flight.at != where:
                return OWNER
        if state.published > state.content:
            return PUBLISHED
        promised = flight.heading + state.move.owes
        if state.charges != (flight.at == "source", (flight.at == "destination") + promised):
            return BOOKS
        if is_end and (state.source.seq or state.destination.seq or sink.blocks):
            return BOOKS
        return state.broken

    # ------------------------------------------------------------------ the flight

    def _flight(self, s: State) -> Steps:
        at = s.flight.at
        if at == "landed" or at == "left":
            return
        yield Step("the client leaves", False, self._land(s, "left"))
        if at == "room":
            for where in WHERE:
                if s.engine(where).serves:
                    routed = s.charge(where, 1)._replace(flight=s.flight._replace(at=where))
                    yield Step(f"the request is routed to the {where}", True, routed)
            return
        engine = s.engine(at)
        if engine.unread:
            yield Step("its flight reads a token", True, self._read_token(s, at))
        elif engine.end:
            yield Step(f"its flight finds the stream of the {at} {engine.end}", True, self._turn(s, at))
        elif engine.seq is None:
            yield Step(f"the {at} turns the request away", not engine.serves, self._turn(s, at))
            if engine.serves:
                yield Step(f"its flight opens a stream of the {at}", True, self._open(s, at))

    def _open(self, s: State, at: Where) -> State:
        known = s.flight.goes_on_from
        num_tokens = len(s.flight.journal) if known is None or at == "source" else known
        engine = s.engine(at)._replace(seq=Seq(self._bounds.prompt + num_tokens)).asked("admit")
        return s.put(at, engine)._replace(flight=s.flight._replace(goes_on_from=None))

    def _read_token(self, s: State, at: Where) -> State:
        engine, flight = s.engine(at), s.flight
        token, unread = engine.unread[0], engine.unread[1:]
        arrived = flight.arrived or not flight.heading
        flight = flight._replace(journal=(*flight.journal, token), arrived=arrived)
        s = s.put(at, engine._replace(unread=unread))._replace(flight=flight)
        return self._land(s, "landed") if token == self._bounds.tokens - 1 else s

    def _turn(self, s: State, at: Where) -> State:
        """The hop has ended without the last token: on to where it heads, or to the waiting room."""
        s = self._leave(s, at)
        if s.flight.heading:
            return s._replace(flight=s.flight._replace(at="destination", heading=False))
        return s._replace(flight=s.flight._replace(at="room", arrived=True))

    def _land(self, s: State, how: Literal["landed", "left"]) -> State:
        at = s.flight.at
        if at == "source" or at == "destination":
            s = self._leave(s, at)
        if s.flight.heading and self._fault != "client leaves its heading behind":
            s = s.charge("destination", -1)
        journal = s.flight.journal if how == "landed" else ()
        return s._replace(flight=Flight(at=how, journal=journal), move=s.move._replace(left=0))

    def _leave(self, s: State, at: Where) -> State:
        """Close the stream: the engine forgets the request before its next step."""
        engine = s.engine(at)
        s = s.put(at, engine._replace(unread=(), end="")).charge(at, -1)
        if at == "source" and self._fault in ("no stop", "resume after release") and engine.end == "evicted":
            return s
        return self._forget(s, at)

    def _forget(self, s: State, at: Where) -> State:
        """The engine has the request no more; what it was asked about its ticket comes to nothing."""
        engine = s.engine(at)
        words = ("admit",) if at == "destination" else ("admit", "park", "unpark")
        mail = tuple(letter for letter in engine.mail if letter[0] not in words)
        s = s.put(at, engine._replace(seq=None, mail=mail))
        if at == "source" and s.move.at != "idle":
            stopped = -1 if s.move.at == "stopping" and s.move.stopped is None else s.move.stopped
            s = s._replace(move=s.move._replace(stale=True, stopped=stopped))
        return s

    # ------------------------------------------------------------------ the engines

    def _engine(self, s: State, where: Where) -> Steps:
        engine = s.engine(where)
        if engine.mail:
            word, about = engine.mail[0]
            s_after = s.put(where, engine._replace(mail=engine.mail[1:]))
            yield Step(
                f"the {where} does what it was asked: {word}", True, self._obey(s_after, where, word, about)
            )
        if engine.seq is not None and engine.seq.state == "running":
            yield Step(f"the {where} decodes a token", True, self._decode(s, where, engine.seq))
        if engine.seq is not None and engine.seq.state == "preempted":
            seq = engine.seq._replace(state="running")
            yield Step(f"the {where} admits the request again", True, s.put(where, engine._replace(seq=seq)))
        if not engine.serves and not s.flight.is_over:
            yield Step(f"the {where} is back", True, s.put(where, engine._replace(serves=True, lost=False)))

    def _decode(self, s: State, where: Where, seq: Seq) -> State:
        engine, token = s.engine(where), seq.tokens - self._bounds.prompt
        unread = engine.unread if engine.end else (*engine.unread, token)
        seq = seq._replace(tokens=seq.tokens + 1, computed=seq.tokens)
        s = s.put(where, engine._replace(seq=seq, unread=unread))
        if token < self._bounds.tokens - 1:
            return s
        s = self._forget(s, where)
        return s.put(where, s.engine(where)._replace(end=engine.end or "finished"))

    def _obey(self, s: State, where: Where, word: str, about: int) -> State:
        engine, sink = s.engine(where), s.sink
        match word:
            case "admit" if engine.seq is not None:
                found = min(s.published, engine.seq.tokens - 1) if where == "destination" else 0
                return s.put(where, engine._replace(seq=engine.seq._replace(computed=found, state="running")))
            case "park":
                return self._park(s)
            case "unpark" if engine.seq is not None and engine.seq.state == "parked":
                return s.put(where, engine._replace(seq=engine.seq._replace(state="running")))
            case "publish":
                broken = HELD if sink.blocks * self._bounds.block < about else s.broken
                content = max(s.content, min(about, sink.written))
                return s._replace(published=max(s.published, about), content=content, broken=broken)
            case "close" | "give":
                broken = HELD if sink.is_writing else s.broken
                return s._replace(sink=Sink(is_writing=sink.is_writing), broken=broken)
        return s

    def _park(self, s: State) -> State:
        """Between two steps; whoever asked may have gone."""
        seq, num_computed = s.source.seq, -1
        if seq is not None and seq.state == "running" and not s.move.stale:
            num_computed = seq.computed
            frees = self._fault == "source frees before the last copy"
            seq = seq._replace(state="parked", computed=0 if frees else num_computed)
        s = s._replace(source=s.source._replace(seq=seq))
        if s.move.at != "stopping":
            return s
        return s._replace(move=s.move._replace(stopped=num_computed))

    def _trouble(self, s: State, where: Where) -> Steps:
        """What befalls an engine: others that want its blocks, a swap, the end of its device."""
        engine = s.engine(where)
        if engine.seq is not None and engine.seq.state == "running" and s.move.at != "idle":
            seq = engine.seq._replace(state="preempted", computed=0)  # as good as new where nothing moves
            yield Step(f"the {where} preempts the request", False, s.put(where, engine._replace(seq=seq)))
        if engine.serves and s.breaks:
            yield Step(f"the {where} is evicted", False, self._break(s, where, is_lost=False))
            yield Step(f"the {where} is lost", False, self._break(s, where, is_lost=True))

    def _break(self, s: State, where: Where, *, is_lost: bool) -> State:
        """The stream ends after its tokens; blocks and mail go with the model that they were of."""
        had_stream = s.engine(where).seq is not None
        s = self._forget(s, where)
        engine = s.engine(where)
        end = ("lost" if is_lost else "evicted") if had_stream and not engine.end else engine.end
        s = s.put(where, engine._replace(serves=False, lost=is_lost, end=end, mail=()))
        s = s._replace(breaks=s.breaks - 1)
        return s if where == "source" else s._replace(sink=Sink(), published=0, content=0)

    # ------------------------------------------------------------------ what the destination keeps

    def _sink(self, s: State) -> Steps:
        sink, destination = s.sink, s.destination
        is_idle = not sink.is_writing or self._fault == "watchdog frees what is being written"
        if sink.is_open and is_idle and self._fault != "watchdog never frees":
            closed = s._replace(sink=sink._replace(is_open=False), destination=destination.asked("give"))
            yield Step("the watchdog of the destination barks", True, closed)
        if destination.mail and destination.mail[0][0] in ("publish", "close"):
            lost = s._replace(destination=destination._replace(mail=destination.mail[1:]))
            yield Step(f"the message {destination.mail[0][0]!r} is lost", False, lost)
        if s.published and not sink.blocks and destination.seq is None:
            yield Step("others take the cached blocks", False, s._replace(published=0, content=0))

    # ------------------------------------------------------------------ the move

    def _move(self, s: State) -> Steps:
        move, at = s.move, s.move.at
        if at == "idle":
            if move.left and self._may_begin(s):
                yield Step("a move begins", False, self._begin(s))
            return
        if at != "writing" or self._fault == "cancel leaves a write behind":
            yield Step(f"the move is cancelled, or its time or its link ends, in {at!r}", False, self._end(s))
        if at == "reserve":
            yield Step("there is no room at the destination", False, self._end(s))
        match at:
            case "stopping" if move.stopped is None:
                return  # until the source has done it
            case "reserve" | "read" if s.source.mail:
                return  # until the source has done what came before
            case "arrive" if not s.flight.arrived:
                return
        yield Step(f"the move goes on from {at!r}", True, self._go_on(s))

    def _may_begin(self, s: State) -> bool:
        seq, sink = s.source.seq, s.sink
        runs = seq is not None and seq.state == "running" and not s.source.mail
        is_free = s.destination.serves and not (sink.is_open or sink.blocks or s.destination.mail)
        return runs and is_free and s.flight.at == "source"

    def _begin(self, s: State) -> State:
        """Charge the destination, and hold the blocks that it has of the request already."""
        present = s.published // self._bounds.block
        sink = Sink(is_open=True, blocks=present, written=present * self._bounds.block)
        move = Move(at="reserve", left=s.move.left - 1, owes=True, copied=present)
        return s._replace(sink=sink, move=move).charge("destination", 1)

    def _go_on(self, s: State) -> State:
        """Do the stage, or end the move where it cannot be done."""
        move = s.move
        match move.at:
            case "reserve":
                return self._reserve(s)
            case "read":
                return self._read(s)
            case "write" if s.sink.is_open:
                return s._replace(sink=s.sink._replace(is_writing=True), move=move._replace(at="writing"))
            case "writing" if s.sink.is_open:
                return self._written(s)
            case "stop" if self._is_here(s):
                return self._stop(s)
            case "stopping" if move.stopped is not None and move.stopped >= 0:
                return s._replace(move=move._replace(at="reserve"))
            case "commit" if s.sink.is_open:
                return self._commit(s)
            case "head" if self._is_here(s):
                return self._head(s)
            case "release" if not s.source.lost and (
                not move.stale or self._fault == "release what has gone"
            ):
                return self._release(s)
            case "writing":
                return self._end(s._replace(sink=s.sink._replace(is_writing=False)))
            case _:
                return self._end(s)

    def _reserve(self, s: State) -> State:
        move, bounds = s.move, self._bounds
        if not s.sink.is_open or (move.stopped is None and not self._source_has(s, 0)):
            return self._end(s)
        if move.stopped is not None:
            until, blocks = move.stopped, -(-move.stopped // bounds.block)
            if self._fault == "publish the last block without its copy":
                until = until // bounds.block * bounds.block
            if self._fault == "publish before the copy":
                s = s._replace(destination=s.destination.asked("publish", move.stopped))
            is_copied = move.copied * bounds.block >= until
            at: Literal["read", "stop", "commit"] = "commit" if is_copied else "read"
        else:
            full = 0 if s.source.seq is None else s.source.seq.computed // bounds.block
            until, blocks = full * bounds.block, full + 1
            at = "stop" if full - move.copied < bounds.last_stage_blocks else "read"
        sink = s.sink._replace(blocks=max(s.sink.blocks, blocks))
        return s._replace(sink=sink, move=move._replace(at=at, until=until))

    def _source_has(self, s: State, num_positions: int) -> bool:
        """Whether the request that the move takes is where it was, with its blocks."""
        seq, is_parked = s.source.seq, s.move.stopped is not None and self._fault != "no stop"
        if s.move.stale or seq is None or seq.state != ("parked" if is_parked else "running"):
            return False
        return seq.computed >= num_positions

    def _read(self, s: State) -> State:
        if self._source_has(s, s.move.until):
            return s._replace(move=s.move._replace(at="write"))
        looks = {"read what a preempted request gave back", "source frees before the last copy"}
        return s._replace(broken=HELD) if self._fault in looks else self._end(s)

    def _written(self, s: State) -> State:
        move, bounds = s.move, self._bounds
        sink = s.sink._replace(is_writing=False, written=max(s.sink.written, move.until))
        s = s._replace(sink=sink)
        if move.stopped is not None:
            return s._replace(move=move._replace(at="commit"))
        if move.stages + 1 == bounds.stages:
            return self._end(s)
        copied = move.until // bounds.block
        return s._replace(move=move._replace(at="reserve", stages=move.stages + 1, copied=copied))

    def _is_here(self, s: State) -> bool:
        return s.flight.at == "source" and s.destination.serves

    def _stop(self, s: State) -> State:
        if self._fault == "no stop":
            seq = s.source.seq
            return s._replace(
                move=s.move._replace(at="stopping", stopped=-1 if seq is None else seq.computed)
            )
        if s.move.stale:  # what is asked of a ticket that has gone comes to nothing
            return s._replace(move=s.move._replace(at="stopping", stopped=-1))
        move = s.move._replace(at="stopping", parks=True)
        return s._replace(source=s.source.asked("park"), move=move)

    def _commit(self, s: State) -> State:
        move, sink = s.move, s.sink
        whole = self._fault == "publish the last block without its copy"
        about = move.stopped if whole and move.stopped is not None else sink.written
        return s._replace(destination=s.destination.asked("publish", about), move=move._replace(at="head"))

    def _head(self, s: State) -> State:
        goes_on_from = None
        if self._fault == "go on from the source, unread dropped" and s.source.seq is not None:
            goes_on_from = s.source.seq.tokens - self._bounds.prompt
        if self._fault == "go on from what was read at the stop":
            goes_on_from = len(s.flight.journal)
        flight = s.flight._replace(heading=True, arrived=False, goes_on_from=goes_on_from)
        return s._replace(flight=flight, move=s.move._replace(at="release", owes=False))

    def _release(self, s: State) -> State:
        """The source's stream ends after the tokens it holds; one that has ended stays as it is."""
        s = s._replace(move=s.move._replace(at="arrive", parks=self._fault == "resume after release"))
        if s.move.stale:
            return s
        keeps = s.source.seq if self._fault in ("no stop", "resume after release") else None
        drops = self._fault == "go on from the source, unread dropped"
        unread = () if drops else s.source.unread
        return s._replace(source=s.source._replace(seq=keeps, unread=unread, end="evicted"))

    def _end(self, s: State) -> State:
        """Leave the blocks, however it ended: books first, then the destination, then the source."""
        move, flight, owes = s.move, s.flight, s.move.owes
        if move.at == "release":
            owes = flight.heading or self._fault == "failed release gives back what the flight took over"
            if self._fault != "failed release leaves the heading":
                s = s._replace(flight=flight._replace(heading=False, goes_on_from=None))
        if owes and self._fault != "abort keeps the charge":
            s = s.charge("destination", -1)
        if s.sink.is_open:
            s = s._replace(destination=s.destination.asked("close"))
        is_parked = s.source.seq is not None and s.source.seq.state == "parked"
        has_gone = s.source.lost or (move.stale and self._fault != "resume after release")
        if move.parks and not has_gone and (is_parked or self._fault != "stop cancelled half way stays"):
            s = s._replace(source=s.source.asked("unpark"))
        return s._replace(move=Move(left=move.left))
