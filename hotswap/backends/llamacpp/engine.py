"""`LlamaCppEngine`: an instance that serves through llama.cpp's server, in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from hotswap.backends.external import ExternalEngine
from hotswap.backends.layouts import require_gguf
from hotswap.backends.llamacpp.files import check_gguf, lent_files
from hotswap.backends.llamacpp.params import Steps, unsupported
from hotswap.backends.llamacpp.server import Server
from hotswap.backends.llamacpp.settings import KV_BLOCK_TOKENS, Settings
from hotswap.backends.llamacpp.streams import Stream, Streams
from hotswap.backends.notifier import Observed
from hotswap.backends.servable import check_servable, most_tokens
from hotswap.errors import HotswapError, RequestEvicted, UnknownAdapter
from hotswap.model import ModelCard
from hotswap.request import Request
from hotswap.store import WeightStore
from hotswap.stream import TokenStream
from hotswap.view import EngineStatus, InstanceState

__all__ = ["LlamaCppEngine"]

_NO_GRAMMAR = "llama.cpp would begin the grammar anew at each token; ask another kind of engine"


class LlamaCppEngine(ExternalEngine):
    """An instance that serves GGUF files through llama.cpp: quantized models, on a CPU or what else it knows.

    Each load starts llama.cpp's server in a process of its own, which `unload` ends: all its memory is free
    then, and a crash of llama.cpp loses this instance alone. The files come from the store by path. Tokens
    go in and out by their ids, one at a time.

    On a CPU with `invariant`, the default, what is computed of a token depends on the tokens before it alone,
    bit for bit: a request that moves between such engines has the tokens of an undisturbed run, at any
    temperature, and so has one beside any others. `docs/llamacpp.md` says what that costs.

    Args:
        id: The instance's name.
        kv_tokens: Tokens that the KV cache holds for all requests together, rounded up. With `invariant` each
            request has an equal share; without, as many as it may grow to.
        max_requests: Most requests at once.
        token_budget: Most tokens of a step, which a cancelled request may take to stop; 64 if `None`, and 512
            without `invariant`.
        invariant: Whether each token is computed by itself. Without, requests are computed together, and
            prompts more than twice as fast.
        prefix_reuse: Whether requests that begin alike share what a slot has computed.
        threads: CPU threads; one for each CPU of this process if `None`.
        memory_bytes: What weights may take; the machine's memory if `None`.
        arguments: More of llama.cpp's parameters (`xllamacpp.CommonParams`), by name, as
            `{"n_gpu_layers": 99, "model.name": "x", "cache_type_k": "GGML_TYPE_Q8_0"}`.

    Raises:
        ConfigError: an argument is out of range, or the engine's own to decide.
    """

    _server = Observed[Server | None](lambda engine: engine._notifier.state_changed())

    def __init__(
        self,
        id: str,
        *,
        kv_tokens: int = 16384,
        max_requests: int = 4,
        token_budget: int | None = None,
        invariant: bool = True,
        prefix_reuse: bool = True,
        threads: int | None = None,
        memory_bytes: int | str | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(id)
        self._settings = Settings(
            kv_tokens=kv_tokens,
            max_requests=max_requests,
            token_budget=token_budget,
            invariant=invariant,
            prefix_reuse=prefix_reuse,
            threads=threads,
            memory_bytes=memory_bytes,
            arguments=arguments or {},
        )
        self._streams = Streams(self._notifier, self._settings)
        self._server = None
        self._card: ModelCard | None = None
        self._lent = AsyncExitStack()

    # ------------------------------------------------------------------ weights

    def most_kv_tokens(self, model: ModelCard) -> int:
        return self._settings.request_blocks * KV_BLOCK_TOKENS

    def check_model(self, model: ModelCard) -> None:
        require_gguf(self.id, model.id, model)

    # ------------------------------------------------------------------ requests

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        stream = self._admit(request)
        try:
            yield stream.tokens
        finally:
            self._streams.leave(stream)

    # ------------------------------------------------------------------ view

    def status(self) -> EngineStatus:
        server = None if self._life.is_lost else self._server
        running = self._streams.num_running
        return EngineStatus(
            id=self.id,
            state=self._life.state,
            model=self._card.id if server and self._card else None,
            num_running=running,
            num_waiting=len(self._streams) - running,
            num_prefill_tokens=self._streams.num_prefill_tokens,
            max_requests=self._settings.max_requests,
            num_kv_blocks=self._settings.num_blocks if server else 0,
            num_free_kv_blocks=self._streams.num_free_blocks if server else 0,
            num_next_kv_blocks=self._streams.num_next_blocks,
            kv_block_tokens=KV_BLOCK_TOKENS,
            request_kv_blocks=self._settings.request_blocks if server else 0,
            memory_bytes=self._settings.total_bytes,
            weight_bytes=self._card.weight_bytes if server and self._card else 0,
            lost_because=self._life.lost_because,
        )

    @property
    def server_pid(self) -> int | None:
        """The process of llama.cpp's server; `None` while there is none."""
        return None if self._server is None else self._server.pid

    # ------------------------------------------------------------------ loading

    async def _start(self, model: ModelCard, store: WeightStore) -> tuple[Server, AsyncExitStack]:
        """Start a server, and return it with what is lent to it."""
        manifest = await store.manifest(model.id)
        check_gguf(self.id, manifest, self._settings.total_bytes)
        async with AsyncExitStack() as lent:
            files = await lent.enter_async_context(lent_files(store, manifest))
            server = await Server.start(self._settings, files)
            return server, lent.pop_all()

    def _serve(self, model: ModelCard, processes: tuple[Server, AsyncExitStack]) -> None:
        server, lent = processes
        self._streams.serve(server)
        self._card, self._lent, self._server = model, lent, server
        self._running.start_soon(self._watch, server, name=f"server of {self.id}")

    async def _watch(self, server: Server) -> None:
        ending = await server.wait()
        if self._server is server:
            self._lose(ending)

    async def _release(self) -> None:
        """End the server. Cannot be interrupted."""
        server, lent = self._server, self._lent
        self._server = self._card = None
        self._lent = AsyncExitStack()
        if server is not None:
            await server.stop()
        await self._streams.wait_until_gone()
        await lent.aclose()

    def _kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    # ------------------------------------------------------------------ streams

    async def _wait_until_drained(self, deadline_s: float) -> None:
        await self._streams.wait_until_drained(deadline_s)

    def _close_streams(self, error: Callable[[], HotswapError]) -> int:
        return self._streams.close_all(error)

    def _admit(self, request: Request) -> Stream:
        self._life.refuse_if_lost()
        card, server = self._card, self._server
        if (
            card is None
            or server is None
            or self._life.state is not InstanceState.SERVING
            or card.id != request.model
        ):
            raise RequestEvicted(
                f"Engine {self.id!r} is {self._life.state} with model {card.id if card else None!r} and "
                f"admits no request for {request.model!r}; ask another."
            )
        if request.adapter is not None:
            raise UnknownAdapter(
                f"Engine {self.id!r} holds no adapter {request.adapter!r}, nor could it; serve it by a "
                "TorchEngine or a VllmEngine."
            )
        context = min(server.context, card.max_context_tokens)
        check_servable(
            request,
            card.id,
            context=context,
            vocabulary=server.vocabulary,
            kv_tokens=self._settings.request_blocks * KV_BLOCK_TOKENS,
            no_grammar=_NO_GRAMMAR,
            unsupported=unsupported(request.sampling),
        )
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= server.end_tokens.union(card.eos_token_ids)
        known = frozenset(token for token in ends if token < server.vocabulary)
        most, reuses = most_tokens(request, context), self._settings.prefix_reuse
        steps = Steps(request, known, server.vocabulary, most, reuses_prefix=reuses)
        stream = Stream(request=request, steps=steps, ends=known, most_tokens=most)
        self._streams.open(self._running, stream)
        return stream
