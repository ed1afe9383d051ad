"""Logs: one JSON object a line on standard error. No bodies, no secrets; every line of a request bears its id."""

from __future__ import annotations

import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec
import structlog

from gateway.clock import Clock

_SECRET = re.compile(rb"(sk-penstock-)[\w-]+|(://[^/@\s\"]*:)[^/@\s\"]+(@)|([Bb]earer )[\w.~+/=-]+")
_KEY_MARK, _URL_MARK, _BEARER_MARK = b"sk-penstock-", b"://", b"earer "
"""One of them is in every secret. To look for them first is much cheaper, and nearly all lines have none."""

_encoder = msgspec.json.Encoder()
_log = structlog.get_logger("gateway.request")
_write: Callable[[bytes], object] | None = None
"""To the stream that logging is configured for; None: it is not configured."""
_level = logging.INFO


def redact(line: bytes) -> bytes:
    """``line`` with API keys, bearer tokens and the passwords of URLs struck out: a last net, not a licence."""
    if _KEY_MARK not in line and _URL_MARK not in line and _BEARER_MARK not in line:
        return line
    return _SECRET.sub(rb"\1\2\4[redacted]\3", line)


class Line(msgspec.Struct, kw_only=True):
    """A line that is written for each request: what else stands in it are the fields of the subclass."""

    event: str
    level: str = "info"
    timestamp: datetime | None = None


def log_line(line: Line) -> None:
    """Write ``line`` as structlog would, at level INFO. Its chain of processors takes several times as long."""
    if _write is None:
        fields = msgspec.structs.asdict(line)
        _log.info(fields.pop("event"), **{name: fields[name] for name in fields if name not in ("level", "timestamp")})
    elif _level <= logging.INFO:
        line.timestamp = datetime.now(UTC)
        _write(redact(_encoder.encode(line)))


def _render(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> bytes:
    return redact(msgspec.json.encode(event, enc_hook=repr))


class _JSONFormatter(logging.Formatter):
    """Records of the standard library's loggers, in the same shape as ours."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "timestamp": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return redact(msgspec.json.encode(event)).decode()


def configure_logging(*, stream: BinaryIO | None = None, level: int = logging.INFO) -> None:
    """Send our logs, and the libraries' from WARNING up (uvicorn's from INFO), to ``stream`` as JSON lines."""
    global _write, _level
    out = stream or sys.stderr.buffer
    _write, _level = structlog.BytesLogger(out).msg, level
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.BytesLoggerFactory(file=out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JSONFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)


class Sampler:
    """Lets one event of each kind through per ``interval_s`` and counts what it held back, so that nobody floods a log.

    It remembers at most ``size`` kinds and forgets the oldest.
    """

    def __init__(self, clock: Clock, *, interval_s: float = 1.0, size: int = 4096) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._size = size
        self._seen: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()

    def take(self, *kind: str) -> int | None:
        """How many events of ``kind`` this one stands for, itself included; None: hold it back."""
        now = self._clock.monotonic()
        last = self._seen.get(kind)
        if last is not None and now - last[0] < self._interval_s:
            self._seen[kind] = (last[0], last[1] + 1)
            return None
        self._seen[kind] = (now, 0)
        self._seen.move_to_end(kind)
        if len(self._seen) > self._size:
            self._seen.popitem(last=False)
        return 1 + (last[1] if last else 0)
