"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from hotswap import Chat
from hotswap.door.body import checked, of_body, read_body
from hotswap.door.errors import Refusal
from hotswap.door.generation import Door
from hotswap.door.keys import use_of
from hotswap.door.protocol import Detokenization, Tokenization
from hotswap.door.served import resolve
from hotswap.door.wire import to_json

__all__ = ["TextEndpoints"]


class TextEndpoints:
    """Texts to token ids, and back; a key spends as many tokens as there are, as for a prompt."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def tokenize(self, request: Request) -> Response:
        """Encode a text, or a chat as the model's template writes it."""
        with use_of(request.scope).request():
            return await self._tokenized(request)

    async def detokenize(self, request: Request) -> Response:
        """Decode token ids, special ones included unless they are to be skipped."""
        with use_of(request.scope).request():
            return await self._detokenized(request)

    async def _tokenized(self, request: Request) -> Response:
        body = await read_body(request.scope, request.receive, self._door.limits)
        asked = await checked(Tokenization, body)
        models = self._door.fleet.models
        name = resolve(self._door.fleet, asked.model, asked.adapter)
        use_of(request.scope).check_model(name.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise Refusal(
                400, "Give prompt or messages, and not both.", "missing_required_parameter", param="prompt"
            )
        prompt: str | Chat | None = asked.prompt
        if prompt is None:
            prompt = await of_body(body, partial(_chat, asked))
        tokens = await models.encode(
            name.model, prompt, adapter=name.adapter, add_special_tokens=asked.add_special_tokens
        )
        use_of(request.scope).spend(len(tokens))
        most = models.card(name.model).max_context_tokens
        answer = {"count": len(tokens), "max_model_len": most, "tokens": tokens}
        return Response(to_json(answer), media_type="application/json")

    async def _detokenized(self, request: Request) -> Response:
        body = await read_body(request.scope, request.receive, self._door.limits)
        asked = await checked(Detokenization, body)
        name = resolve(self._door.fleet, asked.model, asked.adapter)
        use_of(request.scope).check_model(name.model)
        text = await self._door.fleet.models.decode(
            name.model,
            asked.tokens,
            adapter=name.adapter,
            skip_special_tokens=asked.skip_special_tokens,
        )
        use_of(request.scope).spend(len(asked.tokens))
        return Response(to_json({"prompt": text}), media_type="application/json")


def _chat(asked: Tokenization) -> Chat:
    return Chat(
        asked.messages or (),
        add_generation_prompt=asked.add_generation_prompt,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
