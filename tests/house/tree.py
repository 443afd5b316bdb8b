"""The files of the project, for the tests of its structure."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hotswap"

_FOLDERS = (".ci", "benchmarks", "constraints", "docs", "examples", "hotswap", "tests")
_TEXT = frozenset({"", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"})


def modules() -> Iterator[Path]:
    """Every Python file of the package."""
    yield from sorted(PACKAGE.rglob("*.py"))


def texts() -> Iterator[Path]:
    """Every text file that the project wrote, the ones at its top included."""
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for folder in _FOLDERS:
        files += (ROOT / folder).rglob("*")
    for path in sorted(files):
        if path.is_file() and path.suffix in _TEXT and "__pycache__" not in path.parts:
            yield path


def name(path: Path) -> str:
    """How a message names a file: from the root of the project."""
    return path.relative_to(ROOT).as_posix()
