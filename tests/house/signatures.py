"""The types that stand in public signatures, read from the source.

A public signature is that of a function, of a class (its constructor, its public methods, properties and
fields, those of its bases too), or what a type alias stands for. No module is imported: so names that are
imported for type checkers alone are found too, and aliases, which have no name at run time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.house.tree import PACKAGE

__all__ = ["Symbol", "exported", "in_signature_of"]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """A class, a function or an alias, by the module that defines it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class _Source:
    defined: dict[str, Node]
    imported: dict[str, Symbol]


def exported(module: str) -> dict[str, Symbol]:
    """The names of a module's `__all__`, each with what it is; submodules are left out."""
    listed = _source(module).defined["__all__"]
    assert isinstance(listed, ast.Assign)
    names: list[str] = ast.literal_eval(listed.value)
    found = {name: _resolved(module, name) for name in names}
    return {name: symbol for name, symbol in found.items() if symbol is not None}


def in_signature_of(symbol: Symbol, *, constructor: bool = True) -> set[Symbol]:
    """What of hotswap stands in a public signature, without the symbol itself."""
    node = _source(symbol.module).defined[symbol.name]
    if isinstance(node, ast.ClassDef):
        found = set(_of_class(symbol, constructor=constructor))
    elif isinstance(node, FUNCTIONS):
        found = set(_of_function(symbol.module, node))
    else:
        found = set(_named(symbol.module, _type_of(node)))
    return found - {symbol}


def _type_of(node: ast.Assign | ast.AnnAssign) -> ast.expr | None:
    """What an alias stands for, or how a constant is annotated."""
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) != "TypeAlias":
        return node.annotation
    return node.value


def _of_class(symbol: Symbol, *, constructor: bool) -> Iterator[Symbol]:
    node = _source(symbol.module).defined[symbol.name]
    assert isinstance(node, ast.ClassDef)
    for base in node.bases:
        for parent in _named(symbol.module, base):
            if isinstance(_source(parent.module).defined[parent.name], ast.ClassDef):
                yield from _of_class(parent, constructor=constructor)
    for member in node.body:
        if isinstance(member, FUNCTIONS):
            if _is_public(member.name) and (constructor or member.name != "__init__"):
                yield from _of_function(symbol.module, member)
        elif isinstance(member, ast.AnnAssign) and _is_public(ast.unparse(member.target)):
            yield from _named(symbol.module, member.annotation)


def _of_function(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Symbol]:
    given = node.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    for annotation in [*(argument.annotation for argument in arguments if argument), node.returns]:
        yield from _named(module, annotation)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _named(module: str, node: ast.AST | None) -> Iterator[Symbol]:
    """The symbols of hotswap that an annotation names, be it text or not."""
    if node is None:
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            symbol = _resolved(module, part.id)
            if symbol is not None and not _is_type_variable(symbol):
                yield symbol
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            try:
                text = ast.parse(part.value, mode="eval").body
            except SyntaxError:
                continue  # the text of a Literal
            yield from _named(module, text)


def _is_type_variable(symbol: Symbol) -> bool:
    node = _source(symbol.module).defined[symbol.name]
    value = node.value if isinstance(node, ast.Assign) else None
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in {"TypeVar", "TypeVarTuple", "ParamSpec"}


def _resolved(module: str, name: str) -> Symbol | None:
    """What a name of a module is, `None` if it is not of hotswap, or is a module of it."""
    source = _source(module)
    if name in source.defined:
        return Symbol(module, name)
    found = source.imported.get(name)
    if found is None or _path(f"{found.module}.{found.name}") is not None:
        return None
    return _resolved(found.module, found.name)


@cache
def _source(module: str) -> _Source:
    path = _path(module)
    assert path is not None, module
    source = _Source({}, {})
    # Also what stands under `if TYPE_CHECKING` and `try`, and in a module's `__getattr__`.
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hotswap":
            for alias in node.names:
                source.imported[alias.asname or alias.name] = Symbol(node.module or "", alias.name)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            source.defined[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            source.defined[node.target.id] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    source.defined[target.id] = node
    return source


@cache
def _path(module: str) -> Path | None:
    place = PACKAGE.parent.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
