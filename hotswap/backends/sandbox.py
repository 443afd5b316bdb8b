# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# The values of a template have no types.
"""Jinja2's sandbox with a budget: chat templates of checkpoints run in it.

A template is a program that came with a checkpoint, and its input is what clients send. Jinja2's sandbox lets
it read plain values alone. Here it also has a budget: of processor time, which every turn of a loop and every
call looks at, and of characters, which an operation that makes a longer value of others is charged for before
it is carried out. So what a rendering takes is bounded whatever the input, but for one thing: a template that
builds two nested lists for no other purpose can have them compared for long.

Blocks, helpers and white space are those that transformers gives to chat templates. Filters for HTML whose
work cannot be bounded are left out. Tested with Jinja2 3.1.6.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Generator, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, cast

try:
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator, Frame
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context, LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
except ImportError as exc:
    from hotswap.errors import BackendMissing

    raise BackendMissing("Chats need the jinja2 library: pip install 'hotswap[torch]'.") from exc

__all__ = ["Budget", "Sandbox"]

_MOST_REPEATS = 1 << 16  # what a number may ask for: characters of padding, entries, digits
_MOST_BITS = 1 << 14
_MOST_INDENT = 16
_MOST_PATTERN = 1 << 16  # characters of what values are formatted into
_MOST_STRIPPED = 1 << 10
_NUMBER_CHARACTERS = 24
_LEFT_OUT = ("striptags", "urlize", "wordwrap", "xmlattr")
_COPIES = 32  # how often a character may be copied for the price of one
_TICKS = 16  # turns of loops between two looks at the time


class Budget:
    """What one rendering may take.

    Args:
        cpu_s: Seconds of processor time of its thread.
        characters: Characters of all texts that it makes, and entries of all lists.
    """

    def __init__(self, cpu_s: float, characters: int) -> None:
        self._end_s = time.thread_time() + cpu_s
        self._characters = characters
        self._num_ticks = 0

    def tick(self) -> None:
        """Check the time now and then."""
        self._num_ticks += 1
        if not self._num_ticks % _TICKS:
            self.check_time()

    def check_time(self) -> None:
        """Raise `SecurityError` if there is no time left."""
        if time.thread_time() > self._end_s:
            raise SecurityError("it took more processor time than a chat may")

    def spend(self, number: int) -> None:
        """Charge for so many characters or entries; raise `SecurityError` if they are not left."""
        self._characters -= number
        if self._characters < 0:
            raise SecurityError("it made more text than a chat may")

    def append(self, *lengths: int) -> None:
        """Charge for values put together, the longest at a discount.

        A text that grows bit by bit is copied each time: that is no more text, though time.
        """
        longest = max(lengths, default=0)
        self.spend(sum(lengths) - longest + longest // _COPIES)

    def write(self, *values: object) -> int:
        """Charge for values written as text; return how many characters that may be."""
        todo, total = list(values), 0
        while todo:
            value = todo.pop()
            if isinstance(value, Mapping):
                todo += [*value, *value.values()]
            elif isinstance(value, list | tuple | set | frozenset):
                todo += value
            size = len(value) if isinstance(value, str | bytes) else _NUMBER_CHARACTERS
            self.spend(size)
            total += size
        return total


class _Generator(CodeGenerator):
    """Compiles looks at the time, and `~`, to calls of the sandbox."""

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.writeline(f"environment.{node.node.name}()", node)
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates that render on a budget; threads may share it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # or expressions of constants would be computed when it compiles, on no budget
        )
        self._thread = threading.local()
        self.finalize = self._put_out
        self.globals |= {
            "dict": _Dict(),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.filters = {
            name: self._metered(name, made) for name, made in self.filters.items() if name not in _LEFT_OUT
        }
        self.concat = self._concat  # type: ignore[method-assign]  # no method in Jinja

    @contextmanager
    def spending(self, budget: Budget) -> Generator[None]:
        """Have this thread render on a budget."""
        self._thread.budget = budget
        try:
            yield
        finally:
            del self._thread.budget

    def meter(self, template: nodes.Template) -> nodes.Template:
        """Have the loops and macros of a parsed template look at the time."""
        for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            look = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
            cast("nodes.For", node).body.insert(0, nodes.ExprStmt(look, lineno=node.lineno))
        template.set_environment(self)
        return template

    def tick(self) -> None:
        """Look at the time; called in every turn of a loop, and by every macro."""
        self._budget.tick()

    def join(self, *values: object) -> str:
        """Write values one behind the other: the operator `~`."""
        texts = [value for value in values if isinstance(value, str)]
        self._budget.write(*(value for value in values if not isinstance(value, str)))
        self._budget.append(*map(len, texts))
        return "".join(map(str, values))

    @property
    def _budget(self) -> Budget:
        return cast("Budget", self._thread.budget)

    # ------------------------------------------------------------------ called by compiled templates

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._budget.tick()
        if isinstance(obj, BuiltinMethodType):
            args = tuple(map(_entries, args)) if obj.__name__ == "join" else args
            _charge_method(self._budget, obj, args)
        result = super().call(context, obj, *args, **kwargs)
        self._budget.spend(_length(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _OPERATORS[operator](self._budget, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_it = super().wrap_str_format(value)
        if format_it is None:
            return None
        pattern = cast("str", value.__self__)

        def charged(*args: Any, **kwargs: Any) -> str:
            if len(pattern) > _MOST_PATTERN or re.search(r"\d{5}|:[^{}]*\{", pattern):
                raise SecurityError("it formatted text with its own widths")
            size = self._budget.write(*args, *kwargs.values())
            self._budget.spend(len(pattern) + size * pattern.count("{"))
            return format_it(*args, **kwargs)

        return charged

    def _put_out(self, value: Any) -> Any:
        self._budget.write(value)
        return value

    def _concat(self, parts: Iterable[str]) -> str:
        pieces: list[str] = []
        for piece in parts:
            self._budget.spend(len(piece) + 1)
            pieces.append(piece)
        return "".join(pieces)

    def _metered(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that is charged for."""
        wants = getattr(made, "jinja_pass_arg", None)  # whether Jinja gives it the context, or another part
        charge = _FILTERS.get(name)

        def metered(*args: Any, **kwargs: Any) -> Any:
            self._budget.tick()
            if name == "join":
                args = tuple(map(_entries, args))
            if charge is not None:
                own = args if wants is None else args[1:]
                charge(self._budget, own[0], [*own[1:], *kwargs.values()])
            result = made(*args, **kwargs)
            self._budget.spend(_length(result))
            return result

        if wants is not None:
            metered.jinja_pass_arg = wants  # type: ignore[attr-defined]  # Jinja reads it of functions
        return metered


