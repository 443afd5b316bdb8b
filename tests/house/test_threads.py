"""hotswap takes no thread of anyio's default limiter: handlers of a program may hold all of them."""

import ast

import pytest

from tests.house.tree import PACKAGE, modules, name

OWNER = PACKAGE / "worker_threads.py"
# Names of anyio and asyncio, each of which takes threads that are the program's.
TAKING_THREADS = frozenset(
    {
        "NamedTemporaryFile",
        "Path",
        "SpooledTemporaryFile",
        "TemporaryDirectory",
        "TemporaryFile",
        "current_default_thread_limiter",
        "mkdtemp",
        "mkstemp",
        "open_file",
        "to_thread",
        "wrap_file",
    }
)


def uses(tree: ast.AST) -> list[int]:
    """The lines that name anything that takes a shared thread."""
    return sorted(
        {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr) and _is_use(node)}
    )


def _is_use(node: ast.stmt | ast.expr) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name == "anyio.to_thread" for alias in names)
        case ast.ImportFrom(module="anyio" | "asyncio", names=names):
            return any(alias.name in TAKING_THREADS for alias in names)
        case ast.ImportFrom(module="anyio.to_thread"):
            return True
        case ast.Attribute(value=ast.Name(id="anyio" | "asyncio"), attr=attr):
            return attr in TAKING_THREADS
        case ast.Call(func=ast.Attribute(attr="run_in_executor"), args=[ast.Constant(value=None), *_]):
            return True
        case _:
            return False


def test_no_module_takes_a_thread_that_is_shared_with_the_program() -> None:
    assert OWNER.is_file()
    found = [
        f"{name(path)}:{line}"
        for path in modules()
        if path != OWNER
        for line in uses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []  # use hotswap.worker_threads.run_in_thread


@pytest.mark.parametrize(
    "line",
    [
        "import anyio.to_thread",
        "from anyio import Lock, to_thread",
        "from anyio import to_thread as threads",
        "from anyio.to_thread import run_sync",
        "await anyio.to_thread.run_sync(f, limiter=limiter)",
        "await asyncio.to_thread(f)",
        "await anyio.Path(x).stat()",
        "async with await anyio.open_file(x): pass",
        "await loop.run_in_executor(None, f)",
    ],
)
def test_each_way_to_a_shared_thread_is_found(line: str) -> None:
    assert uses(ast.parse(f"async def f():\n    {line}")) == [2]


@pytest.mark.parametrize(
    "line", ["await loop.run_in_executor(pool, f)", "import anyio", "from pathlib import Path"]
)
def test_other_lines_are_not(line: str) -> None:
    assert uses(ast.parse(f"async def f():\n    {line}")) == []
