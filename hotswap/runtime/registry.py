"""What requests may name: models, other names for them, and adapters; a part of a fleet's state."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from hotswap.errors import UnknownModel
from hotswap.model import Adapter, Model, ModelCard
from hotswap.request import ModelId

__all__ = ["Registry"]


class Registry:
    """The names that requests may give.

    Attributes:
        registered: The models that requests may ask for.
        models: The cards of those whose manifest has been read.
        aliases: Names whose requests another model serves.
        adapters: The latest version of each adapter, by model and name.
    """

    def __init__(self) -> None:
        self.registered: dict[ModelId, Model] = {}
        self.models: dict[ModelId, ModelCard] = {}
        self.aliases: dict[ModelId, ModelId] = {}
        self.adapters: dict[tuple[str, str], Adapter] = {}
        self._rolls: list[tuple[ModelId, ModelId]] = []

    def card(self, model: ModelId, *, closed: bool = False) -> ModelCard:
        """Return the card of a model that requests may ask for, or of one that is `closed` to new ones.

        Raises:
            UnknownModel: naming the models there are.
        """
        card = self.models.get(model) if closed or model in self.registered else None
        if card is None:
            known = ", ".join(map(repr, self.registered)) or "none"
            raise UnknownModel(f"Model {model!r} is not registered; this fleet serves {known}.")
        return card

    def add_model(self, model: Model, card: ModelCard) -> None:
        """Let requests ask for a model from now on."""
        self.registered[card.id] = model
        self.models[card.id] = card

    def close_model(self, model: ModelId) -> Model:
        """Let requests ask for a model no more, and schedulers keep no replica of it; return it."""
        self.models[model] = replace(self.models[model], min_replicas=0)
        return self.registered.pop(model)

    def remove_model(self, model: ModelId) -> None:
        """Forget a model that was closed."""
        del self.models[model]
        self.aliases = {name: now for name, now in self.aliases.items() if model not in (name, now)}

    def add_alias(self, old: ModelId, new: ModelId) -> None:
        """Have requests for `old`, and for what it serves, served by `new`; `old` itself ends its alias."""
        others = {name: new if target == old else target for name, target in self.aliases.items()}
        self.aliases = {**others, old: new}
        self.aliases.pop(new, None)

    @contextmanager
    def rolling(self, old: ModelId, new: ModelId) -> Generator[None]:
        """Keep two models while the replicas of one are given the weights of the other."""
        self._rolls.append((old, new))
        try:
            yield
        finally:
            self._rolls.remove((old, new))

    def is_rolling(self, model: ModelId) -> bool:
        """Whether a roll from or to a model is under way."""
        return any(model in roll for roll in self._rolls)

    def hand_min_replicas(self, old: ModelId, new: ModelId) -> None:
        """Give `new` the least number of replicas that `old` had, which has none from now on."""
        if old != new:
            least = max(self.models[old].min_replicas, self.models[new].min_replicas)
            self.models[old] = replace(self.models[old], min_replicas=0)
            self.models[new] = replace(self.models[new], min_replicas=least)

    def is_latest(self, adapter: Adapter) -> bool:
        """Return whether new requests can still name a version of an adapter."""
        return self.adapters.get((adapter.model, adapter.id)) == adapter
