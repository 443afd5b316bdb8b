"""Text on its way in and out of a fleet: prompts become token ids, tokens become text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from anyio import CapacityLimiter, to_thread

from hotswap.checks import to_token_ids
from hotswap.errors import InvalidRequest
from hotswap.request import ModelId, Request, TokenLogprob
from hotswap.sampling import Sampling
from hotswap.text import TextStream, Tokenizer

__all__ = ["Texts"]

# Worker threads of all texts of a fleet. They are of its own: callers may hold all of the default ones.
_NUM_ENCODERS = 4


class Texts:
    """The tokenizers of a fleet's models, and what is done with them."""

    def __init__(self) -> None:
        self._tokenizers: dict[ModelId, Tokenizer] = {}
        self._encoders = CapacityLimiter(_NUM_ENCODERS)

    def use(self, model: ModelId, tokenizer: Tokenizer) -> None:
        """Encode and decode for a model with a tokenizer."""
        self._tokenizers[model] = tokenizer

    def forget(self, model: ModelId) -> None:
        """Forget the tokenizer of a model."""
        self._tokenizers.pop(model, None)

    async def encode(
        self, model: ModelId, prompt: str | Sequence[int], sampling: Sampling, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """Return a prompt as token ids; texts are encoded in worker threads, while streams go on.

        Raises:
            InvalidRequest: it is text, and the model has no tokenizer, or it is neither text nor token ids.
        """
        if isinstance(prompt, str):
            tokens = await self._encode(model, "The prompt", prompt, add_special_tokens=add_special_tokens)
        else:
            tokens = to_token_ids("prompt", prompt)
        kept = sampling.truncate_prompt_tokens
        return tokens if kept is None else tokens[-kept:]

    async def resolve(self, model: ModelId, sampling: Sampling) -> Sampling:
        """Return sampling parameters with all that takes the model's tokenizer as token ids: `bad_words`.

        A word is forbidden as it is written at the beginning of a text, and after a space.

        Raises:
            InvalidRequest: the model has no tokenizer.
        """
        if not sampling.bad_words:
            return sampling
        words = list(sampling.bad_words_ids)
        for at, word in enumerate(sampling.bad_words):
            for text in dict.fromkeys((word, f" {word.lstrip()}")):
                ids = await self._encode(model, f"bad_words[{at}]", text, add_special_tokens=False)
                if ids and ids not in words:
                    words.append(ids)
        return replace(sampling, bad_words=(), bad_words_ids=tuple(words))

    def stream(self, request: Request) -> TextStream | None:
        """Return what turns the request's tokens into text, `None` without a tokenizer.

        Raises:
            InvalidRequest: it has stop strings, and the model has no tokenizer.
        """
        sampling = request.sampling
        tokenizer = self._tokenizers.get(request.model)
        if tokenizer is not None:
            return TextStream(
                tokenizer,
                prompt=request.prompt,
                stop=sampling.stop,
                min_tokens=sampling.min_tokens,
                include_stop=sampling.include_stop,
                skip_special_tokens=sampling.skip_special_tokens,
            )
        if sampling.stop:
            raise InvalidRequest(
                f"Model {request.model!r} has no tokenizer to match stop strings with; use stop_token_ids."
            )
        return None

    def with_text(self, model: ModelId, tokens: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Return tokens with how each reads by itself, special ones too; as they are without a tokenizer."""
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None or not tokens:
            return tokens
        return tuple(
            replace(token, text=tokenizer.decode((token.id,), skip_special_tokens=False)) for token in tokens
        )

    async def _encode(
        self, model: ModelId, name: str, text: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            raise InvalidRequest(f"{name} is text, but model {model!r} has no tokenizer; give token ids.")
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(
                f"{name} has a lone surrogate at character {exc.start}, which is no text; give valid Unicode."
            ) from exc
        encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return tuple(await to_thread.run_sync(encode, limiter=self._encoders))
