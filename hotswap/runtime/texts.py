"""Text on its way in and out of a fleet: prompts become token ids, tokens become text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anyio import Lock

from hotswap.chat import Chat, is_large
from hotswap.checks import check_no_messages, check_unicode, to_token_ids
from hotswap.engine import Engine, SupportsGrammars
from hotswap.errors import HotswapError, InvalidRequest, PromptTooLong, UnsupportedAdapter
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId, Request, ScoredPrompt, TokenLogprob
from hotswap.runtime.lifetime import Lifetime
from hotswap.runtime.text_threads import TextThreads
from hotswap.sampling import MAX_ENTRIES, Sampling
from hotswap.store import SupportsTextSettings, WeightStore
from hotswap.text import (
    ChatTemplate,
    SupportsLeastTokens,
    SupportsLiteralText,
    TextSettings,
    TextStream,
    Tokenizer,
)

__all__ = ["ModelText", "Texts"]

# To encode a million characters takes 0.3 s of a processor.
_MOST_CHARACTERS, _MOST_CHARACTERS_PER_TOKEN, _MOST_CHARACTERS_EVER = 1 << 22, 64, 1 << 26
# So many tokens get their texts, each by itself, in a few milliseconds.
_MOST_TEXTS_ON_LOOP = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """How texts of a model, or of one of its adapters, are read and written.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer, if it has one.
        chat_template: How its conversations are written, if that is said.
        generation_config: Its own sampling parameters, by transformers' names.
        threads: Where long work is done, while streams go on.
    """

    model: ModelId
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    generation_config: Mapping[str, Any]
    threads: TextThreads

    async def encode(
        self,
        prompt: str | Sequence[int] | Chat,
        sampling: Sampling,
        *,
        add_special_tokens: bool | None = None,
        most_tokens: int,
    ) -> tuple[int, ...]:
        """Return a prompt as token ids; texts are written and encoded in worker threads.

        A text gets special tokens round it, and a chat does not, whose template writes them;
        `add_special_tokens` says otherwise. A text that has over `most_tokens` tokens, whatever they are, is
        not encoded, unless the prompt is to be truncated, and one of far more characters is not in any case.
        A cancelled call returns at once.

        Raises:
            PromptTooLong: it surely has more tokens than that, or over 64 characters for each and over four
                million.
            InvalidRequest: it is text and the model has no tokenizer, or a chat and it has no template or one
                that refuses it, or it is neither text, chat nor token ids.
        """
        kept = sampling.truncate_prompt_tokens
        most = most_tokens if kept is None else None
        if isinstance(prompt, Chat):
            _check_characters("The chat", prompt.num_characters, most_tokens)
            text, specials = await self._render(prompt), bool(add_special_tokens)
            _check_characters("The chat", len(text), most_tokens)
            tokens = await self._encode("The chat", text, add_special_tokens=specials, most_tokens=most)
        elif isinstance(prompt, str):
            _check_characters("The prompt", len(prompt), most_tokens)
            specials = add_special_tokens is not False
            tokens = await self._encode("The prompt", prompt, add_special_tokens=specials, most_tokens=most)
        else:
            check_no_messages(prompt)
            if kept is None:
                self._check_length(prompt, most_tokens)
            elif isinstance(prompt, list | tuple):
                prompt = prompt[-kept:]  # the others are not read
            tokens = to_token_ids("prompt", prompt)
        return tokens if kept is None else tokens[-kept:]

    def _check_length(self, prompt: Sequence[int], most_tokens: int) -> None:
        """Refuse token ids that are too many before each of them is read."""
        try:
            size = len(prompt)
        except Exception:  # of a value that is no list
            return
        if size > most_tokens:
            raise PromptTooLong(
                f"The prompt has {size} tokens and model {self.model!r} a context of {most_tokens + 1}; "
                "shorten it so that at least one token can follow."
            )

    async def resolve(self, sampling: Sampling) -> Sampling:
        """Return sampling parameters with all that takes the tokenizer as token ids: `bad_words`.

        A word is forbidden as it is written at the beginning of a text, and after a space.

        Raises:
            InvalidRequest: the model has no tokenizer, or the words are too many or too long as tokens.
        """
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest(
                f"Model {self.model!r} has no tokenizer to match stop strings with; use stop_token_ids."
            )
        if not sampling.bad_words:
            return sampling
        words = list(sampling.bad_words_ids)
        for at, word in enumerate(sampling.bad_words):
            for text in dict.fromkeys((word, f" {word.lstrip()}")):
                ids = await self._encode(f"bad_words[{at}]", text, add_special_tokens=False)
                if len(ids) > MAX_ENTRIES:
                    raise InvalidRequest(f"bad_words[{at}] has {len(ids):,} tokens, over {MAX_ENTRIES:,}.")
                if ids and ids not in words:
                    words.append(ids)
        if len(words) > MAX_ENTRIES:
            found = f"{len(words):,} lists of tokens, up to two for each word"
            raise InvalidRequest(f"bad_words and bad_words_ids are {found}; give at most {MAX_ENTRIES:,}.")
        return replace(sampling, bad_words=(), bad_words_ids=tuple(words))

    async def check_grammar(self, sampling: Sampling, engines: Collection[Engine]) -> None:
        """Refuse a grammar that none of a fleet's engines takes, as far as all of them can say.

        Raises:
            InvalidRequest: it is wrong for every model, or the model has no tokenizer.
            BackendMissing: what it takes is not installed.
            InstanceError: none of their processes can check it now.
        """
        field, grammar = sampling.grammar_field
        checking = [engine for engine in engines if isinstance(engine, SupportsGrammars)] if field else []
        if not checking or len(checking) < len(engines):
            return
        if self.tokenizer is None:
            raise InvalidRequest(
                f"Model {self.model!r} has no tokenizer, which {field} takes; convert it again from a "
                "checkpoint that has one."
            )

        def check() -> None:
            errors = list[HotswapError]()
            for engine in checking:
                try:
                    engine.check_grammar(field, grammar)
                except HotswapError as exc:
                    errors.append(exc)
            if len(errors) == len(checking):
                raise errors.pop()

        await self.threads.run(check, num_characters=len(grammar))

    async def decode(self, tokens: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids; many are decoded in a worker thread.

        Raises:
            InvalidRequest: the model has no tokenizer.
        """
        if (tokenizer := self.tokenizer) is None:
            raise InvalidRequest(f"Model {self.model!r} has no tokenizer to decode tokens with.")
        decode = partial(tokenizer.decode, tokens, skip_special_tokens=skip_special_tokens)
        return await self.threads.run(decode, num_characters=len(tokens))

    def stream(self, request: Request) -> TextStream | None:
        """Return what turns the request's tokens into text, `None` without a tokenizer."""
        if self.tokenizer is None:
            return None
        sampling = request.sampling
        return TextStream(
            self.tokenizer,
            prompt=request.prompt,
            stop=sampling.stop,
            min_tokens=sampling.min_tokens,
            include_stop=sampling.include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def with_text(self, tokens: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Return tokens with how each reads by itself, special ones too; as they are without a tokenizer."""
        if self.tokenizer is None or not tokens:
            return tokens
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        return tuple(replace(token, text=decode((token.id,))) for token in tokens)

    async def with_prompt_texts(self, told: ScoredPrompt | tuple[()]) -> ScoredPrompt | tuple[()]:
        """Return what is told of a prompt with texts as of `with_text`, each distinct token decoded once.

        Many are decoded in a worker thread; a cancelled call returns at once.

        Raises:
            FleetClosed: the fleet closed meanwhile.
        """
        if not told or (tokenizer := self.tokenizer) is None:
            return told

        def write() -> ScoredPrompt:
            texts = {id: tokenizer.decode((id,), skip_special_tokens=False) for id in told.top_ids()}
            return told.with_texts(texts)

        if told.num_top <= _MOST_TEXTS_ON_LOOP:
            return write()
        return await self.threads.run(write, num_characters=told.num_top)

    async def _render(self, chat: Chat) -> str:
        if (template := self.chat_template) is None:
            raise InvalidRequest(
                f"Model {self.model!r} has no chat template; give the prompt as text, or convert it again "
                "from a checkpoint that has one."
            )
        tokenizer = self.tokenizer

        def render() -> str:
            # The first call reads the vocabulary.
            if tokenizer is not None and isinstance(tokenizer, SupportsLiteralText):
                return tokenizer.guarding(template).render(chat)
            return template.render(chat)

        return await self.threads.run(render, num_characters=chat.num_characters)

    async def _encode(
        self, name: str, text: str, *, add_special_tokens: bool, most_tokens: int | None = None
    ) -> tuple[int, ...]:
        if (tokenizer := self.tokenizer) is None:
            raise InvalidRequest(
                f"{name} is text, but model {self.model!r} has no tokenizer; give token ids."
            )

        def encode() -> tuple[int, ...]:
            if most_tokens is not None:
                _check_length(name, text, tokenizer, most_tokens)
            check_unicode(name, text)
            return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))

        return await self.threads.run(encode, num_characters=len(text))


def _check_characters(name: str, num_characters: int, most_tokens: int) -> None:
    """Raise `PromptTooLong` for a text that would take many seconds to encode, whatever is kept of it."""
    most = min(max(_MOST_CHARACTERS, _MOST_CHARACTERS_PER_TOKEN * most_tokens), _MOST_CHARACTERS_EVER)
    if num_characters > most:
        raise PromptTooLong(
            f"{name} has {num_characters:,} characters, over the {most:,} that are read for a model of "
            f"{most_tokens:,} tokens; shorten it."
        )


def _check_length(name: str, text: str, tokenizer: Tokenizer, most_tokens: int) -> None:
    """Raise `PromptTooLong` if a text surely has over so many tokens."""
    if len(text) <= most_tokens or not isinstance(tokenizer, SupportsLeastTokens):
        return
    if (least := tokenizer.least_tokens(text)) > most_tokens:
        raise PromptTooLong(
            f"{name} has {len(text):,} characters, at least {least:,} tokens, and the model takes "
            f"{most_tokens:,}; shorten it, or give truncate_prompt_tokens."
        )


class Texts:
    """The texts of a fleet's models, and of those adapters that have some of their own.

    Args:
        store: Where the files of models are.
        lifetime: Of the fleet.
    """

    def __init__(self, store: WeightStore, lifetime: Lifetime) -> None:
        self._store = store
        self._threads = TextThreads(lifetime)
        self._models: dict[ModelId, ModelText] = {}
        # Of an adapter the version that was read last: requests keep what they began with.
        self._adapters: dict[tuple[str, str], tuple[AdapterId, ModelText | UnsupportedAdapter]] = {}
        self._reading = Lock()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Chat:
        """Return a conversation of these fields of `Chat`, checked and copied in a thread if it is large.

        Its errors are those of `Chat`. A cancelled call returns at once.

        Raises:
            FleetClosed: the fleet is not open, or closed meanwhile.
        """
        make = partial(Chat, messages, **fields)
        return await self._threads.run(make, num_characters=0) if is_large(messages, fields) else make()

    def use(self, model: ModelId, tokenizer: Tokenizer | None, settings: TextSettings | None = None) -> None:
        """Read and write texts of a model by these from now on."""
        settings = settings or TextSettings()
        self._models[model] = ModelText(
            model=model,
            tokenizer=tokenizer,
            chat_template=settings.chat_template,
            generation_config=settings.generation_config,
            threads=self._threads,
        )

    def forget(self, model: ModelId) -> None:
        """Forget the texts of a model and its adapters."""
        self._models.pop(model, None)
        for key in [key for key in self._adapters if key[0] == model]:
            del self._adapters[key]

    def forget_adapter(self, adapter: Adapter) -> None:
        """Forget the texts of an adapter."""
        self._adapters.pop((adapter.model, adapter.id), None)

    def of(self, model: ModelId) -> ModelText:
        """Return the text of a registered model."""
        return self._models[model]

    async def of_adapter(self, adapter: Adapter) -> ModelText:
        """Return the text of a version of an adapter, whose files are read for its first request.

        Raises:
            UnsupportedAdapter: it has a tokenizer that cannot be used with its model.
            StoreError: its files cannot be read.
        """
        base = self.of(ModelId(adapter.model))
        if not isinstance(self._store, SupportsTextSettings):
            return base
        found = self._read(adapter)
        if found is None:
            async with self._reading:
                found = self._read(adapter) or await self._load(self._store, adapter, base)
                self._adapters[adapter.model, adapter.id] = adapter.version, found
        if isinstance(found, UnsupportedAdapter):
            raise UnsupportedAdapter(*found.args)
        return found

    def _read(self, adapter: Adapter) -> ModelText | UnsupportedAdapter | None:
        version, found = self._adapters.get((adapter.model, adapter.id), (None, None))
        return found if version == adapter.version else None

    async def _load(
        self, store: SupportsTextSettings, adapter: Adapter, base: ModelText
    ) -> ModelText | UnsupportedAdapter:
        try:
            own = await store.adapter_settings(adapter)
        except UnsupportedAdapter as exc:
            return exc
        # Adapters that were trained alike have the same tokenizer, which is large: one is kept.
        held = [text.tokenizer for _, text in self._adapters.values() if isinstance(text, ModelText)]
        tokenizer = next((one for one in held if one == own.tokenizer), own.tokenizer)
        return replace(
            base,
            tokenizer=tokenizer or base.tokenizer,
            chat_template=own.chat_template or base.chat_template,
        )
