"""Random JSON schemas whose documents are short, for grammars, and the check of a document by jsonschema."""

from __future__ import annotations

import json
from random import Random
from typing import Any, TypeAlias

__all__ = ["fault", "random_schema"]

Schema: TypeAlias = "dict[str, Any]"

_NAMES = ("a", "b", "key", "two words", "é", 'quote"', "back\\slash", "0", "a_longer_name")
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -7,
    1000,
    1.5,
    "",
    "ab",
    'a"\\b\n',
    "é😀",
    [1, "x"],
    {"k": None},
)
_PATTERNS = (
    r"^[a-c]{2,4}$",
    r"^\d{3}-\d{4}$",
    r"^(red|green|blue)$",
    r"^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?$",
    r"^x+y?z$",
    r"^#[0-9a-f]{6}$",
)
_MOST_NODES = 12


def random_schema(random: Random) -> Schema:
    """Return a schema of nested objects, arrays, unions and references; all it says is enforced."""
    return _Maker(random).root()


def fault(text: str, schema: Schema) -> str:
    """Return why a text is no document of a schema, by jsonschema; empty if it is one."""
    import jsonschema

    try:
        document: Any = json.loads(text)
    except ValueError as exc:
        return f"no JSON: {exc}"
    checker: Any = jsonschema.Draft202012Validator(schema)
    return "; ".join(error.message for error in checker.iter_errors(document))


class _Maker:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._num_nodes = 0
        self._definitions: dict[str, Schema] = {}

    def root(self) -> Schema:
        random = self._random
        for at in range(random.choice((0, 0, 1, 2))):
            self._definitions[f"d{at}"] = self._any(1)
        if random.random() < 0.2:  # a list of nodes, which ends at any of them
            following = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
            self._definitions["node"] = self._closed({"value": self._leaf(), "next": following})
        schema = self._any(3)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _any(self, depth: int) -> Schema:
        self._num_nodes += 1
        if depth == 0 or self._num_nodes > _MOST_NODES or self._random.random() < 0.3:
            return self._leaf()
        makers = (
            self._object,
            self._object,
            self._array,
            self._tuple,
            self._union,
            self._one_of,
            self._all_of,
        )
        return self._random.choice(makers)(depth - 1)

    def _leaf(self) -> Schema:
        random = self._random
        if self._definitions and random.random() < 0.3:
            return {"$ref": f"#/$defs/{random.choice(sorted(self._definitions))}"}
        makers = (
            self._integer,
            self._number,
            self._text,
            self._pattern,
            self._plain,
            self._enum,
            self._const,
        )
        return random.choice(makers)()

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NAMES, self._random.randint(0, 3))
        return self._closed({name: self._any(depth) for name in names})

    def _closed(self, properties: Schema) -> Schema:
        required = [name for name in properties if self._random.random() < 0.6]
        found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return {**found, "required": required} if required or self._random.random() < 0.5 else found

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 2)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": most}

    def _tuple(self, depth: int) -> Schema:
        items = [self._any(depth) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(1, 3))]}

    def _one_of(self, depth: int) -> Schema:
        """Alternatives of which no document is of two: by type, or by a tag."""
        if self._random.random() < 0.5:
            return {"oneOf": [self._integer(), self._text(), self._array(depth), {"type": "null"}]}
        tagged = [self._closed({"kind": {"const": kind}, "body": self._any(depth)}) for kind in ("x", "y")]
        return {"oneOf": [{**one, "required": ["kind"]} for one in tagged]}

    def _all_of(self, depth: int) -> Schema:
        least = self._random.randint(-50, 50)
        return {
            "allOf": [
                {"type": "integer", "minimum": least},
                {"maximum": least + self._random.randint(0, 500)},
            ]
        }

    def _integer(self) -> Schema:
        random = self._random
        least = random.randint(-300, 300)
        most = least + random.randint(10, random.choice((10, 100, 100_000)))
        lower = random.choice(("minimum", "exclusiveMinimum"))
        upper = random.choice(("maximum", "exclusiveMaximum"))
        found: Schema = {"type": "integer", lower: least, upper: most}
        return {**found, "multipleOf": random.choice((2, 5))} if random.random() < 0.2 else found

    def _number(self) -> Schema:
        least = self._random.randint(-40, 40) / 4
        return {"type": "number", "minimum": least, "maximum": least + self._random.randint(1, 400) / 8}

    def _text(self) -> Schema:
        least = self._random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 8)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._random.choice(_PATTERNS)}

    def _plain(self) -> Schema:
        return {"type": self._random.choice(("null", "boolean", ["boolean", "null"]))}

    def _enum(self) -> Schema:
        return {"enum": self._random.sample(_VALUES, self._random.randint(1, 4))}

    def _const(self) -> Schema:
        return {"const": self._random.choice(_VALUES)}
