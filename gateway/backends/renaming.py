"""The model's name in an answer, made the one that the client asked for."""

from __future__ import annotations

import re

import msgspec

from gateway.backends.lenient_json import decoded, encoded

_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*+")')
_NAME = b'"model"'
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Renaming:
    """As ``renamed``, for the events of one stream: they mostly begin alike, up to the name."""

    __slots__ = ("_head", "_model", "_new_head")

    def __init__(self, model: str) -> None:
        self._model = model
        self._head = b""
        """Of an event before, up to the end of the name, which stands there without doubt."""
        self._new_head = b""

    def renamed(self, data: bytes) -> bytes:
        head = self._head
        if head and data.startswith(head) and data.find(_NAME, len(head)) < 0:
            return self._new_head + data[len(head) :]
        match = _MODEL.search(data) if data.count(_NAME) == 1 else None
        if match is None or not _is_plain(data[: match.start()]):
            return renamed(data, self._model)
        self._head = data[: match.end(1)]
        self._new_head = data[: match.start(1)] + msgspec.json.encode(self._model)
        return self._new_head + data[match.end(1) :]


def renamed(data: bytes, model: str) -> bytes:
    """JSON object ``data`` with ``model`` for its name of the model, if it has one; else as it is.

    The other bytes stay, where the name is found without doubt: once, and before anything that is nested or as the
    value of the object's own field. Else the values of the other fields stay.
    """
    found = data.count(_NAME)
    if found == 0:
        return data
    new = msgspec.json.encode(model)
    match = _MODEL.search(data) if found == 1 else None
    if match is not None and _is_plain(data[: match.start()]):
        return data if match[1] == new else b"".join((data[: match.start(1)], new, data[match.end(1) :]))
    try:
        fields = _fields.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return _leniently_renamed(data, model)
    named = bytes(fields.get("model", b""))
    if named in (b"", new):
        return data
    if match is not None and named == match[1]:
        return b"".join((data[: match.start(1)], new, data[match.end(1) :]))
    fields["model"] = msgspec.Raw(new)
    return msgspec.json.encode(fields)


def _is_plain(head: bytes) -> bool:
    """Whether what stands behind it is the object's own field without doubt."""
    return head.count(b"{") == 1 and b"[" not in head and b"\\" not in head


def _leniently_renamed(data: bytes, model: str) -> bytes:
    value = decoded(data)
    if not isinstance(value, dict) or value.get("model", model) == model:
        return data
    value["model"] = model
    return encoded(value)
