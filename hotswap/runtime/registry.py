"""The models of a fleet: cards, tokenizers, and whether a request could ever be served."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from anyio import to_thread

from hotswap.errors import ConfigError, InvalidRequest, ModelTooLarge, PromptTooLong, UnknownModel
from hotswap.model import Model, ModelCard
from hotswap.request import ModelId, Request
from hotswap.store import SupportsImport, SupportsTokenizer, WeightStore
from hotswap.text import TextStream, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Registry", "check_servable", "unique"]

K = TypeVar("K")
V = TypeVar("V")


class Registry:
    """Joins what the user registered with what the store knows."""

    def __init__(self, models: Iterable[Model], store: WeightStore) -> None:
        self.cards: dict[ModelId, ModelCard] = {}
        self._models = unique(models, lambda model: ModelId(model.id), "model")
        self._store = store
        self._tokenizers: dict[ModelId, Tokenizer] = {}

    async def open(self) -> None:
        """Read every model's manifest and tokenizer, importing what the store lacks."""
        for model_id, model in self._models.items():
            if model.source is not None and isinstance(self._store, SupportsImport):
                await self._store.import_model(model)
            self.cards[model_id] = ModelCard.of(model, await self._store.manifest(model_id))
            if isinstance(self._store, SupportsTokenizer):
                tokenizer = await self._store.tokenizer(model_id)
                if tokenizer is not None:
                    self._tokenizers[model_id] = tokenizer

    @property
    def models(self) -> Iterable[ModelId]:
        """The ids of all models, also before `open`."""
        return self._models.keys()

    def hand_floor(self, old: ModelId, new: ModelId) -> None:
        """Let `new` have the least number of replicas that `old` had, which has none from now on."""
        if old != new:
            floor = max(self.cards[old].min_replicas, self.cards[new].min_replicas)
            self.cards[old] = replace(self.cards[old], min_replicas=0)
            self.cards[new] = replace(self.cards[new], min_replicas=floor)

    def card(self, model: ModelId) -> ModelCard:
        """Return a model's card.

        Raises:
            UnknownModel: naming the models there are.
        """
        card = self.cards.get(model)
        if card is None:
            known = ", ".join(map(repr, self._models)) or "none"
            raise UnknownModel(f"Model {model!r} is not registered; this fleet serves {known}.")
        return card

    async def encode(self, model: ModelId, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return a prompt as token ids.

        Raises:
            InvalidRequest: it is text, and the model has no tokenizer.
        """
        if not isinstance(prompt, str):
            return tuple(prompt)
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            raise InvalidRequest(f"Model {model!r} has no tokenizer; give the prompt as token ids.")
        return tuple(await to_thread.run_sync(tokenizer.encode, prompt))

    def text_stream(self, request: Request) -> TextStream | None:
        """Return what turns the request's tokens into text, `None` without a tokenizer.

        Raises:
            InvalidRequest: it has stop strings, and the model has no tokenizer.
        """
        sampling = request.sampling
        tokenizer = self._tokenizers.get(request.model)
        if tokenizer is not None:
            return TextStream(
                tokenizer, prompt=request.prompt, stop=sampling.stop, min_tokens=sampling.min_tokens
            )
        if sampling.stop:
            raise InvalidRequest(
                f"Model {request.model!r} has no tokenizer to match stop strings with; use stop_token_ids."
            )
        return None


def check_servable(request: Request, card: ModelCard, memory_bytes: Callable[[], Iterable[int]]) -> None:
    """Refuse at once what could never be served, given each engine's memory (0: unknown).

    Raises:
        PromptTooLong: no token can follow the prompt within the model's context.
        ModelTooLarge: the weights exceed every engine's memory.
    """
    if request.num_tokens >= card.max_context_tokens:
        raise PromptTooLong(
            f"The prompt has {request.num_tokens} tokens and model {card.id!r} a context of "
            f"{card.max_context_tokens}; shorten it so that at least one token can follow."
        )
    if all(0 < room < card.weight_bytes for room in memory_bytes()):
        raise ModelTooLarge(
            f"Model {card.id!r} has {card.weight_bytes:,} bytes of weights and the largest engine "
            f"{max(memory_bytes(), default=0):,} bytes of memory; add a larger engine."
        )


def unique(items: Iterable[V], key: Callable[[V], K], what: str) -> dict[K, V]:
    """Key items by their ids.

    Raises:
        ConfigError: two share an id.
    """
    found: dict[K, V] = {}
    for item in items:
        if found.setdefault(key(item), item) is not item:
            raise ConfigError(f"Two {what}s are called {key(item)!r}; give each a name of its own.")
    return found
