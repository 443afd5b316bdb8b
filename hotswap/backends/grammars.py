"""Grammars of requests in llguidance's form, their limits, and its errors as hotswap's.

Tested with llguidance 1.9.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from hotswap.errors import BackendMissing, InstanceError, InvalidRequest

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
except ModuleNotFoundError as exc:
    raise BackendMissing(
        f"JSON schemas, regular expressions and grammars need {exc.name!r}, which is not installed: "
        "pip install 'hotswap[torch]'."
    ) from exc

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = [
    "LEXER",
    "MAX_STATES",
    "LLMatcher",
    "LLTokenizer",
    "first_line",
    "limits",
    "on_deep_stack",
    "refusal",
    "to_text",
    "wrong",
]

T = TypeVar("T")

# A state of a lexer takes one or two kB.
MAX_STATES = 50_000
_MAX_MESSAGE = 300
# A step waits for its masks. These let one take some tens of milliseconds at most; compiling, which no step
# waits for, may take some tenths of a second. Text that is forced is followed to its end within one mask.
_COMPILE_FUEL, _MASK_FUEL, _MASK_ITEMS, _MAX_SYMBOLS = 200_000, 30_000, 20_000, 20_000
# The library follows references by recursion: 2,000 of them overflow an ordinary thread's stack, which ends
# the process. The longest chain that a grammar has room for fits this. Memory is taken as it is used.
_STACK_BYTES = 256 << 20
_starts = threading.Lock()
# A small model may write blanks for ever where any number may stand: here a line break and an indent at most.
_JSON: JsonCompileOptions = {"whitespace_pattern": r"\n?[ \t]{0,32}"}
# Parts of the library's messages.
LEXER, _EMPTY = "lexer error", "NoExtension"
_TOO_COMPLEX = (LEXER, "parser error", "Parser Error", "too big")


def to_text(field: str, value: str) -> str:
    """Return the value of a field of `Sampling` as a grammar of the library.

    Raises:
        ValueError: it cannot be one.
    """
    if field == "json_schema":
        return LLMatcher.grammar_from_json_schema(value, defaults=_JSON)
    return LLMatcher.grammar_from_regex(value) if field == "regex" else LLMatcher.grammar_from_lark(value)


def limits(max_states: int = MAX_STATES) -> LLParserLimits:
    """Return the limits of time and memory for a grammar."""
    return LLParserLimits(
        max_lexer_states=max_states,
        initial_lexer_fuel=_COMPILE_FUEL,
        step_lexer_fuel=_MASK_FUEL,
        step_max_items=_MASK_ITEMS,
        max_grammar_size=_MAX_SYMBOLS,
        verbose_errors=False,
    )


def on_deep_stack(call: Callable[[], T]) -> T:
    """Call what compiles a grammar in a thread whose stack is deep enough. Blocking.

    Raises:
        InstanceError: the process cannot start one: it may have no more threads or address space.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as exc:
            result.set_exception(exc)

    with _starts:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="hotswap grammar", daemon=True).start()
        except (RuntimeError, MemoryError) as exc:
            raise InstanceError(
                f"A grammar is compiled on a stack of {_STACK_BYTES >> 20} MiB, for which no thread can be "
                "started; raise the process's limits of address space and threads (ulimit -v, ulimit -u), or "
                "its container's."
            ) from exc
        finally:
            threading.stack_size(before)
    return result.result()


def wrong(field: str, value: str) -> InvalidRequest | None:
    """Return why no model can be held to a grammar, as far as its text tells: some milliseconds at most.

    Raises:
        InstanceError: the process has no thread to compile it in.
    """
    try:
        text = to_text(field, value)
        error = on_deep_stack(lambda: LLMatcher.validate_grammar(text, limits=limits()))
    except ValueError as exc:
        error = str(exc)
    return refusal(field, error) if error else None


def refusal(field: str, error: str) -> InvalidRequest:
    """Return the error of a request for an error of the library."""
    if _EMPTY in error:
        return InvalidRequest(f"{field} matches no text; give one that some text matches.")
    if any(text in error for text in _TOO_COMPLEX):
        return InvalidRequest(f"{field} is too complex; give a simpler one: {first_line(error)}.")
    return InvalidRequest(f"{field} cannot be used: {first_line(error)}.")


def first_line(message: str) -> str:
    """Return the message of the library on one line, without the state of the parser."""
    line = " ".join(message.partition("\n<")[0].split()).rstrip(".")
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."
