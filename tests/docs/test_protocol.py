"""The page of the protocol of remote engines has the verbs, the version and the limits that the code has."""

from __future__ import annotations

import ast
import re

from hotswap.backends.remote import messages
from hotswap.backends.transports import silence
from tests.docs.pages import DOCS
from tests.house.tree import PACKAGE

PAGE = (DOCS / "protocol.md").read_text("utf-8")
REMOTE = PACKAGE / "backends" / "remote"


def spoken() -> set[str]:
    """The verbs that the two ends say, call, or look for in a message that they have received."""
    found = set[str]()
    for path in REMOTE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="say" | "call" | "call_at_once"),
                    args=[ast.Constant(value=str(verb)), *_],
                ):
                    found.add(verb)
                case ast.match_case(pattern=pattern):
                    found |= {
                        part.value.value
                        for part in ast.walk(pattern)
                        if isinstance(part, ast.MatchValue)
                        and isinstance(part.value, ast.Constant)
                        and isinstance(part.value.value, str)
                    }
                case _:
                    pass
    return found


def test_the_page_has_every_verb_and_no_other() -> None:
    (section,) = re.findall(r"^## Verbs\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.*?) \| (?:controller|host|who .*?) \| (.*) \|$", section, re.MULTILINE)
    verbs = {verb for cell, _ in rows for verb in re.findall(r"`(\w+)`", cell)}
    (pages,) = (told for cell, told in rows if cell == "`pages`")
    verbs |= set(re.findall(r"`(\w+)`", pages))
    assert len(verbs) > 30
    assert spoken() <= verbs
    assert {verb for verb in verbs if f'"{verb}"' not in _source()} == set()


def test_the_page_has_the_version_and_the_limits() -> None:
    assert f"describes version {messages.VERSION}." in PAGE
    assert (messages.MAX_MESSAGE_BYTES, messages.MAX_PAYLOAD_BYTES) == (1 << 20, 8 << 20)
    assert "a receiver takes 1 MiB and 8 MiB" in PAGE
    assert f"at least {silence.LEAST_S:g} s" in PAGE


def _source() -> str:
    return "".join(path.read_text("utf-8") for path in REMOTE.glob("*.py"))
