"""Policies by what one would write in Python: `WeightedLoadSwap(patience_s=2)`, or one of your own."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotswap import policies
from hotswap.errors import ConfigError
from hotswap.router import Router
from hotswap.scheduler import Scheduler

__all__ = ["router_named", "scheduler_named"]


def scheduler_named(text: str) -> Scheduler:
    """Return the scheduler that `text` describes: a call with plain values, and calls, as its arguments.

    A name is one of `hotswap.policies`; `module:Name(...)` and `path/to/file.py:Name(...)` take one from
    elsewhere, which runs that code. Without brackets it is called with no arguments. Nothing else of Python
    is understood.

    Raises:
        ConfigError: the text is no such call, the name is not there, or what it gives is no scheduler.
    """
    made = _made(text)
    if not isinstance(made, Scheduler):
        raise ConfigError(f"{text!r} is a {type(made).__name__}, not a Scheduler.")
    return made


def router_named(text: str) -> Router:
    """Return the router that `text` describes, as `scheduler_named` does; errors are those of it."""
    made = _made(text)
    if not isinstance(made, Router):
        raise ConfigError(f"{text!r} is a {type(made).__name__}, not a Router.")
    return made


def _made(text: str) -> object:
    place, separator, call = text.rpartition(":") if ":" in text.partition("(")[0] else ("", "", text)
    try:
        tree = ast.parse(call.strip(), mode="eval").body
    except SyntaxError as exc:
        raise ConfigError(f"{text!r} is no policy; write it like 'WeightedLoadSwap(patience_s=2)'.") from exc
    made = _value(tree, _home(place) if separator else policies, text)
    return _called(made, (), {}, text) if isinstance(made, type) else made


def _home(place: str) -> object:
    path = Path(place)
    if path.suffix != ".py":
        try:
            return importlib.import_module(place)
        except ImportError as exc:
            raise ConfigError(f"There is no module {place!r} to take a policy from ({exc}).") from exc
    name = f"hotswap_policies_of_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or found is None or found.loader is None:
        raise ConfigError(f"There is no file {place!r} to take a policy from.")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # where dataclasses look for it
    found.loader.exec_module(module)
    return module


def _value(node: ast.expr, home: object, text: str) -> object:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id=name):
            return _attribute(home, name, text)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_value(part, home, text) for part in parts)
        case ast.Dict(keys=keys, values=values) if all(keys):
            return {
                _value(key, home, text): _value(value, home, text)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case ast.Call(func=ast.Name(id=name), args=given, keywords=options) if all(o.arg for o in options):
            return _called(
                _attribute(home, name, text),
                [_value(argument, home, text) for argument in given],
                {option.arg: _value(option.value, home, text) for option in options if option.arg},
                text,
            )
        case _:
            raise ConfigError(f"{ast.unparse(node)!r} in {text!r} is neither a value nor a call of a policy.")


def _attribute(home: object, name: str, text: str) -> type:
    for place in (home, policies):
        found: object = None if name.startswith("_") else getattr(place, name, None)
        if isinstance(found, type):
            return found
    there = ", ".join(sorted(policies.__all__))
    raise ConfigError(f"{text!r} names {name!r}, which is not there; hotswap.policies has {there}.")


def _called(made: type, given: Sequence[object], options: Mapping[str, object], text: str) -> object:
    try:
        called: object = made(*given, **options)
    except (TypeError, ValueError) as exc:
        told = str(exc).removesuffix(".")
        raise ConfigError(f"{text!r} cannot be made: {told}.") from exc
    return called
