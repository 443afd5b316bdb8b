"""A picture of what the demo prints, for the first page: `make demo ARGS='--picture docs/demo.svg'`."""

import io
import re
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

__all__ = ["WIDTH", "lines_of", "save_picture", "steady"]

WIDTH: Final = 100
_FONTS: Final = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # which a reader's browser would fetch
_FIRST: Final = "All requests are for"
_TEXT: Final = "{http://www.w3.org/2000/svg}text"


def save_picture(recorded: Console, path: Path) -> None:
    """Write as SVG what a console has recorded of a run: its events and its verdict, without the report."""
    lines = recorded.export_text(styles=True, clear=False).splitlines()
    plain = [Text.from_ansi(line).plain for line in lines]
    began = next(at for at, line in enumerate(plain) if line.startswith(_FIRST))
    report, *_, verdict = (at for at, line in enumerate(plain) if "────" in line)
    console = Console(file=io.StringIO(), record=True, width=WIDTH, color_system="truecolor")
    console.print(Text("$ make demo", "bold"))
    for line in (*lines[began:report], "", *lines[verdict + 1 :]):
        console.print(Text.from_ansi(line), highlight=False)
    svg = _FONTS.sub("", console.export_svg(title="hotswap", unique_id="demo"))
    path.write_text(svg, encoding="utf-8")


def lines_of(picture: Path) -> list[str]:
    """The lines of text of a picture."""
    rows: dict[float, str] = {}
    for text in ElementTree.parse(picture).iter(_TEXT):
        if "clip-path" in text.attrib:  # all but the title
            y = float(text.attrib["y"])
            rows[y] = rows.get(y, "") + (text.text or "").replace("\xa0", " ")
    return [rows[y].rstrip() for y in sorted(rows)]


def steady(lines: list[str]) -> list[str]:
    """The lines that every run prints, with their numbers masked: swaps come as they do, kernels once."""
    kept = [line for line in lines if line.strip() and not line.startswith(("  e", "Kernels", "$"))]
    return [re.sub(r"\d[\d.,]*", "#", line).replace("recitations", "recitation") for line in kept]
