"""What a request leaves behind beside its row: an entry of the prompt log, and an answer for the cache to keep."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Protocol

import structlog

from gateway.ask import Ask
from gateway.assembly import Assembler, assembler, describe
from gateway.billing.usage import TokenUsage, UsageEvent
from gateway.cache.found import Miss
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog.entry import Entry

SPARE: Final = 64 * 1024
"""Bytes beyond what is kept of an answer that are put together of it: what is redacted may grow shorter."""
_log = structlog.get_logger("gateway.request")


class LogWriter(Protocol):
    def record(self, policy: PromptLogPolicy, entry: Entry) -> None:
        """Neither waits nor raises."""
        ...


class Recording:
    """Of one admitted request. ``feed`` what the client is sent, then call ``ended`` once; neither waits nor raises.

    ``log``: None where nothing is logged. ``miss``: None where nothing is kept.
    """

    def __init__(
        self,
        ask: Ask,
        admitted_at: datetime,
        *,
        policy: PromptLogPolicy,
        log: LogWriter | None,
        miss: Miss | None,
        most_kept: int,
    ) -> None:
        """``most_kept``: bytes of an answer that the cache keeps."""
        self._ask = ask
        self._admitted_at = admitted_at
        self._policy = policy
        self._log = log
        self._miss = miss
        keeps = miss is not None and miss.keeps
        self._bodies = log is not None and policy.level in ("redacted", "full")
        self._assembler: Assembler | None = None
        self._whole: bytes | None = None
        self._broken = False
        """Whether the stream could not be put together to its end."""
        limit = max(most_kept if keeps else 0, policy.max_body_bytes + SPARE if self._bodies else 0)
        if ask.stream and limit:
            self._assembler = assembler(ask.api, limit=limit)

    def feed(self, events: list[bytes]) -> None:
        """Of a stream."""
        if self._assembler is None or self._broken:
            return
        try:
            for event in events:
                self._assembler.feed(event)
        except Exception:
            self._broken = True
            _log.exception("stream_not_recorded", api=self._ask.api)

    def whole(self, body: bytes) -> None:
        self._whole = body

    def ended(self, event: UsageEvent, usage: TokenUsage | None, *, cache: str | None = None) -> None:
        """``event``: its row. ``usage``: what the answer took, if that is known. ``cache``: what the answer cache made
        of it, as the client is told."""
        try:
            body, cut = self._body(usage)
            if self._log is not None:
                self._log.record(self._policy, self._entry(event, body, cache, cut=cut))
            self._keep(event, body, usage or TokenUsage(), cut=cut)
        except Exception:
            # The client's answer and the row are what they are.
            _log.exception("request_not_recorded", request_id=str(event.request_id))
        finally:
            if self._miss is not None:
                # Whoever waits for this answer must not wait in vain.
                self._miss.drop()

    def _body(self, usage: TokenUsage | None) -> tuple[bytes | None, bool]:
        """The answer, as far as it came, and whether something of it is missing here."""
        if self._whole is not None or self._assembler is None:
            return self._whole, False
        try:
            return self._assembler.whole(usage), self._assembler.over or self._broken
        except Exception:
            _log.exception("stream_not_recorded", api=self._ask.api)
            return None, True

    def _keep(self, event: UsageEvent, body: bytes | None, usage: TokenUsage, *, cut: bool) -> None:
        miss = self._miss
        if miss is None or not miss.keeps or event.status != "ok" or body is None or cut:
            return
        miss.keep(body, usage, describe(self._ask.api, body), str(event.request_id))

    def _entry(self, event: UsageEvent, body: bytes | None, cache: str | None, *, cut: bool) -> Entry:
        return Entry(
            tenant_id=event.tenant_id,
            request_id=event.request_id,
            admitted_at=self._admitted_at,
            project_id=event.project_id,
            key_id=event.key_id,
            end_user=event.end_user,
            api=self._ask.api,
            model=self._ask.model,
            backend=event.backend,
            status=event.status,
            error_code=event.error_code,
            streamed=event.streamed,
            attempts=event.attempts,
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
            charged_nano_usd=event.charged_nano_usd,
            first_token_ms=event.first_token_ms,
            total_ms=event.total_ms,
            cache=cache,
            tags=tuple(event.tags),
            client_request_id=event.client_request_id,
            request=self._ask.raw if self._bodies else b"",
            response=body or b"" if self._bodies else b"",
            response_cut=cut,
        )
