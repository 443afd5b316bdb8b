"""A model of the hand-over of one request with its KV blocks, small enough to explore all its states.

    request       tokens received by its client, its instance, its next instance    `runtime/active.py`
    source        the request's steps and stream, and its queue of commands         `backends/torch/`
    destination   the same, with the sink of the move and the published blocks
    move          its stage, from "reserve" to "arrive"                             `runtime/move.py`

A step of the model is the code between two awaits, so all interleavings at awaits are explored. Tokens are
represented by their index, blocks by the number of positions in them. Where the code is more detailed, the
model allows more: an engine executes a command at any later time, the watchdog may time out at any time, and
a move may be aborted in any stage, for any reason: a cancellation, a time limit, a lost link, a drain of the
destination.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from tests.model.explore import Step

__all__ = [
    "HELD",
    "OWNER",
    "PUBLISHED",
    "RELEASED",
    "TOKENS",
    "WHERE",
    "Bounds",
    "Fault",
    "HandOver",
    "State",
]

TOKENS = "tokens: the client receives every token once, in order"
OWNER = "owner: at most one engine decodes the request, the one that it is assigned to"
PUBLISHED = "published: the content of a published block was copied before"
HELD = "held: no block is freed while it is read or written"
RELEASED = "released: assignments and blocks are released exactly once"

Fault: TypeAlias = Literal[
    "publish before the copy",
    "publish the last block without its copy",
    "source frees before the last copy",
    "read blocks of a preempted request",
    "watchdog frees what is being written",
    "watchdog never frees",
    "cancel leaves a write behind",
    "no stop",
    "release a stream that ended",
    "resume after release",
    "cancelled stop stays parked",
    "continue from the source, unread dropped",
    "continue from the tokens read at the stop",
    "abort keeps the assignment",
    "failed release keeps the redirection",
    "failed release frees the request's assignment",
    "client leaves its redirection",
]
Where: TypeAlias = Literal["source", "destination"]
WHERE: tuple[Where, Where] = ("source", "destination")


class Bounds(NamedTuple):
    """The size of the model.

    Attributes:
        prompt: Tokens of the prompt.
        tokens: Generated tokens.
        block: Tokens per KV block.
        last_stage_blocks: The request stops when fewer full blocks than this are left to copy.
        stages: Maximum number of copies before the last one.
        moves: Maximum number of moves, one after another.
        breaks: How often an engine may be evicted or lost; it comes back afterwards.
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
    state: Literal["queued", "running", "parked", "preempted"] = "queued"


class Engine(NamedTuple):
    """An engine and its part of the request.

    Attributes:
        serves: Whether it admits requests; if not, it was evicted or lost, and comes back.
        lost: Whether it was lost.
        seq: The request.
        unread: Tokens in the stream that are not read yet.
        end: How the stream ends after these tokens.
        commands: Queued commands in order, each with a number of positions.
    """

    serves: bool = True
    lost: bool = False
    seq: Seq | None = None
    unread: tuple[int, ...] = ()
    end: Literal["", "finished", "evicted", "lost"] = ""
    commands: tuple[tuple[str, int], ...] = ()

    def command(self, name: str, about: int = 0) -> Engine:
        return self._replace(commands=(*self.commands, (name, about)))


class Sink(NamedTuple):
    """The sink of a move at the destination: `written` positions in `blocks`."""

    is_open: bool = False
    blocks: int = 0
    written: int = 0
    is_writing: bool = False


class ActiveRequest(NamedTuple):
    """The task of the request in the fleet.

    Attributes:
        at: Its state: an engine, waiting, or over; on an engine without a stream it opens one next.
        received: Tokens that the client has received.
        redirected: Whether the destination is its next instance, to which it is assigned already.
        arrived: Whether the event of its arrival is set.
        goes_on_from: Number of tokens for the destination, if a fault does not use `received`.
    """

    at: Literal["waiting", "source", "destination", "finished", "left"] = "waiting"
    received: tuple[int, ...] = ()
    redirected: bool = False
    arrived: bool = True
    goes_on_from: int | None = None

    @property
    def is_over(self) -> bool:
        return self.at in ("finished", "left")


