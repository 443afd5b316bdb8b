"""The modules of the stores: their number, no repetition, and the load path in docs/stores-reference.md."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import anyio

from hotswap import ModelId
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from tests.backends.stores.models import UNIT, put, read
from tests.house.tree import PACKAGE, ROOT

STORES = PACKAGE / "backends" / "stores"
MOST_MODULES = 36
RUN_LINES = 6
PAGE = (ROOT / "docs" / "stores-reference.md").read_text("utf-8")
(SECTION,) = re.findall(r"^## The load path of a shard\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
WAY = re.findall(r"`([\w/]+\.py): ([\w.]+)`", SECTION)


def modules() -> list[str]:
    return [path.relative_to(STORES).as_posix() for path in sorted(STORES.rglob("*.py"))]


def code_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that do something, normalised: no docstrings, comments, imports, blanks or lone brackets."""
    tree = ast.parse(path.read_text("utf-8"))
    left_out: set[int] = set()
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(path.read_text("utf-8").splitlines(), start=1)
    plain = ((number, " ".join(line.split("  #")[0].split())) for number, line in lines)
    return [
        (number, line)
        for number, line in plain
        if number not in left_out and re.search(r"\w", line) and not line.startswith("#")
    ]


def test_there_are_few_modules() -> None:
    assert len(modules()) <= MOST_MODULES


def test_no_run_of_lines_stands_twice() -> None:
    places: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(STORES.rglob("*.py")):
        lines = code_lines(path)
        for start in range(len(lines) - RUN_LINES + 1):
            run = tuple(line for _, line in lines[start : start + RUN_LINES])
            places.setdefault(run, []).append(f"{path.relative_to(STORES)}:{lines[start][0]}")
    assert places
    assert [where for where in places.values() if len(where) > 1] == []


@contextmanager
def entered() -> Generator[dict[tuple[str, str], None]]:
    """Record the stores' functions in the order in which each is entered first, in any new thread."""
    found: dict[tuple[str, str], None] = {}
    files = {str(path): path.relative_to(STORES).as_posix() for path in STORES.rglob("*.py")}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := files.get(frame.f_code.co_filename)) is not None:
            found.setdefault((name, frame.f_code.co_qualname))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def test_a_shard_goes_as_the_page_says(tmp_path: Path) -> None:
    manifest, ranks = put(tmp_path, file_bytes=8 * UNIT)

    async def load(found: dict[tuple[str, str], None]) -> None:
        async with TieredStore(PinnedStore("1 MiB"), NvmeStore(tmp_path)) as store:
            await store.manifest(ModelId("m"))
            found.clear()
            assert await read(store, manifest.shards[0]) == ranks[0]

    with entered() as found:
        anyio.run(load, found)
    assert [function for function in WAY if function not in found] == []
    places = {function: place for place, function in enumerate(found)}
    assert sorted(WAY, key=places.__getitem__) == WAY
