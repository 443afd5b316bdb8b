"""Compiles the grammars of requests in threads, for one loaded model. Works without llguidance until then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import CapacityLimiter, Lock, to_thread

from hotswap.backends.tokenizer import HfTokenizer
from hotswap.backends.torch.loading import LoadedModel
from hotswap.backends.torch.masks import Constraint
from hotswap.errors import BackendMissing, InvalidRequest
from hotswap.request import Request
from hotswap.store import SupportsTokenizer, WeightStore

if TYPE_CHECKING:
    from hotswap.backends.torch.grammar import GrammarCompiler

__all__ = ["Constraints"]


class Constraints:
    """Compiles the grammars of requests for one loaded model; used on the event loop.

    The tokenizer is read from the store and prepared with the first grammar: a swap does not wait for it.

    Args:
        model: The model.
        store: The store that it came from.
        threads: Limits how many grammars are compiled at once.
    """

    def __init__(self, model: LoadedModel, store: WeightStore, threads: CapacityLimiter) -> None:
        self._model, self._store, self._threads = model, store, threads
        self._compiler: GrammarCompiler | None = None
        self._lock = Lock()

    async def compile(self, request: Request) -> Constraint:
        """Return the grammar of a request after its tokens so far.

        A cancelled call returns at once; the thread ends with the grammar that it compiles.

        Raises:
            InvalidRequest: the grammar cannot be used, or none can with this model.
            BackendMissing: llguidance is not installed.
            StoreError: the tokenizer cannot be read.
        """
        async with self._lock:
            if self._compiler is None:
                self._compiler = await self._make_compiler(request)
        return await to_thread.run_sync(
            self._compiler.compile,
            request.sampling,
            request.generated,
            abandon_on_cancel=True,
            limiter=self._threads,
        )

    async def _make_compiler(self, request: Request) -> GrammarCompiler:
        model, store = self._model, self._store
        tokenizer = await store.tokenizer(model.card.id) if isinstance(store, SupportsTokenizer) else None
        if not isinstance(tokenizer, HfTokenizer):
            raise InvalidRequest(
                f"Request {request.id!r} is to be held to a grammar, but its store has no tokenizer of "
                f"{model.card.id!r}; import the model with its tokenizer.json."
            )
        return await to_thread.run_sync(_make_compiler, tokenizer, model, limiter=self._threads)


def _make_compiler(tokenizer: HfTokenizer, model: LoadedModel) -> GrammarCompiler:
    try:
        from hotswap.backends.torch.grammar import GrammarCompiler
    except ModuleNotFoundError as exc:
        raise BackendMissing(
            f"JSON schemas, regular expressions and grammars need {exc.name!r}, which is not installed: "
            "pip install 'hotswap[torch]'."
        ) from exc
    return GrammarCompiler(tokenizer, model.vocabulary, model.eos_token_ids)
