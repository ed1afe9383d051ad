"""What a tenant says of its prompt log."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Level = Literal["off", "metadata", "redacted", "full"]
MAX_PATTERNS: Final = 50
MAX_PATTERN: Final = 500


class CustomPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be blacked out beside the built-in kinds."""

    name: Annotated[str, Meta(pattern="^[A-Za-z][A-Za-z0-9_ -]{0,39}$")]
    """What stands in its place, in capitals and brackets: ``[EMPLOYEE]`` for ``employee``."""
    regex: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN)]
    """In RE2's syntax, which takes linear time."""


class PromptLogPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    level: Level = "off"
    """Nothing; what the ledger knows, without bodies; bodies with personal data and secrets blacked out; bodies."""
    opt_out: bool = False
    """Whether a request may keep itself out, by the header ``x-penstock-log: off``."""
    retention_days: Annotated[int, Meta(ge=1, le=3650)] = 30
    max_bytes: Annotated[int, Meta(ge=1, le=2**40)] = 256 * 1024 * 1024
    """What the tenant's log may take in Redis; the oldest entries go first."""
    max_body_bytes: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] = 1024 * 1024
    """Longer bodies are cut, and the entry says so."""
    patterns: Annotated[tuple[CustomPattern, ...], Meta(max_length=MAX_PATTERNS)] = ()


NO_LOG: Final = PromptLogPolicy()
