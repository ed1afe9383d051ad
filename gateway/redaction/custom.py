"""Patterns of a tenant's own, in RE2's syntax: whatever they are, they take linear time and bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import re2

from gateway.redaction.spans import Span

MOST_OF_MATCH: Final = 16_000
"""Bytes of UTF-8 of a match of which it is certain that it is found whole, wherever it stands in a long text."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_MEMORY: Final = 1024 * 1024
"""Bytes that RE2 may take for one pattern."""
_MOST_STEPS: Final = 2500
"""Instructions of RE2's program. The worst of patterns takes so many for each character: seconds for a megabyte."""
_SYNTAX: Final = "https://github.com/google/re2/wiki/Syntax"


class Pattern(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def regex(self) -> str: ...


class Compiled(NamedTuple):
    kind: str
    """What stands in brackets where it matched."""
    expression: Any

    def find(self, data: bytes) -> Iterator[Span]:
        for match in self.expression.finditer(data):
            start, end = match.span()
            if end > start:
                yield Span(start, end, self.kind)


def compile_patterns(patterns: Sequence[Pattern]) -> tuple[Compiled, ...]:
    """Raises ValueError that says which pattern is wrong and what to do."""
    found: dict[str, Compiled] = {}
    for pattern in patterns:
        if _NAME.fullmatch(pattern.name) is None:
            raise ValueError(
                f"a pattern's name must be a letter and up to 31 letters, digits or underscores: {pattern.name[:64]!r}"
            )
        kind = pattern.name.upper()
        if kind in found:
            raise ValueError(f"two patterns have the name {pattern.name!r}; give each a name of its own")
        found[kind] = Compiled(kind, _expression(pattern))
    return tuple(found.values())


def _expression(pattern: Pattern) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY
    options.never_capture = True
    try:
        expression = re2.compile(pattern.regex, options)
    except re2.error as fault:
        why = fault.args[0] if fault.args else ""
        why = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
        raise ValueError(
            f"pattern {pattern.name!r} is not in RE2's syntax ({why}), which has no look-around and no references"
            f" to groups: see {_SYNTAX}"
        ) from None
    except UnicodeEncodeError:
        raise ValueError(f"pattern {pattern.name!r} holds half a surrogate pair; write the whole character") from None
    if expression.programsize > _MOST_STEPS:
        raise ValueError(
            f"pattern {pattern.name!r} is too large ({expression.programsize} steps, of {_MOST_STEPS} at most):"
            " write + for counted repetitions, and fewer characters for classes as \\p{L}"
        )
    if expression.search(b"") is not None:
        raise ValueError(
            f"pattern {pattern.name!r} matches nothing at all, too; make it need a character, as by + for *"
        )
    return expression
