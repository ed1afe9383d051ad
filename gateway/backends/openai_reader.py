"""Answers in OpenAI's words: chat completions, completions, embeddings; as an event stream or as one JSON body.

Reference: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.ask import Translator, Untranslatable
from gateway.backends import faults
from gateway.backends.backend import Order, Reading
from gateway.backends.faults import BackendFault
from gateway.backends.lenient_json import as_utf8, decoded
from gateway.backends.openai_errors import error_of_event
from gateway.backends.openai_reshaping import Gathered, events_of
from gateway.backends.openai_totals import Totals
from gateway.backends.renaming import Renaming, renamed
from gateway.backends.tool_calls import StreamedCalls, identified
from gateway.billing.usage import TokenUsage
from worker.protocol.sse import DONE, Comment, Event, EventTooLarge, Framer

EVENT_LIMIT = 16 * 1024 * 1024
BODY_LIMIT = 128 * 1024 * 1024
Meter = Callable[[bytes], TokenUsage | None]
"""Running totals that a comment of the stream tells, if it tells any."""
MOST_WAITING = 256
_FINISH_REASON = re.compile(rb'"finish_reason"\s*:\s*"')
_SAYS_NOTHING = re.compile(
    rb'"choices"\s*:\s*\[\s*\]|"delta"\s*:\s*\{\s*'
    rb'(?:"(?:role|content|refusal|reasoning_content|reasoning|tool_calls)"\s*:\s*(?:"assistant"|""|null)\s*,?\s*)*+\}'
)


class EventReader:
    """An event stream that ends with ``[DONE]``.

    A whole answer may come so, too: as one event, between a meter's comments. It waits for its end, and events of a
    stream that say nothing yet, as the one with the role, wait for the first that does: an error behind them can still
    go elsewhere. Without ``ends_with_done`` the body's end is the answer's good end as well, if the last event but
    usage bears a reason to finish.
    """

    def __init__(
        self,
        order: Order,
        *,
        meter: Meter | None = None,
        translator: Translator | None = None,
        ends_with_done: bool = True,
        secrets: Sequence[str] = (),
    ) -> None:
        """``secrets``: what no error may repeat."""
        self._order = order
        self._meter = meter
        self._translator = translator
        self._ends_with_done = ends_with_done
        self._secrets = secrets
        # A whole answer is one event.
        self._framer = Framer(limit=EVENT_LIMIT if order.streamed else BODY_LIMIT, error_field=True)
        self._metered = False
        """Whether the meter tells usage. Until it does, the totals count."""
        self._totals = Totals(order)
        self._calls = StreamedCalls()
        self._renaming = Renaming(order.model)
        self._usage_event: bytes | None = None
        """The event without choices that tells usage; it is handed on last, and once, however many there are."""
        self._waiting: list[bytes] | None = []
        """Events before the first that says something; None from then on. A whole answer waits for its end."""
        self._anything = False
        self._finished = False
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
        # What no blank line ended may have been cut anywhere, also where it looks whole.
        whole = all(isinstance(item, Comment) or item.data == DONE or decoded(item.data) is not None for item in items)
        self._take(items if whole else [], reading)
        if not self._over:
            if whole and self._finished and not self._ends_with_done:
                self._done(reading)
            else:
                self._fail(reading, faults.disconnected())
        return reading

    def _take(self, items: list[Event | Comment], reading: Reading) -> Reading:
        for item in items:
            if isinstance(item, Comment):
                usage = self._meter(item.text) if self._meter is not None else None
                if usage is not None:
                    reading.usage = usage
                    self._metered = True
                continue
            if item.data == DONE:
                self._done(reading)
            else:
                self._event(item, reading)
            if self._over:
                break
        if not self._metered and not reading.complete:
            reading.usage = self._totals.changed()
        self._anything = self._anything or bool(reading.events)
        return reading

    def _event(self, item: Event, reading: Reading) -> None:
        data, order = as_utf8(item.data), self._order
        counted = self._metered
        # Cheap tests on the bytes first: a JSON key stands there unescaped, so what they miss is not there.
        if (b'"error"' in data or item.event == b"error" or not _is_object(data)) and self._is_no_chunk(item, reading):
            return
        if b'"usage"' in data and data.count(b'"usage"') > data.count(b'"usage":null'):
            # Where a meter tells usage, what the event says of it only matters for the event's place.
            told = _usage_of(data)
            if told is not None:
                counted = counted or self._totals.told(told.usage)
                if order.streamed and told.has_no_choice:
                    self._usage_event = data
                    return
        if not counted:
            self._totals.said(data)
        if not self._ends_with_done:
            self._finished = _FINISH_REASON.search(data) is not None
        if not order.streamed:
            if self._waiting:
                self._fail(reading, faults.malformed("sent two answers at once"))
            self._waiting = [data]
            return
        if self._waiting is not None:
            if len(self._waiting) < MOST_WAITING and _SAYS_NOTHING.search(data) and not _FINISH_REASON.search(data):
                self._waiting.append(data)
                return
            self._wait_no_longer(reading)
        if not self._over:
            self._hand_on(data, reading)

    def _is_no_chunk(self, item: Event, reading: Reading) -> bool:
        data = item.data.strip()
        named = item.event == b"error"
        if data == DONE:
            self._done(reading)
        elif (error := error_of_event(data, named=named, secrets=self._secrets)) is not None:
            self._fail(reading, error)
        elif named:
            self._fail(reading, faults.malformed("sent an error event without an error"))
        elif data and not _is_object(data):
            self._fail(reading, faults.malformed("sent an event that is not a JSON object"))
        # An event of nothing is a sign of life.
        return self._over or not data

    def _wait_no_longer(self, reading: Reading) -> None:
        waiting, self._waiting = self._waiting or [], None
        for data in waiting:
            if not self._over:
                self._hand_on(data, reading)

    def _hand_on(self, data: bytes, reading: Reading) -> None:
        if self._order.streamed:
            data = self._calls.corrected(data)
        if self._translator is None:
            reading.events.append(self._renaming.renamed(data))
            return
        try:
            if self._order.streamed:
                reading.events += self._translator.event(data)
            else:
                reading.events.append(self._translator.whole(data))
        except Untranslatable as fault:
            self._fail(reading, _untranslatable(fault))

    def _done(self, reading: Reading) -> None:
        self._wait_no_longer(reading)
        if reading.fault is not None:
            return
        if not (reading.events or self._anything):
            self._fail(reading, faults.malformed("ended its answer before it began"))
            return
        self._over = True
        if not self._metered:
            # Also where nothing is text: embeddings, for one.
            reading.usage = self._totals.final()
        if self._usage_event is not None and self._order.include_usage:
            self._hand_on(self._usage_event, reading)
        if self._translator is not None and self._order.streamed and reading.fault is None:
            try:
                reading.events += self._translator.end()
            except Untranslatable as fault:
                self._fail(reading, _untranslatable(fault))
        reading.complete = reading.fault is None

    def _fail(self, reading: Reading, fault: BackendFault) -> Reading:
        self._over = True
        reading.fault = fault
        return reading


class WholeReader:
    """One JSON body. Where a stream was asked for, its content is told as one."""

    def __init__(self, order: Order, *, translator: Translator | None = None, secrets: Sequence[str] = ()) -> None:
        self._order = order
        self._translator = translator
        self._secrets = secrets
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Reading:
        if self._size > BODY_LIMIT:
            return Reading()
        self._size += len(chunk)
        if self._size > BODY_LIMIT:
            self._parts.clear()
            return Reading(fault=faults.malformed("sent an answer that is too long"))
        self._parts.append(chunk)
        return Reading()

    def end(self) -> Reading:
        if self._size > BODY_LIMIT:
            return Reading()
        body = as_utf8(b"".join(self._parts))
        error = error_of_event(body, secrets=self._secrets) if b'"error"' in body else None
        if error is not None:
            return Reading(fault=error)
        answer = _whole_of(body)
        if answer is None:
            return Reading(fault=faults.malformed("sent an answer that is not a JSON object"))
        embeds = self._order.api == "embeddings"
        if not bytes(answer.data if embeds else answer.choices).startswith(b"["):
            return Reading(fault=faults.malformed("sent an answer without content"))
        totals = Totals(self._order)
        if not totals.told(answer.usage) and not embeds:
            totals.said(body)
        usage = totals.final()
        try:
            return Reading(self._told(body), usage, complete=True)
        except Untranslatable as fault:
            return Reading(usage=usage, fault=_untranslatable(fault))

    def _told(self, body: bytes) -> list[bytes]:
        """Raises Untranslatable."""
        order, translator, body = self._order, self._translator, identified(body)
        if not order.streamed:
            return [renamed(body, order.model) if translator is None else translator.whole(body)]
        answer = decoded(body)
        if not isinstance(answer, dict):
            raise Untranslatable("is not wholly JSON")
        events = events_of(answer, include_usage=order.include_usage)
        if translator is None:
            return [renamed(data, order.model) for data in events]
        return [told for data in events for told in translator.event(data)] + translator.end()


class GatheringReader:
    """An event stream where a whole answer was asked for: its chunks are put together."""

    def __init__(
        self,
        order: Order,
        *,
        translator: Translator | None = None,
        ends_with_done: bool = True,
        secrets: Sequence[str] = (),
    ) -> None:
        self._over = False
        streamed = replace(order, streamed=True, include_usage=True)
        self._events = EventReader(streamed, ends_with_done=ends_with_done, secrets=secrets)
        self._translator = translator
        self._gathered = Gathered()
        self._size = 0

    def feed(self, chunk: bytes) -> Reading:
        return self._gather(self._events.feed(chunk))

    def end(self) -> Reading:
        return self._gather(self._events.end())

    def _gather(self, reading: Reading) -> Reading:
        if self._over:
            return Reading()
        self._size += sum(map(len, reading.events))
        for data in reading.events:
            self._gathered.add(data)
        reading.events = []
        if self._size > BODY_LIMIT:
            self._over = True
            return Reading(usage=reading.usage, fault=faults.malformed("sent an answer that is too long"))
        if not reading.complete:
            return reading
        whole = self._gathered.whole()
        if whole is None:
            return Reading(usage=reading.usage, fault=faults.malformed("sent a stream that is no answer"))
        try:
            reading.events = [whole if self._translator is None else self._translator.whole(whole)]
        except Untranslatable as fault:
            return Reading(usage=reading.usage, fault=_untranslatable(fault))
        return reading


class _Object(msgspec.Struct):
    """Any JSON object."""


class _Usage(msgspec.Struct):
    """What an event tells of usage. Some servers tell it in the choice, as Moonshot's."""

    usage: Any = None
    choices: msgspec.Raw = msgspec.Raw(b"[]")

    @property
    def has_no_choice(self) -> bool:
        return bytes(self.choices) in (b"[]", b"null") or not bytes(self.choices).strip(b"[] \t\r\n")


