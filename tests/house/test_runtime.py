"""The runtime and the simulation stay small, keep callbacks few, and meet at public names only."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.house.tree import PACKAGE, name

MAX_FLEET_LINES = 400
# 7,676 when the state of a fleet got one owner; 200 more for what requests may ask for and are told, 160 for
# the files of adapters, 100 to close gracefully, 250 for chats and the texts of adapters, 160 for metrics and
# the log, 150 for operations on drained instances, rolls with waiting requests and engines that stop with an
# error, 60 for arguments that are checked before anything is done, 330 for several samples of one prompt and
# the first error of one, 80 for engines that cannot tell their status or are in use elsewhere, 100 for the
# beginning of turns and what views tell of stalls, 190 for requests whose prompts are read: under way like
# others, cancelled at once, bounded, and refused before a swap for a wrong grammar, 360 for measured times,
# the search for the fewest engines and traces with a process for each model, 10 for a status of another type
# and outcomes whose text is the same each time, 20 for token ids that are too many, 30 for texts of a
# prompt's log-probabilities that are written in a thread, 10 for requests that take their instances down as
# they decode, 60 for the bound of log-probabilities of all prompts together and for chats that are checked in
# a thread, 40 for the part of prefills that tokens do not lengthen, the times of tokens, and requests that
# stalled beside a preload, 60 for engines that are asked beforehand whether they could serve a model, 20 for
# those that try it, or that a wrapper has, 30 for aliases, 450 for what a server needs: events, phases and
# bytes of swaps, ids of requests and their cancellation, cards and texts of models, and requests that no
# engine has the KV blocks for, 35 for engines that start at the same time, in one task each, and progress
# that is told to those that wait for it, 30 for what a simulation counts of models without an instance, 770
# for KV blocks that survive a swap: saved beside a preload and at a deadline, restored before a stay,
# measured, counted and logged, 20 for texts of clients that stay text and the time of the last plan, 75 for
# KV stores that cannot tell their view, what is learned of each model, and warnings of other threads, 40 for
# schedulers that size KV pools, 100 for pools that are sized by hand, 5 for simulated requests with adapters
# that are admitted in the turn in which production admits them, 25 for KV blocks that other ends copy, and
# adapters of engines that tell only once they have started what they can hold.
# Raise it for what is added, never for how.
MAX_LINES = 11_800
MAX_CALLBACKS = 15

RUNTIME, SIMULATION = PACKAGE / "runtime", PACKAGE / "simulation"


def sources(*folders: Path) -> dict[str, str]:
    """The text of every module, by the name of its file."""
    files = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    return {name(path): path.read_text(encoding="utf-8") for path in files}


# ---------------------------------------------------------------------- size


def test_the_fleet_is_a_facade() -> None:
    lines = (RUNTIME / "fleet.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_FLEET_LINES


def test_runtime_and_simulation_have_few_lines() -> None:
    assert sum(len(text.splitlines()) for text in sources(RUNTIME, SIMULATION).values()) <= MAX_LINES


# ---------------------------------------------------------------------- callbacks


def names_in(annotation: ast.expr) -> set[str]:
    """The names in an annotation, also in one that is quoted."""
    names: set[str] = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with suppress(SyntaxError):  # a value of Literal
                names |= names_in(ast.parse(node.value, mode="eval").body)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def aliases(trees: list[ast.Module]) -> set[str]:
    """`Callable` itself, and names that the modules give to a type made of it."""
    found = {"Callable"}
    for tree in trees:
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=alias)], value=value):
                    pass
                case ast.AnnAssign(target=ast.Name(id=alias), annotation=kind, value=ast.expr() as value):
                    if "TypeAlias" not in names_in(kind):
                        continue
                case _:
                    continue
            if not isinstance(value, ast.Subscript | ast.BinOp | ast.Constant):
                continue
            if names_in(value) & found:
                found.add(alias)
    return found


def callbacks(texts: dict[str, str]) -> list[str]:
    """Where a parameter of a function or a field of a dataclass is a `Callable`."""
    trees = {file: ast.parse(text) for file, text in texts.items()}
    of = aliases(list(trees.values()))
    return [
        f"{file}:{annotation.lineno}: {label}"
        for file, tree in trees.items()
        for annotation, label in annotated(tree)
        if names_in(annotation) & of
    ]


def annotated(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            all_of = node.args
            rest = [one for one in (all_of.vararg, all_of.kwarg) if one is not None]
            for argument in [*all_of.posonlyargs, *all_of.args, *all_of.kwonlyargs, *rest]:
                if argument.annotation is not None:
                    yield argument.annotation, f"{node.name}({argument.arg})"
        elif isinstance(node, ast.ClassDef) and any("dataclass" in names_in(d) for d in node.decorator_list):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.annotation, f"{node.name}.{field.target.id}"


def test_few_callbacks_carry_news_between_the_parts() -> None:
    found = callbacks(sources(RUNTIME, SIMULATION))
    assert len(found) <= MAX_CALLBACKS, "\n".join(found)


def test_callbacks_are_found_however_they_are_written() -> None:
    text = """
