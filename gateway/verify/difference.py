"""What does not agree, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

Kind = Literal[
    "spent", "reserved", "requests", "tokens", "slot", "lease", "reservation", "tombstone", "row", "rollup", "refusals"
]


@dataclass(frozen=True, slots=True)
class Difference:
    """``expected``, ``found``: nano-USD, requests or tokens, as ``kind`` and ``where`` say."""

    kind: Kind
    tenant_id: UUID | None
    """None: it cannot be told whose it is."""
    where: tuple[tuple[str, str], ...]
    """Names and values that lead there: subject, target, window, begin of the period; request; key of a rollup."""
    expected: int
    found: int
    meaning: str = ""
    """What is wrong, where numbers do not say it."""

    @property
    def difference(self) -> int:
        return self.found - self.expected

    @property
    def identity(self) -> tuple[object, ...]:
        """The same in two looks at counters that moved between them."""
        return self.kind, self.tenant_id, self.where, self.difference, self.meaning
