"""What the site has beside the pages of `docs/`: pages from elsewhere, and references made from the code.

Links are written for readers of the repository. Here each is turned to the page of the site that has its
file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = "docs"
# Pages that are written outside of docs/, by their place in the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/papers.md": "papers-in-full.md",
}
CODE = re.compile(r"(^ *```.*?^ *```[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".sh": "sh",
    ".service": "ini",
    ".txt": "text",
}


def on_config(config: Any) -> Any:
    """Name the pages of the API, and have diagrams drawn by the Mermaid that `make` has fetched, if any."""
    if (ROOT / reference.MERMAID).is_file():
        fence = {"name": "mermaid", "class": "mermaid", "format": _mermaid()}
        config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
        config.extra_javascript.append("assets/mermaid.min.js")
    api = next(entry for entry in config.nav if "API" in entry)
    api["API"] = ["api.md", *({title: f"api/{module}.md"} for module, title in reference.PUBLIC.items())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of `docs/`, and the references."""
    for path, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    if (mermaid := ROOT / reference.MERMAID).is_file():
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(mermaid)))
    for uri, text in reference.pages().items():
        files.append(File.generated(config, uri, content=text))
    linked = {
        target
        for file in files.documentation_pages()
        for target in _targets(file.content_string, _origin(file.src_uri))
        if not target.startswith(f"{DOCS}/") and target not in ELSEWHERE
    }
    for target in sorted(linked):
        if (ROOT / target).exists():
            files.append(_source(config, target))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    uri = page.file.src_uri
    if uri.startswith(("api", "reference/", "source/")):
        return markdown

    def turned(match: re.Match[str]) -> str:
        opened, link, anchor, closed = match.groups()
        to = posixpath.relpath(_uri(_target(link, _origin(uri))), posixpath.dirname(uri) or ".")
        return f"{opened}{to}{anchor or ''}{closed}"

    return "".join(part if CODE.fullmatch(part) else LINK.sub(turned, part) for part in CODE.split(markdown))


def on_post_build(config: Any) -> None:
    """Refuse a site that lacks an entry of a public name."""
    missing = reference.missing(Path(config.site_dir))
    if missing:
        raise PluginError(f"The site has no entry of these public names: {', '.join(missing)}.")


def _origin(uri: str) -> str:
    """Where a page is written, from the root of the repository."""
    return next((path for path, place in ELSEWHERE.items() if place == uri), f"{DOCS}/{uri}")


def _targets(markdown: str, origin: str) -> Iterator[str]:
    for part in CODE.split(markdown):
        if not CODE.fullmatch(part):
            yield from (_target(match[2], origin) for match in LINK.finditer(part))


def _target(link: str, origin: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _uri(target: str) -> str:
    """The place in the site of a file of the repository."""
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    if target.startswith(f"{DOCS}/"):
        return target.removeprefix(f"{DOCS}/")
    return f"source/{target}" if _is_data(target) else f"source/{target}.md"


def _is_data(target: str) -> bool:
    return Path(target).suffix in {".json", ".csv", ".png", ".svg"}


def _source(config: Any, target: str) -> File:
    """A page that shows a file or the names in a folder; data is there as it is."""
    path = ROOT / target
    if _is_data(target):
        return File.generated(config, _uri(target), abs_src_path=str(path))
    if path.is_dir():
        names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
        listed = "\n".join(f"- `{name}`" for name in names if not name.startswith((".", "__")))
        return File.generated(config, _uri(target), content=f"# `{target}/`\n\n{listed}\n")
    text = path.read_text("utf-8")
    language = LANGUAGES.get(path.suffix, "text")
    return File.generated(config, _uri(target), content=f"# `{target}`\n\n````{language}\n{text}\n````\n")


def _mermaid() -> Any:
    from pymdownx.superfences import fence_code_format

    return fence_code_format
