"""Compiles kernels with numba, and caches the machine code on disk, for other processes and later ones.

numba's own cache key has the closure of a function, which differs in every process if it contains other
functions, and it misses changes of imported modules. The key used here is: the source of all kernels, the
versions of Python, numba and llvmlite, and the processor. Each kernel has cache files of its own per dtype,
because numba numbers the entries of a shared index, and two processes can use one number for different code.

Cached machine code is linked by symbol name, and two processes may give the same name to functions that
differ only in their closure. `specialized` makes these names unique.

The files are in numba's cache folder: `NUMBA_CACHE_DIR`, or `numba` in the user's cache folder. A kernel
whose files cannot be read is compiled again.
"""

# mypy: ignore-errors
# pyright: basic, reportIncompatibleMethodOverride=false, reportCallIssue=false
from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core import caching, registry, sigutils
from numba.core.ccallback import CFunc

from hotswap.kernels.simd import fetch_add, pointer_to

__all__ = ["compiled", "compiled_for_c", "specialized"]

log = logging.getLogger("hotswap.kernels")

_FOLDER = Path(__file__).parent


def specialized(kind: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that kernels call, and whose closure differs from one specialization to another.

    Args:
        kind: Name of the specialization, such as the dtype; a unique one for each closure.
        options: Options of `numba.njit`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        _name(function, kind)
        return numba.njit(**options)(function)

    return decorate


def compiled(function: Callable[..., Any], signature: Any, name: str, **options: Any) -> Callable[..., Any]:
    """Return a function compiled for one signature, from the disk cache if possible.

    Args:
        function: The function, which numba compiles in nopython mode.
        signature: Its only signature.
        name: Cache name; unique for each function and closure.
        options: Options of `numba.njit`.
    """
    _name(function, name)
    made: Any = numba.njit(**options)(function)
    made._cache = _cache_of(function, name)
    made.compile(signature)
    made.disable_compile()
    return made


def compiled_for_c(function: Callable[[int], None], name: str, **options: Any) -> Any:
    """Return a C function for `run_threads`, from the disk cache if possible.

    An exception cannot cross into C: numba prints it and returns normally. So each call increments a counter
    at its start and decrements it at its end; a counter above zero shows that a call failed, out of memory.

    Args:
        function: Takes the address of its int64 arguments; numba compiles it in nopython mode.
        name: Cache name; unique for each function and closure.
        options: Options of `numba.cfunc`.
    """
    inner, integers = specialized(name, **options)(function), pointer_to(types.int64)

    def counted(at):
        fetch_add(integers(at), 1)
        inner(at + 8)
        fetch_add(integers(at), -1)

    _name(counted, name)
    signature = sigutils.normalize_signature(types.void(types.int64))
    made: Any = CFunc(counted, signature, locals={}, options=options)
    made._cache = _cache_of(function, name)
    made.compile()
    return made


def _name(function: Callable[..., Any], kind: str) -> None:
    function.__qualname__ += f"[{kind}]"


class _Results(caching.CompileResultCacheImpl):
    # Not the folder of the sources, where cache files would look like a part of the package.
    _locator_classes = (caching.UserProvidedCacheLocator, caching.UserWideCacheLocator)


class _Cache(caching.FunctionCache):
    """The disk cache of one function with one signature, in files of its own."""

    _impl_class = _Results

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function)
        self._kernel = name
        digest = sha256(f"{name} {_state()}".encode()).hexdigest()
        self._cache_file = caching.IndexDataCacheFile(
            cache_path=self.cache_path, filename_base=f"hotswap-{name}-{digest[:16]}", source_stamp=digest
        )

    def _index_key(self, sig: Any, codegen: Any) -> str:
        return "only"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        try:
            found = super().load_overload(sig, target_context)
        except Exception as exc:  # a truncated file raises many kinds of errors
            log.info(
                "The kernel %r is compiled again: its cache file cannot be read (%r).", self._kernel, exc
            )
            with suppress(OSError):
                self.flush()  # otherwise saving would fail too
        if found is None:
            _tell_of_compilation()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as exc:
            log.info(
                "The kernel %r is compiled in every process: its cache file cannot be written (%r).",
                self._kernel,
                exc,
            )


def _cache_of(function: Callable[..., Any], name: str) -> Any:
    try:
        return _Cache(function, name)
    except Exception as exc:  # for example, no writable folder
        log.info(
            "The kernel %r is compiled in every process: its cache file cannot be written (%r).", name, exc
        )
        _tell_of_compilation()
        return caching.NullCache()


@cache
def _tell_of_compilation() -> None:
    """Log, once in a process, why the first load takes longer."""
    log.info("Kernels are compiled for this processor, which may take half a minute; later loads find them.")


@cache
def _state() -> str:
    """Everything that the machine code depends on, except the function itself."""
    sources = sha256()
    for path in sorted(_FOLDER.rglob("*.py")):
        sources.update(path.read_bytes())
    target: Any = registry.cpu_target
    processor = target.target_context.codegen().magic_tuple()
    return repr((sources.hexdigest(), sys.version, numba.__version__, llvmlite.__version__, processor))
