"""A contract for `lint-imports`: no module imports itself by way of others.

    [tool.importlinter]
    contract_types = ["circles: tests.house.circles.NoCircles"]

Every import statement counts: at the top of a module, in a function, and under `if TYPE_CHECKING`. A package
is a module like any other: `x/__init__.py` that imports `x.y` and an `x.y` that imports a name from `x` are a
circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

from grimp import ImportGraph
from importlinter.application import output
from importlinter.domain import fields
from importlinter.domain.contract import Contract, ContractCheck

__all__ = ["NoCircles", "circles"]

Link = tuple[str, str]


class NoCircles(Contract):
    """Modules import each other in no circle.

    Options:
        ignore_imports: Imports, `importer -> imported`, that are taken to be absent. One that is in no circle
            is an error too, so that the list cannot outlive what it excuses.
    """

    type_name = "circles"

    ignore_imports = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
        group_of = {module: group for group in _groups(imports) for module in group}
        ignored = [_link(text) for text in cast("list[str] | None", self.ignore_imports) or []]
        idle = [
            (importer, imported)
            for importer, imported in ignored
            if imported not in group_of.get(importer, frozenset()) & imports.get(importer, set())
        ]
        for importer, imported in set(ignored) - set(idle):
            imports[importer] = imports[importer] - {imported}
        found = [
            [(link, _lines(graph, link)) for link in zip(circle, (*circle[1:], circle[0]), strict=True)]
            for circle in circles(imports)
        ]
        return ContractCheck(
            kept=not found and not idle,
            metadata={"circles": found, "idle": idle},
            ignored_import_count=len(ignored) - len(idle),
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        for circle in check.metadata["circles"]:
            output.print_error(f"{len(circle)} modules import each other in a circle:")
            for (importer, imported), lines in circle:
                output.print(f"- {importer} -> {imported} (l. {', '.join(map(str, lines))})")
            output.new_line()
        for importer, imported in check.metadata["idle"]:
            output.print_error(f"{importer} -> {imported} is in no circle; take it from the ignored imports.")


def circles(imports: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Return one of the shortest circles of each group of modules that reach each other, in order."""
    return [_shortest(group, imports) for group in _groups(imports)]


def _groups(imports: Mapping[str, Iterable[str]]) -> list[frozenset[str]]:
    """Strongly connected components of two modules or more, by their first module."""
    reached = {module: frozenset(_paths(module, imports)) for module in imports}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imports
        if module in reached[module]
    }
    return sorted(groups, key=min)


def _shortest(group: frozenset[str], imports: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    inside = {module: [other for other in imports[module] if other in group] for module in group}
    return min((_paths(module, inside)[module] for module in sorted(group)), key=len)


def _paths(start: str, imports: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """A shortest path to each module that `start` reaches by one import or more, perhaps to itself."""
    paths: dict[str, tuple[str, ...]] = {}
    queue: deque[tuple[str, ...]] = deque([(start,)])
    while queue:
        path = queue.popleft()
        for module in sorted(imports.get(path[-1], ())):
            if module not in paths:
                paths[module] = path
                queue.append((*path, module))
    return paths


def _link(text: str) -> Link:
    importer, _, imported = (part.strip() for part in text.partition("->"))
    return importer, imported


def _lines(graph: ImportGraph, link: Link) -> list[int]:
    details: list[Any] = list(graph.get_import_details(importer=link[0], imported=link[1]))
    return sorted(detail["line_number"] for detail in details)
