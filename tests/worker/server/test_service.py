"""What an engine's refusal becomes for the one who asked."""

from __future__ import annotations

import pytest

from worker.engine.client import (
    ControlRefused,
    EngineDead,
    EngineError,
    EngineStopped,
    GrammarFailed,
    QueueFull,
    QueueTimeout,
    RequestRejected,
)
from worker.server.service import engine_fault


@pytest.mark.parametrize(
    ("fault", "status", "code", "retry_after"),
    [
        (QueueFull("full"), 503, "engine_overloaded", "1"),
        (QueueTimeout("too long"), 503, "engine_overloaded", "1"),
        (GrammarFailed("no"), 400, "invalid_grammar", None),
        (RequestRejected("no"), 400, None, None),
        (ControlRefused("busy"), 503, "engine_asleep", None),
        (EngineStopped("stopped"), 503, "worker_stopping", "1"),
        (EngineDead("/secret/path"), 500, "engine_dead", None),
        (EngineError("/secret/path"), 500, "internal_error", None),
    ],
)
def test_faults(fault: EngineError, status: int, code: str | None, retry_after: str | None) -> None:
    error = engine_fault(fault)
    assert (error.status, error.body.code, error.headers.get("retry-after")) == (status, code, retry_after)
    assert "secret" not in error.body.message
    assert engine_fault(fault, "guided_regex").body.param == ("guided_regex" if code == "invalid_grammar" else None)
