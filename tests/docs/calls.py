"""What a block of Python calls, held against the classes and functions that the package defines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from tests.house.tree import PACKAGE, ROOT

# What the pages call the objects that their blocks do not make themselves.
VARIABLES = {
    "advisor": ["SharingAdvisor"],
    "allocation": ["Allocation"],
    "costs": ["StartupCosts"],
    "disk": ["NvmeStore"],
    "engine": ["TorchEngine"],
    "engines": ["RayEngines"],
    "fleet": ["Fleet", "FleetView"],
    "fleet.adapters": ["Adapters"],
    "fleet.models": ["Models"],
    "host": ["EngineHost"],
    "remote": ["RemoteStore"],
    "store": ["TieredStore"],
    "stream": ["FleetStream"],
}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Defined:
    """A class, or a function as one with a single method."""

    bases: list[str] = field(default_factory=list[str])
    methods: dict[str, ast.arguments] = field(default_factory=dict[str, ast.arguments])
    attributes: list[str] = field(default_factory=list[str])  # of a dataclass


@cache
def definitions() -> dict[str, list[Defined]]:
    """Every class and function of the package by name; a name may be there more than once."""
    found: dict[str, list[Defined]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, _FUNCTIONS):
                found.setdefault(node.name, []).append(Defined(methods={"": node.args}))
            elif isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(_class(node))
    return found


def wrong_calls(code: str, page: str) -> list[str]:
    """The calls and the imports of a block that the package has not, or takes other arguments."""
    tree = compile(code, page, "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    return [said for node in ast.walk(tree) for said in _wrong(node)]


def _wrong(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ImportFrom(module=str(module), names=names) if module.startswith("hotswap"):
            yield from (
                f"{module} exports no {name.name}" for name in names if not _exports(module, name.name)
            )
        case ast.Call(func=ast.Name(id=name)) if name in definitions():
            yield from _unless_taken([name], "", node)
        case ast.Call(func=ast.Attribute(value=of, attr=method)):
            name = ast.unparse(of)
            if name == "hotswap":
                if method in definitions():
                    yield from _unless_taken([method], "", node)
            elif name in VARIABLES:
                yield from _unless_taken(VARIABLES[name], method, node)
            elif name[0].isupper() and name in definitions():
                yield from _unless_taken([name], method, node)
        case _:
            pass


def _exports(module: str, name: str) -> bool:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.is_file() and f'"{name}"' in file.read_text("utf-8")


def _unless_taken(names: list[str], method: str, call: ast.Call) -> Iterator[str]:
    """Say so if no definition of one of the names takes the arguments of a call."""
    kinds = [kind for name in names for kind in definitions().get(name, [])]
    if not any(_takes(kind, method, call) for kind in kinds):
        yield f"{names[0]}{method and '.' + method} takes no {ast.unparse(call)[:120]}"


def _takes(kind: Defined, method: str, call: ast.Call) -> bool:
    args = _arguments(kind, method or ("" if "" in kind.methods else "__init__"))
    keywords = [keyword.arg for keyword in call.keywords]
    positional = [arg for arg in call.args if not isinstance(arg, ast.Constant) or arg.value is not ...]
    if args is None:
        if method:
            return False
        names = _attributes(kind)
        return {arg for arg in keywords if arg} <= set(names) and len(positional) <= len(names)
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    known = {*names, *(arg.arg for arg in args.kwonlyargs)}
    fits = args.vararg is not None or len(positional) <= len(names)
    return fits and (args.kwarg is not None or {arg for arg in keywords if arg} <= known)


def _arguments(kind: Defined, method: str) -> ast.arguments | None:
    if method in kind.methods:
        return kind.methods[method]
    for base in kind.bases:
        for of in definitions().get(base, []):
            if (args := _arguments(of, method)) is not None:
                return args
    return None


def _attributes(kind: Defined) -> list[str]:
    inherited = [
        name for base in kind.bases for of in definitions().get(base, []) for name in _attributes(of)
    ]
    return [*inherited, *kind.attributes]


def _class(node: ast.ClassDef) -> Defined:
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
    made = Defined(bases=bases)
    for part in node.body:
        if isinstance(part, _FUNCTIONS):
            made.methods.setdefault(part.name, part.args)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            made.attributes.append(part.target.id)
    return made
