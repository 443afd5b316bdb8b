"""The models that a fleet serves: they come and go while it is open."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import anyio

from hotswap.chat import Chat
from hotswap.checks import MAX_TOKEN_ID, check_kind, check_seconds, check_strings, to_token_ids
from hotswap.engine import SupportsPreload
from hotswap.errors import (
    ConfigError,
    InvalidRequest,
    ModelTooLarge,
    PromptTooLong,
    UnknownModel,
    UnsupportedModel,
)
from hotswap.generation import sampling_of, unmapped
from hotswap.model import Model, ModelCard
from hotswap.request import ModelId, Request
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.adapters import Adapters
from hotswap.runtime.entering import EnteringRequest
from hotswap.runtime.instance import refusal
from hotswap.runtime.lifetime import Lifetime
from hotswap.runtime.state import FleetState
from hotswap.runtime.swaps import Swaps
from hotswap.runtime.texts import ModelText, Texts
from hotswap.sampling import Sampling
from hotswap.store import SupportsImport, SupportsTextSettings, SupportsTokenizer
from hotswap.view import InstanceView

__all__ = ["Models"]

V = TypeVar("V")

log = logging.getLogger("hotswap")


class Models:
    """What requests may ask a fleet for; a `Fleet` has it as `models`.

    Args:
        state: Of the fleet.
        texts: Gets each model's tokenizer and chat template.
        swaps: Unloads a model that is removed.
        adapters: Those of a model are removed with it.
        lifetime: Of the fleet, which bounds both verbs.
    """

    def __init__(
        self, state: FleetState, texts: Texts, swaps: Swaps, adapters: Adapters, lifetime: Lifetime
    ) -> None:
        self._state, self._texts, self._lifetime = state, texts, lifetime
        self._swaps, self._adapters = swaps, adapters
        self._adding: set[ModelId] = set()
        self._told: set[ModelId] = set()

    def __len__(self) -> int:
        return len(self._state.registered)

    def __iter__(self) -> Iterator[Model]:
        """The registered models, as they were given."""
        return iter(tuple(self._state.registered.values()))

    def sampling(self, model: str, **fields: Any) -> Sampling:
        """Return a model's own sampling parameters, as its `generation_config.json` gives them.

        `fields` are those of `Sampling` and go before the model's: `fleet.models.sampling("llama",
        max_tokens=500)`. A file that draws at random (`do_sample`) gives a temperature, others a greedy
        answer. What the file asks for and no field can say is logged, once for each model.

        Raises:
            UnknownModel: the fleet has no such model.
            InvalidRequest: the file or `fields` have a value that cannot be used.
            FleetClosed: the fleet is not open.
        """
        name = self.card(model).id
        config = self._texts.of(name).generation_config
        if name not in self._told and (names := unmapped(config)):
            self._told.add(name)
            log.warning(
                "generation_config.json of model %r asks for %s, which is not applied.",
                name,
                ", ".join(names),
            )
        return sampling_of(config, **fields)

    def card(self, model: str) -> ModelCard:
        """Return what is known of the model that serves requests for a name, from its manifest.

        Raises:
            UnknownModel: the fleet has no such model.
            FleetClosed: the fleet is not open.
        """
        check_strings(ConfigError, model=model)
        self._lifetime.check_open()
        name = ModelId(model)
        return self._state.card(self._state.aliases.get(name, name))

    @property
    def aliases(self) -> dict[ModelId, ModelId]:
        """The models by the other names that requests may give them."""
        return dict(self._state.aliases)

    async def encode(
        self,
        model: str,
        prompt: str | Chat,
        *,
        adapter: str | None = None,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """Return a prompt in token ids, as a request with it would begin; it may exceed the context.

        Raises:
            UnknownModel, UnknownAdapter: the fleet has none of that name.
            InvalidRequest: the model has no tokenizer or no chat template, or the template refuses the chat.
            PromptTooLong: it has over four million characters, and over 64 for each token of the context.
            FleetClosed: the fleet is not open, or closes meanwhile.
        """
        card = self.card(model)
        text = await self._text(card.id, adapter)
        check_kind(InvalidRequest, "prompt", prompt, Chat if isinstance(prompt, Chat) else str)
        whole = Sampling(truncate_prompt_tokens=MAX_TOKEN_ID)  # its end, however long that is
        return await text.encode(
            prompt, whole, add_special_tokens=add_special_tokens, most_tokens=card.max_context_tokens
        )

    async def decode(
        self,
        model: str,
        tokens: Sequence[int],
        *,
        adapter: str | None = None,
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the text of token ids, special ones left out by default, incomplete characters as U+FFFD.

        Raises:
            UnknownModel, UnknownAdapter: the fleet has none of that name.
            InvalidRequest: the model has no tokenizer, or has no such token ids.
            FleetClosed: the fleet is not open, or closes meanwhile.
        """
        card = self.card(model)
        ids = to_token_ids("tokens", tokens)
        if card.vocabulary is not None and ids and max(ids) >= card.vocabulary:
            raise InvalidRequest(
                f"tokens has {max(ids)}, but the largest id in the vocabulary of {card.id!r} is "
                f"{card.vocabulary - 1}; use the model's own tokenizer."
            )
        text = await self._text(card.id, adapter)
        return await text.decode(ids, skip_special_tokens=skip_special_tokens)

    async def _text(self, model: ModelId, adapter: str | None) -> ModelText:
        if adapter is None:
            return self._texts.of(model)
        return await self._texts.of_adapter(self._adapters.named(model, adapter))

    def register(self, models: Iterable[Model]) -> None:
        """Take the models in that a fleet begins with; `open` reads them.

        Raises:
            ConfigError: two share an id.
        """
        for model in models:
            name = ModelId(model.id)
            if name in self._state.registered:
                raise ConfigError(f"Two models are called {name!r}; give each a name of its own.")
            self._state.registered[name] = model

    async def open(self) -> None:
        """Read the manifest and the text files of every model, importing what the store lacks.

        Raises:
            ConfigError: there are adapters, and no engine can hold any.
        """
        self._adapters.check_engines()
        for model in self._state.registered.values():
            card = await self._read(model)
            self._state.models[card.id] = card
        self._consider(*self._state.models.values())

    async def add(self, model: Model) -> None:
        """Let requests ask for a model from now on; one with a source is imported if the store lacks it.

        Schedulers see it from the next plan on. A failure or a cancellation leaves the fleet as it was; what
        was imported stays in the store.

        Raises:
            ConfigError: the fleet has a model of this id.
            StoreError: its weights cannot be read.
            FleetClosed: the fleet is not open, or closed meanwhile.
        """
        await self._lifetime.run(self._add(model), "the addition of a model")

    async def _add(self, model: Model) -> None:
        check_kind(ConfigError, "model", model, Model)
        name = ModelId(model.id)
        if name in self._state.models or name in self._adding or name in self._state.aliases:
            raise ConfigError(f"There is a model or an alias {name!r} already; give the new one another id.")
        self._adding.add(name)
        try:
            card = await self._read(model)
        finally:
            self._adding.discard(name)
        self._state.add_model(model, card)
        self._consider(card)
        self._state.events.note("model_added", model=name)

    def alias(self, name: str, model: str | None) -> None:
        """Have requests that name a model `name` served by `model` from now on; `None` ends that.

        Requests that wait or run go on with the model that they have. An alias may be given to another model
        at any time, and goes with its model when that is removed. `name` may have slashes.

        Raises:
            ConfigError: the fleet has a model that is called `name`.
            UnknownModel: the fleet has no such model.
            FleetClosed: the fleet is not open.
        """
        check_strings(ConfigError, name=name, **({} if model is None else {"model": model}))
        self._lifetime.check_open()
        state, alias = self._state, ModelId(name)
        if alias in state.models or alias in self._adding:
            raise ConfigError(f"There is a model {name!r}; an alias needs a name of its own.")
        target = alias if model is None else ModelId(model)
        if model is not None:
            target = state.card(state.aliases.get(target, target)).id
        state.add_alias(alias, target)

    async def remove(self, model: str, *, deadline_s: float | None = None) -> None:
        """Let requests ask for a model no more, and unload it wherever it is once its requests have ended.

        Its requests under way go on to their end, also those that wait or whose prompts are being read; after
        `deadline_s` seconds those left end by `UnknownModel`. Its adapters go with it. Its weights stay in
        the store. A cancellation leaves the model registered.

        Raises:
            UnknownModel: the fleet has no such model.
            ConfigError: another model was rolled to it, and requests for that one would have none; or a roll
                from it or to it is under way.
            SwapFailed: an instance could not unload it; the model stays registered.
            FleetClosed: the fleet is not open, or closed meanwhile.
        """
        check_strings(ConfigError, model=model)
        check_seconds(ConfigError, deadline_s=deadline_s)
        await self._lifetime.run(self._remove(model, deadline_s), f"the removal of model {model!r}")

    async def _remove(self, model: str, deadline_s: float | None) -> None:
        state, name = self._state, ModelId(model)
        card = state.card(name)
        if state.is_rolling(name):
            raise ConfigError(f"A roll of model {name!r} is under way; remove it when that has ended.")
        if old := [old for old, new in state.aliases.items() if new == name and old in state.models]:
            raise ConfigError(f"Model {old[0]!r} was rolled to {name!r}, which serves its requests; keep it.")
        registered = state.close_model(name)
        try:
            with anyio.move_on_after(math.inf if deadline_s is None else deadline_s):
                await self._requests_ended(name)
            self._end_requests(name)
            await self._requests_ended(name)
            await self._unload_everywhere(name)
        except BaseException:
            state.add_model(registered, card)
            raise
        self._adapters.forget(name)
        self._texts.forget(name)
        self._told.discard(name)
        for instance in state.instances.values():
            instance.refused.pop(name, None)
        state.remove_model(name)
        state.events.note("model_removed", model=name)

    def _consider(self, *models: ModelCard) -> None:
        """Have every engine asked whether it could serve some models."""
        for instance in self._state.instances.values():
            if instance.consider(*models):
                self._state.index.state_changed(instance.id)

    async def _read(self, model: Model) -> ModelCard:
        store, name = self._state.store, ModelId(model.id)
        if model.source is not None and isinstance(store, SupportsImport):
            await store.import_model(model)
        card = ModelCard.of(model, await store.manifest(name))
        tokenizer = await store.tokenizer(name) if isinstance(store, SupportsTokenizer) else None
        settings = await store.text_settings(name) if isinstance(store, SupportsTextSettings) else None
        self._texts.use(name, tokenizer, settings)
        return card

    # ------------------------------------------------------------------ removal

    def _under_way(self, model: ModelId) -> list[EnteringRequest | ActiveRequest]:
        entering = [request for request in self._state.entering if request.model == model]
        begun = [active for active in self._state.requests.values() if active.request.model == model]
        return [*entering, *begun]

    async def _requests_ended(self, model: ModelId) -> None:
        while self._under_way(model):
            await self._state.changed(self._state.version)

    def _end_requests(self, model: ModelId) -> None:
        for request in self._under_way(model):
            request.abort(UnknownModel(f"Model {model!r} was removed from the fleet; ask for another."))

    async def _unload_everywhere(self, model: ModelId) -> None:
        while view := self._holder(model):
            found = self._state.instances[view.id]
            if found.swapping:
                await self._state.changed(self._state.version)
            elif view.model == model:
                self._state.claim(found, None)
                await self._swaps.run(found, None, deadline_s=0.0, reason=f"{model} is removed")
            elif isinstance(found.engine, SupportsPreload):
                await found.engine.drop_preload()

    def _holder(self, model: ModelId) -> InstanceView | None:
        """Return an instance that has a model, is to have it, or has it preloaded."""
        self._state.refresh()
        views = self._state.index.instances()
        return next((view for view in views if model in (view.model, view.preloaded, view.target)), None)

    # ------------------------------------------------------------------ requests

    def check_servable(self, request: Request) -> None:
        """Refuse at once what could never be served.

        Raises:
            InvalidRequest: it names token ids that the model does not have, or asks for too many
                log-probabilities.
            PromptTooLong: no token can follow the prompt within the model's context, or the request could
                outgrow the KV blocks of every engine.
            ModelTooLarge: the weights exceed every engine's memory, where that is known.
            UnsupportedModel: every engine says that it will never serve the model.
        """
        card = self._state.card(request.model, closed=True)
        request.check_prompt_logprobs()
        if card.vocabulary is not None:
            request.check_vocabulary(card.vocabulary)
        if request.num_tokens >= card.max_context_tokens:
            raise PromptTooLong(
                f"The prompt has {request.num_tokens} tokens and model {card.id!r} a context of "
                f"{card.max_context_tokens}; shorten it so that at least one token can follow."
            )
        most = min(len(request.prompt) + request.sampling.max_tokens, card.max_context_tokens) - 1
        if self._first_can_serve(card, most):
            return
        if refused := refusal(self._state.instances.values(), card.id):
            raise UnsupportedModel(str(refused))
        if (fitting := self.fitting(card, most)) < most:
            raise PromptTooLong(
                f"The prompt of {request.num_tokens} tokens and an answer of up to "
                f"{request.remaining_tokens} take the KV blocks of {most} tokens, and no engine has those of "
                f"more than {fitting}; shorten the prompt, lower max_tokens or give engines more of them."
            )
        self._state.refresh()
        memory_bytes = [view.memory_bytes for view in self._state.index.seen()]
        if memory_bytes and all(0 < memory < card.weight_bytes for memory in memory_bytes):
            raise ModelTooLarge(
                f"Model {card.id!r} has {card.weight_bytes:,} bytes of weights and the largest engine "
                f"{max(memory_bytes):,} bytes of memory; add a larger engine."
            )

    def _first_can_serve(self, card: ModelCard, num_tokens: int) -> bool:
        """Whether one engine, asked before the thousands of others, could serve a request of a model."""
        view = next(iter(self._state.index.seen()), None)
        if view is None or card.id in (instance := self._state.instances[view.id]).refused:
            return False
        limit = instance.most_kv_tokens(card)
        return (limit is None or limit >= num_tokens) and not 0 < view.memory_bytes < card.weight_bytes

    def fitting(self, card: ModelCard, num_tokens: int) -> int:
        """Return how many of a request's tokens the engine with the most KV blocks could hold."""
        most = 0 if self._state.instances else num_tokens
        for instance in self._state.instances.values():
            if card.id in instance.refused:
                continue
            limit = instance.most_kv_tokens(card)
            if limit is None or limit >= num_tokens:
                return num_tokens
            most = max(most, limit)
        return most

    def __repr__(self) -> str:
        return f"<Models [{', '.join(self._state.registered) or 'none'}]>"
