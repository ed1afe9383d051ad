"""A fault in putting an answer together costs its text, and neither the entry nor the cache's followers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from gateway.ask import Ask
from gateway.billing.usage import TokenUsage, UsageEvent
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog.entry import Entry
from gateway.recording import Recording
from tests.gateway.conftest import chunk_event

FULL = PromptLogPolicy(level="full")


class Log:
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, _policy: PromptLogPolicy, entry: Entry) -> None:
        self.entries.append(entry)


def event() -> UsageEvent:
    return UsageEvent(
        request_id=uuid4(),
        admitted_at=datetime.now(UTC),
        tenant_id=uuid4(),
        key_id="pk",
        route="m",
        status="ok",
        prompt_tokens=1,
        completion_tokens=1,
        charged_nano_usd=1,
        cost_nano_usd=1,
        price_id=None,
        streamed=True,
    )


@pytest.mark.parametrize("fails", ["feed", "whole"])
def test_the_entry_says_that_something_is_missing(fails: str) -> None:
    log = Log()
    ask = Ask(
        body={}, model="m", size=2, stream=True, include_usage=False, choices=1, max_output_tokens=None, raw=b"{}"
    )
    recording = Recording(ask, datetime.now(UTC), policy=FULL, log=log, miss=None, most_kept=0)
    recording.feed([chunk_event("Par")])

    def broken(*_: Any) -> Any:
        raise ValueError("a fault of ours")

    assembler: Any = recording._assembler
    proper = getattr(assembler, fails)
    setattr(assembler, fails, broken)
    recording.feed([chunk_event("is")])
    if fails == "feed":
        setattr(assembler, fails, proper)
        recording.feed([chunk_event("!")])
    recording.ended(event(), TokenUsage())
    (entry,) = log.entries
    assert entry.response_cut
    assert (b"Par" in entry.response) == (fails == "feed")
    assert b"!" not in entry.response
