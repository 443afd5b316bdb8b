"""Has numba compile kernels, and keeps what it made on disk, for other processes and later ones.

numba's own cache tells functions apart by what they close over, which is new in every process where that is
other functions, and does not see when a module that a kernel imports has changed. So it is told here what a
kernel's machine code depends on: all sources of kernels, the versions and the processor. Each kernel of each
kind has files of its own, since numba numbers what shares an index in a way that two processes can confuse.

Machine code from disk is linked by its names, and two processes may give one name to functions that differ in
what they close over alone. So these are told apart by `part` as well.

The files lie where numba keeps what a user's functions were compiled to: in `NUMBA_CACHE_DIR`, or in `numba`
among the user's caches. Whatever is wrong with them, a kernel is compiled again.
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

from hotswap.kernels.lanes import address, claim

__all__ = ["compiled", "compiled_for_c", "part"]

log = logging.getLogger("hotswap")

_FOLDER = Path(__file__).parent


def part(kind: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that kernels call, and that closes over what its arguments' types do not tell.

    Args:
        kind: What it closes over, in a word: another one for each.
        options: As `numba.njit` takes them.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        _name(function, kind)
        return numba.njit(**options)(function)

    return decorate


def compiled(function: Callable[..., Any], signature: Any, name: str, **options: Any) -> Callable[..., Any]:
    """Return a function of a signature, compiled or found on disk.

    Args:
        function: What numba is to compile, without the interpreter.
        signature: Its only signature.
        name: What it is; another name for each function, and for all that it closes over.
        options: As `numba.njit` takes them.
    """
    _name(function, name)
    made: Any = numba.njit(**options)(function)
    made._cache = _cache_of(function, name)
    made.compile(signature)
    made.disable_compile()
    return made


def compiled_for_c(function: Callable[[int], None], name: str, **options: Any) -> Any:
    """Return a kernel for `run_together`, compiled or found on disk.

    C gets no exceptions: numba prints them and returns as if nothing had been. So a kernel counts itself
    before and after, and one that ended in the middle, for want of memory, is noticed.

    Args:
        function: Of the address of what is asked, for numba to compile without the interpreter.
        name: What it is; another name for each function, and for all that it closes over.
        options: As `numba.njit` takes them.
    """
    inner, integers = part(name, **options)(function), address(types.int64)

    def counted(at):
        claim(integers(at), 1)
        inner(at + 8)
        claim(integers(at), -1)

    _name(counted, name)
    signature = sigutils.normalize_signature(types.void(types.int64))
    made: Any = CFunc(counted, signature, locals={}, options=options)
    made._cache = _cache_of(function, name)
    made.compile()
    return made


def _name(function: Callable[..., Any], kind: str) -> None:
    function.__qualname__ += f"[{kind}]"


class _Results(caching.CompileResultCacheImpl):
    # Not beside the sources, where they would be taken for a part of the package.
    _locator_classes = (caching.UserProvidedCacheLocator, caching.UserWideCacheLocator)


class _Cache(caching.FunctionCache):
    """The cache of one function of one signature, whose files nothing else has."""

    _impl_class = _Results

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function)
        self._kernel = name
        told = sha256(f"{name} {_state()}".encode()).hexdigest()
        self._cache_file = caching.IndexDataCacheFile(
            cache_path=self.cache_path, filename_base=f"hotswap-{name}-{told[:16]}", source_stamp=told
        )

    def _index_key(self, sig: Any, codegen: Any) -> str:
        return "the only one"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as exc:  # a file that was cut short fails in as many ways as it has bytes
            log.info("%s is compiled again: what is kept of it cannot be read (%r).", self._kernel, exc)
        with suppress(OSError):
            self.flush()  # else nothing could be saved
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as exc:
            log.info("%s is compiled in every process: it cannot be kept (%r).", self._kernel, exc)


def _cache_of(function: Callable[..., Any], name: str) -> Any:
    try:
        return _Cache(function, name)
    except Exception as exc:  # such as no folder that can be written to
        log.info("The kernel %r is compiled in every process: it cannot be kept (%r).", name, exc)
        return caching.NullCache()


@cache
def _state() -> str:
    """All that machine code depends on, beside the function itself."""
    sources = sha256()
    for path in sorted(_FOLDER.rglob("*.py")):
        sources.update(path.read_bytes())
    target: Any = registry.cpu_target
    processor = target.target_context.codegen().magic_tuple()
    return repr((sources.hexdigest(), sys.version, numba.__version__, llvmlite.__version__, processor))
