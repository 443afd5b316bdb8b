"""Unpacked sources of vLLM, read as syntax: nothing of it is run, so those of any build can be looked at."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Gone(LookupError):
    """A name that the sources do not have."""


@dataclass(frozen=True, slots=True)
class Found:
    """A definition, and the module that has it."""

    module: str
    node: ast.AST


class Sources:
    """The modules below a directory that holds the package `vllm`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parse = cache(self._parsed)

    def find(self, path: str) -> Found:
        """Return what is defined at `"module:name.name"`, wherever it is imported or inherited from.

        Raises:
            Gone: nothing is.
        """
        module, _, names = path.partition(":")
        if not names:
            return Found(module, self._parse(module))
        first, *rest = names.split(".")
        found = self._in_module(module, first)
        for name in rest:
            found = self.member(found, name)
        return found

    def member(self, owner: Found, name: str) -> Found:
        """Return an attribute of a class, its own or an inherited one; `self.name = ...` counts."""
        for each in self.ancestry(owner):
            if name in (known := _attributes(each.node)):
                return Found(each.module, known[name])
        raise Gone(f"{getattr(owner.node, 'name', owner.module)} has no {name}")

    def ancestry(self, found: Found) -> Iterator[Found]:
        """Yield a class and all its bases in the sources, itself first."""
        yield found
        for base in getattr(found.node, "bases", ()):
            root = base.value if isinstance(base, ast.Subscript) else base
            try:
                yield from self.ancestry(self._in_module(found.module, ast.unparse(root)))
            except Gone:  # of another library
                continue

    def parameters(self, found: Found) -> list[str] | None:
        """Return the names of parameters, of a class those of its constructor; `None` if any are taken."""
        if isinstance(found.node, ast.ClassDef):
            names: list[str] = []
            for each in self.ancestry(found):
                known = _attributes(each.node)
                if isinstance(made := known.get("__init__"), Function):
                    return (taken := _parameters(made)) and taken[1:]
                names += [name for name, node in known.items() if isinstance(node, ast.AnnAssign)]
            return names
        assert isinstance(found.node, Function), f"{ast.unparse(found.node)} takes no parameters"
        return _parameters(found.node)

    def _in_module(self, module: str, name: str) -> Found:
        name, *rest = name.split(".")
        node = _definitions(self._parse(module)).get(name)
        if isinstance(node, ast.ImportFrom):
            origin, its = (
                self._origin(module, node),
                next(a.name for a in node.names if name in (a.asname, a.name)),
            )
            try:
                found = self._in_module(origin, its)
            except Gone:
                found = Found(f"{origin}.{its}", self._parse(f"{origin}.{its}"))
        elif node is None:
            raise Gone(f"{module} has no {name}")
        else:
            found = Found(module, node)
        return self._in_module(found.module, ".".join(rest)) if rest else found

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self._root / module.replace(".", "/")).is_dir()
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _parsed(self, module: str) -> ast.Module:
        place = self._root / module.replace(".", "/")
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text())
        raise Gone(f"there is no module {module}")


def kind(node: ast.AST) -> str:
    """Return what an attribute of a class is: a method, classmethod, staticmethod, property, or a value."""
    if not isinstance(node, Function):
        return "value"
    marks = [ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list]
    return next((mark for mark in marks if mark in ("classmethod", "staticmethod", "property")), "method")


def is_abstract(node: ast.AST) -> bool:
    """Whether a method must be overridden."""
    return isinstance(node, Function) and any("abstractmethod" in ast.unparse(d) for d in node.decorator_list)


def clash(ours: Function, base: Function) -> str:
    """Return why a call that fits `base` does not fit `ours`; empty if each does."""
    taken, given = ours.args, base.args
    names = [arg.arg for arg in (*taken.posonlyargs, *taken.args)]
    required = len(names) - len(taken.defaults)
    wanted = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    for place, name in enumerate(wanted):
        if place >= len(names):
            if taken.vararg is None and not (name in [a.arg for a in taken.kwonlyargs] or taken.kwarg):
                return f"takes no {name}"
        elif names[place] != name:
            return f"has {names[place]} where vLLM has {name}"
    if extra := names[len(wanted) : required]:
        return f"needs {', '.join(extra)}"
    keywords = {arg.arg for arg in taken.kwonlyargs} | set(names)
    missing = [arg.arg for arg in given.kwonlyargs if arg.arg not in keywords and taken.kwarg is None]
    if given.kwarg is not None and taken.kwarg is None:
        missing.append(f"**{given.kwarg.arg}")
    return f"takes no {', '.join(missing)}" if missing else ""


def _parameters(node: Function) -> list[str] | None:
    given = node.args
    if given.kwarg is not None:
        return None
    rest = [given.vararg] if given.vararg is not None else []
    return [arg.arg for arg in (*given.posonlyargs, *given.args, *rest, *given.kwonlyargs)]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those below conditions too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(node, part, []))


@cache
def _definitions(tree: ast.AST) -> Mapping[str, ast.AST]:
    """Return what a module or a class defines, by name."""
    found: dict[str, ast.AST] = {}
    for node in _statements(getattr(tree, "body", [])):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


@cache
def _attributes(owner: ast.AST) -> Mapping[str, ast.AST]:
    """Return the attributes of a class: what it defines, and what its methods set on `self`."""
    own = dict(_definitions(owner))
    for method in [node for node in own.values() if isinstance(node, Function)]:
        for node in _set_on_self(method):
            own.setdefault(node.attr, node)
    return own


def _set_on_self(method: Function) -> Iterator[ast.Attribute]:
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node] if ast.unparse(node.value) == "self" else ()
