"""`RemoteStatus`: the status of an engine elsewhere, as its controller shows it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from hotswap.backends.notifier import StatusNotifier
from hotswap.request import ModelId
from hotswap.view import EngineStatus, InstanceId, InstanceState

__all__ = ["RemoteStatus"]

_LOAD = frozenset(
    (
        "num_running",
        "num_waiting",
        "num_prefill_tokens",
        "num_free_kv_blocks",
        "num_next_kv_blocks",
        "kept_since_s",
        "preempted",
    )
)


class RemoteStatus(StatusNotifier):
    """What the host told last; while a verb is pending, the state that the verb brings.

    A host tells its status before the answer to a verb, on one link that keeps the order. So the state shown
    is never older than an answer: until then it is that of the verb, afterwards that of the host.

    Args:
        id: The engine's.
        node: Where it is; "" for what its host says.
    """

    def __init__(self, id: InstanceId, node: str) -> None:
        super().__init__()
        self._node = node
        self._none = EngineStatus(id=id, state=InstanceState.EMPTY, node=node)
        self._told = self._shown = self._none
        self._pending: tuple[InstanceState, ModelId | None] | None = None

    @property
    def told(self) -> EngineStatus:
        """What the host told last."""
        return self._told

    @property
    def shown(self) -> EngineStatus:
        """The status."""
        return self._shown

    def move(self, node: str) -> None:
        """Show another node from now on."""
        self._node, self._told = node, self._told.updated(node=node)
        self._show()

    def tell(self, status: EngineStatus) -> None:
        """Take what the host tells."""
        self._told = status.updated(node=self._node) if self._node else status
        self._show()

    def end(self) -> None:
        """Show an engine that is EMPTY and holds nothing."""
        self._end(state=InstanceState.EMPTY)

    def lose(self, because: str) -> None:
        """Show one that is LOST."""
        self._end(state=InstanceState.LOST, lost_because=because)

    def _end(self, **fields: object) -> None:
        self._told, self._pending = self._none.updated(node=self._told.node, **fields), None
        self._show()

    @contextmanager
    def becoming(self, state: InstanceState, model: ModelId | None, *of: InstanceState) -> Generator[None]:
        """Show a state while a verb is pending that begins in one of some states; LOST is always shown."""
        if self._told.state not in of:
            yield  # the host refuses it
            return
        pending = self._pending = state, model
        self._show()
        try:
            yield
        finally:
            if self._pending is pending:
                self._pending = None
                self._show()

    def _show(self) -> None:
        before, now = self._shown, self._told
        if self._pending is not None and now.state is not InstanceState.LOST:
            state, model = self._pending
            now = now.updated(state=state, model=model)
        if now.__dict__ == before.__dict__:
            return
        self._shown = now
        changed = {name for name, value in now.__dict__.items() if before.__dict__[name] != value}
        if changed <= _LOAD:
            self.load_changed()
        else:
            self.state_changed()
