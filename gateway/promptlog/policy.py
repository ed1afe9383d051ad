"""What a tenant says of its prompt log."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Level = Literal["off", "metadata", "redacted", "full"]
MAX_PATTERNS: Final = 50
MAX_PATTERN: Final = 500


class CustomPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be blacked out beside the built-in kinds."""

    name: str
    """What stands in its place, in capitals and brackets: ``[EMPLOYEE]`` for ``employee``."""
    regex: str
    """In RE2's syntax, which takes linear time."""


class PromptLogPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    level: Level = "off"
    """Nothing; what the ledger knows, without bodies; bodies with personal data and secrets blacked out; bodies."""
    opt_out: bool = False
    """Whether a request may keep itself out, by the header ``x-penstock-log: off``."""
    retention_days: int = 30
    max_bytes: int = 256 * 1024 * 1024
    """What the tenant's log may take in Redis; the oldest entries go first."""
    max_body_bytes: int = 1024 * 1024
    """Longer bodies are cut, and the entry says so."""
    patterns: tuple[CustomPattern, ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be between {least} and {most}")
        if len(self.patterns) > MAX_PATTERNS:
            raise ValueError(f"there are {len(self.patterns)} patterns; at most {MAX_PATTERNS} are allowed")
        if any(len(pattern.regex) > MAX_PATTERN for pattern in self.patterns):
            raise ValueError(f"a pattern may have at most {MAX_PATTERN} characters")


_RANGES: Final[dict[str, tuple[int, int]]] = {
    "retention_days": (1, 3650),
    "max_bytes": (1, 1024**4),
    "max_body_bytes": (0, 64 * 1024 * 1024),
}
NO_LOG: Final = PromptLogPolicy()
