"""How much work a JSON schema would make, told before a grammar is built of it.

The grammar library bounds its own work but for two things. Patterns that a string must match all at once are
intersected, in time exponential in their number; and patterns of property names are compared each with each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

MAX_INTERSECTED_PATTERNS: Final = 12
"""Takes some ten milliseconds; each further one doubles that."""
MAX_PATTERN_PROPERTIES: Final = 64

_STRING_RULES: Final = ("pattern", "format", "minLength", "maxLength")
_CHILDREN: Final = ("items", "additionalProperties", "contains", "unevaluatedProperties", "unevaluatedItems")
_MAPS_OF_CHILDREN: Final = ("properties", "patternProperties")


def excess(schema: Mapping[str, Any]) -> str | None:
    """What there is too much of in a schema, in words for its author; None if it is within bounds."""
    try:
        patterns, names = _Count(schema).of_root()
    except RecursionError:
        return "it is nested too deeply"
    if names > MAX_PATTERN_PROPERTIES:
        return f"'patternProperties' has {names} patterns, and at most {MAX_PATTERN_PROPERTIES} are allowed"
    if patterns > MAX_INTERSECTED_PATTERNS:
        return (
            f"up to {patterns} rules of 'pattern', 'format' or length come together on one string by 'allOf' or "
            f"'$ref', and at most {MAX_INTERSECTED_PATTERNS} are allowed"
        )
    return None


class _Count:
    """Counts within one schema. Each part is looked at once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._counted: dict[int, int] = {}
        self._most_names = 0

    def of_root(self) -> tuple[int, int]:
        """Bound on the patterns that are intersected for one string, and most patterns of names in one object."""
        return self._together(self._root), self._most_names

    def _together(self, schema: Any) -> int:
        """Bound on the rules that meet in any one string at or below ``schema``."""
        if not isinstance(schema, Mapping):
            return 0
        known = self._counted.get(id(schema))
        if known is not None:
            return known
        # A schema that refers to itself adds nothing to itself.
        self._counted[id(schema)] = 0
        names = schema.get("patternProperties")
        if isinstance(names, Mapping):
            self._most_names = max(self._most_names, len(names))
        own = max(sum(rule in schema for rule in _STRING_RULES), *map(self._together, self._children(schema)), 0)
        merged = sum(map(self._together, _list(schema.get("allOf")))) + self._together(self._target(schema.get("$ref")))
        chosen = max(map(self._together, [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]), default=0)
        self._counted[id(schema)] = own + merged + chosen
        return own + merged + chosen

    def _children(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        yield from (schema.get(name) for name in _CHILDREN)
        yield from _list(schema.get("prefixItems"))
        for name in _MAPS_OF_CHILDREN:
            children = schema.get(name)
            if isinstance(children, Mapping):
                yield from children.values()

    def _target(self, reference: Any) -> Any:
        """What a reference within this schema points at; None for any other."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(step)
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
