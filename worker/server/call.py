"""What came with a request besides its body."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """All but ``request_id`` is the gateway's to say."""

    request_id: str
    salt: str = ""
    tenant: str = ""
    """Who asks, for fairness."""
    weight: float = 1.0
    """The tenant's share beside others'."""
    priority: int = 0
    clamp_output: bool = False
    """Whether ``max_tokens`` is a default, to be shortened to what fits."""
    metered: bool = False
