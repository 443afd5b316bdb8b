"""Which adapters a simulated engine can hold."""

from __future__ import annotations

from collections.abc import Collection

from hotswap.errors import InstanceError, OutOfMemory
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.view import InstanceId

__all__ = ["check_adaptable"]


def check_adaptable(
    adapter: Adapter, engine: InstanceId, serving: ModelId | None, held: Collection[AdapterId], most: int
) -> None:
    """Refuse an adapter of another model than an engine serves, or one too many of those that it holds.

    Raises:
        InstanceError: the engine serves another model.
        OutOfMemory: it holds as many as it can.
    """
    if serving != adapter.model:
        raise InstanceError(
            f"Engine {engine!r} serves {serving!r}, and adapter {adapter.id!r} is of {adapter.model!r}; ask "
            "an engine that serves that."
        )
    if adapter.version not in held and len(held) >= most:
        raise OutOfMemory(f"Engine {engine!r} holds {len(held)} adapters, which is all it can; drop one.")
