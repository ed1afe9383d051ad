"""The model's name in an answer, made the one that the client asked for."""

from __future__ import annotations

import re

import msgspec

_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


def renamed(data: bytes, model: str) -> bytes:
    """JSON object ``data`` with ``model`` for its name of the model, if it has one; else as it is.

    The other bytes stay, where the name is found without doubt: once, and before anything that is nested.
    """
    found = data.count(b'"model"')
    if found == 0:
        return data
    if found == 1 and (match := _MODEL.search(data)) is not None:
        head = data[: match.start()]
        if head.count(b"{") == 1 and b"[" not in head and b"\\" not in head:
            new = msgspec.json.encode(model)
            return data if match[1] == new else b"".join((data[: match.start(1)], new, data[match.end(1) :]))
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return data
    if not isinstance(event, dict) or "model" not in event or event["model"] == model:
        return data
    event["model"] = model
    return msgspec.json.encode(event)
