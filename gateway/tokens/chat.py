"""A chat's messages as far as counting must know them. What is not of a known form is left as the JSON it came as."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from worker.protocol.errors import bad_request

MAX_OBJECTS = 20_000
"""With more braces than that, a body is bounded by its bytes: each object in it becomes a Python object."""


_Nothing = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=0)] | None
"""Fields that clients send along empty, when they hand an answer back as it came."""


class Image(msgspec.Struct, frozen=True):
    detail: str = "auto"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a content; ``type`` is ``text`` or ``image_url``."""

    type: str
    text: str | None = None
    image_url: Image | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One that has a role, a content, perhaps a name, and nothing else."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: _Nothing = None
    function_call: _Nothing = None
    refusal: _Nothing = None
    annotations: _Nothing = None
    audio: _Nothing = None
    reasoning_content: _Nothing = None

    def texts(self) -> list[str] | None:
        """The texts of its content; None if it holds more than texts."""
        if isinstance(self.content, str):
            return [self.content]
        texts = [part.text for part in self.content or () if part.type == "text" and part.image_url is None]
        found = [text for text in texts if text is not None]
        return found if len(found) == len(self.content or ()) else None


_NULL = msgspec.Raw(b"null")


class _AnyPart(msgspec.Struct):
    type: str = ""
    image_url: msgspec.Raw = _NULL

    @property
    def is_image(self) -> bool:
        return "image" in self.type or self.image_url != _NULL


class _AnyMessage(msgspec.Struct):
    content: str | list[_AnyPart] | None = None
    audio: msgspec.Raw = _NULL


_MAYBE_IMAGE = re.compile(rb"image")
"""Ten times as fast as ``in``, which a text of nothing but one letter of the word makes slow."""
_ESCAPED = re.compile(rb"\\u")
_INSIDE = frozenset(("text", "refusal", "input_audio"))
"""Kinds of parts that are no more tokens than their JSON has bytes."""
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_messages_decoder = msgspec.json.Decoder(list[Message])
_message_decoder = msgspec.json.Decoder(Message)
_any_decoder = msgspec.json.Decoder(list[_AnyMessage])


def count_messages(raw: bytes) -> int:
    """Raises ApiError (400) if one of them is no object."""
    messages = _list_decoder.decode(raw)
    for index, message in enumerate(messages):
        if not bytes(message).startswith(b"{"):
            raise bad_request(
                f"'messages[{index}]' must be an object with 'role' and 'content'.", param=f"messages[{index}]"
            )
    return len(messages)


def few_objects(raw: bytes) -> bool:
    return raw.count(b"{") <= MAX_OBJECTS


def read_messages(raw: bytes) -> Sequence[Message | msgspec.Raw]:
    """Those of a known form, and the JSON of the others. For bodies with ``few_objects``."""
    try:
        return _messages_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return list(_one_by_one(raw))


def _one_by_one(raw: bytes) -> Iterator[Message | msgspec.Raw]:
    for message in _list_decoder.decode(raw):
        try:
            yield _message_decoder.decode(message)
        except (msgspec.DecodeError, RecursionError):
            yield message


def count_images(raw: bytes) -> int:
    """Images in the messages. Of a body without ``few_objects``, those that call themselves so without escapes."""
    # A key or a value stands in JSON as it is, or with an escape: what has neither holds no image.
    if not _MAYBE_IMAGE.search(raw) and not _ESCAPED.search(raw):
        return 0
    if few_objects(raw):
        try:
            return sum(
                part.is_image
                for message in _any_decoder.decode(raw)
                if isinstance(message.content, list)
                for part in message.content
            )
        except (msgspec.DecodeError, RecursionError):
            pass
    return -(-raw.count(b'"image_url"') // 2)


def lies_elsewhere(raw: bytes) -> bool:
    """Whether the messages may name something that is put into the prompt and is not in them, nor an image: a file, a
    video, an earlier answer's audio. True for what cannot be read."""
    if not few_objects(raw):
        return True
    try:
        messages = _any_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return True
    parts = (part for message in messages if isinstance(message.content, list) for part in message.content)
    return any(message.audio != _NULL for message in messages) or not all(
        part.is_image or part.type in _INSIDE for part in parts
    )