# ----------------------------------------------------------------------------------------- blocks and helpers


class _Generation(Extension):
    """`{% generation %}` blocks, by which trainers find the answers: what is in them is written as it is."""

    tags = {"generation"}  # noqa: RUF012 -- as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Dict:
    """What templates know as `dict`, without the class of Python."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """See `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's `namespace`, whose attributes do not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        attributes: dict[str, Any] = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it gave a namespace the attribute {name!r}")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# ----------------------------------------------------------------------------------- what operations may make


def _entries(value: Any) -> Any:
    """Return a list of what can be gone through once, and of what has entries that it does not hold."""
    lazy = isinstance(value, Iterator | range | KeysView | ValuesView | ItemsView)
    return list(value) if lazy and not isinstance(value, LoopContext) else value


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | set) else 1


def _add(budget: Budget, left: object, right: object) -> None:
    budget.append(_length(left), _length(right))


def _multiply(budget: Budget, left: object, right: object) -> None:
    for number, value in ((left, right), (right, left)):
        if isinstance(number, int) and isinstance(value, str | bytes | list | tuple):
            budget.spend(max(number, 0) * len(value))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _raise_to_power(budget: Budget, left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(number: int) -> None:
    if number > _MOST_BITS:
        raise SecurityError("it computed too large a number")


def _format(budget: Budget, pattern: object, values: object) -> None:
    if not isinstance(pattern, str | bytes):
        return
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    if len(text) > _MOST_PATTERN or re.search(r"%[^a-zA-Z%]*(\d{5}|\*)", text):
        raise SecurityError("it formatted text with its own widths")
    budget.spend(len(text) + budget.write(values) * text.count("%"))


_OPERATORS: dict[str, Callable[[Budget, Any, Any], None]] = {
    "+": _add,
    "*": _multiply,
    "**": _raise_to_power,
    "%": _format,
}


def _write(budget: Budget, value: object, others: list[Any]) -> None:
    budget.write(value, *others)


def _repeat(budget: Budget, value: object, others: list[Any]) -> None:
    """Texts and lists that grow by numbers, or by other texts: neither may be large."""
    budget.write(value)
    for other in others:
        if _length(other) > _MOST_INDENT or (isinstance(other, int) and abs(other) > _MOST_REPEATS):
            raise SecurityError("it padded text by too much")
    if isinstance(value, list | tuple):
        budget.spend(len(value))


def _indent(budget: Budget, value: object, others: list[Any]) -> None:
    text = str(value)
    widest = max([4, *(other if isinstance(other, int) else _length(other) for other in others)])
    budget.spend(len(text) + (text.count("\n") + 1) * widest)


def _json(budget: Budget, value: object, others: list[Any]) -> None:
    budget.write(value)
    wide = (other for other in others if not isinstance(other, bool))
    if any(
        other > _MOST_INDENT if isinstance(other, int) else _length(other) > _MOST_INDENT for other in wide
    ):
        raise SecurityError("it indented JSON by too much")


def _replace(budget: Budget, value: object, others: list[Any]) -> None:
    if len(others) < 2:
        return
    text, old, new = (
        (other if isinstance(other, str | bytes) else str(other)) for other in (value, *others[:2])
    )
    found = cast("str", text).count(cast("str", old)) if type(text) is type(old) else 0
    budget.spend(len(text) + found * len(new))


def _join(budget: Budget, values: object, others: list[Any]) -> None:
    budget.write(values)
    budget.spend(_length(values) * max((_length(other) for other in others), default=0))


def _sum(budget: Budget, values: object, others: list[Any]) -> None:
    if not all(isinstance(other, int | float | str) for other in others):  # or the sum of lists is one
        raise SecurityError("it summed what are no numbers")


_FILTERS: dict[str, Callable[[Budget, Any, list[Any]], None]] = {
    **dict.fromkeys(
        ("capitalize", "e", "escape", "forceescape", "lower", "pprint", "safe", "string"), _write
    ),
    **dict.fromkeys(("title", "trim", "upper", "urlencode", "wordcount"), _write),
    **dict.fromkeys(("batch", "center", "round", "slice", "truncate"), _repeat),
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "sum": _sum,
    "tojson": _json,
}


def _charge_method(budget: Budget, method: BuiltinMethodType, args: tuple[Any, ...]) -> None:
    value, name = method.__self__, method.__name__
    if isinstance(value, int | float) or name in ("translate", "maketrans"):
        raise SecurityError(f"it called {name!r}")
    if name == "replace":
        _replace(budget, value, list(args))
    elif name == "join":
        _join(budget, args[0] if args else [], [value])
    elif name in ("strip", "lstrip", "rstrip"):
        if any(_length(arg) > _MOST_STRIPPED for arg in args):
            raise SecurityError("it stripped text of too many characters")
    elif name in ("center", "ljust", "rjust", "zfill"):
        _repeat(budget, value, list(args))
    elif name == "expandtabs" and isinstance(value, str):
        _repeat(budget, value, list(args))
        budget.spend(value.count("\t") * _MOST_REPEATS)
