"""Compiles the grammars of requests in threads. Works without llguidance until the first one."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from anyio import CapacityLimiter, Lock

from hotswap.backends.tokenizer import HfTokenizer
from hotswap.backends.torch.loading import LoadedModel
from hotswap.backends.torch.masks import Constraint
from hotswap.errors import InvalidRequest
from hotswap.request import Request
from hotswap.store import SupportsTokenizer, WeightStore
from hotswap.worker_threads import run_in_thread

if TYPE_CHECKING:
    from hotswap.backends.torch.grammar import GrammarCompiler

__all__ = ["Compilers", "Constraints"]

# How many grammars an engine compiles at once, and how many tokenizers it keeps prepared.
_NUM_THREADS, _MAX_KEPT = 2, 4


class Compilers:
    """The compilers of the tokenizers that an engine used last, kept across loads; used on the event loop.

    To prepare a tokenizer of 128,000 tokens takes about a second, in which no other thread of the process
    runs Python. So a model that was swapped out and in again does not prepare it anew.

    Attributes:
        threads: Limits how many grammars are compiled at once.
    """

    def __init__(self) -> None:
        self.threads = CapacityLimiter(_NUM_THREADS)
        self._kept: OrderedDict[tuple[HfTokenizer, int, frozenset[int]], GrammarCompiler] = OrderedDict()
        self._lock = Lock()

    async def of(self, tokenizer: HfTokenizer, model: LoadedModel) -> GrammarCompiler:
        """Return the compiler for the tokenizer of a model.

        Raises:
            InvalidRequest: grammars cannot be used with the tokenizer.
            BackendMissing: llguidance is not installed.
        """
        key = tokenizer, model.vocabulary, model.eos_token_ids
        async with self._lock:
            if key not in self._kept:
                self._kept[key] = await run_in_thread(_make_compiler, tokenizer, model, limiter=self.threads)
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]


class Constraints:
    """Compiles the grammars of requests for one loaded model; used on the event loop.

    The tokenizer is read from the store and prepared with the first grammar: a swap does not wait for it.

    Args:
        model: The model.
        store: The store that it came from.
        compilers: Those of the engine.
    """

    def __init__(self, model: LoadedModel, store: WeightStore, compilers: Compilers) -> None:
        self._model, self._store, self._compilers = model, store, compilers
        self._compiler: GrammarCompiler | None = None
        self._lock = Lock()

    async def compile(self, request: Request) -> Constraint:
        """Return the grammar of a request after its tokens so far.

        A cancelled call returns at once; the thread ends with the grammar that it compiles.

        Raises:
            InvalidRequest: the grammar cannot be used, or none can with this model.
            BackendMissing: llguidance is not installed.
            InstanceError: the process has no thread to compile it in.
            StoreError: the tokenizer cannot be read.
        """
        async with self._lock:
            if self._compiler is None:
                self._compiler = await self._find_compiler(request)
        return await run_in_thread(
            self._compiler.compile,
            request.sampling,
            request.generated,
            abandon_on_cancel=True,
            limiter=self._compilers.threads,
        )

    async def _find_compiler(self, request: Request) -> GrammarCompiler:
        model, store = self._model, self._store
        tokenizer = await store.tokenizer(model.card.id) if isinstance(store, SupportsTokenizer) else None
        if not isinstance(tokenizer, HfTokenizer):
            raise InvalidRequest(
                f"Request {request.id!r} is to be held to a grammar, but its store has no tokenizer of "
                f"{model.card.id!r}; import the model with its tokenizer.json."
            )
        return await self._compilers.of(tokenizer, model)


def _make_compiler(tokenizer: HfTokenizer, model: LoadedModel) -> GrammarCompiler:
    from hotswap.backends.torch.grammar import GrammarCompiler

    return GrammarCompiler(tokenizer, model.vocabulary, model.eos_token_ids)
