"""The size and shape of the package's modules."""

import ast

from tests.house.tree import PACKAGE, modules, name

MAX_LINES = 450
# A longer module needs a reason here. An entry that is no longer needed fails the test.
LONGER: dict[str, str] = {
    "hotswap/backends/torch/engine.py": "the verbs of an engine, in order; the work is in modules beside it",
}


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_modules_are_short() -> None:
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert lines
    assert sorted(module for module, count in lines.items() if count >= MAX_LINES) == sorted(LONGER)


def test_every_module_has_a_docstring() -> None:
    undocumented = [
        name(path) for path in modules() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert undocumented == []
