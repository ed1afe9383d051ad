"""Answers in OpenAI's words: chat completions, completions, embeddings; as an event stream or as one JSON body.

Reference: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.ask import Translator, Untranslatable
from gateway.backends import faults
from gateway.backends.backend import Order, Reading
from gateway.backends.estimates import BYTES_PER_TOKEN, estimated
from gateway.backends.faults import BackendFault
from gateway.backends.openai_errors import error_of_event
from gateway.backends.renaming import renamed
from gateway.billing.normalise import openai_usage
from gateway.billing.usage import TokenUsage
from worker.protocol.sse import DONE, Comment, Event, EventTooLarge, Framer

EVENT_LIMIT = 16 * 1024 * 1024
BODY_LIMIT = 64 * 1024 * 1024
Meter = Callable[[bytes], TokenUsage | None]
"""Running totals that a comment of the stream tells, if it tells any."""


class EventReader:
    """An event stream that ends with ``[DONE]``.

    A whole answer may come so, too: as one event, between a meter's comments.
    """

    def __init__(self, order: Order, *, meter: Meter | None = None, translator: Translator | None = None) -> None:
        self._order = order
        self._meter = meter
        self._translator = translator
        self._framer = Framer(limit=EVENT_LIMIT)
        self._metered = False
        self._told = False
        """Whether the backend told usage, by meter or otherwise. Until it has, tokens are estimated."""
        self._reported = TokenUsage()
        self._counted = 0
        self._anything = False
        self._over = False

    def feed(self, chunk: bytes) -> Reading:
        reading = Reading()
        if self._over:
            return reading
        try:
            items = self._framer.feed(chunk)
        except EventTooLarge:
            return self._fail(reading, faults.malformed("sent an event that is too long"))
        return self._take(items, reading)

    def end(self) -> Reading:
        reading = Reading()
        if self._over:
            return reading
        try:
            items = self._framer.flush()
        except EventTooLarge:
            return self._fail(reading, faults.malformed("sent an event that is too long"))
        self._take(items, reading)
        if not self._over:
            self._fail(reading, faults.disconnected())
        return reading

    def _take(self, items: list[Event | Comment], reading: Reading) -> Reading:
        for item in items:
            if isinstance(item, Comment):
                usage = self._meter(item.text) if self._meter is not None else None
                if usage is not None:
                    reading.usage = usage
                    self._metered = self._told = True
                continue
            if item.data == DONE:
                self._done(reading)
                break
            self._event(item, reading)
            if self._over:
                break
        if self._counted and not self._told:
            reading.usage = estimated(self._order, self._counted)
        self._anything = self._anything or bool(reading.events)
        return reading

    def _event(self, item: Event, reading: Reading) -> None:
        data, order = item.data, self._order
        # Cheap tests on the bytes first: a JSON key stands there unescaped, so what they miss is not there.
        if b'"error"' in data or item.event == b"error":
            error = error_of_event(data)
            if error is not None or item.event == b"error":
                self._fail(reading, error or faults.malformed("sent an error event that is not JSON"))
                return
        if b'"usage"' in data and b'"usage":null' not in data:
            unwanted = order.streamed and not order.include_usage
            # Where a meter tells usage, what the event says of it only matters if the event may have to go.
            told = _usage_of(data, self._reported) if unwanted or not self._metered else None
            if told is not None and not self._metered:
                reading.usage = self._reported = told
                self._told = True
            if told is not None and unwanted and _has_no_choice(data):
                return
        if not self._told:
            self._counted += 1 if order.streamed else -(-len(data) // BYTES_PER_TOKEN)
        if self._translator is None:
            reading.events.append(renamed(data, order.model))
            return
        try:
            reading.events += self._translator.event(data) if order.streamed else [self._translator.whole(data)]
        except Untranslatable as fault:
            self._fail(reading, faults.malformed(f"sent an answer that cannot be read: it {fault}"))

    def _done(self, reading: Reading) -> None:
        self._over = True
        if self._translator is not None and self._order.streamed:
            try:
                reading.events += self._translator.end()
            except Untranslatable as fault:
                self._fail(reading, faults.malformed(f"sent an answer that cannot be read: it {fault}"))
                return
        if reading.events or self._anything:
            reading.complete = True
        else:
            self._fail(reading, faults.malformed("ended its answer before it began"))

    def _fail(self, reading: Reading, fault: BackendFault) -> Reading:
        self._over = True
        reading.fault = fault
        return reading


class WholeReader:
    """One JSON body."""

    def __init__(self, order: Order, *, translator: Translator | None = None) -> None:
        self._order = order
        self._translator = translator
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Reading:
        self._size += len(chunk)
        if self._size > BODY_LIMIT:
            self._parts.clear()
            return Reading(fault=faults.malformed("sent an answer that is too long"))
        self._parts.append(chunk)
        return Reading()

    def end(self) -> Reading:
        body = b"".join(self._parts)
        answer = decoded(body)
        if not isinstance(answer, dict):
            return Reading(fault=faults.malformed("sent an answer that is not a JSON object"))
        error = error_of_event(body) if "error" in answer else None
        if error is not None:
            return Reading(fault=error)
        before = TokenUsage()
        usage = openai_usage(answer.get("usage"), before)
        if usage is before:
            output = 0 if self._order.api == "embeddings" else -(-len(body) // BYTES_PER_TOKEN)
            usage = estimated(self._order, output)
        if self._translator is None:
            return Reading([renamed(body, self._order.model)], usage, complete=True)
        try:
            return Reading([self._translator.whole(body)], usage, complete=True)
        except Untranslatable as fault:
            return Reading(usage=usage, fault=faults.malformed(f"sent an answer that cannot be read: it {fault}"))


def decoded(data: bytes) -> Any:
    """The JSON value; None for what is none."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def _usage_of(data: bytes, before: TokenUsage) -> TokenUsage | None:
    """Running totals, after those told ``before``, if the event tells any."""
    event = decoded(data)
    reported = event.get("usage") if isinstance(event, dict) else None
    usage = openai_usage(reported, before)
    return None if usage is before else usage


def _has_no_choice(data: bytes) -> bool:
    event = decoded(data)
    return isinstance(event, dict) and event.get("choices") == []