class _Whole(msgspec.Struct):
    """A whole answer; its content may be large, and half a surrogate pair in it is the model's own."""

    usage: Any = None
    choices: msgspec.Raw = msgspec.Raw(b"")
    data: msgspec.Raw = msgspec.Raw(b"")


_whole_decoder = msgspec.json.Decoder(_Whole)
_usage_decoder = msgspec.json.Decoder(_Usage)
_object_decoder = msgspec.json.Decoder(_Object)


def _is_object(data: bytes) -> bool:
    """Whether it is JSON of an object, or nearly."""
    try:
        _object_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return isinstance(decoded(data), dict)
    return True


def _whole_of(body: bytes) -> _Whole | None:
    try:
        return _whole_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = decoded(body)
        if not isinstance(value, dict):
            return None
        return _Whole(value.get("usage"), _list_or_not(value.get("choices")), _list_or_not(value.get("data")))


def _usage_of(data: bytes) -> _Usage | None:
    """None where the event tells none."""
    try:
        told = _usage_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        value = decoded(data)
        if not isinstance(value, dict):
            return None
        told = _Usage(value.get("usage"), _list_or_not(value.get("choices")))
    if told.usage is None and b'"usage"' in bytes(told.choices):
        choices = decoded(told.choices)
        first = choices[0] if isinstance(choices, list) and choices else None
        told.usage = first.get("usage") if isinstance(first, dict) else None
    return None if told.usage is None else told


def _list_or_not(value: object) -> msgspec.Raw:
    """As much of it as is asked of it: whether it is a list, and whether there is anything in it."""
    return msgspec.Raw(b"null" if not isinstance(value, list) else b"[{}]" if value else b"[]")


def _untranslatable(fault: Untranslatable) -> BackendFault:
    return faults.malformed(f"sent an answer that cannot be read: it {fault}")
