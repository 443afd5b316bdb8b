"""What can be said of a grammar without its model: whether it is one, and which keywords seem misspelled."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterator
from difflib import get_close_matches
from hashlib import sha256
from itertools import islice
from threading import Lock
from typing import cast

from hotswap.checks import shown

__all__ = ["GrammarCheck"]

log = logging.getLogger("hotswap")

# To compare a key with all keywords takes a tenth of a millisecond.
_MAX_KNOWN, _MAX_COMPARED, _MAX_TOLD = 1024, 200, 3
# Keywords of JSON Schema by what their values are: a schema, a list or an object of them, or anything else.
_OF_SCHEMA = """
    items additionalItems contains additionalProperties propertyNames not if then else unevaluatedItems
    unevaluatedProperties
"""
_OF_LIST = "items prefixItems allOf anyOf oneOf"
_OF_OBJECT = "properties patternProperties dependentSchemas dependencies $defs definitions"
_OF_OTHERS = """
    $ref type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength
    pattern format maxItems minItems uniqueItems maxContains minContains required dependentRequired
    maxProperties minProperties
"""
_OF_NO_EFFECT = """
    $schema $id id $anchor $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor $vocabulary $comment
    title description default examples example deprecated readOnly writeOnly nullable
"""
_SCHEMAS, _LISTS, _OBJECTS, _OTHERS, _IGNORED = (
    frozenset(words.split()) for words in (_OF_SCHEMA, _OF_LIST, _OF_OBJECT, _OF_OTHERS, _OF_NO_EFFECT)
)
_KEYWORDS = {word.lower(): word for word in _SCHEMAS | _LISTS | _OBJECTS | _OTHERS}


class GrammarCheck:
    """Refuses grammars that no model can be held to, before one is loaded for them; threads may share it.

    It remembers the grammars that it has checked last.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = Lock()

    def check(self, field: str, value: str) -> None:
        """Refuse a grammar that llguidance does not take.

        Keywords of a JSON schema that are none have no effect, as JSON Schema says. Those that look like a
        misspelled one are logged, once for each schema.

        Raises:
            InvalidRequest: naming the field and what is wrong.
            BackendMissing: llguidance is not installed.
            InstanceError: the process has no thread to check it in.
        """
        key = sha256(f"{field} {value}".encode()).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return
        from hotswap.backends.grammars import wrong

        if (error := wrong(field, value)) is not None:
            raise error
        with self._lock:
            self._known[key] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if field == "json_schema" and (told := _misspelled(value)):
            log.warning("A json_schema has keywords that are none, and are ignored: %s.", "; ".join(told))


def _misspelled(schema: str) -> list[str]:
    """Return the first keys of a schema that look like keywords and are none, with what may be meant."""
    unknown = islice(_unknown(json.loads(schema)), _MAX_COMPARED)
    told = (
        f"{shown(key)} at {shown(path)} (did you mean {meant!r}?)"
        for path, key in unknown
        if (meant := _meant(key)) is not None
    )
    return list(islice(told, _MAX_TOLD))


def _unknown(schema: object) -> Iterator[tuple[str, str]]:
    """Yield the places in a schema, as JSON pointers, and the keys there that are no keywords."""
    waiting: list[tuple[str, object]] = [("#", schema)]
    while waiting:
        path, found = waiting.pop()
        if not isinstance(found, dict):
            continue
        for key, value in cast("dict[str, object]", found).items():
            place = f"{path}/{key}"
            if key in _OBJECTS and isinstance(value, dict):
                named = cast("dict[str, object]", value)
                waiting += [(f"{place}/{name}", one) for name, one in named.items()]
            elif key in _LISTS and isinstance(value, list):
                listed = cast("list[object]", value)
                waiting += [(f"{place}/{at}", one) for at, one in enumerate(listed)]
            elif key in _SCHEMAS:
                waiting.append((place, value))
            elif key not in _OBJECTS | _LISTS | _OTHERS | _IGNORED:
                yield path, key


def _meant(key: str) -> str | None:
    """Return the keyword that a key looks like; `None` if it looks like none."""
    plain = key.lower().replace("_", "").replace("-", "")
    close = get_close_matches(plain, _KEYWORDS, n=1, cutoff=0.8) if len(plain) < 40 else []
    return _KEYWORDS[close[0]] if close else None
