"""Answers in the words of Anthropic's Messages API: as an event stream or as one JSON body.

Reference: https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from gateway.ask import Translator, Untranslatable
from gateway.backends import faults
from gateway.backends.anthropic_errors import error_of_event
from gateway.backends.backend import Order, Reading
from gateway.backends.estimates import TextCount, estimated
from gateway.backends.faults import BackendFault
from gateway.backends.lenient_json import as_utf8, strict
from gateway.backends.renaming import renamed
from gateway.billing.normalise import anthropic_usage
from gateway.billing.usage import TokenUsage
from worker.protocol.sse import Comment, Event, EventTooLarge, Framer

EVENT_LIMIT = 16 * 1024 * 1024
BODY_LIMIT = 64 * 1024 * 1024
MOST_HELD = 16
"""Events before the first content that are kept back, so that another backend may still be asked."""
_NULL = msgspec.Raw(b"null")
T = TypeVar("T")


class _Event(msgspec.Struct):
    type: str
    message: msgspec.Raw = _NULL
    usage: msgspec.Raw = _NULL


class _Message(msgspec.Struct):
    type: str = ""
    usage: msgspec.Raw = _NULL


_event_decoder = msgspec.json.Decoder(_Event)
_message_decoder = msgspec.json.Decoder(_Message)


class MessageEvents:
    """An event stream from ``message_start`` to ``message_stop``.

    An overload is often told behind ``message_start``. That, and ``ping``, say nothing of the answer yet: they are kept
    back until something does.
    """

    def __init__(self, order: Order, *, translator: Translator | None = None, secrets: Iterable[str] = ()) -> None:
        self._order = order
        self._translator = translator
        self._secrets = tuple(secrets)
        self._framer = Framer(limit=EVENT_LIMIT)
        self._usage = _Usage(order)
        self._held: list[bytes] = []
        self._holding = True
        self._begun = False
        self._over = False

    def feed(self, chunk: bytes) -> Reading:
        reading = Reading()
        if self._over:
            return reading
        try:
            return self._take(self._framer.feed(chunk), reading)
        except EventTooLarge:
            return self._fail(reading, faults.malformed("sent an event that is too long"))

    def end(self) -> Reading:
        reading = Reading()
        if self._over:
            return reading
        try:
            self._take(self._framer.flush(), reading)
        except EventTooLarge:
            return self._fail(reading, faults.malformed("sent an event that is too long"))
        if not self._over:
            self._fail(reading, faults.disconnected())
        return reading

    def _take(self, items: list[Event | Comment], reading: Reading) -> Reading:
        for item in items:
            if isinstance(item, Event):
                self._event(item.data, reading)
                if self._over:
                    break
        reading.usage = self._usage.changed()
        return reading

    def _event(self, data: bytes, reading: Reading) -> None:
        read = _read(_event_decoder, data)
        if read is None:
            self._fail(reading, faults.malformed("sent an event that is none of the Messages API"))
            return
        data, event = read
        match event.type:
            case "message_start":
                self._begun = True
                self._usage.begun(_of_message(event.message))
                data = _renamed_within(data, bytes(event.message), self._order.model)
            case "message_delta":
                self._usage.told(decoded(event.usage))
            case "content_block_start" | "content_block_delta":
                self._usage.said(data)
            case "error":
                self._fail(reading, error_of_event(data, secrets=self._secrets))
                return
            case "message_stop" if not self._begun:
                self._fail(reading, faults.malformed("ended its answer before it began"))
                return
        data = as_utf8(data)
        try:
            found = [data] if self._translator is None else self._translator.event(data)
            if event.type == "message_stop":
                if self._translator is not None:
                    found += self._translator.end()
                self._over = reading.complete = True
        except Untranslatable as fault:
            self._fail(reading, faults.malformed(f"sent an answer that cannot be read: it {fault}"))
            return
        self._hand_on(event.type, found, reading)

    def _hand_on(self, kind: str, found: list[bytes], reading: Reading) -> None:
        if self._holding:
            self._held += found
            if kind in ("message_start", "ping") and len(self._held) < MOST_HELD:
                return
            self._holding = False
            found, self._held = self._held, []
        reading.events += found

    def _fail(self, reading: Reading, fault: BackendFault) -> Reading:
        self._over = True
        self._held.clear()
        reading.fault = fault
        return reading


class MessageBody:
    """One JSON body."""

    def __init__(self, order: Order, *, translator: Translator | None = None, secrets: Iterable[str] = ()) -> None:
        self._order = order
        self._translator = translator
        self._secrets = tuple(secrets)
        self._parts: list[bytes] = []
        self._size = 0
        self._over = False

    def feed(self, chunk: bytes) -> Reading:
        if self._over:
            return Reading()
        self._size += len(chunk)
        if self._size > BODY_LIMIT:
            self._over = True
            self._parts.clear()
            return Reading(fault=faults.malformed("sent an answer that is too long"))
        self._parts.append(chunk)
        return Reading()

    def end(self) -> Reading:
        if self._over:
            return Reading()
        self._over = True
        body = b"".join(self._parts)
        self._parts.clear()
        read = _read(_message_decoder, body)
        if read is None:
            return Reading(fault=faults.malformed("sent an answer that is not a JSON object"))
        body, message = read
        if message.type == "error":
            return Reading(fault=error_of_event(body, secrets=self._secrets))
        if message.type != "message":
            return Reading(fault=faults.malformed("sent an answer that is no message"))
        count = _Usage(self._order)
        count.said(body)
        count.told(decoded(message.usage))
        usage = count.changed()
        body = as_utf8(body)
        if self._translator is None:
            return Reading([renamed(body, self._order.model)], usage, complete=True)
        try:
            return Reading([self._translator.whole(body)], usage, complete=True)
        except Untranslatable as fault:
            return Reading(usage=usage, fault=faults.malformed(f"sent an answer that cannot be read: it {fault}"))


class _Usage:
    """Running totals. The beginning tells the prompt's tokens, only the end those of the output: they are estimated
    in between, for an answer that is broken off cost what had been said of it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._reported = TokenUsage()
        self._anything = False
        self._all = False
        self._text = TextCount()
        self._latest: TokenUsage | None = None

    def begun(self, reported: object) -> None:
        self._report(reported)

    def said(self, data: bytes) -> None:
        if not self._all:
            self._text.add(data)

    def told(self, reported: object) -> None:
        """By what comes at the end."""
        self._all = self._report(reported) or self._all

    def changed(self) -> TokenUsage | None:
        """The totals, if they are others than last time."""
        usage = self._now()
        if usage == self._latest:
            return None
        self._latest = usage
        return usage

    def _report(self, reported: object) -> bool:
        told = anthropic_usage(reported, self._reported)
        if told is self._reported:
            return False
        self._reported = told
        self._anything = True
        return True

    def _now(self) -> TokenUsage | None:
        reported, tokens = self._reported, self._text.tokens
        if self._all and reported.prompt_tokens:
            return reported
        if not self._anything and not tokens:
            return None
        guess = estimated(self._order, tokens)
        prompt = reported.prompt_tokens or guess.prompt_tokens
        completion = reported.completion_tokens
        if not self._all:
            completion = max(completion, guess.completion_tokens)
        if (prompt, completion) == (reported.prompt_tokens, reported.completion_tokens):
            return reported
        return replace(reported, prompt_tokens=prompt, completion_tokens=completion, source="estimated")


def _read(decoder: msgspec.json.Decoder[T], data: bytes) -> tuple[bytes, T] | None:
    """The data, made JSON if it was only nearly so, and what it says. None: it says nothing that the decoder knows."""
    try:
        return data, decoder.decode(data)
    except RecursionError:
        return None
    except msgspec.DecodeError:
        mended = strict(data)
    try:
        return None if mended is None else (mended, decoder.decode(mended))
    except msgspec.DecodeError:
        return None


def decoded(data: bytes) -> Any:
    """The JSON value; None for what is none."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None


def _of_message(message: msgspec.Raw) -> Any:
    try:
        return decoded(_message_decoder.decode(message).usage)
    except (msgspec.DecodeError, RecursionError):
        return None


def _renamed_within(data: bytes, message: bytes, model: str) -> bytes:
    """``data`` with ``message``, an object in it, renamed."""
    new = renamed(message, model)
    return data if new == message else data.replace(message, new, 1)
