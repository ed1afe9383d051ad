"""An entry as a line of JSON."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.promptlog.entry import Feedback, Kept

_encoder: Final = msgspec.json.Encoder()
NONE: Final = msgspec.Raw(b"null")


class _Line(msgspec.Struct):
    entry: Kept
    feedback: Feedback | None
    request: msgspec.Raw
    response: msgspec.Raw


def line(facts: Kept, feedback: Feedback | None, request: bytes | None, response: bytes | None) -> bytes:
    """With its newline. Bodies stand in it as JSON; those that are none, as a string."""
    whole = _Line(facts, feedback, _embedded(request), _embedded(response))
    return _encoder.encode(whole) + b"\n"


def _embedded(body: bytes | None) -> msgspec.Raw:
    if body is None:
        return NONE
    try:
        text = body.decode()
        # Without line breaks; numbers stay as they were written.
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except UnicodeDecodeError:
        text = body.decode(errors="replace")
    except (msgspec.DecodeError, RecursionError):
        pass
    return msgspec.Raw(_encoder.encode(text))
