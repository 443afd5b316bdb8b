"""The references of the site that are made from the code: public names, commands, configuration."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotswap.cli import _parser
from hotswap.config import schema

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hotswap"
MERMAID = Path(".cache/docs-env/mermaid/dist/mermaid.min.js")
# The modules that programs import, in the order of the site; each has a page. A name that several export is
# on the first.
PUBLIC = {
    "hotswap.errors": "Errors",
    "hotswap": "Fleets, requests and views",
    "hotswap.abc": "Interfaces",
    "hotswap.policies": "Routers and schedulers",
    "hotswap.policies.planning": "Planning tools",
    "hotswap.backends.torch": "PyTorch engines",
    "hotswap.backends.vllm": "vLLM engines",
    "hotswap.backends.llamacpp": "llama.cpp engines",
    "hotswap.backends.process": "Engines in processes of their own",
    "hotswap.backends.remote": "Engines on other machines",
    "hotswap.backends.ray": "Engines on a Ray cluster",
    "hotswap.backends.sim": "Simulated engines and stores",
    "hotswap.backends.stores": "Stores of weights",
    "hotswap.backends.nodes": "Stores of several nodes",
    "hotswap.backends.kv_stores": "Stores of KV blocks",
    "hotswap.backends.transports": "Channels",
    "hotswap.door": "OpenAI's endpoints",
    "hotswap.config": "Files that describe fleets",
    "hotswap.simulation": "Simulation",
    "hotswap.offline": "Virtual time and workloads",
    "hotswap.profiling": "Profiles of devices",
    "hotswap.testing": "Conformance suites",
}
TABLE = ("| field | type | default | meaning |", "|---|---|---|---|")
SHARED = ("hotswap.errors", "hotswap", "hotswap.abc")  # a name of two of them is one object
# Imported when it is asked for, which its source alone does not tell.
LAZY = {"hotswap.backends.stores.RemoteStore": "hotswap.backends.stores.remote.RemoteStore"}


def pages() -> dict[str, str]:
    """Every page, by its place in the site."""
    return {**_api(), "reference/cli.md": _commands(), "reference/configuration.md": _configuration()}


def missing(site: Path) -> list[str]:
    """The public names of which the API pages have no entry."""
    found = "".join(page.read_text("utf-8") for page in (site / "api").glob("*.html"))
    names = public_names()
    return [
        f"{module}.{name}"
        for module in PUBLIC
        for name in names[module]
        if f'id="{_home(module, name, names)}"' not in found
    ]


# ---------------------------------------------------------------- public names


def public_names() -> dict[str, list[str]]:
    """The `__all__` of each public module, read from its source, since some need libraries to be imported."""
    return {module: _exported(_file(module)) for module in PUBLIC}


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{path} has no __all__.")


def _home(module: str, name: str, names: dict[str, list[str]]) -> str:
    """The path under which a name has its entry."""
    shared = SHARED if module in SHARED else (module,)
    path = f"{next(place for place in shared if name in names[place])}.{name}"
    return LAZY.get(path, path)


def _api() -> dict[str, str]:
    names = public_names()
    listed = "".join(
        f"| [`{module}`]({_page(module)}) | {title} | {len(names[module])} |\n"
        for module, title in PUBLIC.items()
    )
    head = (
        "# API\n\nEvery public name, made from its docstring.\n\n| module | what | names |\n|---|---|---|\n"
    )
    index = head + listed
    return {"api.md": index, **{f"api/{module}.md": _module(module, names) for module in PUBLIC}}


def _page(module: str) -> str:
    return f"api/{module}.md"


def _module(module: str, names: dict[str, list[str]]) -> str:
    said = ast.get_docstring(ast.parse(_file(module).read_text("utf-8"))) or ""
    if "\n  " in said:  # a drawing, as that of the errors
        first, _, rest = said.partition("\n\n")
        said = f"{first}\n\n```text\n{rest}\n```"
    parts = [f"# `{module}`: {PUBLIC[module].lower()}", said]
    homes = {name: _home(module, name, names) for name in names[module]}
    elsewhere = {
        name: home for name, home in homes.items() if _owner(home) != module and home not in LAZY.values()
    }
    if elsewhere:
        linked = ", ".join(f"[`{name}`]({_owner(home)}.md#{home})" for name, home in elsewhere.items())
        parts.append(f"Also exported here: {linked}.")
    parts += [f"::: {home}" for name, home in homes.items() if name not in elsewhere]
    return "\n\n".join(parts) + "\n"


def _owner(home: str) -> str:
    return home.rpartition(".")[0]


# ---------------------------------------------------------------- commands


def _commands() -> str:
    parser = _parser()
    parts = ["# Command line", "Made from the program's own help. `hotswap COMMAND --help` prints the same."]
    for words, made in _leaves(parser, "hotswap"):
        parts.append(f"## `{words}`")
        about = (made.description or _ABOUT.get(words, "")).strip()
        if about:
            parts.append(f"{about[0].upper()}{about[1:]}.")
        usage = made.format_usage().removeprefix("usage: ").strip()
        parts.append(f"```text\n{usage}\n```")
        rows = [_argument(action) for action in made._actions if action.dest != "help"]
        if rows:
            parts.append("| argument | meaning |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


_ABOUT: dict[str, str] = {}


def _leaves(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield words, parser
    for group in groups:
        helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
        for name, made in group.choices.items():
            _ABOUT[f"{words} {name}"] = helps.get(name, "")
            yield from _leaves(made, f"{words} {name}")


def _argument(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    if action.option_strings and action.nargs != 0:
        choices = " or ".join(f"`{choice}`" for choice in action.choices or ())
        names += f" {choices or f'`{action.metavar or action.dest.upper()}`'}"
    said = (action.help or "") % {**vars(action), "prog": "hotswap"}
    return f"| {names} | {said} |"


# ---------------------------------------------------------------- configuration


def _configuration() -> str:
    made = schema()
    parts = [
        "# Configuration",
        "Every field of a file of [`hotswap serve`](../serve.md#the-file), made from its JSON schema, which "
        "`hotswap config schema` prints for editors.",
    ]
    sections = made["$defs"]
    for title, section in [("The file", made), *sections.items()]:
        about = section.get("description", "").strip()
        parts += [f"## {_titled(title, about)}", about]
        rows = [
            f"| `{name}` | {_type(field, sections)} | {_default(name, field, section)} "
            f"| {field.get('description', '')} |"
            for name, field in section.get("properties", {}).items()
        ]
        parts.append("\n".join([*TABLE, *rows]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _titled(title: str, about: str) -> str:
    """A section by its name in the file, which its description has in backquotes."""
    named = [word for word in about.split("`") if word.startswith("[")]
    return f"`{named[0]}`" if named else title


def _type(field: dict[str, Any], sections: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return _titled(name, sections[name].get("description", ""))
    if "anyOf" in field:
        return " or ".join(_type(one, sections) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = field.get("type", "any")
    return (
        f"list of {_type(field['items'], sections)}" if kind == "array" and field.get("items") else str(kind)
    )


def _default(name: str, field: dict[str, Any], section: dict[str, Any]) -> str:
    if name in section.get("required", []):
        return "required"
    value = field.get("default")
    return "-" if value in (None, {}, []) or isinstance(value, dict) else f"`{json.dumps(value)}`"