Tell = Callable[[int], None]
Told: TypeAlias = "Tell | None"

def one(a: Callable[[], None], /, b: "Callable[[], int] | None" = None, *c: abc.Callable[..., int]): ...
async def two(self, *, d: dict[str, Tell], **e: Told) -> Callable[[], None]: ...

@dataclass(frozen=True)
class Three:
    f: Tell
    g: int

class Four:
    h: Tell
"""
    labels = [found.rpartition(" ")[2] for found in callbacks({"x.py": text})]
    assert sorted(labels) == ["Three.f", "one(a)", "one(b)", "one(c)", "two(d)", "two(e)"]


# ---------------------------------------------------------------------- private names


OWN = """
class A:
    def __init__(self) -> None:
        self._a = 1

    def same(self, other: A) -> bool:
        return other._a == self._a == super()._a
"""


class Base:
    def __init__(self) -> None:
        self._state = 0

    def _step(self) -> int:
        return self._state


class Uses(Base):
    def go(self) -> int:
        self._own = 1
        return self._step() + self._own


class Redefines(Base):
    def _step(self) -> int:
        return 1


def is_private(label: str) -> bool:
    return label.startswith("_") and not label.startswith("__")


def private_names(file: str, text: str) -> Iterator[str]:
    """Private names that a module imports from the package, or takes of an object other than its own."""
    tree = ast.parse(text)
    own = defined_in(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=imported) if module.startswith("hotswap."):
                parts = [*module.split("."), *(alias.name for alias in imported)]
                yield from (f"{file}:{node.lineno}: {part}" for part in parts if is_private(part))
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls"))
                | ast.Attribute(value=ast.Call(func=ast.Name(id="super")))
            ):
                continue
            case ast.Attribute(attr=attr) if is_private(attr) and attr not in own:
                yield f"{file}:{node.lineno}: {ast.unparse(node)}"


def defined_in(tree: ast.AST) -> set[str]:
    """The private names that a module or a class gives to what is its own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=label) | ast.AsyncFunctionDef(name=label) | ast.ClassDef(name=label):
                found.add(label)
            case ast.Attribute(value=ast.Name(id="self"), attr=label, ctx=ast.Store()):
                found.add(label)
            case ast.Name(id=label, ctx=ast.Store()):
                found.add(label)
    return set(filter(is_private, found))


def inherited_names(module_name: str, package: str) -> Iterator[str]:
    """Private names of a base class in `package` that a class of the module uses or redefines."""
    module = importlib.import_module(module_name)
    for label, cls in inspect.getmembers(module, inspect.isclass):
        if cls.__module__ != module_name:
            continue
        bases = [base for base in cls.__mro__[1:] if f"{base.__module__}.".startswith(f"{package}.")]
        theirs = {private for base in bases for private in defined_in(ast.parse(inspect.getsource(base)))}
        tree = ast.parse(inspect.getsource(cls))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        yield from (
            f"{module_name}.{label}: {private}" for private in sorted(theirs & (used | defined_in(tree)))
        )


def test_the_simulation_uses_no_private_name_of_the_runtime() -> None:
    texts = sources(SIMULATION)
    named = [found for file, text in texts.items() for found in private_names(file, text)]
    modules = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in texts]
    inherited = [found for module in modules for found in inherited_names(module, "hotswap.runtime")]
    assert named + inherited == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from hotswap.runtime.fleet import Fleet, _secret\n", "_secret"),
        ("from hotswap.runtime._state import State\n", "_state"),
        ("def f(fleet: Fleet) -> None:\n    fleet._instances.clear()\n", "fleet._instances"),
        ("def f(self) -> None:\n    self.fleet._changed()\n", "self.fleet._changed"),
        ("from hotswap.runtime.fleet import Fleet\nself._fleet.view()\n", ""),
        (OWN, ""),
        ("_x = fleet.__class__\n", ""),
    ],
)
def test_a_private_name_is_found(text: str, found: str) -> None:
    assert [line.rpartition(" ")[2] for line in private_names("x.py", text)] == ([found] if found else [])


def test_a_private_name_of_a_base_class_is_found() -> None:
    assert list(inherited_names(__name__, __name__)) == [
        f"{__name__}.Redefines: _step",
        f"{__name__}.Uses: _step",
    ]
    assert list(inherited_names(__name__, "hotswap")) == []