class Move(NamedTuple):
    """The state of the move.

    Attributes:
        at: The stage that it does next or waits in.
        left: How many more moves may begin.
        owes: Whether the move has to release the assignment to the destination.
        stages: Copies so far.
        copied: Full blocks at the destination.
        until: Positions that the current copy covers.
        stopped: Positions computed when the request stopped; `None` before, -1 if it could not.
        parks: Whether the source was told to park the request, and not yet to release it.
        stale: Whether the stream of the request at the source has ended.
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
        "redirect",
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
    """A state of the model.

    Attributes:
        breaks: How often an engine may still break.
        assigned: Assignments to the source and to the destination.
        published: Positions in the prefix cache of the destination.
        content: Positions of these that were copied.
        broken: The invariant that the last step itself broke.
    """

    request: ActiveRequest = ActiveRequest()
    source: Engine = Engine()
    destination: Engine = Engine()
    sink: Sink = Sink()
    move: Move = Move()
    breaks: int = 0
    assigned: tuple[int, int] = (0, 0)
    published: int = 0
    content: int = 0
    broken: str | None = None

    def engine(self, where: Where) -> Engine:
        return self.source if where == "source" else self.destination

    def put(self, where: Where, engine: Engine) -> State:
        return self._replace(source=engine) if where == "source" else self._replace(destination=engine)

    def assign(self, where: Where, by: int) -> State:
        source, destination = self.assigned
        return self._replace(
            assigned=(source + by, destination) if where == "source" else (source, destination + by)
        )


Steps: TypeAlias = Iterator[Step[State]]


class HandOver:
    """The transition system, with or without a fault; `successors` yields the steps of all actors."""

    def __init__(self, fault: Fault | None = None, bounds: Bounds | None = None) -> None:
        self._fault, self._bounds = fault, bounds or Bounds()

    def initial(self) -> State:
        return State(move=Move(left=self._bounds.moves), breaks=self._bounds.breaks)

    def successors(self, state: State) -> Steps:
        yield from self._request(state)
        for where in WHERE:
            yield from self._engine(state, where)
            yield from self._failures(state, where)
        yield from self._sink(state)
        yield from self._move(state)

    def may_end(self, state: State) -> bool:
        return state.request.is_over

    def broken(self, state: State, *, is_end: bool) -> str | None:
        request, sink = state.request, state.sink
        if request.received != tuple(range(len(request.received))):
            return TOKENS
        if request.at == "finished" and len(request.received) != self._bounds.tokens:
            return TOKENS
        for where in WHERE:
            seq = state.engine(where).seq
            if seq is not None and seq.state != "parked" and request.at != where:
                return OWNER
        if state.published > state.content:
            return PUBLISHED
        promised = request.redirected + state.move.owes
        if state.assigned != (request.at == "source", (request.at == "destination") + promised):
            return RELEASED
        if is_end and (state.source.seq or state.destination.seq or sink.blocks):
            return RELEASED
        return state.broken

    # ------------------------------------------------------------------ the request

    def _request(self, s: State) -> Steps:
        at = s.request.at
        if at == "finished" or at == "left":
            return
        yield Step("the client leaves", False, self._finish(s, "left"))
        if at == "waiting":
            for where in WHERE:
                if s.engine(where).serves:
                    routed = s.assign(where, 1)._replace(request=s.request._replace(at=where))
                    yield Step(f"the request is routed to the {where}", True, routed)
            return
        engine = s.engine(at)
        if engine.unread:
            yield Step("the request reads a token", True, self._read_token(s, at))
        elif engine.end:
            yield Step(f"the request finds the stream of the {at} {engine.end}", True, self._next_hop(s, at))
        elif engine.seq is None:
            yield Step(f"the {at} refuses the request", not engine.serves, self._next_hop(s, at))
            if engine.serves:
                yield Step(f"the request opens a stream of the {at}", True, self._open(s, at))

    def _open(self, s: State, at: Where) -> State:
        known = s.request.goes_on_from
        num_tokens = len(s.request.received) if known is None or at == "source" else known
        engine = s.engine(at)._replace(seq=Seq(self._bounds.prompt + num_tokens)).command("admit")
        return s.put(at, engine)._replace(request=s.request._replace(goes_on_from=None))

    def _read_token(self, s: State, at: Where) -> State:
        engine, request = s.engine(at), s.request
        token, unread = engine.unread[0], engine.unread[1:]
        arrived = request.arrived or not request.redirected
        request = request._replace(received=(*request.received, token), arrived=arrived)
        s = s.put(at, engine._replace(unread=unread))._replace(request=request)
        return self._finish(s, "finished") if token == self._bounds.tokens - 1 else s

    def _next_hop(self, s: State, at: Where) -> State:
        """The hop ended before the last token: continue on the next instance, or wait."""
        s = self._leave(s, at)
        if s.request.redirected:
            return s._replace(request=s.request._replace(at="destination", redirected=False))
        return s._replace(request=s.request._replace(at="waiting", arrived=True))

    def _finish(self, s: State, how: Literal["finished", "left"]) -> State:
        at = s.request.at
        if at == "source" or at == "destination":
            s = self._leave(s, at)
        if s.request.redirected and self._fault != "client leaves its redirection":
            s = s.assign("destination", -1)
        received = s.request.received if how == "finished" else ()
        return s._replace(request=ActiveRequest(at=how, received=received), move=s.move._replace(left=0))

    def _leave(self, s: State, at: Where) -> State:
        """Close the stream: the engine forgets the request before its next step."""
        engine = s.engine(at)
        s = s.put(at, engine._replace(unread=(), end="")).assign(at, -1)
        if at == "source" and self._fault in ("no stop", "resume after release") and engine.end == "evicted":
            return s
        return self._forget(s, at)

    def _forget(self, s: State, at: Where) -> State:
        """The engine forgets the request, and drops commands for its ticket."""
        engine = s.engine(at)
        names = ("admit",) if at == "destination" else ("admit", "park", "unpark")
        commands = tuple(command for command in engine.commands if command[0] not in names)
        s = s.put(at, engine._replace(seq=None, commands=commands))
        if at == "source" and s.move.at != "idle":
            stopped = -1 if s.move.at == "stopping" and s.move.stopped is None else s.move.stopped
            s = s._replace(move=s.move._replace(stale=True, stopped=stopped))
        return s

    # ------------------------------------------------------------------ the engines

    def _engine(self, s: State, where: Where) -> Steps:
        engine = s.engine(where)
        if engine.commands:
            word, about = engine.commands[0]
            s_after = s.put(where, engine._replace(commands=engine.commands[1:]))
            yield Step(f"the {where} executes: {word}", True, self._execute(s_after, where, word, about))
        if engine.seq is not None and engine.seq.state == "running":
            yield Step(f"the {where} decodes a token", True, self._decode(s, where, engine.seq))
        if engine.seq is not None and engine.seq.state == "preempted":
            seq = engine.seq._replace(state="running")
            yield Step(f"the {where} admits the request again", True, s.put(where, engine._replace(seq=seq)))
        if not engine.serves and not s.request.is_over:
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

    def _execute(self, s: State, where: Where, word: str, about: int) -> State:
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
        """Park the request between two steps; the move may have ended."""
        seq, num_computed = s.source.seq, -1
        if seq is not None and seq.state == "running" and not s.move.stale:
            num_computed = seq.computed
            frees = self._fault == "source frees before the last copy"
            seq = seq._replace(state="parked", computed=0 if frees else num_computed)
        s = s._replace(source=s.source._replace(seq=seq))
        if s.move.at != "stopping":
            return s
        return s._replace(move=s.move._replace(stopped=num_computed))

    def _failures(self, s: State, where: Where) -> Steps:
        """Failures of an engine: a preemption, an eviction by a swap, the loss of its device."""
        engine = s.engine(where)
        if engine.seq is not None and engine.seq.state == "running" and s.move.at != "idle":
            seq = engine.seq._replace(
                state="preempted", computed=0
            )  # equivalent to a new request without a move
            yield Step(f"the {where} preempts the request", False, s.put(where, engine._replace(seq=seq)))
        if engine.serves and s.breaks:
            yield Step(f"the {where} is evicted", False, self._break(s, where, is_lost=False))
            yield Step(f"the {where} is lost", False, self._break(s, where, is_lost=True))

    def _break(self, s: State, where: Where, *, is_lost: bool) -> State:
        """End the stream after its tokens; blocks and commands are gone with the model."""
        had_stream = s.engine(where).seq is not None
        s = self._forget(s, where)
        engine = s.engine(where)
        end = ("lost" if is_lost else "evicted") if had_stream and not engine.end else engine.end
        s = s.put(where, engine._replace(serves=False, lost=is_lost, end=end, commands=()))
        s = s._replace(breaks=s.breaks - 1)
        return s if where == "source" else s._replace(sink=Sink(), published=0, content=0)

    # ------------------------------------------------------------------ the sink of the destination

    def _sink(self, s: State) -> Steps:
        sink, destination = s.sink, s.destination
        is_idle = not sink.is_writing or self._fault == "watchdog frees what is being written"
        if sink.is_open and is_idle and self._fault != "watchdog never frees":
            closed = s._replace(sink=sink._replace(is_open=False), destination=destination.command("give"))
            yield Step("the watchdog of the destination times out", True, closed)
        if destination.commands and destination.commands[0][0] in ("publish", "close"):
            lost = s._replace(destination=destination._replace(commands=destination.commands[1:]))
            yield Step(f"the message {destination.commands[0][0]!r} is lost", False, lost)
        if s.published and not sink.blocks and destination.seq is None:
            yield Step("other requests take the cached blocks", False, s._replace(published=0, content=0))

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
                return  # until the source has parked the request
            case "reserve" | "read" if s.source.commands:
                return  # until the source has executed earlier commands
            case "arrive" if not s.request.arrived:
                return
        yield Step(f"the move goes on from {at!r}", True, self._go_on(s))

    def _may_begin(self, s: State) -> bool:
        seq, sink = s.source.seq, s.sink
        runs = seq is not None and seq.state == "running" and not s.source.commands
        is_free = s.destination.serves and not (sink.is_open or sink.blocks or s.destination.commands)
        return runs and is_free and s.request.at == "source"

    def _begin(self, s: State) -> State:
        """Assign the request to the destination, and keep the blocks that it has already."""
        present = s.published // self._bounds.block
        sink = Sink(is_open=True, blocks=present, written=present * self._bounds.block)
        move = Move(at="reserve", left=s.move.left - 1, owes=True, copied=present)
        return s._replace(sink=sink, move=move).assign("destination", 1)

    def _go_on(self, s: State) -> State:
        """Do the stage, or end the move if that is impossible."""
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
            case "redirect" if self._is_here(s):
                return self._redirect(s)
            case "release" if not s.source.lost and (
                not move.stale or self._fault == "release a stream that ended"
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
                s = s._replace(destination=s.destination.command("publish", move.stopped))
            is_copied = move.copied * bounds.block >= until
            at: Literal["read", "stop", "commit"] = "commit" if is_copied else "read"
        else:
            full = 0 if s.source.seq is None else s.source.seq.computed // bounds.block
            until, blocks = full * bounds.block, full + 1
            at = "stop" if full - move.copied < bounds.last_stage_blocks else "read"
        sink = s.sink._replace(blocks=max(s.sink.blocks, blocks))
        return s._replace(sink=sink, move=move._replace(at=at, until=until))

    def _source_has(self, s: State, num_positions: int) -> bool:
        """Whether the request is still at the source, with its blocks."""
        seq, is_parked = s.source.seq, s.move.stopped is not None and self._fault != "no stop"
        if s.move.stale or seq is None or seq.state != ("parked" if is_parked else "running"):
            return False
        return seq.computed >= num_positions

    def _read(self, s: State) -> State:
        if self._source_has(s, s.move.until):
            return s._replace(move=s.move._replace(at="write"))
        looks = {"read blocks of a preempted request", "source frees before the last copy"}
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
        return s.request.at == "source" and s.destination.serves

    def _stop(self, s: State) -> State:
        if self._fault == "no stop":
            seq = s.source.seq
            return s._replace(
                move=s.move._replace(at="stopping", stopped=-1 if seq is None else seq.computed)
            )
        if s.move.stale:  # a command for a ticket that is gone does nothing
            return s._replace(move=s.move._replace(at="stopping", stopped=-1))
        move = s.move._replace(at="stopping", parks=True)
        return s._replace(source=s.source.command("park"), move=move)

    def _commit(self, s: State) -> State:
        move, sink = s.move, s.sink
        complete = self._fault == "publish the last block without its copy"
        about = move.stopped if complete and move.stopped is not None else sink.written
        return s._replace(
            destination=s.destination.command("publish", about), move=move._replace(at="redirect")
        )

    def _redirect(self, s: State) -> State:
        goes_on_from = None
        if self._fault == "continue from the source, unread dropped" and s.source.seq is not None:
            goes_on_from = s.source.seq.tokens - self._bounds.prompt
        if self._fault == "continue from the tokens read at the stop":
            goes_on_from = len(s.request.received)
        request = s.request._replace(redirected=True, arrived=False, goes_on_from=goes_on_from)
        return s._replace(request=request, move=s.move._replace(at="release", owes=False))

    def _release(self, s: State) -> State:
        """End the source's stream after its unread tokens, unless it has ended already."""
        s = s._replace(move=s.move._replace(at="arrive", parks=self._fault == "resume after release"))
        if s.move.stale:
            return s
        keeps = s.source.seq if self._fault in ("no stop", "resume after release") else None
        drops = self._fault == "continue from the source, unread dropped"
        unread = () if drops else s.source.unread
        return s._replace(source=s.source._replace(seq=keeps, unread=unread, end="evicted"))

    def _end(self, s: State) -> State:
        """End the move in any stage: release the assignment, then the sink, then the source."""
        move, request, owes = s.move, s.request, s.move.owes
        if move.at == "release":
            owes = request.redirected or self._fault == "failed release frees the request's assignment"
            if self._fault != "failed release keeps the redirection":
                s = s._replace(request=request._replace(redirected=False, goes_on_from=None))
        if owes and self._fault != "abort keeps the assignment":
            s = s.assign("destination", -1)
        if s.sink.is_open:
            s = s._replace(destination=s.destination.command("close"))
        is_parked = s.source.seq is not None and s.source.seq.state == "parked"
        has_gone = s.source.lost or (move.stale and self._fault != "resume after release")
        if move.parks and not has_gone and (is_parked or self._fault != "cancelled stop stays parked"):
            s = s._replace(source=s.source.command("unpark"))
        return s._replace(move=Move(left=move.left))
