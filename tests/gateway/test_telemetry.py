from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import structlog
import structlog.testing

from gateway import telemetry
from gateway.telemetry import Line, Sampler, configure_logging, log_line, redact

KEY = "sk-penstock-abcdefghijkl-" + "S3cr3t_" * 6 + "x"


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(telemetry, "_write", None)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    "text",
    [
        f"key={KEY}",
        f"authorization: Bearer {KEY}",
        "authorization: bearer fleet.S3cr3t~token+/=",
        "redis://:S3cr3t@127.0.0.1:6379/0 is away",
        "postgresql://app:S3cr3t@db/penstock",
    ],
)
def test_secrets_are_struck_out(text: str) -> None:
    cleaned = redact(text.encode())
    assert b"S3cr3t" not in cleaned
    assert b"[redacted]" in cleaned


def test_harmless_text_stays() -> None:
    line = b'{"url":"http://127.0.0.1:8100/v1","at":"2026-01-01T00:00:00Z","mail":"a@b"}'
    assert redact(line) == line


def test_a_line_is_one_json_object_with_level_and_time() -> None:
    out = io.BytesIO()
    configure_logging(stream=out)
    log = structlog.get_logger("test")
    try:
        raise ValueError(f"refused {KEY}")
    except ValueError:
        log.exception("failed", request_id="0199", text="line\nbreak")
    log.debug("not shown")
    (line,) = out.getvalue().splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["request_id"]) == ("failed", "error", "0199")
    assert datetime.fromisoformat(event["timestamp"]).tzinfo is not None
    assert "ValueError" in event["exception"]
    assert "S3cr3t" not in line.decode()


class _Served(Line, kw_only=True):
    tokens: int
    backend: str | None
    event: str = "served"


def test_a_line_of_every_request_looks_as_any_other() -> None:
    with structlog.testing.capture_logs() as captured:
        log_line(_Served(tokens=3, backend=None))  # nobody configured logging
    assert captured == [{"event": "served", "log_level": "info", "tokens": 3, "backend": None}]
    out = io.BytesIO()
    configure_logging(stream=out)
    log_line(_Served(tokens=3, backend=f"http://user:{KEY}@host"))
    structlog.get_logger("test").info("served", tokens=3, backend=f"http://user:{KEY}@host")
    one, other = map(json.loads, out.getvalue().splitlines())
    assert datetime.fromisoformat(one.pop("timestamp")) <= datetime.fromisoformat(other.pop("timestamp"))
    assert one == other
    assert "S3cr3t" not in one["backend"]
    configure_logging(stream=out, level=logging.WARNING)
    log_line(_Served(tokens=3, backend=None))
    assert len(out.getvalue().splitlines()) == 2


def test_libraries_log_warnings_in_the_same_shape(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    logging.getLogger("some.library").info("not shown")
    logging.getLogger("some.library").warning("key %s", KEY)
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["level"], event["logger"]) == ("warning", "some.library")
    assert "S3cr3t" not in line


class HandClock:
    time = 0.0

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return self.time


def test_the_sampler_lets_one_through_and_counts_the_rest() -> None:
    clock = HandClock()
    sampler = Sampler(clock, interval_s=1.0, size=2)
    assert sampler.take("a") == 1
    assert [sampler.take("a") for _ in range(3)] == [None] * 3
    assert sampler.take("b") == 1
    clock.time = 1.5
    assert sampler.take("a") == 4
    assert sampler.take("a") is None
    sampler.take("c")  # more kinds than it remembers: the oldest is forgotten
    assert sampler.take("b") == 1
