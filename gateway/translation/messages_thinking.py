"""``reasoning_effort`` as what Anthropic's models know of it: an effort, or an allowance of tokens for thinking.

Reference: https://platform.claude.com/docs/en/build-with-claude/thinking-troubleshooting
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from worker.protocol.errors import bad_request

LEAST_BUDGET = 1024
_SHARE: Final = {"minimal": 10, "low": 20, "medium": 50, "high": 80, "xhigh": 90, "max": 95}
"""Percent of the output cap that may be thought."""
_EFFORT: Final = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max"}
_VERSION = re.compile(r"claude-(?:[a-z]+-)?([0-9]{1,2})(?:[-.]([0-9]{1,2}))?(?![0-9])")
_FIRST_ADAPTIVE = (4, 6)
_FIRST_THINKING = (3, 7)
_ALWAYS_THINK = re.compile(r"claude-(?:fable|mythos)")


@dataclass(frozen=True, slots=True)
class Thought:
    thinking: dict[str, Any] | None = None
    effort: str | None = None
    """Of ``output_config``."""


def thinking(effort: object, model: str, *, max_tokens: int, forced: bool, resumes: bool) -> Thought:
    """What to ask for. A model without a version in its name is taken for a new one.

    ``forced``: a tool must be called, which goes without thinking. ``resumes``: the last turn brings results of tools;
    the older models would want the thoughts that led to the calls, which a chat completion does not carry.
    Raises ApiError (400) for an effort that nobody knows.
    """
    if effort not in ("none", *_EFFORT):
        raise bad_request(f"'reasoning_effort' must be one of none, {', '.join(_EFFORT)}.", param="reasoning_effort")
    effort = str(effort)
    version = _version(model)
    if version is None or version >= _FIRST_ADAPTIVE:
        if effort == "none":
            return Thought(effort="low") if _ALWAYS_THINK.search(model) else Thought({"type": "disabled"})
        return Thought(None if forced else {"type": "adaptive", "display": "summarized"}, _EFFORT[effort])
    if effort == "none" or version < _FIRST_THINKING or forced or resumes or max_tokens <= LEAST_BUDGET:
        return Thought()
    budget = max(LEAST_BUDGET, max_tokens * _SHARE[effort] // 100)
    return Thought({"type": "enabled", "budget_tokens": min(budget, max_tokens - 1)})


def _version(model: str) -> tuple[int, int] | None:
    found = _VERSION.search(model)
    return None if found is None else (int(found[1]), int(found[2] or 0))
