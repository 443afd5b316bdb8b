"""Python blocks of the pages, run with places of a test in place of theirs."""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Mapping
from inspect import isawaitable
from types import CodeType

from anyio.lowlevel import checkpoint

from tests.docs.pages import DOCS
from tests.house.tree import ROOT

PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if "decisions" not in page.parts)]
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def all_blocks(language: str) -> list[tuple[str, str]]:
    """All blocks of a language, by page and without the indentation of a list."""
    return [
        (
            page.relative_to(ROOT).as_posix(),
            "\n".join(line.removeprefix(indent) for line in code.splitlines()),
        )
        for page in PAGES
        for indent, of, code in _BLOCK.findall(page.read_text("utf-8"))
        if of == language
    ]


def runnable(page: str, contains: str, places: Mapping[str, object] | None = None) -> CodeType:
    """The only block of a page that contains a text, compiled; it may await.

    What the page writes for a place of its reader, as a directory or a device, is replaced by what is here.
    """
    (code,) = (code for of, code in all_blocks("python") if of == f"docs/{page}" and contains in code)
    for written, here in (places or {}).items():
        assert written in code, f"{page} has no {written}"
        code = code.replace(written, str(here))
    compiled = compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(compiled, CodeType)
    return compiled


async def run(code: CodeType, names: dict[str, object]) -> None:
    """Run a block, which may await, among names, to which it adds its own."""
    if isawaitable(done := eval(code, names)):
        await done


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def until_open(port: int) -> None:
    """Return once something listens on a port of this machine."""
    while True:
        with socket.socket() as asking:
            if asking.connect_ex(("127.0.0.1", port)) == 0:
                return
        await checkpoint()
